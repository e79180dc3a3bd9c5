"""Find tensors of a model that share memory without sharing a storage, as arrays of another library make them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from piper_ir.ground.errors import JobError


def check_separate(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise JobError for two tensors that training would separate."""
    if shared := shared_memory(tensors):
        raise JobError(
            f"Job.model() makes {shared[0]!r} and {shared[1]!r} of the same memory, from arrays of another "
            f"library, and training would separate them. Use one Parameter under both names, or copy one of them "
            f"(torch.tensor)"
        )


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors whose storages are different objects on the same bytes, or None.

    numpy arrays and DLPack make such tensors; shared storage objects were found when the model was captured.
    """
    storages = {name: t.untyped_storage() for name, t in tensors.items() if t.device.type == "cpu"}
    regions = sorted(
        (s.data_ptr(), s.data_ptr() + s.nbytes(), name)
        for name, s in storages.items()
        if s.nbytes()
    )
    for (_, end, first), (begin, _, second) in pairwise(regions):
        if begin < end and storages[first]._cdata != storages[second]._cdata:
            return first, second
    return None
