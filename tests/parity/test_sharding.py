"""Protect what stands in plans whose ranks share states: gathers, scatters, windows, refusals and their texts.

And that the judge of tests/parity/test_compositions.py sees a rank that is left out. That they train what one device
trains is checked there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import piper
from piper.views.explained.explain import explain
from piper_compiler import Strategy, durations, recipes, replicate
from piper_compiler.passes.steps import release, residency
from piper_ir.fold.memory import with_peaks
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Part, Plan
from piper_ir.plan.text import format_plan
from piper_ir.program.ops import Collective, Compute, Fresh
from piper_ir.tools import size_text
from piper_ir.verify import check, verify
from piper_ops.written import opaque
from piper_runtime.rank.binding import rank as ranks
from tests.faults.sharding_faults import SHARDING
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition
from tests.helpers.judged import judge
from tests.helpers.memory_judge import lies


@pytest.mark.parametrize("keep", ["all", "inputs"])
def test_opaque_regions_compute_the_same_bits_with_gathered_parameters(keep: str) -> None:
    """Gradients are summed in the order of whole ones where each is scattered once."""
    whole = Composition("opaque", dp=2, microbatches=2, keep=keep)
    runs = [
        compositions.run(c)
        for c in (whole, replace(whole, zero=3, bucket_mb=0.0005, reduced_mb="step"))
    ]
    for expected, found in zip(runs[0].gradients, runs[1].gradients, strict=True):
        assert expected.keys() == found.keys() and all(
            torch.equal(expected[n], found[n]) for n in expected
        )


def test_autograd_would_keep_gathered_parameters_of_opaque_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: what it saves is kept as it is, and the counter sees it."""
    c = Composition("opaque", dp=2, microbatches=2, zero=3, bucket_mb=0.0005)
    plan = compositions.compiled(c).plan
    monkeypatch.setattr(opaque._Places, "pack", lambda self, t: t.detach())
    assert lies(plan, dict(compositions.run(c, plan, memory=True).memory))


CASE = Composition(
    "gpt",
    pp=2,
    dp=2,
    microbatches=4,
    schedule="1f1b",
    optimizer="adamw",
    clip=0.05,
    bucket_mb=0.002,
    zero=3,
)


def test_the_text_of_a_plan_names_what_ranks_share() -> None:
    plan = compositions.compiled(CASE).plan
    text = format_plan(plan)
    assert " holding " in text and " Fresh " in text and " Fold " in text


def parts(plan: Plan, role: str) -> list[Part]:
    return [part for instr in plan.role(role).program for part in instr.parts]


def gathers(plan: Plan, role: str) -> Counter[str]:
    return Counter(
        p.op.bucket
        for p in parts(plan, role)
        if isinstance(p.op, Collective) and p.op.kind == "all_gather"
    )


