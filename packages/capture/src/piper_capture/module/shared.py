"""Find named tensors of a model, or of a batch, that share bytes but are separate tensors of the plan.

A plan stores every parameter and buffer separately. One Parameter under two names is one parameter of the plan. Two
tensors over the same bytes would be separated, so that a change of one no longer changes the other. This does not
matter if neither changes; otherwise the model is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper_ir.ground.errors import CaptureError
from piper_ops import storage_key

ATTRIBUTE = "_piper_shared"
"""The attribute of a fake model that holds the pairs of tensors that share bytes in the user's model."""
MOST_BYTES = 2**28
"""The extent of two interleaved tensors up to which they are compared byte by byte; beyond it they count as shared."""


@dataclass(frozen=True)
class Shared:
    """Name two tensors, by their first names, that have some bytes in common."""

    first: str
    second: str


def shared_tensors(named: Sequence[tuple[str, Tensor]]) -> tuple[Shared, ...]:
    """Return the pairs of different tensors that share bytes."""
    by_storage: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.numel():
            by_storage.setdefault(storage_key(tensor), {}).setdefault(id(tensor), (name, tensor))
    return tuple(pair for group in by_storage.values() for pair in _pairs(list(group.values())))


def _pairs(group: Sequence[tuple[str, Tensor]]) -> Iterator[Shared]:
    """Yield the pairs within one storage, by a sweep over the first and last bytes of its tensors."""
    order = {name: k for k, (name, _) in enumerate(group)}
    open_ones: list[tuple[str, Tensor]] = []
    for name, tensor in sorted(group, key=lambda item: _extent(item[1])):
        open_ones = [(n, t) for n, t in open_ones if _extent(t)[1] > _extent(tensor)[0]]
        yield from (
            Shared(*sorted((n, name), key=order.__getitem__))
            for n, t in open_ones
            if _overlap(t, tensor)
        )
        open_ones.append((name, tensor))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage, whose extents overlap, have a byte in common."""
    end = max(_extent(a)[1], _extent(b)[1])
    if (a.is_contiguous() and b.is_contiguous()) or end > MOST_BYTES:
        return True
    return bool((_bytes(a, end) & _bytes(b, end)).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's first byte in the storage, and the one after its last."""
    last = sum(
        int(size - 1) * int(stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _bytes(tensor: Tensor, end: int) -> Tensor:
    """Return a mask over the first bytes of the storage that is true for the bytes of the tensor."""
    size = tensor.element_size()
    mask = torch.zeros(end, dtype=torch.bool, device="cpu")
    mask.as_strided(
        (*tensor.shape, size),
        (*(s * size for s in tensor.stride()), 1),
        tensor.storage_offset() * size,
    ).fill_(True)
    return mask


def check_shared(model: nn.Module, trainable: Collection[str], changed: Collection[str]) -> None:
    """Raise CaptureError if a tensor that training changes shares bytes with another one.

    `trainable` are parameters with requires_grad; `changed` are buffers that forward changes.
    """
    pairs: tuple[Shared, ...] = getattr(model, ATTRIBUTE, ())
    for pair in pairs:
        writer = next(
            (name for name in (pair.first, pair.second) if name in trainable or name in changed),
            None,
        )
        if writer is None:
            continue
        other = pair.second if writer == pair.first else pair.first
        how = "is trained" if writer in trainable else "is changed in forward"
        raise CaptureError(
            f"{pair.first!r} and {pair.second!r} share memory without being one tensor, and {writer!r} {how}: on "
            f"one device {other!r} changes, too, but a plan keeps the two apart. Give both names the same object "
            f"(`b.weight = a.weight` ties parameters), make the view in forward, or copy it in the constructor: "
            f".clone(). Of the two spectral_norm of torch take that of torch.nn.utils.parametrizations"
        )


def check_batch(sharing: Collection[tuple[str, str]], changed: Mapping[str, str]) -> None:
    """Raise CaptureError if a tensor of the batch that is changed in place shares bytes with another one.

    `sharing` are pairs of names, and `changed` maps a name to the line that changes the tensor.
    """
    for pair in sharing:
        name = next((one for one in pair if one in changed), None)
        if name is None:
            continue
        other = pair[0] if name == pair[1] else pair[1]
        raise CaptureError(
            f"{changed[name]}: changes {name} of the batch in place, and {other} lies in the same memory: on one "
            f"device it changes, too, but a plan loads the two apart. Let forward change a copy "
            f"({name.split('.')[0]}.clone()), or let batch return two tensors: .clone() of one of them"
        )
