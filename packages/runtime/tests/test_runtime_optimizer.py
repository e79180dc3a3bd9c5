"""Optimizers: what a spec says is what ranks hold; flat and per-parameter optimizers equal one device."""

from typing import Any

import pytest
import torch
from torch import nn

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import CODE, WIDTH, adamw, chain_job, chain_program, sgd
from piper_ir.ground.errors import JobError
from piper_ir.program.ops import Update
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.binding.update_scale import gradient_scale
from piper_runtime.rank.job.job import materialize
from piper_runtime.rank.optimizers.optimizer_groups import optimizer_spec
from tests.helpers.cases import each_case

Named = list[tuple[str, nn.Parameter]]


def spec_of(function: Any) -> Any:
    return optimizer_spec(chain_job(2, 4, optimizer=function), chain_program(2).params)


def test_the_function_sees_every_parameter_with_its_full_shape_on_meta() -> None:
    seen: Named = []

    def spy(named: Named) -> torch.optim.Optimizer:
        seen.extend(named)
        return sgd(named)

    spec_of(spy)
    assert [n for n, _ in seen] == ["head", "frozen", "layers.0", "layers.1"]
    assert all(p.is_meta and p.dtype is torch.float64 for _, p in seen)
    assert [tuple(p.shape) for _, p in seen] == [
        (WIDTH, WIDTH),
        (3,),
        (WIDTH, WIDTH),
        (WIDTH, WIDTH),
    ]
    assert [p.requires_grad for _, p in seen] == [True, False, True, True]


def test_groups_follow_the_user() -> None:
    spec = spec_of(adamw)
    assert (
        spec.group_of == {"layers.0": 0, "layers.1": 0, "head": 1}
        and spec.kind == "AdamW"
        and spec.flat
    )


def adam(**options: Any) -> Any:
    return lambda named: torch.optim.Adam([p for _, p in named], lr=0.01, **options)


def plain_sgd(**options: Any) -> Any:
    return lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, **options)


def other(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    return lambda named: kind([p for _, p in named], lr=0.01, **options)  # type: ignore[call-arg]  # every optimizer takes lr


def by_name(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        named, lr=0.01
    )  # (name, parameter) pairs as they are: torch keeps the names in its groups


OPTIMIZERS: dict[str, Any] = {
    "sgd": plain_sgd(),
    "momentum": sgd,
    "nesterov": plain_sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": plain_sgd(momentum=0.9, dampening=0.5),
    "adam": adam(),
    "adam, foreach": adam(foreach=True),
    "amsgrad": adam(amsgrad=True, weight_decay=0.1),
    "adamw": adamw,
    "named": by_name,
    "rmsprop": other(torch.optim.RMSprop),
    "adagrad": other(torch.optim.Adagrad),
}


@each_case("name", OPTIMIZERS)
def test_a_step_is_that_of_one_device_and_holds_the_state_that_was_planned(name: str) -> None:
    plan, job = chain(dp=2, optimizer=OPTIMIZERS[name])
    assert distance(run(plan, job), plan, job) < TOLERANCE
    spec = optimizer_spec(job, plan.params)
    state, rank_job = materialize(job), RankJob(job.batch, job.optimizer, None, 0)
    rank = Rank(plan, 0, CODE, rank_job, state.params, state.buffers)
    buckets = tuple(b.id for b in rank.store.buckets)
    with torch.no_grad():
        rank.optimizer.update(buckets, 1.0)
    held = sum(t.nbytes for t in rank.optimizer.state_tensors())
    assert held == sum(spec.state_bytes(b) for b in rank.store.buckets)


def test_a_rank_without_parameters_follows_the_schedule() -> None:
    rates: list[float] = []

    def watched(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        rates.extend(g["lr"] for g in optimizer.param_groups)
        return scheduler

    plan, job = chain(2, optimizer=adamw, scheduler=watched)
    assert distance(run(plan, job), plan, job) < TOLERANCE
    assert rates[:4] == [
        0.01,
        0.02,
        0.01,
        0.02,
    ]  # both groups on both ranks, though each rank holds one


def incomplete(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for n, p in named if n != "layers.1"], lr=0.1)


def foreign(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(2)], lr=0.1)


def hooked(named: Named) -> torch.optim.Optimizer:
    named[0][1].register_hook(lambda gradient: gradient * 2)
    return sgd(named)


def counting(named: Named) -> torch.optim.Optimizer:
    named[0][1].register_post_accumulate_grad_hook(lambda parameter: None)
    return sgd(named)


def zeroed(named: Named) -> torch.optim.Optimizer:
    torch.nn.init.zeros_(named[0][1])
    return sgd(named)


@each_case(
    ("function", "says"),
    [
        (hooked, r"puts a hook on the gradient of parameter 'head'"),
        (counting, r"puts a hook on the gradient of parameter 'head'"),
        (zeroed, r"changes the values of parameter 'head'"),
        (incomplete, r"layers\.1 in no parameter group"),
        (foreign, "group 0 holds a tensor that it was not given"),
        (lambda named: None, "returned a NoneType"),
        (
            lambda named: torch.optim.LBFGS([p for _, p in named]),
            "LBFGS, which cannot run on a plan",
        ),
        (adam(differentiable=True), "differentiable"),
        (
            lambda named: torch.optim.SGD([p for _, p in named], lr=torch.tensor(0.1)),
            "group 0 has a tensor as lr; give a float",
        ),
        (lambda named: named[0][2], r"raised IndexError: .*test_runtime_optimizer.py:\d+\)"),
    ],
)
def test_optimizers_that_cannot_run_are_refused(function: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        spec_of(function)


class Sign(torch.optim.Optimizer):
    """Asks for a gradient of every parameter."""

    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad.sign())


def test_an_optimizer_that_needs_all_gradients_is_told_of_ranks_without_them() -> None:
    spec = spec_of(lambda named: Sign([p for _, p in named if p.requires_grad], {"lr": 0.1}))
    assert spec.whole_steps.held(["layers.0", "layers.1", "head"]) > 0
    with pytest.raises(JobError, match=r"second step.*skips those without a gradient"):
        spec.whole_steps.held(["layers.0"])


def test_another_grouping_than_the_planned_one_is_refused() -> None:
    plan, job = chain(optimizer=adamw)
    _, other_job = chain(optimizer=sgd)
    with pytest.raises(JobError, match="was planned for parameter group 1"):
        run(plan, other_job)
    assert run(plan, job).losses


def test_the_scale_is_torchs_clipping_after_division() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = gradient / 2
    torch.nn.utils.clip_grad_norm_([p], 0.7)
    scale = gradient_scale(Update((), True, 0.7), [2.0, 25.0], "")
    assert torch.allclose(gradient * scale, p.grad, rtol=1e-15)
    assert gradient_scale(Update(()), [], "") == 1.0
    assert gradient_scale(Update((), False, 100.0), [25.0], "") == 1.0


@each_case(
    ("function", "says"),
    [
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "ReduceLROnPlateau, which cannot run on a plan",
        ),
        (lambda optimizer: None, "returned a NoneType"),
        (lambda optimizer: 1 // 0, r"raised ZeroDivisionError: .*test_runtime_optimizer.py:\d+\)"),
    ],
)
def test_schedules_that_cannot_run_are_refused(function: Any, says: str) -> None:
    plan, job = chain(scheduler=function)
    with pytest.raises(JobError, match=f"Job.scheduler.*{says}"):
        run(plan, job)
