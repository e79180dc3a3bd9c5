"""Take apart what the devices of an axis share, and put it together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from piper_ir.layout import Layout, places
from piper_ir.mesh import Mesh
from piper_ir.plan import Plan


def part_of(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor."""
    for part, degree, place in places(layout, mesh, rank):
        shape = whole.shape
        own = shape[part.dim] // degree
        split = whole.reshape(*shape[: part.dim], part.outer, degree, own // part.outer, *shape[part.dim + 1 :])
        whole = split.select(part.dim + 1, place).reshape(*shape[: part.dim], own, *shape[part.dim + 1 :])
    return whole


def whole_of(parts: Mapping[int, torch.Tensor], layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the tensor of which the ranks have parts: of those that share it with `rank`."""
    if not layout:
        return parts[rank]
    first, *rest = layout
    coords = mesh.coords(rank)
    mates = [mesh.rank({**coords, first.axis: k}) for k in range(mesh.size(first.axis))]
    return joined([whole_of(parts, tuple(rest), mesh, mate) for mate in mates], first.dim, first.outer)


def joined(parts: list[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """Return the tensor whose dimension is [outer, n, rest], given its n parts."""
    shape = parts[0].shape
    split = [p.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]) for p in parts]
    return torch.stack(split, dim + 1).reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


class OwnParts(Mapping[str, torch.Tensor]):
    """Give a rank's parts of tensors, each taken when it is asked for."""

    def __init__(self, whole: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], mesh: Mesh, rank: int) -> None:
        self._whole, self._layouts, self._mesh, self._rank = whole, layouts, mesh, rank

    def __getitem__(self, name: str) -> torch.Tensor:
        return part_of(self._whole[name], self._layouts.get(name, ()), self._mesh, self._rank)

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def own_parts(plan: Plan, rank: int, whole: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the parameters of a model as a rank has them."""
    layouts = {p.name: p.layout for p in plan.params if p.layout}
    return OwnParts(whole, layouts, plan.mesh, rank) if layouts else whole
