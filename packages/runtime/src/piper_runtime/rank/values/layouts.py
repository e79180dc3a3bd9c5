"""Shard tensors over the devices of mesh axes, and join the shards again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from piper_ir.program.layout import DimPart, Layout, places
from piper_runtime.weights import LazyTensors


def part_of(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor."""
    for part, degree, place in places(layout, mesh, rank):
        shape = whole.shape
        own = shape[part.dim] // degree
        split = whole.reshape(
            *shape[: part.dim], part.outer, degree, own // part.outer, *shape[part.dim + 1 :]
        )
        whole = split.select(part.dim + 1, place).reshape(
            *shape[: part.dim], own, *shape[part.dim + 1 :]
        )
    return whole


def whole_of(
    parts: Mapping[int, torch.Tensor], layout: Layout, mesh: Mesh, rank: int
) -> torch.Tensor:
    """Return a whole tensor, joined from the parts of the ranks that share it with `rank`."""
    if not layout:
        return parts[rank]
    first, *rest = layout
    coords = mesh.coords(rank)
    mates = [mesh.rank({**coords, first.axis: k}) for k in range(mesh.size(first.axis))]
    return joined(
        [whole_of(parts, tuple(rest), mesh, mate) for mate in mates], first.dim, first.outer
    )


def joined(parts: list[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """Return the tensor whose dimension is [outer, n, rest], given its n parts."""
    shape = parts[0].shape
    split = [p.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]) for p in parts]
    return torch.stack(split, dim + 1).reshape(
        *shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :]
    )


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Describe elements of a part that are contiguous in the whole tensor, both in row-major order."""

    own: int
    whole: int
    numel: int


def runs(
    shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int, elements: range
) -> Iterator[ElementRun]:
    """Yield the places in the whole tensor of some elements of a rank's part of this shape, which follow each other."""
    there = places(layout, mesh, rank)
    unit = min(
        (shape[p.dim] // p.outer * prod(shape[p.dim + 1 :]) for p, _, _ in there),
        default=prod(shape),
    )
    run: ElementRun | None = None
    at = elements.start
    while at < elements.stop:
        numel = min(unit - at % unit, elements.stop - at)
        first = _in_whole(shape, there, at)
        if run is not None and run.whole + run.numel == first:
            run = ElementRun(run.own, run.whole, run.numel + numel)
        else:
            if run is not None:
                yield run
            run = ElementRun(at, first, numel)
        at += numel
    if run is not None:
        yield run


def _in_whole(shape: Sequence[int], there: Sequence[tuple[DimPart, int, int]], at: int) -> int:
    """Return the index in the whole tensor of an element of a part."""
    sizes = list(shape)
    index: list[int] = []
    for size in reversed(sizes):
        at, k = divmod(at, size)
        index.insert(0, k)
    for part, degree, place in reversed(there):
        rest = sizes[part.dim] // part.outer
        outer, inner = divmod(index[part.dim], rest)
        index[part.dim] = (outer * degree + place) * rest + inner
        sizes[part.dim] *= degree
    position = 0
    for size, k in zip(sizes, index, strict=True):
        position = position * size + k
    return position


class OwnParts(Mapping[str, torch.Tensor]):
    """Give a rank's parts of tensors, each taken when it is asked for."""

    def __init__(
        self,
        whole: Mapping[str, torch.Tensor],
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        rank: int,
    ) -> None:
        self._whole, self._layouts, self._mesh, self._rank = whole, layouts, mesh, rank

    def __getitem__(self, name: str) -> torch.Tensor:
        layout = self._layouts.get(name, ())
        if layout and isinstance(self._whole, LazyTensors) and self._whole.in_file(name):
            return self._read(self._whole, name, layout)
        return part_of(self._whole[name], layout, self._mesh, self._rank)

    def _read(self, files: LazyTensors, name: str, layout: Layout) -> torch.Tensor:
        """Return a part of a tensor of a file, and read only the bytes of that part."""
        shape = list(files.forms[name].shape)
        for part, degree, _ in places(layout, self._mesh, self._rank):
            shape[part.dim] //= degree
        pieces = [
            files.flat(name, run.whole, run.whole + run.numel)
            for run in runs(shape, layout, self._mesh, self._rank, range(prod(shape)))
        ]
        return torch.cat(pieces).view(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def own_parts(
    plan: Plan, rank: int, whole: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the parameters of a model as a rank has them."""
    layouts = {p.name: p.layout for p in plan.params if p.layout}
    return OwnParts(whole, layouts, plan.mesh, rank) if layouts else whole
