"""Protect that recomputation changes memory and time, and no bit of what is trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import piper
from piper.api.compiling.compiling import Compiled
from piper_capture import POLICIES as KINDS
from piper_compiler import (
    Strategy,
    order,
    partition,
    place,
    recipes,
    split,
    split_backward,
)
from piper_compiler.directives.recompute import POLICIES as NAMED
from piper_compiler.interchange.of_plan import rows_of_plan
from piper_ir.fold import memory
from piper_ir.ground.errors import FormatError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, where
from piper_ir.program.ops import Compute
from piper_ir.verify import check
from piper_runtime import Run
from piper_runtime.launch.running.run import execute
from piper_runtime.rank.binding import parts
from tests.helpers import compositions, models
from tests.helpers.compositions import Composition, fitted, job_of, strategy_of
from tests.helpers.memory_judge import lies, planned
from tests.helpers.parity import RunOutcome

POLICIES = ("inputs", "attention", "products", ("addmm", "native_dropout"))
FLOAT64 = piper.Precision(params="float64")
PIPELINES: dict[str, Any] = {
    "gpipe": lambda: recipes.gpipe(pp=2, microbatches=4),
    "1f1b": lambda: recipes.one_f_one_b(pp=2, microbatches=4),
    "interleaved": lambda: recipes.interleaved(pp=2, microbatches=4),
    "zbv": lambda: recipes.zbv(pp=2, microbatches=4),
    "zb_h1": lambda: recipes.zb_h1(pp=2, microbatches=4),
}


@functools.cache
def dropout_job() -> piper.Job:
    """Four layers with dropout, for two chunks on each of two devices."""
    case = models.CASES["gpt_dropout"]
    model = functools.partial(models.TinyGPT, layers=4, tied=False, dropout=0.2)
    sgd = compositions.OPTIMIZERS["sgd"]
    return piper.Job(model, case.batch, case.loss, sgd, global_batch=8, precision=FLOAT64)


def trained(made: Compiled, **options: Any) -> Run:
    plan = made.plan
    assert made.code is not None and made.job is not None
    code = made.code.export([c.code for c in (*plan.chunks, *plan.variants)], plan.rows)
    return execute(
        plan, code, made.job, **{"steps": 2, "launcher": "inline", "gradients": True, **options}
    )


def tensors(found: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nest, by its place."""
    if isinstance(found, torch.Tensor):
        yield at, found
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from tensors(value, f"{at}.{key}")
    elif isinstance(found, list | tuple):
        for k, value in enumerate(found):
            yield from tensors(value, f"{at}.{k}")


def differing(one: Run, other: Run) -> list[str]:
    """Where two runs differ in a bit: losses, gradients of every rank and step, states of every rank."""
    a, b = (RunOutcome.of(run) for run in (one, other))
    left, right = (dict(tensors([r.gradients, r.states])) for r in (a, b))
    assert left and left.keys() == right.keys()
    found = [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]
    return found if list(a.losses) == list(b.losses) else ["losses", *found]


def judged(made: Compiled, base: Run) -> None:
    """AssertionError where a plan breaks a rule, trains otherwise than `base` in any bit, or is wrong about memory."""
    assert check(made.plan) == []
    assert differing(trained(made), base) == []
    found = lies(made.plan, dict(trained(made, steps=1, gradients=False, memory=True).memory))
    assert not found, "\n".join(found[:6])


@functools.cache
def without(schedule: str) -> Run:
    return trained(piper.compile(dropout_job(), Strategy(Mesh(pp=2), PIPELINES[schedule]())))


def schedules_and_policies() -> list[Any]:
    """Return every schedule with every policy; `make test` takes each schedule with one of them."""
    return [
        pytest.param(
            schedule,
            keep,
            marks=[pytest.mark.long] * (i % len(POLICIES) != k),
            id=f"{schedule}-{keep}",
        )
        for i, schedule in enumerate(PIPELINES)
        for k, keep in enumerate(POLICIES)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "keep"), schedules_and_policies())
def test_every_schedule_under_every_policy(schedule: str, keep: Any) -> None:
    """R may be a node of its own, and be in some stages and microbatches only."""
    selection, apart = where(), keep == "attention"
    if keep == "products":
        selection = where(stage=0, mb=(0, 2, 3))
    directives = (*PIPELINES[schedule](), piper.recompute(selection, keep=keep, apart=apart))
    judged(piper.compile(dropout_job(), Strategy(Mesh(pp=2), directives)), without(schedule))


