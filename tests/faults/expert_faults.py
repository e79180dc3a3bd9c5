"""Faults in how devices share experts: changes of a finished plan, and wrong rewriting or running, which no plan
shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from piper.api.captures import capturing
from piper.models.mixture import ExpertLayer
from piper_capture.chunks.dispatch import Dispatched
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Bucket, Part, Plan, RolePlan
from piper_ir.program.layout import DimPart
from piper_ir.program.ops import Collective, SquaredNorm, Update
from piper_runtime.engine import inline
from piper_runtime.rank.binding import parts
from piper_runtime.rank.binding.rank_state import RankState
from piper_runtime.rank.binding.update_scale import scale_of
from piper_runtime.rank.values import layouts
from tests.faults.job_faults import JobFault, Judged
from tests.faults.layout_faults import Change
from tests.helpers import compositions, models
from tests.helpers.compositions import Composition
from tests.helpers.plan_edits import every_part, first_part, with_op, with_program, without

# changes of a finished plan


def _of_experts(plan: Plan) -> Bucket | None:
    """A bucket of experts that replicas hold."""
    return next((b for b in plan.buckets if set(b.parts) & set(plan.experts) and b.over), None)


def experts_summed_over_ep(plan: Plan) -> Plan | None:
    """The gradients of different experts are added up, as if they were replicas."""
    found = _of_experts(plan)
    if found is None:
        return None
    over = (*plan.experts, *found.over)
    channels = [replace(c, over=over) if c.id == found.channel else c for c in plan.channels]
    buckets = [replace(b, over=over) if b.channel == found.channel else b for b in plan.buckets]
    return replace(plan, channels=tuple(channels), buckets=tuple(buckets))


def experts_not_summed_over_dp(plan: Plan) -> Plan | None:
    """The gradients of experts stay on each replica."""
    found = _of_experts(plan)
    if found is None or not found.channel:
        return None
    for role, k, instr in plan.instructions():
        if any(isinstance(p.op, Collective) and p.op.bucket == found.id for p in instr.parts):
            plan = with_program(plan, plan.role(role.role), without(plan.role(role.role), k))
            break
    buckets = tuple(replace(b, channel="", over=()) if b is found else b for b in plan.buckets)
    return replace(plan, buckets=buckets)


def experts_are_replicas(plan: Plan) -> Plan | None:
    """The bucket of experts is said to be the same on all devices."""
    return (
        replace(plan, buckets=tuple(replace(b, parts=()) for b in plan.buckets))
        if plan.experts
        else None
    )


def norm_of_own_experts(plan: Plan) -> Plan | None:
    """The norm is that of a device's own experts."""
    if not any(c.id == "norm" and set(c.over) & set(plan.experts) for c in plan.channels):
        return None
    apart = [
        replace(c, over=tuple(a for a in c.over if a not in plan.experts)) if c.id == "norm" else c
        for c in plan.channels
    ]
    return replace(plan, channels=tuple(apart))


def norm_counts_every_replica(plan: Plan) -> Plan | None:
    """What all devices have counts once for each of them in the norm."""
    if not plan.experts:
        return None
    return first_part(
        plan,
        lambda r, p: isinstance(p.op, SquaredNorm) and bool(p.op.once),
        lambda p: with_op(p, once=(), over=()),
    )


def norm_counts_experts_once(plan: Plan) -> Plan | None:
    """The experts of one device alone count in the norm."""
    mine = {b.id for b in plan.buckets if set(b.parts) & set(plan.experts)}

    def counted(part: Part) -> Part:
        assert isinstance(part.op, SquaredNorm)
        return with_op(part, once=(*part.op.once, *(b for b in part.op.buckets if b in mine)))

    return first_part(
        plan, lambda r, p: isinstance(p.op, SquaredNorm) and bool(mine & set(p.op.buckets)), counted
    )


def _exchange(part: Part) -> bool:
    return isinstance(part.op, Collective) and part.op.kind == "all_to_all"


def exchange_is_a_sum(plan: Plan) -> Plan | None:
    """Tokens are added up over devices in place of being exchanged."""
    return every_part(plan, lambda r, p: _exchange(p), lambda p: with_op(p, kind="all_reduce"))


def _unexchanged(plan: Plan, wanted: Callable[[str], bool]) -> Plan | None:
    """The plan in which the readers of some exchanged values read what was to be exchanged."""
    for role in plan.roles if plan.experts else ():
        for instr in role.program:
            for part in instr.parts:
                if _exchange(part) and wanted(part.reads[0]):
                    return _swapped(plan, role, part)
    return None


