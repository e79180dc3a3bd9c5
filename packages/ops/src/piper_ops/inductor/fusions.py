"""Compile a fusion for a device, or describe its compiled form without compiling it.

A fusion is a group of operations that are compiled together: the text of a function `fusion` of a list of contiguous
tensors, made of functional ops alone. Its results have the shapes, dtypes and strides of the ops'. They are rounded
differently: Inductor does not round the values between two operations that it puts into one kernel to their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from piper_ops.ground.library import LIBRARY

if TYPE_CHECKING:
    from piper_ops.inductor._torch_inductor import Function, Spec

TorchSettings = tuple[torch.dtype, bool]
"""The default dtype, and whether torch's algorithms are deterministic."""


@dataclass(frozen=True)
class FusionForm:
    """Describe the compiled form of a fusion.

    Attributes:
        moved: the bytes that each of its kernels reads and writes, in order.
        workspace: the most bytes that are alive inside of it, beyond its arguments and results.
        strides: the strides of its results.
        owning: whether each result is a storage of its own, without a gap.
        others: the operators that it calls as they are, since Inductor has no form of them.
    """

    moved: tuple[int, ...]
    workspace: int
    strides: tuple[tuple[int, ...], ...]
    owning: bool
    others: tuple[str, ...]


def loaded(source: str, device: torch.device) -> Function:
    """Return the function `fusion` of a source text, for tensors on a device."""
    namespace: dict[str, Any] = {"torch": torch, "DEVICE": device}
    exec(source, namespace)  # the source comes from our own code generator
    function: Function = namespace["fusion"]
    return function


def lowered(source: str, specs: tuple[Spec, ...], device: str) -> FusionForm:
    """Return the compiled form of a fusion for arguments of these specs; nothing is compiled.

    A CUDA device's form needs a CUDA device, whose properties decide it.
    """
    return _lowered(source, specs, device, _settings())


def _settings() -> TorchSettings:
    """Return the settings of this process that decide results or kernels of one text: a quotient of integers is one.

    The key of Inductor's cache on disk has them, too.
    """
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


@lru_cache(maxsize=4096)
def _lowered(source: str, specs: tuple[Spec, ...], device: str, _: TorchSettings) -> FusionForm:
    from piper_ops.inductor._torch_inductor import Launches, traced, written

    module, arguments, _ = traced(loaded(source, torch.device(device)), specs, torch.device(device))
    run = Launches(written(module, arguments), arguments)
    storages = [t.untyped_storage() for t in run.results]
    sole = {id(s) for s in storages}
    return FusionForm(
        tuple(run.moved),
        run.peak - sum({id(s): s.nbytes() for s in storages}.values()),
        tuple(t.stride() for t in run.results),
        len(sole) == len(storages)
        and not sole & {id(s) for s in run.given}
        and all(s.nbytes() == t.nbytes for s, t in zip(storages, run.results, strict=True)),
        tuple(run.others),
    )


def compiled_fusion(source: str, specs: Sequence[Spec], device: str | torch.device) -> Function:
    """Return the compiled function of a fusion for arguments of these specs on a device.

    It empties the list that it gets, and must be called under `torch.no_grad()`. Equal fusions of one process share it,
    and Inductor's cache on disk keeps the kernels for other processes: of ranks that start together one compiles, and
    the others wait for it. It raises RuntimeError for arguments of other dtypes.
    """
    return _compiled(source, tuple(specs), str(device), _settings())


@lru_cache(maxsize=4096)
def _compiled(
    source: str, specs: tuple[Spec, ...], device: str, settings: TorchSettings
) -> Function:
    from piper_ops.inductor._torch_inductor import cache_folder, compiled

    where = torch.device(device)
    key = sha256(f"{source} {specs} {device} {settings}".encode()).hexdigest()[:32]
    with FileLock(cache_folder() / f"piper-{key}.lock"):
        return _checked(compiled(loaded(source, where), specs, where), specs)


def _checked(function: Function, specs: Sequence[Spec]) -> Function:
    """Return the function, which raises RuntimeError for other dtypes: its kernels would read past their end."""
    dtypes = [getattr(torch, dtype) for _, dtype in specs]

    def call(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if [t.dtype for t in given] != dtypes:
            raise RuntimeError(
                f"a fusion gets {[t.dtype for t in given]}, and was compiled for {dtypes}: a kernel of torch gives "
                f"another dtype than torch says of it; leave the chunk to torch by eager(where(...)), and report the model"
            )
        return function(given)

    return call


LIBRARY.define("fusion(Tensor[] inputs, str source) -> Tensor[]")
fusion = torch.ops.piper.fusion.default
"""The op that stands for a fusion in a step's graph; a step calls the compiled function instead."""
