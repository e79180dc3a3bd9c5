"""Faults in how chunks are rewritten for devices that share them, and in how these run them: what no plan shows.

Each runs a composition with the fault and returns the run with what one device computes; None where a case has no
sharers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from piper_capture.layouts import choice, local, pieces
from piper_capture.layouts.rules import rules
from piper_capture.layouts.rules.letters import lettered
from piper_ir.ground.mesh import Mesh
from piper_runtime import Checkpoints
from piper_runtime.checkpoint import rank_tensors
from piper_runtime.engine.fibers import Fiber
from piper_runtime.rank.binding import parts, rank_state, step_collectives
from piper_runtime.rank.values import layouts
from tests.faults import ring_faults
from tests.faults.job_faults import JobFault, Judged
from tests.helpers import compositions
from tests.helpers.compositions import Composition

aten = torch.ops.aten


def _forget(c: Composition) -> None:
    """Let the chunks of a model be rewritten anew."""
    compositions.captured.cache_clear()  # the front door gets this capture again if it has dropped it
    captured = compositions.captured(c.model, c.precision)
    store = captured.code
    captured.shared.clear()
    store._sharded.clear()
    store._joints.clear()  # which keep what the rules said
    for code, rows in list(store._traced):  # of stages without layers, too, which have no recipe
        if code in store._recipes and store._recipes[code].shardings:
            del store._traced[code, rows]


@contextmanager
def _rewritten(c: Composition) -> Iterator[None]:
    _forget(c)
    try:
        yield
    finally:
        _forget(c)


def _judged(c: Composition) -> Judged:
    return compositions.run(c), compositions.expected(c)


def bias_before_the_sum(c: Composition) -> Judged | None:
    """Each sharer adds the bias to its term of a product."""

    def added(call: Any) -> Any:
        loops = lettered({1: "mk", 2: "kn", -1: "mn"}, summed="k")
        return replace(loops, same=(*loops.same, *rules.rules_products.broadcast(call, 0, -1)))

    if c.tp == 1 or c.model != "gpt":
        return None
    with (
        _rewritten(c),
        patch.dict(rules.RULES, {aten.addmm.default: added}),
        patch.object(choice, "unfused", lambda j, chosen: j),
    ):
        return _judged(c)


def next_part_of_parameters(c: Composition) -> Judged | None:
    """Each device begins with the part of the next one."""
    right = layouts.places

    def shifted(layout: Any, mesh: Mesh, rank: int) -> Any:
        return tuple((part, n, (k + 1) % n) for part, n, k in right(layout, mesh, rank))

    with patch.object(layouts, "places", shifted):
        return _judged(c) if c.tp > 1 else None


def next_place_in_code(c: Composition) -> Judged | None:
    """Code takes each device for the next one where it looks at its place."""
    right = rank_state._Places.__missing__

    def shifted(places: Any, axis: str) -> int:
        mesh = places._mesh
        found: int = (right(places, axis) + 1) % mesh.degree(mesh.along(axis))
        return found

    with patch.object(rank_state._Places, "__missing__", shifted):
        return _judged(c) if c.stream else None


@contextmanager
def exchanging(change: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let `change` see each collective inside of steps: its number within the work, kind, axis and tensor, and the
    right one."""
    right, seen = Fiber.exchange, WeakKeyDictionary[Fiber, int]()

    def exchange(fiber: Fiber, kind: str, axis: str, given: torch.Tensor) -> torch.Tensor:
        number = seen[fiber] = seen.get(fiber, -1) + 1
        return change(number, kind, axis, given, lambda tensor: right(fiber, kind, axis, tensor))

    with patch.object(Fiber, "exchange", exchange):
        yield


def sum_left_out(c: Composition) -> Judged | None:
    """A sum over sharers is left out: each goes on with its own term."""
    with exchanging(
        lambda n, kind, axis, x, right: x.clone() if kind == "all_reduce" and n == 1 else right(x)
    ):
        return _judged(c) if c.tp > 1 and not c.stream else None


def keys_not_summed(c: Composition) -> Judged | None:
    """The gradients of keys and values are not summed over the devices that share a head of them."""
    right = local.Sharded.summed

    def summed(layouts: Any, number: int) -> tuple[str, ...]:
        return () if layouts.layout_of(number) else right(layouts, number)

    if c.model != "llama" or c.tp != 4:
        return None
    with _rewritten(c), patch.object(local.Sharded, "summed", summed):
        return _judged(c)


def block_of_the_next(c: Composition) -> Judged | None:
    """A reduce-scatter gives each device the block of the next one."""
    with exchanging(
        lambda n, kind, axis, x, right: right(x.roll(1, 0) if kind == "reduce_scatter" else x)
    ):
        return _judged(c) if c.stream else None


