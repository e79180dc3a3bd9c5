"""Mistakes of a runtime in the rows of a batch, in random numbers and in recomputation; see runtime_faults.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch

from piper_ir.plan.plan import Part
from piper_ir.program.ops import (
    Compute,
    Load,
)
from piper_ir.program.program import Chunk
from piper_ops import DrawsOfCall
from piper_runtime.rank.batches.batches import microbatch_rows
from piper_runtime.rank.binding import parts
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank_state import RankState
from tests.faults.fault import BindPart, Fault


def _swap_inputs(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    if (
        isinstance(part.op, Load)
        and part.op.tensor.startswith("inputs")
        and rank.plan.microbatches > 1
    ):
        part = replace(part, mb=part.mb ^ 1 if part.mb ^ 1 < rank.plan.microbatches else part.mb)
    return bind(part, rank)


def _same_rows(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    return bind(replace(part, mb=0) if isinstance(part.op, Load) else part, rank)


def _rotate_replica(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    if not isinstance(part.op, Load) or not part.op.tensor.startswith("inputs"):
        return bind(part, rank)
    run, feed, own = bind(part, rank), rank.feed, rank.feed._call
    replica = (rank.plan.replica_of(rank.rank) + 1) % rank.plan.replicas
    other = replace(own, rows={mb: microbatch_rows(rank.plan, replica, mb) for mb in own.rows})

    def load() -> None:
        feed._call = other
        feed._staged.clear()
        try:
            run()
        finally:
            feed._call = own
            feed._staged.clear()

    return load


def _keep_references(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    rank.feed.kept = _as_it_is  # type: ignore[method-assign]  # on purpose: it is a fault
    return bind(part, rank)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _reuse_random(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if (
        not isinstance(part.op, Compute)
        or part.op.step != "F"
        or not rank.plan.chunk(part.op.chunk).random
    ):
        return run

    def unseeded() -> None:
        kept, rank.seed = rank.seed, rank.seed + 1
        try:
            run()
        finally:
            rank.seed = kept

    return unseeded


def _drawn_by(
    change: Callable[[DrawsOfCall, Chunk], DrawsOfCall],
) -> Callable[[Part, RankState, BindPart], Thunk]:
    """Return a fault of what random numbers depend on."""

    def fault(part: Part, rank: RankState, bind: BindPart) -> Thunk:
        run = bind(part, rank)
        if not isinstance(part.op, Compute) or not rank.plan.chunk(part.op.chunk).random:
            return run

        def otherwise() -> None:
            right = parts.drawing_of
            with patch.object(
                parts,
                "drawing_of",
                lambda plan, chunk, *more: change(right(plan, chunk, *more), chunk),
            ):
                run()

        return otherwise

    return fault


def _other_mask(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run, values = bind(part, rank), rank.store.values
    if (
        not isinstance(part.op, Compute)
        or part.op.step not in ("I", "W")
        or not rank.plan.chunk(part.op.chunk).random
    ):
        return run

    def other() -> None:
        values.update(
            {v: values[v].roll(1, 0) for v in part.reads if values[v].dtype == torch.bool}
        )
        run()

    return other


def _by_cut(drawing: DrawsOfCall, chunk: Chunk) -> DrawsOfCall:
    draws = [replace(draw, place=f"{chunk.id}#{k}") for k, draw in enumerate(chunk.draws)]
    return replace(drawing, draws=draws)


def _is_recomputation(part: Part) -> bool:
    return isinstance(part.op, Compute) and part.op.step == "R"


def _other_dropout(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not _is_recomputation(part):
        return run

    def other() -> None:
        rank.seed += 1
        try:
            run()
        finally:
            rank.seed -= 1

    return other


def _first_recomputed(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run, values = bind(part, rank), rank.store.values
    if not _is_recomputation(part) or not isinstance(part.op, Compute):
        return run
    first: dict[str, list[torch.Tensor]] = rank.__dict__.setdefault("first_recomputed", {})
    chunk = part.op.chunk

    def stale() -> None:
        run()
        before = first.setdefault(chunk, [values[v].clone() for v in part.writes])
        values.update(zip(part.writes, [t.clone() for t in before], strict=True))

    return stale


BATCHES: dict[str, Fault] = {
    "swap_microbatches": Fault(
        "inputs of two microbatches are swapped, targets are not", part=_swap_inputs
    ),
    "repeat_microbatch": Fault("every microbatch gets the rows of the first", part=_same_rows),
    "wrong_rank_order": Fault("replicas read each other's inputs", part=_rotate_replica),
    "refilled_batch": Fault(
        "rows that are loaded later are held by reference, and refilled", part=_keep_references
    ),
}
DRAWS: dict[str, Fault] = {
    "recompute_other_dropout": Fault(
        "recomputation draws other random numbers than its forward", part=_other_dropout
    ),
    "recompute_stale": Fault(
        "every microbatch gets what was recomputed for the first one", part=_first_recomputed
    ),
    "mask_of_other_rows": Fault(
        "a backward reads another mask of dropout than its forward made", part=_other_mask
    ),
    "places_by_cut": Fault(
        "random numbers depend on how the model is cut", part=_drawn_by(_by_cut)
    ),
    "rows_of_the_microbatch": Fault(
        "random numbers are drawn for the rows of a microbatch, not of the batch",
        part=_drawn_by(lambda drawing, _: replace(drawing, first=0)),
    ),
    "step_that_draws": Fault(
        "each step draws the same numbers",
        part=_drawn_by(lambda drawing, _: replace(drawing, step=0)),
    ),
    "wrong_random_state": Fault(
        "random operations do not follow the seed rule", part=_reuse_random
    ),
}
