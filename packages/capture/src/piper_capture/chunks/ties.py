"""Let chunks with the same parameter agree how devices shard it, such as an embedding and a tied output head.

Each chunk by itself shards its parameters as its ops allow. A parameter that two chunks would shard in different ways
stays whole in both. The gradient of a whole parameter is a partial sum if devices have shards of the activations that
it is used on, else equal on all. Chunks add their gradients up before the devices do, so if it is a partial sum in one,
it must be one in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from piper_capture.layouts import Agreed, Sharded
from piper_capture.steps.routed import RoutedLayouts
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import Layout
from piper_ir.program.program import Chunk, Program

Axes = tuple[str, ...]


class Ties:
    """Find for each parameter a layout that suits all chunks that use it."""

    def __init__(
        self, program: Program, layouts: Callable[[Chunk, Agreed], Sharded | RoutedLayouts | None]
    ) -> None:
        self._chunks, self._layouts = program.chunks, layouts
        self._whole: set[str] = set()
        self._terms: set[str] = set()

    def settle(self) -> None:
        """Keep parameters whole, and gradients partial sums, until all chunks agree."""
        while True:
            if more := {p for p, ways in self._ways().items() if len(ways) > 1}:
                assert not more & self._whole
                self._whole |= more
                continue
            apart = {p: sums for p, sums in self._sums().items() if len(sums) > 1}
            if not apart:
                return
            for param in apart.keys() & self._terms:
                raise DirectiveError(
                    f"the gradient of parameter {param!r} is a sum over {_listed(apart[param])}; untie it"
                )
            self._terms |= set(apart)

    def agreed(self, chunk: Chunk) -> Agreed:
        """Return the parameters of a chunk that must stay whole, or whose gradients must be partial sums."""
        whole, terms = (
            frozenset(k for k, p in _params(chunk) if p in chosen)
            for chosen in (self._whole, self._terms)
        )
        return Agreed(whole, terms)

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of each parameter, once chunks agree."""
        return {param: next(iter(ways)) for param, ways in self._ways().items()}

    def summed(self) -> dict[str, Axes]:
        """Return the axes along which the gradient of each parameter is a partial sum, once chunks agree."""
        return {param: next(iter(sums)) for param, sums in self._sums().items()}

    def unshared(self) -> dict[str, str]:
        """Return the dimensions of parameters that stay whole though their own ops could shard them, with why."""
        reasons: dict[str, str] = {}
        for chunk, layouts in self._made():
            names = dict(_params(chunk))
            reasons |= {
                f"{names[u.input]}:{u.dim}": u.why
                for u in (layouts.unshared if layouts is not None else ())
            }
        for param in sorted(self._whole):
            users = [chunk.id for chunk in self._chunks if param in dict(_params(chunk)).values()]
            reasons[param] = f"not all chunks that have it can share it alike: {', '.join(users)}"
        return reasons

    def _made(self) -> Iterator[tuple[Chunk, Sharded | RoutedLayouts | None]]:
        for chunk in self._chunks:
            yield chunk, self._layouts(chunk, self.agreed(chunk))

    def _ways(self) -> dict[str, dict[Layout, str]]:
        """Return for each parameter the layouts that chunks give it, each with the last chunk that does."""
        ways_by_param: dict[str, dict[Layout, str]] = {}
        for chunk, layouts in self._made():
            for k, param in _params(chunk):
                ways_by_param.setdefault(param, {})[
                    () if layouts is None else layouts.layout_of(k)
                ] = chunk.id
        return ways_by_param

    def _sums(self) -> dict[str, dict[Axes, str]]:
        """Return for each parameter the axes along which its gradient is a partial sum, each with the last chunk."""
        axes_by_param: dict[str, dict[Axes, str]] = {}
        for chunk, layouts in self._made():
            for k, param in _params(chunk):
                if chunk.inputs[k].needs_grad if layouts is None else k in layouts.grads:
                    axes_by_param.setdefault(param, {})[
                        () if layouts is None else layouts.summed(k)
                    ] = chunk.id
        return axes_by_param


def _params(chunk: Chunk) -> Iterator[tuple[int, str]]:
    yield from (
        (k, chunk_input.ref)
        for k, chunk_input in enumerate(chunk.inputs)
        if chunk_input.kind == "param"
    )


def _listed(sums: dict[Axes, str]) -> str:
    return " and over ".join(
        f"{', '.join(axes) or 'no axis'} in {chunk}" for axes, chunk in sums.items()
    )