CASES = (
    Composition("skip", 4, 1, 4, "1f1b"),
    Composition("keywords", 2, 2, 4, "1f1b", rows=1),
    Composition("opaque", 2, 1, 4, "random", "v", backward="mixed", overlap=True, seed=3),
    Composition("slices", 2, 1, 4, "random", "random", seed=1),
    Composition("in_place", 2, 1, 2, "gpipe"),
    Composition("frozen", 2, 1, 4, "1f1b", "v", backward="split"),
    Composition("custom_op", 2, 2, 2, "1f1b", clip=0.05),
    Composition("llama", 2, 1, 4, "1f1b", "shared"),
    Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002),
    Composition("branches", 2, 1, 2, "default"),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "c",
    [pytest.param(c, marks=[pytest.mark.long] * (k % 2), id=str(c)) for k, c in enumerate(CASES)],
)
def test_every_kind_of_model(c: Composition) -> None:
    compositions.captured(c.model)
    c = fitted(c)
    base, pipeline = compositions.run(c, steps=2), strategy_of(c)
    for keep, apart in (("inputs", False), ("products", True)):
        strategy = Strategy(
            pipeline.mesh, (*pipeline.directives, piper.recompute(where(), keep=keep, apart=apart))
        )
        judged(piper.compile(job_of(c), strategy), base)


def test_at_one_row() -> None:
    c = fitted(Composition("gpt", 2, 1, 2, "1f1b", rows=1))
    compositions.captured(c.model)
    base, pipeline = compositions.run(c, steps=2), strategy_of(c)
    strategy = Strategy(
        pipeline.mesh, (*pipeline.directives, piper.recompute(where(), keep="attention"))
    )
    judged(piper.compile(job_of(c), strategy), base)


