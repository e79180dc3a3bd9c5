"""Collect the requests of a strategy's directives to the capture, before there is a graph.

Some of a strategy changes the code of chunks, and code is rewritten where the model was captured: `partition(layers=)`
chooses the modules that are layers, `shard` divides ops among devices, `tile_loss` makes a loop of the loss, and
`recompute` makes chunks that compute saved tensors again. Such a directive has a method `prepare`, which adds to a
`CaptureRequest`; `piper.compile` rewrites the capture by it (`piper.api.captures.capturing.rewritten`), and only then
the directives edit the graph by `apply`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from piper_compiler.directives.base import Directive
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import LONGEST_CHAIN, Where
from piper_ir.program.layout import Sharding
from piper_ir.program.program import Program


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """Say how a capture is rewritten for a strategy.

    Attributes:
        layers: patterns of the names of the modules that are layers; none for the usual ones.
        shardings: how devices share the ops of chunks, for the axes with more than one device.
        policies: the policies of recomputation for which chunks have variants, in alphabetical order.
        tiles: the tiles of tokens in which logits and loss are computed.
        empty_stages: the stages without layers, which pass on the values of the unit before them: (set of units, number
            of the first unit behind them, stage), see `partition`.
    """

    layers: tuple[str, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    policies: tuple[str, ...] = ()
    tiles: int = 1
    empty_stages: tuple[tuple[str, int, int], ...] = ()

    @property
    def empty(self) -> bool:
        """Return whether the capture serves as it is."""
        return self == CaptureRequest()

    def under(self, *policies: str) -> CaptureRequest:
        """Return the request with these policies, too."""
        return replace(self, policies=tuple(sorted({*self.policies, *policies})))


@dataclass(frozen=True)
class Preparation:
    """Hold the facts that a directive may read when it prepares.

    Attributes:
        mesh: the mesh of the strategy.
        program: the program with the usual layers.
        directives: all directives of the strategy.
        before: the directives that stand before this one.
    """

    mesh: Mesh
    program: Program
    directives: tuple[Directive, ...]
    before: tuple[Directive, ...] = ()


@runtime_checkable
class Preparing(Protocol):
    """Describe a directive that asks something of the capture.

    `prepare` returns the request with its additions, or raises DirectiveError. It is called in the order written,
    before `check`.
    """

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest: ...


def written_request(
    mesh: Mesh, directives: Iterable[Directive], program: Program
) -> CaptureRequest:
    """Return the request of directives to the capture whose program with the usual layers is `program`."""
    written = tuple(directives)
    request = CaptureRequest()
    if any(selects(item, "layer") for item in written) and lacks_layers(program, 1):
        request = replace(request, layers=LONGEST_CHAIN)
    for number, item in enumerate(written):
        if isinstance(item, Preparing):
            request = item.prepare(request, Preparation(mesh, program, written, written[:number]))
    return request


def lacks_layers(program: Program, wanted: int) -> bool:
    """Return whether a captured program has fewer than `wanted` layers in a chain, so that others must be chosen.

    It never does if its layers were chosen by name, or if its chunks have stages already.
    """
    if program.source != "captured" or program.layers:
        return False
    if program.chained and len(layers_of(program)) >= wanted:
        return False
    return not any("stage" in chunk.coords for chunk in program.chunks)


def by_layers(request: CaptureRequest, seen: Preparation) -> CaptureRequest:
    """Ask for a chain of like modules as layers if the program has none: its parameters are lent chunk by chunk.

    Chunks that another directive names stay as they are.
    """
    named = any(selects(item, "chunk") for item in seen.directives)
    if request.layers or named or not lacks_layers(seen.program, 1):
        return request
    return replace(request, layers=LONGEST_CHAIN)


def layers_of(program: Program) -> list[int]:
    """Return the layer coordinates in order of first appearance."""
    return list(dict.fromkeys(c.coords["layer"] for c in program.chunks if "layer" in c.coords))


def selects(item: Directive, coordinate: str) -> bool:
    """Return whether a directive selects by a coordinate."""
    selection = getattr(item, "selection", None)
    return isinstance(selection, Where) and coordinate in dict(selection.terms)