def _swapped(plan: Plan, role: RolePlan, move: Part) -> Plan:
    """Let who reads a value after its exchange read it before, and the other way round where it is freed."""
    (given,), (got,) = move.reads, move.writes
    program = []
    for instr in role.program:
        parts = tuple(
            replace(
                p,
                reads=tuple(given if v == got else v for v in p.reads),
                frees=tuple(given if v == got else v for v in p.frees),
            )
            for p in instr.parts
        )
        before = tuple(got if v == given else v for v in instr.frees_before)
        program.append(replace(instr, parts=parts, frees_before=before))
    return with_program(plan, role, program)


def tokens_not_dispatched(plan: Plan) -> Plan | None:
    """Experts take the tokens of their own device in place of those that come."""
    return _unexchanged(plan, lambda v: "experts" not in v and ":out" in v)


def results_not_returned(plan: Plan) -> Plan | None:
    """Tokens are combined from what the device's own experts made, for whomever."""
    return _unexchanged(plan, lambda v: "experts" in v and ":out" in v)


def gradients_not_dispatched(plan: Plan) -> Plan | None:
    """The gradients of results do not go to the experts that made these."""
    return _unexchanged(plan, lambda v: "experts" not in v and ":gin" in v)


def gradients_not_returned(plan: Plan) -> Plan | None:
    """The gradients of tokens do not come back from the experts."""
    return _unexchanged(plan, lambda v: "experts" in v and ":gin" in v)


def tokens_among_replicas(plan: Plan) -> Plan | None:
    """Tokens go to the same experts of other replicas."""
    others = tuple(a for a in plan.replicated if a not in plan.experts)
    if not plan.experts or not others:
        return None
    return replace(
        plan,
        channels=tuple(
            replace(c, over=others) if c.purpose == "expert" else c for c in plan.channels
        ),
    )


def exchange_of_no_experts(plan: Plan) -> Plan | None:
    """The plan does not say that its exchanges are those of tokens with experts."""
    plain = tuple(
        replace(c, purpose="activation") if c.purpose == "expert" else c for c in plan.channels
    )
    return replace(plan, channels=plain) if plain != plan.channels else None


def experts_forgotten(plan: Plan) -> Plan | None:
    """The plan does not say which chunks have experts of their own."""
    return (
        replace(plan, chunks=tuple(replace(c, experts="") for c in plan.chunks))
        if plan.experts
        else None
    )


def experts_along_no_axis(plan: Plan) -> Plan | None:
    """The plan does not say along which axis experts differ."""
    return replace(plan, experts=()) if plan.experts else None


def experts_with_the_same_rows(plan: Plan) -> Plan | None:
    """Devices with different experts are given the same rows."""
    return (
        replace(plan, replicated=tuple(a for a in plan.replicated if a not in plan.experts))
        if plan.experts
        else None
    )


def experts_along_another_dimension(plan: Plan) -> Plan | None:
    """Weights of experts are taken apart along their second dimension."""
    other = tuple(
        replace(
            p,
            layout=tuple(
                replace(part, dim=1) if part.axis in plan.experts else part for part in p.layout
            ),
        )
        for p in plan.params
    )
    return replace(plan, params=other) if other != plan.params else None


EXPERT_PLANS: tuple[Change, ...] = (
    experts_summed_over_ep, experts_not_summed_over_dp, experts_are_replicas, norm_of_own_experts, norm_counts_every_replica,
    norm_counts_experts_once, exchange_is_a_sum, tokens_not_dispatched, results_not_returned, gradients_not_dispatched,
    gradients_not_returned, tokens_among_replicas, exchange_of_no_experts, experts_forgotten, experts_along_no_axis,
    experts_with_the_same_rows, experts_along_another_dimension,
)  # fmt: skip

# rewriting and running


@contextmanager
def _rewritten(c: Composition) -> Iterator[None]:
    """Let the chunks of a model be rewritten anew, and again afterwards."""

    def forget() -> None:
        captured = compositions.captured(c.model, c.precision)
        captured.shared.clear()
        store = captured.code
        made = {
            code
            for code, recipe in store._recipes.items()
            if recipe.shardings or recipe.dispatch is not None
        }
        for kept in (store._sharded, store._traced, store._joints):
            for key in [key for key in kept if key[0] in made]:
                del kept[key]
        for code in made & store._expected.keys():
            del store._expected[code]

    forget()
    try:
        yield
    finally:
        forget()


def _judged(c: Composition) -> Judged:
    return compositions.run(c), compositions.expected(c)


def _shared(c: Composition) -> bool:
    return c.ep > 1


