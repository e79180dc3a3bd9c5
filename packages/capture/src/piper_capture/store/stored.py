"""Keep a capture without its graphs and modules, and make these again only if something new is asked for.

A stored capture holds the program, its forms under policies, layers and shardings that were asked for, and the code of
all steps that was made so far. It can be pickled. The capture that is restored from it traces nothing for these. For
anything else it captures the model again, which gives the same codes, since their names are hashes of their content.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from piper_capture.chunks.advancing import Advancing
from piper_capture.chunks.dispatch import Dispatch
from piper_capture.chunks.layers import Layers
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import Agreed, Sharded
from piper_capture.steps.joint import TracedChunk
from piper_capture.steps.linearity import Auxiliary
from piper_capture.steps.routed import Routed, RoutedLayouts
from piper_capture.store.assemble import with_layers
from piper_capture.store.captured import Captured
from piper_capture.store.codestore import CodeStore, Fused, PassedOn, TraceSpec
from piper_capture.store.sharding import cut_at_experts, with_shardings
from piper_capture.store.tiles import with_tiles
from piper_capture.store.traced import Traced
from piper_capture.store.variants import with_policies
from piper_capture.torch_api._torch_rows import RowGuard
from piper_capture.trace.dynamo import Forward, TensorInfo
from piper_capture.whole_batch.counting import CounterSpec
from piper_ir.ground.errors import CaptureError
from piper_ir.program.layout import Sharding
from piper_ir.program.program import Chunk, Program, Step
from piper_ops import BatchNorm

Again = Callable[[], Captured]
"""A function that captures the model again."""


@dataclass(frozen=True)
class StoredFacts:
    """Hold the facts about a captured graph that remain without it.

    Attributes:
        guards: the facts about rows that its path depends on.
        notes: the remarks on it.
        norms: its batch norms.
        warned: the warnings about the model.
    """

    params: tuple[TensorInfo, ...]
    guards: tuple[RowGuard, ...]
    notes: tuple[str, ...]
    norms: tuple[BatchNorm, ...]
    warned: list[str]


@dataclass(frozen=True)
class StoredCapture:
    """Hold a capture without its graphs.

    Attributes:
        under: as in `Captured`, like the fields after it.
        traced: code and rows -> steps; empty if the capture above holds the code.
        expected: code -> the chunk of the program.
        fused: as in `CodeStore`.
    """

    program: Program
    facts: StoredFacts
    advancing: tuple[Advancing, ...]
    remarks: Mapping[str, str]
    layers: Layers
    reduce: torch.dtype | None
    unshared: Mapping[str, str]
    auxiliary: tuple[Auxiliary, ...] = ()
    under: Mapping[tuple[tuple[str, ...], int], Program] = field(default_factory=dict)
    shared: Mapping[tuple[tuple[Sharding, ...], int], StoredCapture] = field(default_factory=dict)
    traced: Mapping[tuple[str, int], TracedChunk] = field(default_factory=dict)
    expected: Mapping[str, Chunk] = field(default_factory=dict)
    fused: Fused = field(default_factory=dict)
    tiled: Mapping[int, StoredCapture] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTrace:
    """Hold a traced model without its graph.

    Attributes:
        usual: the capture with the usual layers, if it was made.
        layered: the captures with other layers; None stands for the one with the usual layers.
        experts: whether the model has regions of experts.
    """

    layers: Layers
    outline: Program
    reduce: torch.dtype | None
    facts: StoredFacts
    usual: StoredCapture | None
    layered: Mapping[tuple[str, ...], StoredCapture | None]
    experts: bool


def stored(traced: Traced) -> StoredTrace:
    """Return the form of a traced model that can be pickled."""
    usual = traced.found
    return StoredTrace(
        traced.layers.without_graph(),
        traced.outline,
        traced.reduce,
        _facts(traced.forward),
        None if usual is None else _stored(usual),
        {asked: None if one is usual else _stored(one) for asked, one in traced.layered.items()},
        traced.experts,
    )


def _facts(forward: Forward) -> StoredFacts:
    return StoredFacts(forward.params, forward.guards, forward.notes, forward.norms, forward.warned)


def _stored(captured: Captured, own_code: bool = True) -> StoredCapture:
    """Return the form of a capture that can be pickled; with `own_code`, its code as well."""
    traced, expected, fused = captured.code.made if own_code else ({}, {}, {})
    return StoredCapture(
        captured.program,
        _facts(captured.forward),
        captured.advancing,
        dict(captured.remarks),
        captured.layers.without_graph(),
        captured.reduce,
        dict(captured.unshared),
        captured.auxiliary,
        dict(captured.under),
        {asked: _stored(one, own_code=False) for asked, one in captured.shared.items()},
        traced,
        expected,
        fused,
        {tiles: _stored(one, own_code=False) for tiles, one in captured.tiled.items()},
    )


def extent(traced: Traced) -> int:
    """Return a number that grows whenever a traced model comes to hold more; 0 if it holds no capture."""
    captures = [traced.found, *(one for one in traced.layered.values() if one is not traced.found)]
    return len(traced.layered) + sum(_extent(one) for one in captures if one is not None)


def _extent(captured: Captured) -> int:
    shared = sum(len(one.under) for one in captured.shared.values())
    tiled = sum(1 + _extent(one) for one in captured.tiled.values())
    return len(captured.code.made[0]) + len(captured.under) + len(captured.shared) + shared + tiled


def restored(kept: StoredTrace, again: Callable[[], Traced]) -> Traced:
    """Return a traced model that holds the stored parts, and calls `again` for everything else."""
    again = functools.cache(again)

    def form(asked: tuple[str, ...]) -> Captured:
        return with_layers(again(), asked)

    forward = cast(Forward, _ForwardAgain(kept.facts, again))
    make = functools.partial(form, ())
    traced = Traced(forward, kept.layers, kept.outline, kept.reduce, make, kept.experts)
    if kept.usual is not None:
        vars(traced)["assembled"] = _restored(kept.usual, functools.partial(form, ()), forward)
    for asked, one in kept.layered.items():
        traced.layered[asked] = (
            traced.assembled
            if one is None
            else _restored(one, functools.partial(form, asked), forward)
        )
    return traced


def _restored(kept: StoredCapture, again: Again, forward: Forward) -> Captured:
    captures: list[Captured] = []
    code = StoredCode(
        kept.traced,
        kept.expected,
        kept.fused,
        again,
        lambda name: _derive(again(), captures[0], name),
    )
    captures.append(_captured(kept, code, forward))
    return captures[0]


def _captured(kept: StoredCapture, code: CodeStore, forward: Forward) -> Captured:
    shared = {asked: _captured(one, code, forward) for asked, one in kept.shared.items()}
    more: dict[str, Any] = {
        "unshared": kept.unshared,
        "layers": kept.layers,
        "reduce": kept.reduce,
        "auxiliary": kept.auxiliary,
        "tiled": {tiles: _captured(one, code, forward) for tiles, one in kept.tiled.items()},
    }
    return Captured(
        kept.program, code, forward, kept.advancing, kept.remarks, dict(kept.under), shared, **more
    )


def _derive(live: Captured, kept: Captured, code: str) -> None:
    """Make the variants and shardings of a live capture that have this code in the stored one."""
    for tiles, form in kept.tiled.items():
        _derive(with_tiles(live, tiles), form, code)
    for (policies, rows), program in kept.under.items():
        if code in _codes(program):
            with_policies(live, policies, rows or None)
    for (asked, at), one in kept.shared.items():
        programs = {((), at): one.program, **one.under}
        for (policies, rows), program in programs.items():
            if code in _codes(program):
                form = with_shardings(live, asked, at or None) if asked else cut_at_experts(live)
                with_policies(form, policies, rows or None)


def _codes(program: Program) -> set[str]:
    return {chunk.code for chunk in (*program.chunks, *program.variants)}


class _ForwardAgain:
    """Stand for a captured graph: hold the stored facts, and take all else from a new capture."""

    def __init__(self, kept: StoredFacts, again: Callable[[], Traced]) -> None:
        self.params, self.guards = kept.params, kept.guards
        self.notes, self.norms, self.warned = kept.notes, kept.norms, kept.warned
        self._again = again

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._again().forward, name)


class StaleCapture(CaptureError):
    """Report that a kept capture has code that a new capture of the same model does not have."""


def _not_here() -> Captured:
    raise CaptureError(
        "this was compiled in another process and holds the code of its own plan only; call piper.compile here for "
        "anything else"
    )


class StoredCode(CodeStore):
    """Hold the code that was kept, and take all else from the store of a new capture, if there can be one."""

    def __init__(
        self,
        traced: Mapping[tuple[str, int], TracedChunk],
        expected: Mapping[str, Chunk],
        fused: Fused,
        again: Again | None = None,
        derive: Callable[[str], None] = lambda code: None,
    ) -> None:
        super().__init__()
        self._traced.update(traced)
        self._expected.update(expected)
        self._fused.update(fused)
        self._again, self._derive = again or _not_here, derive

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredCode, self.made

    def trace(self, code: str, rows: int) -> TracedChunk:
        traced = self._traced.get((code, rows))
        if traced is None:
            traced = self._traced[code, rows] = self._live(code).trace(code, rows)
        return traced

    def _fuse(self, name: str, code: str, steps: tuple[Step, ...]) -> bool:
        return self._live(code).fused(code, steps) == name

    def _live(self, code: str) -> CodeStore:
        """Return the store of the new capture, which knows this code."""
        own, steps = self._fused.get(code, (code, ()))
        store = self._again().code
        if own not in set(store):
            self._derive(own)
        if own not in set(store):
            raise StaleCapture(
                "the model was captured in an earlier process, and its code has other names in this one; a set whose "
                "order changes from process to process may be the reason. Please run the same again; if this comes "
                'back, set PIPER_CACHE="", so that no capture is kept'
            )
        if steps:
            store.fused(own, steps)
        return store

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    def add(self, code: str, recipe: TraceSpec) -> None:
        self._again().code.add(code, recipe)

    def add_passed(self, code: str, passed: PassedOn) -> None:
        self._again().code.add_passed(code, passed)

    def add_counter(self, counter: CounterSpec) -> None:
        self._again().code.add_counter(counter)

    def variant(
        self, code: str, keep: str, inside: tuple[tuple[int, ...], ...] | None = None
    ) -> str:
        return self._live(code).variant(code, keep, inside)

    def shared(
        self,
        code: str,
        asked: tuple[Sharding, ...],
        agreed: Agreed,
        params: tuple[tuple[str, ...], ...] = (),
    ) -> str:
        return self._live(code).shared(code, asked, agreed, params)

    def tiled(self, code: str, tiles: int) -> str:
        return self._live(code).tiled(code, tiles)

    def dispatched(self, code: str, dispatch: Dispatch) -> str:
        return self._live(code).dispatched(code, dispatch)

    def routed(self, code: str, how: Routed) -> str:
        return self._live(code).routed(code, how)

    def routed_layouts(self, code: str) -> RoutedLayouts:
        return self._live(code).routed_layouts(code)

    def recipe(self, code: str) -> TraceSpec:
        return self._live(code).recipe(code)

    def layouts(self, code: str, rows: int) -> Sharded:
        return self._live(code).layouts(code, rows)

    def joint(self, code: str, rows: int) -> Joint:
        return self._live(code).joint(code, rows)
