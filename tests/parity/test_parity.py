"""Protect facts beside equal numbers: equal bits under schedules and fusion, where tied weights stand, single sums.

And what is refused of buffers. That any composition trains what one device trains is checked in test_compositions.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import piper
from piper_compiler import Strategy, order, place, recipes, split
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Collective, Compute
from piper_runtime.launch.ground.result import Run
from piper_runtime.launch.running.run import execute
from tests.helpers import compositions, models, parity
from tests.helpers.compositions import Composition, fitted
from tests.helpers.judged import judge
from tests.helpers.written_out import groups_of

CLIP = 0.05
"""Below the norm of every model's gradient, so that clipping always acts."""


def test_with_one_microbatch_both_schedules_are_one_plan() -> None:
    gpipe, other = (
        compositions.compiled(Composition("gpt", 2, 2, 1, schedule)).plan
        for schedule in ("gpipe", "1f1b")
    )
    assert gpipe.key == other.key


def nadam(named: compositions.Named) -> torch.optim.Optimizer:
    return torch.optim.NAdam([p for _, p in named], lr=0.01)


def dampened(named: compositions.Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for _, p in named], lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1
    )


@pytest.mark.parametrize(("name", "optimizer"), [("gpt", nadam), ("frozen", dampened)])
def test_optimizers_that_step_parameter_by_parameter_or_start_in_their_own_way(
    name: str, optimizer: Any
) -> None:
    c = Composition(name, 2, 2, 4, "1f1b", bucket_mb=0.002, clip=CLIP)
    job = replace(compositions.job_of(c), optimizer=optimizer)
    plan = piper.compile(job, compositions.strategy_of(c)).plan
    run = execute(
        plan,
        compositions.code_of(c, plan),
        job,
        steps=parity.STEPS,
        launcher="inline",
        gradients=True,
    )
    parity.assert_parity(run, parity.reference(job, replicas=2, microbatches=4))


def test_clipping_acts_in_the_cases_above() -> None:
    c = Composition("gpt", 2, 2, 4, "1f1b", clip=CLIP)
    clipped, free = (
        compositions.expected(c).gradients[0],
        compositions.expected(replace(c, clip=None)).gradients[0],
    )
    norm = torch.stack([g.norm() for g in clipped.values()]).norm()
    assert (
        norm == pytest.approx(CLIP, rel=1e-4)
        and torch.stack([g.norm() for g in free.values()]).norm() > 2 * CLIP
    )


def test_small_buckets_are_many() -> None:
    """Among them one for the tied embedding, over all ranks."""
    c = Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002, clip=CLIP)
    assert len(compositions.compiled(c).plan.buckets) > 4


def test_tied_embedding_and_head_stand_on_different_devices() -> None:
    c = Composition("gpt", 4, 1, 4, "1f1b")
    plan = compositions.compiled(c).plan
    (tied,) = [b for b in plan.buckets if "embed.weight" in b.params]
    assert tied.roles == (plan.roles[0].role, plan.roles[-1].role) and tied.channel
    run = judge(c)
    first, last = run.rank_states[0]["embed.weight"], run.rank_states[3]["embed.weight"]
    assert torch.equal(first, last), "copies of a tied parameter stay bit-identical"


def test_a_microbatch_of_weight_zero_is_among_the_cases() -> None:
    job = compositions.job_of(Composition("keywords", microbatches=8, rows=1))
    weights = [
        float(job.loss(torch.zeros(1, 8, 32), job.batch(0, range(r, r + 1))[1])[1])
        for r in range(8)
    ]
    assert weights.count(0) == 2 and len(set(weights)) > 3


def test_v_placement_and_a_stage_on_two_devices() -> None:
    """The first and the last chunk on one device; the microbatches of one chunk on two."""
    for name in ("gpt", "skip"):
        for placement in ("v", "shared"):
            pp = 2 if placement == "v" else 3
            c = fitted(Composition(name, pp, 1, 4, "1f1b", placement))
            plan = compositions.compiled(c).plan
            roles = {p.node: r.role for r in plan.roles for i in r.program for p in i.parts}
            chunks = groups_of(compositions.captured(name).program, 99)
            first, last = chunks[0][0], chunks[-1][-1]
            if placement == "v":
                assert roles[f"{first}.F@0"] == roles[f"{last}.F@0"] == "pp0"
            else:
                assert roles[f"{last}.F@0"] != roles[f"{last}.F@1"]


@pytest.mark.parametrize("name", ["gpt", "frozen", "skip", "keywords"])
def test_some_instruction_runs_w_alone_where_backwards_are_split(name: str) -> None:
    for placement, schedule, backward, overlap in (
        ("chunks", "default", "split", False),
        ("v", "1f1b", "split", True),
        ("shared", "random", "mixed", True),
    ):
        how: dict[str, Any] = dict(placement=placement, backward=backward, overlap=overlap, seed=7)
        plan = compositions.compiled(fitted(Composition(name, 3, 1, 4, schedule, **how))).plan
        apart = {
            frozenset(p.op.step for p in i.parts if isinstance(p.op, Compute))
            for _, _, i in plan.instructions()
        }
        assert frozenset("W") in apart, (placement, schedule)


def test_buffers_that_follow_the_batch_have_no_replicas() -> None:
    """A chunk that reads an updated buffer stays with the one that updates it."""
    job = compositions.job_of(Composition("buffers", dp=2, microbatches=2))
    with pytest.raises(CompileError, match=r"'mean'.*replicas would differ"):
        piper.compile(
            job, Strategy(Mesh(dp=2), (split(where(), microbatches=2), *recipes.data_parallel()))
        )