def gathered_in_another_order(c: Composition) -> Judged | None:
    """A gather stacks what devices have in the wrong order."""
    with exchanging(
        lambda n, kind, axis, x, right: right(x).flip(0) if kind == "all_gather" else right(x)
    ):
        return _judged(c) if c.stream else None


def masks_of_their_own(c: Composition) -> Judged | None:
    """Each sharer draws another mask of dropout."""

    right = parts._drawing

    def drawing(run: Any, part: Any, chunk: Any, rank: Any) -> Any:
        drawn = right(run, part, chunk, rank)

        def own() -> None:
            seed, rank.seed = rank.seed, rank.seed + rank.rank
            drawn()
            rank.seed = seed

        return own

    with patch.object(parts, "_drawing", drawing):
        return _judged(c) if c.model == "gpt_dropout" and c.tp > 1 else None


def parts_drawn_as_wholes(c: Composition) -> Judged | None:
    """A sharer of a dropout draws the first numbers for its part, not those of its elements."""
    if c.model != "gpt_dropout" or not (c.stream or c.cp > 1):
        return None
    with _rewritten(c), patch.object(local._Builder, "_drawn", lambda *_: ()):
        return _judged(c)


def losses_of_all_sharers(c: Composition) -> Judged | None:
    """The loss of each sharer counts."""
    right = rank_state.RankState.record

    def record(self: Any, kind: str, mb: int, value: float) -> None:
        counts = self.counts
        self.counts = (
            counts or kind == "loss"
        )  # a weight that counted as often would take it out again
        right(self, kind, mb, value)
        self.counts = counts

    with patch.object(rank_state.RankState, "record", record):
        return _judged(c) if c.tp > 1 else None


def a_wait_without_effect(c: Composition) -> Judged | None:
    """A step goes on with the memory of a result before the collective has written it."""
    right = rank_state.post_late

    def post(exchange: Any) -> Any:
        def early(*given: Any) -> Any:
            wait = right(exchange)(*given)
            return lambda: torch.full_like(wait(), step_collectives.SPOILED)

        return early

    with patch.object(rank_state, "post_late", post):
        return _judged(c) if c.pieces > 1 else None


def pieces_by_device(c: Composition) -> Judged | None:
    """The gathered pieces are put together by device, not in the order of tokens."""

    def joined(self: Any, whole: Any, parts: Any, degree: int, rows: int) -> Any:
        parts = [parts[-1], *parts[:-1]]
        return right(self, whole, parts, degree, rows)

    right = pieces._Builder._joined
    if c.pieces == 1:
        return None
    with _rewritten(c), patch.object(pieces._Builder, "_joined", joined):
        return _judged(c)


def saved_ranges_shifted(c: Composition) -> Judged | None:
    """A checkpoint has the part of each device where that of the next one belongs."""
    if c.tp == 1:
        return None
    right = rank_tensors.runs

    def shifted(shape: Any, layout: Any, mesh: Mesh, rank: int, *within: Any) -> Any:
        coords = mesh.coords(rank)
        axes = {part.axis for part in layout}
        other = {a: (k + 1) % mesh.size(a) if a in axes else k for a, k in coords.items()}
        return right(shape, layout, mesh, mesh.rank(other), *within)

    with tempfile.TemporaryDirectory() as folder:
        with patch.object(rank_tensors, "runs", shifted):
            compositions.run(c, steps=2, checkpoint=Checkpoints(Path(folder), every=2))
        found = compositions.run(c, steps=1, resume=Path(folder) / "step-00000002", gradients=True)
    whole = compositions.expected(c)
    return found, replace(whole, losses=whole.losses[2:], gradients=whole.gradients[2:])


def _of_tokens(name: str) -> JobFault:
    """A fault in attention whose tokens are shared."""

    def fault(c: Composition) -> Judged | None:
        if c.attention != "ring":
            return None
        with _rewritten(c), ring_faults.FAULTS[name]():
            return _judged(c)

    fault.__name__ = name
    fault.__doc__ = ring_faults.FAULTS[name].__doc__
    return fault


SHARERS: tuple[JobFault, ...] = (
    bias_before_the_sum, next_part_of_parameters, next_place_in_code, sum_left_out,
    keys_not_summed, block_of_the_next, gathered_in_another_order, masks_of_their_own, parts_drawn_as_wholes,
    losses_of_all_sharers, saved_ranges_shifted, *map(_of_tokens, ring_faults.FAULTS),
)  # fmt: skip
PIECES: tuple[JobFault, ...] = (a_wait_without_effect, pieces_by_device)
"""Faults of products in pieces."""