def test_random_numbers_of_another_state_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the state of the forward, R draws other numbers, and the run differs."""
    drawing = parts._drawing
    monkeypatch.setattr(
        parts,
        "_drawing",
        lambda run, part, *rest: run if part.op.step == "R" else drawing(run, part, *rest),
    )
    directives = (*PIPELINES["1f1b"](), piper.recompute(where(), keep="inputs"))
    assert differing(
        trained(piper.compile(dropout_job(), Strategy(Mesh(pp=2), directives))), without("1f1b")
    )


def test_a_plan_without_recomputation_is_what_it_was() -> None:
    plain = piper.compile(dropout_job(), Strategy(Mesh(pp=2), PIPELINES["1f1b"]()))
    kept = piper.compile(
        dropout_job(),
        Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), piper.recompute(where(), keep="all"))),
    )
    assert plain.plan.key == kept.plan.key and not kept.plan.variants
    some = piper.compile(
        dropout_job(),
        Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), piper.recompute(where(), keep="inputs"))),
    )
    assert some.plan.key != plain.plan.key and some.plan.program_key == plain.plan.program_key


def test_what_is_kept_grows_with_the_policy() -> None:
    """Bytes at the peak: inputs, attention, products, all; in stage 0 of 1F1B, where most microbatches are in
    flight."""
    peaks = []
    for keep in ("inputs", "attention", "products", "all"):
        directives = (*recipes.gpipe(pp=2, microbatches=4), piper.recompute(where(), keep=keep))
        peaks.append(
            piper.compile(dropout_job(), Strategy(Mesh(pp=2), directives)).plan.roles[0].peak_bytes
        )
    assert peaks == sorted(peaks) and len(set(peaks)) == 4


def test_the_fullest_moment_of_a_recomputed_forward_is_planned_to_the_byte() -> None:
    """It is that of attention, whose kernel gives a logsumexp that is made contiguous."""
    c = Composition("own_loss", 2, 1, 2, "gpipe", rows=4, keep="inputs", fuse=False)
    compiled = compositions.compiled(c)
    record = compositions.run(c, compiled, gradients=False, memory=True).memory[0]
    role = compiled.plan.role_of(0)
    within = {p.instr: p.within - record.states for p in record.points}
    forwards = [
        p for p in planned(compiled.plan, role) if role.program[p.instr].name.startswith("layer0.F")
    ]
    assert [within[p.instr] for p in forwards] == [p.fullest for p in forwards] != []


def test_an_order_may_name_recomputation_and_put_it_early() -> None:
    """R of microbatch 0 before the forward of microbatch 2, long before its gradient arrives."""
    steps = (
        ("F", 0),
        ("F", 1),
        ("R", 0),
        ("F", 2),
        ("B", 0),
        ("R", 1),
        ("B", 1),
        ("R", 2),
        ("B", 2),
        ("F", 3),
        ("R", 3),
        ("B", 3),
    )
    made = piper.compile(
        dropout_job(),
        Strategy(
            Mesh(),
            (
                split(where(), microbatches=4),
                piper.recompute(where(layer=(0, 1, 2, 3)), apart=True),
                order(*[where(layer=(0, 1, 2, 3), phase=phase, mb=mb) for phase, mb in steps]),
            ),
        ),
    )
    (role,) = made.plan.roles
    nodes = [p.node for i in role.program for p in i.parts if isinstance(p.op, Compute)]
    assert nodes.index("layer1.R@0") < nodes.index("layer0.F@2") < nodes.index("layer1.I@0")
    base = trained(
        piper.compile(dropout_job(), Strategy(Mesh(), (split(where(), microbatches=4),)))
    )
    judged(made, base)


def test_recomputation_that_no_order_names_is_not_early() -> None:
    directives = (*PIPELINES["gpipe"](), piper.recompute(where(), apart=True))
    made = piper.compile(dropout_job(), Strategy(Mesh(pp=2), directives))
    for role in made.plan.roles:
        steps = "".join(
            p.op.step for i in role.program for p in i.parts if isinstance(p.op, Compute)
        )
        assert steps.index("R") > steps.rindex("F"), steps


def test_a_split_backward_begins_with_recomputation() -> None:
    """Whichever of the two directives is written first."""
    plans = []
    for first, then in ((split_backward, piper.recompute), (piper.recompute, split_backward)):
        places = [place(where(stage=k), on=dict(pp=k)) for k in range(2)]
        directives = (
            split(where(), microbatches=4),
            partition(stages=2),
            *places,
            first(where()),
            then(where()),
        )
        plans.append(piper.compile(dropout_job(), Strategy(Mesh(pp=2), directives)).plan)
    for plan in plans:
        for role in plan.roles:
            for instr in role.program:
                steps = [p.op.step for p in instr.parts if isinstance(p.op, Compute)]
                assert "R" not in steps or "I" in steps or "W" in steps
    assert plans[0].key == plans[1].key


def test_the_named_policies_are_those_of_the_cut() -> None:
    assert set(NAMED) == {"all", *KINDS}


def test_the_scores_of_attention_are_made_again_and_nothing_else() -> None:
    config = piper.models.DecoderConfig(
        layers=2, width=32, heads=4, hidden=64, vocab=64, length=16, attention="math", dropout=0.2
    )
    job = piper.models.job(config, global_batch=4, precision=FLOAT64)
    pipeline = recipes.gpipe(pp=2, microbatches=2)
    base = trained(piper.compile(job, Strategy(Mesh(pp=2), pipeline)))
    core = piper.recompute(where(layer=ANY), keep="outputs", modules="*.attention.core")
    again = (*pipeline, core)
    made = piper.compile(job, Strategy(Mesh(pp=2), again))
    judged(made, base)
    ops = {k.op for v in made.plan.variants for k in v.steps["R"].cost.kernels}
    assert {"_softmax", "native_dropout"} <= ops and not ops & {"mm", "addmm", "rms_norm", "silu"}


def test_strategies_are_saved_with_their_policies() -> None:
    strategy = Strategy(
        Mesh(),
        (
            piper.recompute(where(layer=0), keep=("mm", "addmm"), apart=True),
            place(where(), on=dict(pp=0)),
        ),
    )
    again = Strategy.loads(strategy.dumps())
    policies = [d.policies() for d in again.directives if isinstance(d, piper.recompute)]
    assert again == strategy and policies == [("addmm+mm",)]


def test_a_table_holds_recomputation_as_part_of_the_backward() -> None:
    plain, under = (
        piper.compile(
            dropout_job(),
            Strategy(Mesh(pp=2), (*PIPELINES["zb_h1"](), piper.recompute(where(), keep=keep))),
        ).plan
        for keep in ("all", "inputs")
    )
    assert rows_of_plan(under, lowered=True) == rows_of_plan(plain, lowered=True)
    apart = piper.compile(
        dropout_job(),
        Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), piper.recompute(where(), apart=True))),
    ).plan
    with pytest.raises(FormatError, match="recomputation alone"):
        rows_of_plan(apart, lowered=True)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_groups_keep_the_inputs_of_their_first_layer_alone(schedule: str) -> None:
    alone, paired = (
        piper.compile(
            dropout_job(),
            Strategy(Mesh(pp=2), (*PIPELINES[schedule](), piper.recompute(where(), group=k))),
        )
        for k in (1, 2)
    )
    judged(paired, without(schedule))
    kinds = [
        {
            v.partition("@")[0]
            for r in made.plan.roles
            for i in r.program
            for p in i.parts
            for v in p.reads
        }
        for made in (alone, paired)
    ]
    assert "layer0:out0!r" in kinds[1] and not any(v.endswith("!r") for v in kinds[0])
    steps = "".join(
        p.op.step
        for i in paired.plan.roles[0].program
        for p in i.parts
        if isinstance(p.op, Compute)
    )
    assert steps.index("R") > steps.index("F")


def test_a_group_keeps_one_input_per_microbatch() -> None:
    """Each further microbatch in flight keeps half as much on a device with two layers."""
    more = []
    for k in (1, 2):
        held = []
        for microbatches in (4, 8):
            job = replace(dropout_job(), global_batch=2 * microbatches)
            directives = (
                *recipes.gpipe(pp=2, microbatches=microbatches),
                piper.recompute(where(layer=(0, 1, 2, 3)), group=k),
            )
            plan = piper.compile(job, Strategy(Mesh(pp=2), directives)).plan
            held.append(
                max(usage.bytes.get("activation", 0) for usage in memory.scan(plan, plan.roles[0]))
            )
        more.append(held[1] - held[0])
    assert more[0] == 2 * more[1] > 0


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_tuner_tries_policies_per_stage(workers: int) -> None:
    """Where memory is short the fastest that fits keeps as much as there is room for."""

    def strategy(trial: Any) -> Strategy:
        keeps = [
            trial.suggest_categorical(f"keep{k}", ["all", "products", "inputs"]) for k in range(2)
        ]
        under = [piper.recompute(where(stage=k), keep=keep) for k, keep in enumerate(keeps)]
        return Strategy(Mesh(pp=2), (*PIPELINES["gpipe"](), *under))

    free = piper.tune(dropout_job(), strategy, cluster="h100x8", trials=9, workers=workers)
    assert free.best_row is not None and free.best_row.params == {"keep0": "all", "keep1": "all"}
    held = sorted(row.device_bytes or 0 for row in free.rows)
    few = piper.tune(
        dropout_job(), strategy, cluster="h100x8", trials=9, workers=workers, memory_limit=held[1]
    )
    assert few.best_row is not None and few.best_row.params == {
        "keep0": "products",
        "keep1": "inputs",
    }
    assert sum(row.state == "complete" for row in few.rows) == 2


class TwoDraws(torch.nn.Module):
    """The backward needs the second dropout's mask alone; the numbers of the first come before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(models.D, models.D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.region(stage=0):
            noise = F.dropout(x.detach(), 0.3)
            x = noise + F.dropout(self.linear(x), 0.4)
        with piper.region(stage=1):
            return torch.tanh(x)


def two_draws(keep: str) -> Compiled:
    case = models.CASES["skip"]
    sgd = compositions.OPTIMIZERS["sgd"]
    job = piper.Job(
        TwoDraws,
        case.batch,
        case.loss,
        sgd,
        global_batch=4,
        precision=piper.Precision(params="float64"),
    )
    return piper.compile(
        job, Strategy(Mesh(), (split(where(), microbatches=2), piper.recompute(where(), keep=keep)))
    )


def test_numbers_that_nobody_needs_again_are_not_drawn_again() -> None:
    base, again = two_draws("all"), two_draws("inputs")
    assert differing(trained(again), trained(base)) == []
    code = again.code.export([c.code for c in again.program.variants], 2)
    drawn = {
        step: sum(steps[step].source.count("draw(") for steps in code.values() if step in steps)
        for step in ("F", "R")
    }
    assert drawn == {"F": 2, "R": 1}
