"""Describe the device mesh: its named axes, and which rank sits at which coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

from piper_ir.ground.errors import CompileError
from piper_ir.ground.limits import MOST_RANKS

AXES = ("tp", "cp", "etp", "ep", "dp", "rep", "pp")
"""The names of all axes, fastest-varying first.

Neighbouring ranks share a tensor-parallel group, and pipeline stages are farthest apart. `etp` is for replicas
whose ranks cut each expert, `rep` for replicas of ranks that share states along `dp`.
"""


def whole_axis(name: str) -> str:
    """Return the axis that an axis was split from (`Mesh.split`); any other is its own."""
    whole, dot, number = name.partition(".")
    return whole if dot and number.isdigit() else name


def _speed(axis: str, order: Sequence[str]) -> tuple[int, int]:
    """Return the place of an axis among all: first the axes of `order`, then the others as in AXES."""
    whole = whole_axis(axis)
    place = order.index(whole) if whole in order else len(order) + AXES.index(whole)
    return place, -int(axis[len(whole) + 1 :] or 0)


@dataclass(frozen=True, init=False)
class Mesh:
    """Arrange ranks along named axes: `Mesh(pp=4, dp=2)` has 8 ranks.

    Axes that are not named have size 1. Ranks are counted along the axes in the order of AXES, fastest first, so that
    the first ones lie inside of nodes. `order` names axes that come before the others, in an order of its own:
    `Mesh(pp=4, dp=2, order=("tp", "pp"))` has neighbouring stages on neighbouring ranks.
    """

    sizes: tuple[tuple[str, int], ...]
    order: tuple[str, ...] = ()

    def __init__(
        self,
        sizes: tuple[tuple[str, int], ...] = (),
        order: str | Sequence[str] = (),
        **axes: int,
    ) -> None:
        order = (order,) if isinstance(order, str) else tuple(order)
        for name in order:
            if name not in AXES or order.count(name) > 1:
                raise CompileError(
                    f"Mesh(order={order!r}): {name!r} is unknown or stands twice; each of {', '.join(AXES)} may stand "
                    f"once, that of neighbouring ranks first"
                )
        named = [name for name, _ in sizes]
        if twice := [name for name in named if named.count(name) > 1]:
            raise CompileError(f"Mesh: axis {twice[0]} stands twice; leave one of them out")
        size_by_axis = dict(sizes) | axes
        for name, size in size_by_axis.items():
            if whole_axis(name) not in AXES:
                raise CompileError(
                    f"Mesh: unknown axis {name!r}; the axes are {', '.join(sorted(AXES))}"
                )
            if type(size) is not int or size < 1:
                raise CompileError(
                    f"Mesh: axis {name} has size {size!r}; a positive integer is needed"
                )
        used = [a for a, size in size_by_axis.items() if size > 1]
        usual, own = (sorted(used, key=partial(_speed, order=o)) for o in ((), order))
        object.__setattr__(self, "sizes", tuple((a, size_by_axis[a]) for a in own))
        object.__setattr__(self, "order", order if own != usual else ())
        if self.world > MOST_RANKS:
            raise CompileError(
                f"{self}: {self.world} ranks; at most {MOST_RANKS} are accepted, use smaller axes"
            )

    def split(self, axis: str, degrees: Sequence[int]) -> Mesh:
        """Return the same ranks with an axis split into several: "tp.0", "tp.1", ...; the last varies fastest."""
        if len(degrees) == 1:
            return self
        parts = ((f"{axis}.{k}", degree) for k, degree in enumerate(degrees))
        return Mesh((*((a, n) for a, n in self.sizes if a != axis), *parts), self.order)

    def along(self, axis: str) -> tuple[str, ...]:
        """Return the axis, or the axes that it is split into, fastest first; "tp.0+tp.1" names some of these."""
        named = axis.split("+")
        return tuple(a for a in self.axes if a in named or whole_axis(a) in named)

    def size(self, axis: str) -> int:
        """Return the number of coordinates along an axis."""
        return self._size_by_axis.get(axis, 1)

    @cached_property
    def _size_by_axis(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Return the axes with more than one device, fastest first."""
        return tuple(a for a, _ in self.sizes)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return prod(n for _, n in self.sizes)

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the rank at the given coordinates; axes of size 1 may be left out."""
        rank, stride = 0, 1
        for axis, size in self.sizes:
            rank += coords[axis] * stride
            stride *= size
        return rank

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by axis."""
        coords_by_axis = {}
        for axis, size in self.sizes:
            rank, coords_by_axis[axis] = divmod(rank, size)
        return coords_by_axis

    def degree(self, axes: Iterable[str]) -> int:
        """Return how many ranks differ along some axes only: the product of the axes' sizes."""
        sizes = self._size_by_axis
        return prod([sizes.get(axis, 1) for axis in axes])

    def index_along(self, axes: Iterable[str], rank: int) -> int:
        """Return the position of a rank, from 0, among the ranks that differ only along some axes, in their order."""
        chosen, coords, index, stride = set(axes), self.coords(rank), 0, 1
        for axis, size in self.sizes:
            if axis in chosen:
                index += coords[axis] * stride
                stride *= size
        return index

    def ranks(self, fixed: Mapping[str, int]) -> tuple[int, ...]:
        """Return all ranks, ascending, at which the axes of `fixed` have the given coordinates."""
        matching, stride = [0], 1
        for axis, size in self.sizes:
            places = (fixed[axis],) if axis in fixed else range(size)
            matching = [rank + at * stride for at in places for rank in matching]
            stride *= size
        return tuple(matching)

    def __str__(self) -> str:
        order = [f"order={self.order!r}"] if self.order else []
        return f"Mesh({', '.join([*(f'{a}={n}' for a, n in reversed(self.sizes)), *order])})"