def test_a_buffer_is_not_read_away_from_where_it_is_updated() -> None:
    job = compositions.job_of(Composition("buffers", microbatches=2))
    chunks = [c.id for c in compositions.captured("buffers").program.chunks]
    places = [
        place(where(chunk=chunks[0]), on=dict(pp=0)),
        place(where(chunk=tuple(chunks[1:])), on=dict(pp=1)),
    ]
    with pytest.raises(CompileError, match="'mean'"):
        piper.compile(job, Strategy(Mesh(pp=2), (split(where(), microbatches=2), *places)))


def test_an_order_against_the_updates_of_a_buffer_is_refused() -> None:
    """The reader before the update sees what the microbatch before left, so the forwards of two microbatches cannot be
    exchanged."""
    job = compositions.job_of(Composition("buffers", microbatches=2))
    first, second, *_ = compositions.captured("buffers").program.chunks
    breadth = order(where(chunk=first.id, phase="F"), where(chunk=second.id, phase="F"))
    with pytest.raises(CompileError, match=r"(?s)update a buffer in order.*ordered by order\("):
        piper.compile(job, Strategy(Mesh(), (split(where(), microbatches=2), breadth)))


class DropsEverywhere(torch.nn.Module):
    """Dropout before, in and after the layers: one place of the random state each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            torch.nn.Embedding(models.VOCAB, models.D),
            torch.nn.Linear(models.D, models.VOCAB),
        )
        self.layers = torch.nn.ModuleList(torch.nn.Linear(models.D, models.D) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(self.embed(tokens), 0.2, True)
        for layer in self.layers:
            x = torch.dropout(torch.tanh(layer(x)), 0.2, True)
        out: torch.Tensor = self.head(torch.dropout(x, 0.2, True))
        return out


def test_dropout_before_in_and_behind_the_layers() -> None:
    gpt = compositions.job_of(Composition("gpt", dp=2, microbatches=2))
    job = replace(gpt, model=DropsEverywhere, seed=7)
    pieces = (*recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel())
    compiled = piper.compile(job, Strategy(Mesh(pp=2, dp=2), pieces))
    assert compiled.code is not None
    code = compiled.code.export([c.code for c in compiled.plan.chunks], compiled.plan.rows)
    run = execute(compiled.plan, code, job, steps=parity.STEPS, launcher="inline", gradients=True)
    # What is drawn behind a layer's module belongs to that layer, behind the last one to the head.
    parity.assert_parity(run, parity.reference(job, replicas=2, microbatches=2))


def same_bits(a: Run, b: Run, steps: range) -> bool:
    """Whether two runs have equal losses and gradients in these steps, and equal parameters after the last, to the
    bit."""
    gradients = all(
        a.gradients[s].keys() == b.gradients[s].keys()
        and all(torch.equal(g, b.gradients[s][n]) for n, g in a.gradients[s].items())
        for s in steps
    )
    x, y = a.state_dict(), b.state_dict()
    return (
        gradients
        and [a.losses[s] for s in steps] == [b.losses[s] for s in steps]
        and all(torch.equal(x[n], y[n]) for n in x)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["gpt_untied", "gpt_dropout", "skip", "branches", "keywords", "buffers"]
)
def test_untied_models_have_equal_bits_under_every_schedule_and_placement(name: str) -> None:
    """dp=1 and equal m. Before the first update nothing can differ by schedule, so steps 2 and 3 are what counts."""
    base = Composition(name, 1, 1, 4)
    first = compositions.run(base)
    for c in (
        replace(base, pp=2, schedule="gpipe"),
        replace(base, pp=2, schedule="1f1b"),
        replace(base, pp=4, schedule="1f1b"),
        replace(base, pp=2, schedule="1f1b", placement="v"),
    ):
        if name == "gpt_dropout":  # tied: its sum over devices may be rounded in another order
            parity.assert_parity(compositions.run(fitted(c)), compositions.expected(base))
        else:
            assert same_bits(first, compositions.run(fitted(c)), range(1, parity.STEPS)), c


def test_equal_bits_is_a_claim_that_can_fail() -> None:
    base = Composition("gpt_untied", 1, 1, 4)
    other = compositions.run(replace(base, microbatches=2, rows=4))
    assert not same_bits(compositions.run(base), other, range(1, parity.STEPS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["gpt", "gpt_dropout", "skip", "slices", "keywords", "frozen", "buffers", "in_place"]
)
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fused_and_unfused_plans_have_equal_bits(name: str, dp: int) -> None:
    fused = fitted(Composition(name, 2, dp, 4, "1f1b", bucket_mb=0.002))
    plain = replace(fused, fuse=False)
    plans: dict[bool, Plan] = {c.fuse: compositions.compiled(c).plan for c in (fused, plain)}
    counts = {
        fuse: sum(len(i.parts) for _, _, i in plan.instructions()) for fuse, plan in plans.items()
    }
    assert counts[True] == counts[False]
    if models.CASES[name].layers:  # the others have one chunk per stage
        assert sum(1 for _ in plans[True].instructions()) < sum(
            1 for _ in plans[False].instructions()
        )
    assert same_bits(
        compositions.run(fused, plans[True]),
        compositions.run(plain, plans[False]),
        range(parity.STEPS),
    )


def test_gradients_are_reduced_once_per_step() -> None:
    """dp=2, m=4: a reduction per microbatch would add up sums that are sums already."""
    plan = compositions.compiled(Composition("gpt", 1, 2, 4, bucket_mb=0.01)).plan
    for role in plan.roles:
        reduced = [
            p.op.bucket
            for i in role.program
            for p in i.parts
            if isinstance(p.op, Collective) and p.op.bucket
        ]
        assert sorted(reduced) == sorted(b.id for b in plan.buckets) and len(reduced) > 3
