"""Keep a capture without its graphs and modules, and make these again only where something new is asked for.

A stored capture holds the program, its forms under policies, layers and shardings that were asked for, and the code of
all steps that was made so far. It can be pickled. The capture that is restored from it traces nothing for what it
holds. For anything else it captures the model again, which gives the same codes, since their names say what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from piper_compiler.capture._torch import RowGuard
from piper_compiler.capture.advancing import Advancing
from piper_compiler.capture.assemble import with_layers
from piper_compiler.capture.codestore import Captured, CodeStore, TraceSpec
from piper_compiler.capture.dispatch import Dispatch
from piper_compiler.capture.dynamo import Forward, TensorInfo
from piper_compiler.capture.joint import TracedChunk
from piper_compiler.capture.layers import Layers
from piper_compiler.capture.layouts import Agreed, Sharded
from piper_compiler.capture.routed import Routed, RoutedLayouts
from piper_compiler.capture.sharding import with_shardings
from piper_compiler.capture.stepgraph import Joint
from piper_compiler.capture.variants import with_policies
from piper_ir.errors import CaptureError
from piper_ir.layout import Sharding
from piper_ir.program import Chunk, Program
from piper_ops import BatchNorm

Again = Callable[[], Captured]
"""A function that captures the model again."""


@dataclass(frozen=True)
class StoredCapture:
    """Hold what is left of a capture without its graphs.

    Attributes:
        params: parameters of the captured graph; `guards` are the facts about rows that its path depends on, and
            `notes` and `norms` what is said of it.
        under: as in `Captured`, like what follows.
        layered: None stands for the capture itself.
        traced: code and rows -> steps; empty where the code is that of the capture above.
        expected: code -> the chunk of the program.
    """

    program: Program
    params: tuple[TensorInfo, ...]
    guards: tuple[RowGuard, ...]
    notes: tuple[str, ...]
    norms: tuple[BatchNorm, ...]
    advancing: tuple[Advancing, ...]
    remarks: Mapping[str, str]
    layers: Layers
    reduce: torch.dtype | None
    unshared: Mapping[str, str]
    under: Mapping[tuple[str, ...], Program] = field(default_factory=dict)
    shared: Mapping[tuple[Sharding, ...], StoredCapture] = field(default_factory=dict)
    layered: Mapping[tuple[str, ...], StoredCapture | None] = field(default_factory=dict)
    traced: Mapping[tuple[str, int], TracedChunk] = field(default_factory=dict)
    expected: Mapping[str, Chunk] = field(default_factory=dict)


def stored(captured: Captured, own_code: bool = True) -> StoredCapture:
    """Return what can be kept of a capture; with `own_code`, its code and its forms with other layers as well."""
    layered = captured.layered if own_code else {}
    traced, expected = captured.code.made if own_code else ({}, {})
    return StoredCapture(
        captured.program,
        captured.forward.params,
        captured.forward.guards,
        captured.forward.notes,
        captured.forward.norms,
        captured.advancing,
        dict(captured.remarks),
        captured.layers.without_graph(),
        captured.reduce,
        dict(captured.unshared),
        dict(captured.under),
        {asked: stored(one, own_code=False) for asked, one in captured.shared.items()},
        {asked: None if one is captured else stored(one) for asked, one in layered.items()},
        traced,
        expected,
    )


def extent(captured: Captured) -> int:
    """Return a number that grows whenever a capture comes to hold more."""
    layered = sum(extent(one) for one in captured.layered.values() if one is not captured)
    shared = sum(len(one.under) for one in captured.shared.values())
    return len(captured.code.made[0]) + len(captured.under) + len(captured.shared) + shared + len(captured.layered) + layered


def restored(kept: StoredCapture, again: Again) -> Captured:
    """Return a capture that holds what was kept, and calls `again` for what it does not hold."""
    again = functools.cache(again)
    found: list[Captured] = []
    code = StoredCode(kept.traced, kept.expected, again, lambda name: _derive(again(), found[0], name))
    found.append(_captured(kept, code, again))
    for asked, one in kept.layered.items():
        form = functools.partial(with_layers, asked=asked)
        found[0].layered[asked] = found[0] if one is None else restored(one, functools.partial(_of, form, again))
    return found[0]


def _of(form: Callable[[Captured], Captured], again: Again) -> Captured:
    return form(again())


def _captured(kept: StoredCapture, code: CodeStore, again: Again) -> Captured:
    forward = cast(Forward, _ForwardAgain(kept, again))
    shared = {asked: _captured(one, code, again) for asked, one in kept.shared.items()}
    more: dict[str, Any] = {"unshared": kept.unshared, "layers": kept.layers, "reduce": kept.reduce}
    return Captured(kept.program, code, forward, kept.advancing, kept.remarks, dict(kept.under), shared, **more)


def _derive(live: Captured, kept: Captured, code: str) -> None:
    """Make the form of a live capture that has this code, as it was made for the one that was kept."""
    for policies, program in kept.under.items():
        if code in _codes(program):
            with_policies(live, policies)
    for asked, one in kept.shared.items():
        programs = {(): one.program, **one.under}
        for policies, program in programs.items():
            if asked and code in _codes(program):
                with_policies(with_shardings(live, asked), policies)


def _codes(program: Program) -> set[str]:
    return {chunk.code for chunk in (*program.chunks, *program.variants)}


class _ForwardAgain:
    """Stand for a captured graph: what is known of it without it, and all else from a new capture."""

    def __init__(self, kept: StoredCapture, again: Again) -> None:
        self.params, self.guards, self.notes, self.norms = kept.params, kept.guards, kept.notes, kept.norms
        self._again = again

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._again().forward, name)


def _not_here() -> Captured:
    raise CaptureError(
        "this was compiled in another process and holds the code of its own plan only; call piper.compile here for anything else"
    )


class StoredCode(CodeStore):
    """Hold the code that was kept, and take all else from the store of a new capture, if there can be one."""

    def __init__(
        self,
        traced: Mapping[tuple[str, int], TracedChunk],
        expected: Mapping[str, Chunk],
        again: Again | None = None,
        derive: Callable[[str], None] = lambda code: None,
    ) -> None:
        super().__init__()
        self._traced.update(traced)
        self._expected.update(expected)
        self._again, self._derive = again or _not_here, derive

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredCode, self.made

    def trace(self, code: str, rows: int) -> TracedChunk:
        found = self._traced.get((code, rows))
        if found is None:
            found = self._traced[code, rows] = self._live(code).trace(code, rows)
        return found

    def _live(self, code: str) -> CodeStore:
        """Return the store of the new capture, in which this code is known."""
        store = self._again().code
        if code not in set(store):
            self._derive(code)
        return store

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    def add(self, code: str, recipe: TraceSpec) -> None:
        self._again().code.add(code, recipe)

    def variant(self, code: str, keep: str) -> str:
        return self._live(code).variant(code, keep)

    def shared(self, code: str, asked: tuple[Sharding, ...], agreed: Agreed, params: tuple[tuple[str, ...], ...] = ()) -> str:
        return self._live(code).shared(code, asked, agreed, params)

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
