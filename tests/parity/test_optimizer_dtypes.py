"""Protect that every optimizer moves parameters on the CPU as plain PyTorch does in every dtype, whatever kernel it
has, and holds what was planned."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import piper
from piper import Job, Mesh, Precision, Strategy, recipes
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper.api.reference.reference import reference
from piper_autotune.space.problem import packed
from piper_ir.ground.errors import JobError, PiperWarning
from piper_ir.program.ops import Update
from piper_runtime.rank.optimizers import fused
from piper_simulator import cpu_local
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies, planned

Named = list[tuple[str, nn.Parameter]]
WIDTH, ROWS, STEPS = 32, 4, 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
"""Relative to how far a parameter moves. A kernel that does nothing for whole vectors is off by 0.8."""


class Small(nn.Module):
    """A weight of many whole vectors, a bias, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.gain
        return out


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rows.start)
    return torch.randn(len(rows), WIDTH, generator=generator), torch.randn(
        len(rows), WIDTH, generator=generator
    )


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def job(optimizer: Callable[[Named], Optimizer], dtype: str) -> Job:
    return Job(
        model=Small,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        global_batch=ROWS,
        precision=Precision(params=dtype),
    )


def of(kind: type[Optimizer], **options: Any) -> Callable[[Named], Optimizer]:
    return lambda named: kind([p for _, p in named], **{"lr": 0.05, **options})  # type: ignore[call-arg]  # every optimizer takes lr


OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "sgd": of(SGD),
    "momentum": of(SGD, momentum=0.9),
    "nesterov": of(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, fused": of(SGD, fused=True),
    "adam": of(Adam),
    "adam, foreach": of(Adam, foreach=True),
    "amsgrad": of(Adam, amsgrad=True, weight_decay=0.1),
    "adamw": of(AdamW),
    "adagrad": of(torch.optim.Adagrad),
    "rmsprop": of(torch.optim.RMSprop),
    "nadam": of(torch.optim.NAdam),
    "radam": of(torch.optim.RAdam),
    "adamax": of(torch.optim.Adamax),
    "adadelta": of(torch.optim.Adadelta, lr=1.0, eps=1e-3),
    "asgd": of(torch.optim.ASGD, weight_decay=0.1),
    "rprop": of(torch.optim.Rprop),
    "adafactor": of(torch.optim.Adafactor),
}