def scatters(plan: Plan, role: str) -> int:
    return sum(
        isinstance(p.op, Collective) and p.op.kind == "reduce_scatter" for p in parts(plan, role)
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_kept_for_the_step_is_gathered_and_scattered_once(zero: int) -> None:
    plan = compositions.compiled(
        replace(CASE, zero=zero, resident_mb="step", reduced_mb="step")
    ).plan
    for role in plan.roles:
        held = {b.id for b in plan.buckets if role.role in b.roles}
        assert gathers(plan, role.role) == Counter(held)
        assert scatters(plan, role.role) == len(held)


def test_gpipe_gathers_twice_per_microbatch_and_scatters_once() -> None:
    """Without room, every F and every B needs its bucket anew, but where two uses of a bucket follow each other."""
    c = replace(CASE, model="gpt_untied", optimizer="sgd", schedule="gpipe", bucket_mb=25)
    plan = compositions.compiled(c).plan
    for role in plan.roles:
        assert len({b.id for b in plan.buckets if role.role in b.roles}) == 1
        assert (
            sum(gathers(plan, role.role).values()) == 1
        )  # one bucket is all that the role uses, one use after the other
    plan = compositions.compiled(replace(c, bucket_mb=0.0001)).plan  # a bucket per parameter
    reads = Counter(b for p in parts(plan, "pp0") for b in _read(plan, p))
    found = gathers(plan, "pp0")
    assert found.keys() == reads.keys() and all(
        c.microbatches <= found[b] <= reads[b] for b in found
    )


def _read(plan: Plan, part: Part) -> set[str]:
    gathered = {
        p.writes[0]: p.op.bucket
        for p in parts(plan, "pp0")
        if isinstance(p.op, Collective) and p.op.kind == "all_gather"
    }
    return {gathered[v] for v in part.held if v in gathered}


@pytest.mark.parametrize(("zero", "mb"), [(1, 0), (2, 0), (3, 0), (3, "step")])
def test_the_explanation_says_what_is_gathered_and_why_a_window_ends(zero: int, mb: Any) -> None:
    made = compositions.compiled(
        replace(CASE, model="skip", zero=zero, resident_mb=mb, reduced_mb="step")
    )
    text, plan = explain(made), made.plan
    for role in plan.roles:
        found = gathers(plan, role.role)
        moved = sum(n * plan.bucket(b).numel * 8 for b, n in found.items())
        assert f"{found.total()} gathers of {len(found)} buckets, {size_text(moved)} in all" in text
        early = found.total() - len(found)
        assert (f"{early} make room for other buckets (resident_mb=0" in text) == (early > 0)
    assert ("make room" in text) == (zero == 3 and mb == 0)
    assert ("at the start of the step" in text) == (zero < 3)


def test_nothing_is_explained_where_nothing_is_shared() -> None:
    assert "gathers" not in explain(compositions.compiled(replace(CASE, zero=0)))


def under_way(plan: Plan) -> int:
    """The most buffers that are being scattered, or scattered and kept, when a role makes another one."""
    most = 0
    for role in plan.roles:
        going: set[str] = set()
        made: set[str] = set()
        for instr in role.program:
            going -= set(instr.frees_before)
            for part in instr.parts:
                if isinstance(part.op, Fresh):
                    made |= set(part.writes)
                    most = max(most, len(going))
                elif isinstance(part.op, Collective) and part.reads and part.reads[0] in made:
                    going.add(part.reads[0])
                going -= set(part.frees)
    return most


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_one_scatter_is_under_way_while_a_buffer_is_filled(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow links are; negative control: without the bound there are more, where folds do not wait for them
    anyway."""
    c = replace(CASE, model="deep", schedule=schedule)
    monkeypatch.setattr(residency, "LINK", 1e3)
    monkeypatch.setattr(durations, "LINK", 1e3)
    assert under_way(compositions.compiled(c).plan) == 1
    monkeypatch.setattr(
        release, "_bounded", lambda draft, sent, *_: np.full(len(sent), np.iinfo(np.int64).max)
    )
    assert under_way(compositions.compiled(c).plan) > 1 or schedule != "1f1b"


def test_no_weight_gradient_waits_for_a_gather() -> None:
    plan = compositions.compiled(replace(CASE, model="deep", schedule="zbv")).plan
    for role in plan.roles:
        weights = [
            p for p in parts(plan, role.role) if isinstance(p.op, Compute) and p.op.step == "W"
        ]
        gathered = {
            p.writes[0]
            for p in parts(plan, role.role)
            if isinstance(p.op, Collective) and p.op.kind == "all_gather"
        }
        assert weights and not any(gathered & set(p.held) for p in weights)


def test_each_level_shares_one_more_state() -> None:
    case = replace(CASE, dp=4, rows=1, microbatches=2, bucket_mb=0.01, optimizer="sgd", clip=None)
    plans = [compositions.compiled(replace(case, zero=zero)).plan for zero in range(4)]
    whole = _bytes_by_state(plans[1], 4)
    for zero, plan in enumerate(plans[1:], 1):
        shared = ("optim", "grad", "param")[:zero]
        assert _bytes_by_state(plan, 1) == {
            kind: whole[kind] // (4 if kind in shared else 1) for kind in whole
        }
    assert plans[3].roles[0].peak_bytes < plans[0].roles[0].peak_bytes


def _bytes_by_state(plan: Plan, sharers: int) -> dict[str, int]:
    """Return the bytes of each kind of state of the first role, where `sharers` ranks share the optimizer's."""
    out: Counter[str] = Counter()
    for state in plan.roles[0].states:
        out[state.category] += state.nbytes * (sharers if state.category == "optim" else 1)
    return dict(out)


SMALL = 192 * 8  # bytes: biases, norms and positions of the model, and no other matrix


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_small_parameters_stay_whole(schedule: str) -> None:
    """Their gradients and optimizer states do not; they are gathered once in a step, and dropped from no window."""
    c = replace(CASE, model="deep", schedule=schedule, whole_mb=SMALL / 2**20)
    plan = compositions.compiled(c).plan
    sizes = {
        p.name: bind(p.spec.numel, 0) * 8 for p in compositions.captured("deep").program.params
    }
    whole = [b for b in plan.buckets if not b.shard.params]
    assert whole and all(b.shard.optim == b.shard.grads == ("dp",) for b in plan.buckets)
    assert {n for b in whole for n in b.params} == {n for n, size in sizes.items() if size <= SMALL}
    for role in plan.roles:
        found = gathers(plan, role.role)
        assert all(found[b.id] == 1 for b in whole if role.role in b.roles)
        alone = replace(c, whole_mb=0)
        assert found.total() < gathers(compositions.compiled(alone).plan, role.role).total()
    judge(c)
    shown = explain(compositions.compiled(c))
    mine = [b for b in whole if "pp0" in b.roles]
    assert f"{len(mine)} of these stay whole through the step, " in shown
    assert "stay whole" not in explain(compositions.compiled(replace(c, whole_mb=0)))


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    with pytest.raises(
        CompileError,
        match=r"zero=3.*Adafactor works on whole parameters here \(it keeps sums over rows",
    ):
        compositions.compiled(replace(CASE, optimizer="adafactor", clip=None))


def test_replicas_of_sharers_keep_the_same_parts() -> None:
    """Two axes: states are shared along one, and what is kept is summed along the other."""
    program = compositions.captured("gpt").program
    directives = (
        *recipes.one_f_one_b(pp=2, microbatches=2),
        replicate(where(), over=("dp", "rep"), shard=SHARED, bucket_mb=0.002),
    )
    c = Composition(
        "gpt", pp=2, dp=4, microbatches=2, schedule="1f1b", optimizer="adamw", clip=0.05, rows=1
    )
    made = piper.compile(compositions.job_of(c), Strategy(Mesh(pp=2, dp=2, rep=2), directives))
    verify(made.plan)
    assert (
        program.params
        and {b.channel for b in made.plan.buckets}
        and all(b.shard.grads == ("dp",) for b in made.plan.buckets)
    )
    run = compositions.run(c, made.plan, memory=True)
    parity.assert_parity(run, compositions.expected(c))
    assert not lies(made.plan, dict(run.memory))


def test_a_norm_over_other_axes_here_and_there_counts_each_part_once() -> None:
    along = [
        replicate(where(stage=k), over=("dp", "rep"), shard={"optim": axes})
        for k, axes in ((0, ("dp",)), (1, ("rep",)))
    ]
    c = Composition("gpt_untied", pp=2, dp=4, microbatches=2, schedule="1f1b", rows=1, clip=0.05)
    strategy = Strategy(
        Mesh(pp=2, dp=2, rep=2), (*recipes.one_f_one_b(pp=2, microbatches=2), *along)
    )
    made = piper.compile(compositions.job_of(c), strategy)
    verify(made.plan)
    run = compositions.run(c, made, memory=True)
    parity.assert_parity(run, compositions.expected(c))
    assert not lies(made.plan, dict(run.memory))


SHARED = {"params": ("dp",), "grads": ("dp",), "optim": ("dp",)}


@contextmanager
def bound_otherwise(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[None]:
    with monkeypatch.context() as m:
        m.setattr(ranks.Rank, "binder", replace(ranks.Rank.binder, **changes))
        yield


def stale(part: Part, rank: Any) -> Any:
    """A gather of the second step that is left out: what it would give is what the first step had."""
    found, seen = ranks.bind_operand(part, rank), dict[int, torch.Tensor]()
    if not (isinstance(part.op, Collective) and part.op.kind == "all_gather" and rank.rank == 1):
        return found
    return lambda: seen.setdefault(0, found().clone()) if rank.step < 2 else found()


def silent(part: Part, rank: Any) -> Any:
    """A scatter that forgets one rank: it adds nothing of that rank's in the second step."""
    found = ranks.bind_operand(part, rank)
    forgets = (
        isinstance(part.op, Collective) and part.op.kind == "reduce_scatter" and rank.rank == 1
    )
    return lambda: torch.zeros_like(found()) if forgets and rank.step == 1 else found()


@pytest.mark.parametrize("fault", [stale, silent])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_judge_sees_a_rank_that_is_left_out(
    zero: int, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls of the cases above; the first step of both is right, so that one step would hide it."""
    c = replace(CASE, zero=zero)
    with (
        bound_otherwise(monkeypatch, operand=fault),
        pytest.raises(AssertionError, match="step 1, gradient") as found,
    ):
        judge(c, memory=False)
    assert "step 0" not in str(found.value)


def test_a_gathered_buffer_that_lives_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compositions.compiled(CASE).plan
    kept: list[Any] = []

    def keep(part: Part, rank: Any) -> Any:
        run = ranks.bind_part(part, rank)
        if not part.held or kept:
            return run
        return lambda: (kept.append(rank.store.values[part.held[0]]), run())

    with bound_otherwise(monkeypatch, part=keep):
        run = compositions.run(CASE, plan, memory=True)
    assert lies(plan, dict(run.memory))


def test_faults_in_what_ranks_share_break_the_rules_of_it() -> None:
    plan = compositions.compiled(CASE).plan
    broken = {
        v.rule for fault in SHARDING if (faulty := fault(plan)) is not None for v in check(faulty)
    }
    assert not check(plan) and {"R30-shards", "R31-gathered", "R32-contributions"} <= broken


def test_a_step_of_whole_parameters_follows_their_gather() -> None:
    plan = compositions.compiled(replace(CASE, zero=1)).plan
    role = plan.roles[0]
    stream = next(instr.stream for instr in role.program if instr.comm and "gather" in instr.name)
    program = tuple(
        replace(i, waits=tuple(w for w in i.waits if w[0] != stream)) for i in role.program
    )
    found = check(
        with_peaks(replace(plan, roles=(replace(role, program=program), *plan.roles[1:])))
    )
    assert any(
        v.rule == "R31-gathered" and re.search("without waiting for its gather", v.message)
        for v in found
    )