def blocks_of_the_next(c: Composition) -> Judged | None:
    """Each device gets the tokens for the experts of the next one."""
    right = inline.collected

    def shifted(law: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        got = right(law, given)
        return [*got[1:], got[0]] if law.name == "AllToAll" else got

    with patch.object(inline, "collected", shifted):
        return _judged(c) if _shared(c) else None


def blocks_in_another_order(c: Composition) -> Judged | None:
    """The blocks of devices arrive in the order of none of them."""
    right = inline.collected

    def reversed_(law: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        got = right(law, given)
        return (
            [torch.cat(g.chunk(len(given))[::-1]) for g in got] if law.name == "AllToAll" else got
        )

    with patch.object(inline, "collected", reversed_):
        return _judged(c) if _shared(c) else None


def places_permuted(c: Composition) -> Judged | None:
    """A device begins with the experts of the next one."""
    right = layouts.places

    def shifted(layout: Any, mesh: Mesh, rank: int) -> tuple[tuple[DimPart, int, int], ...]:
        return tuple((part, n, (k + 1) % n) for part, n, k in right(layout, mesh, rank))

    with patch.object(layouts, "places", shifted):
        return _judged(c) if _shared(c) else None


def dimensions_swapped(c: Composition) -> Judged | None:
    """What arrives is taken for blocks of rows, and not of devices."""

    def taken(self: Dispatched, graph: Any, node: Any, shape: Any, degree: int) -> Any:
        if degree > 1:
            node = graph.call_method("reshape", (node, *self.form(shape, 1)))
        return node if not self.experts else graph.call_method("movedim", (node, 0, self.experts))

    with _rewritten(c), patch.object(Dispatched, "taken", taken):
        return _judged(c) if _shared(c) else None


def rows_permuted(c: Composition) -> Judged | None:
    """Results go back with the rows of devices in the wrong order."""
    right = Dispatched.given

    def given(self: Dispatched, graph: Any, node: Any, shape: Any, degree: int) -> Any:
        if degree > 1:
            node = graph.call_method("flip", (node, (self.rows,)))
        return right(self, graph, node, shape, degree)

    with _rewritten(c), patch.object(Dispatched, "given", given):
        return _judged(c) if _shared(c) else None


def gradients_of_own_rows(c: Composition) -> Judged | None:
    """The gradients of experts are those of the device's own rows."""
    right = Dispatched.taken

    def taken(self: Dispatched, graph: Any, node: Any, shape: Any, degree: int) -> Any:
        node = right(self, graph, node, shape, degree)
        if degree == 1:
            return node
        own = shape[self.rows] // degree
        mine = graph.call_method("narrow", (node, self.rows, 0, own))
        rest = graph.call_method("narrow", (node, self.rows, own, shape[self.rows] - own))
        return graph.call_function(
            torch.cat, ((mine, graph.call_method("mul", (rest, 0))), self.rows)
        )

    with _rewritten(c), patch.object(Dispatched, "taken", taken):
        return _judged(c) if _shared(c) else None


def experts_averaged_over_ep(c: Composition) -> Judged | None:
    """The gradients of experts are divided by the number of devices that share them, as if they were sums of
    replicas."""
    right = scale_of

    def averaging(part: Part, op: Update, rank: RankState) -> Callable[[], float | torch.Tensor]:
        scale, shared = right(part, op, rank), set(rank.plan.experts)
        own = [
            rank.store.flat_grads[b] for b in op.buckets if shared & set(rank.plan.bucket(b).parts)
        ]

        def averaged() -> float | torch.Tensor:
            for flat in own:
                flat.div_(c.ep)
            return scale()

        return averaged

    with patch.object(parts, "scale_of", averaging):
        return _judged(c) if _shared(c) else None


def combined_without_weights(c: Composition) -> Judged | None:
    """The results of a token's experts are added up as they are."""
    if not _shared(c):
        return None
    right = ExpertLayer.routed

    def even(self: ExpertLayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share, chosen = right(self, x)
        return torch.ones_like(share) * share.detach().mean(), chosen

    with patch.object(ExpertLayer, "routed", even):
        wrong = models.captured.__wrapped__(c.model)
        with (
            patch.dict(capturing._CAPTURES, {capturing.capture_key(compositions.job_of(c)): wrong}),
            patch.object(compositions, "captured", lambda *_: wrong),
        ):
            found = compositions.run(c)
    return found, compositions.expected(c)


EXPERT_RUNS: tuple[JobFault, ...] = (
    blocks_of_the_next, blocks_in_another_order, places_permuted, dimensions_swapped, rows_permuted, gradients_of_own_rows,
    experts_averaged_over_ep, combined_without_weights,
)  # fmt: skip