def moved(state: Any, dtype: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    start = Small().to(getattr(torch, dtype)).state_dict()
    return {n: state[n].double() - t.double() for n, t in start.items()}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:torch's fused SGD")
def test_parameters_move_as_in_plain_pytorch_in_the_memory_that_was_planned(name: str) -> None:
    # Plain PyTorch is asked for no fused kernel, as it takes none on the CPU by itself.
    plain = OPTIMIZERS[name.removesuffix(", fused")]
    for dtype, tolerance in TOLERANCE.items():
        compiled = piper.compile(job(OPTIMIZERS[name], dtype), Strategy(Mesh()))
        run = piper.execute(compiled, steps=STEPS, launcher="inline")
        assert run.peak_bytes == {0: compiled.plan.roles[0].peak_bytes}, dtype
        wanted = moved(reference(job(plain, dtype), steps=STEPS).state_dict, dtype)
        for parameter, step in moved(run.state_dict(), dtype).items():
            assert step.any(), f"{parameter} has not moved in {dtype}"
            differing = float((step - wanted[parameter]).norm())
            assert differing <= tolerance * float(wanted[parameter].norm()), (parameter, dtype)


def no_step(kind: type[Optimizer], options: Any, dtype: torch.dtype, device: torch.device) -> str:
    return "differs from the plain one on cpu"


@pytest.mark.parametrize("optimizer", [of(SGD, weight_decay=0.1, momentum=0.9), of(AdamW)])
def test_the_plan_counts_what_the_plain_kernel_holds(
    optimizer: Callable[[Named], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_tried", {})
    monkeypatch.setattr(fused, "_said", set())
    monkeypatch.setattr(fused, "_try", no_step)
    with pytest.warns(
        PiperWarning,
        match=r"torch's fused (SGD|AdamW) differs .* in float32, so the plain one is used",
    ):
        compiled = piper.compile(job(optimizer, "float32"), Strategy(Mesh()))
    role = compiled.plan.roles[0]
    assert role.peak_by_category.get("workspace", 0) >= WIDTH * WIDTH * 4
    assert piper.execute(compiled, steps=STEPS, launcher="inline").peak_bytes == {
        0: role.peak_bytes
    }


class Uneven(nn.Module):
    """A stage of two weights, and one of a smaller weight and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.last, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.region(stage=0):
            hidden = self.down(self.up(x))
        with piper.region(stage=1):
            return self.last(hidden) * self.gain


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_stage_is_planned_with_the_temporaries_of_its_own_parameters(microbatches: int) -> None:
    uneven = replace(job(of(torch.optim.Adafactor), "float64"), model=Uneven)
    compiled = piper.compile(
        uneven, Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=microbatches))
    )
    run = piper.execute(compiled, steps=2, launcher="inline", memory=True)
    temporaries = {}
    for rank, record in run.memory.items():
        role = compiled.plan.role_of(rank)
        (update,) = (
            p
            for p in planned(compiled.plan, role)
            if isinstance(role.program[p.instr].parts[0].op, Update)
        )
        (point,) = (p for p in record.points if p.instr == update.instr)
        assert point.within - record.states == update.fullest
        temporaries[rank] = update.fullest - update.before
    assert temporaries[0] > 2 * temporaries[1] > 2 * WIDTH * WIDTH * 8


def test_a_search_sends_its_workers_no_optimizer() -> None:
    """They have no torch: there the temporaries of a step over all parameters count."""
    uneven = replace(job(of(torch.optim.Adafactor), "float64"), model=Uneven)
    problem, more = problem_of(uneven, Conditions(cpu_local()))
    buckets = piper.compile(uneven, Strategy(Mesh())).plan.buckets
    script = (
        "import pickle, sys; problem, buckets = pickle.loads(sys.stdin.buffer.read()); "
        "print(problem.training.update_bytes(buckets), 'torch' in sys.modules)"
    )
    sent = packed((problem, buckets), more["modules"])
    worker = subprocess.run(
        [sys.executable, "-c", script], input=sent, capture_output=True, check=True
    )
    assert worker.stdout.split() == [str(problem.training.update_bytes(buckets)).encode(), b"False"]
    assert problem.training.update_bytes(buckets) > WIDTH * WIDTH * 8


def test_kernels_are_tried_once_and_a_failure_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[torch.dtype] = []

    def spy(kind: type[Optimizer], options: Any, dtype: torch.dtype, device: torch.device) -> str:
        tries.append(dtype)
        return no_step(kind, options, dtype, device)

    monkeypatch.setattr(fused, "_tried", {})
    monkeypatch.setattr(fused, "_said", set())
    monkeypatch.setattr(fused, "_try", spy)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled = piper.compile(job(of(SGD), "float32"), Strategy(Mesh()))
            piper.execute(compiled, steps=1, launcher="inline", memory=False)
    assert tries == [torch.float32]
    assert [str(w.message).partition(" differs")[0] for w in said] == ["torch's fused SGD"]


def resumed(kind: type[Optimizer]) -> Callable[[Named], Optimizer]:
    """An optimizer that goes on from the state that it has after a step."""
    model = Small().double()
    before = of(kind)(list(model.named_parameters()))
    loss(model(batch(9, range(ROWS))[0].double()), torch.zeros(ROWS, WIDTH)).backward()
    before.step()

    def function(named: Named) -> Optimizer:
        optimizer = of(kind)(named)
        optimizer.load_state_dict(
            deepcopy(before.state_dict())
        )  # torch takes its tensors as they are
        return optimizer

    return function


@each_case("kind", [Adam, AdamW])
def test_loaded_state_that_would_be_dropped_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(
        JobError, match=f"Job.optimizer returned {kind.__name__} with state that it has loaded"
    ):
        piper.compile(job(resumed(kind), "float64"), Strategy(Mesh()))


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_loaded_state_of_other_optimizers_counts(kind: type[Optimizer]) -> None:
    trained = job(resumed(kind), "float64")
    run = piper.execute(
        piper.compile(trained, Strategy(Mesh())), steps=STEPS, launcher="inline", memory=False
    )
    wanted, fresh = (
        reference(trained, steps=STEPS),
        reference(job(of(kind), "float64"), steps=STEPS),
    )
    assert not torch.allclose(wanted.parameters["layer.weight"], fresh.parameters["layer.weight"])
    for name, parameter in wanted.parameters.items():
        assert torch.allclose(run.state_dict()[name], parameter, rtol=1e-9), name


def test_a_group_does_not_hold_what_another_one_has_left() -> None:
    """Torch updates each group in a call of its own, after which the names of its loop are gone."""

    def apart(named: Named) -> Optimizer:
        weights = [[p for n, p in named if (n == "layer.weight") == own] for own in (True, False)]
        return torch.optim.RMSprop([{"params": group} for group in weights], lr=0.05)

    made = piper.compile(job(apart, "float64"), Strategy(Mesh()))
    run = piper.execute(made, steps=STEPS, launcher="inline")
    assert not lies(made.plan, run.memory)
