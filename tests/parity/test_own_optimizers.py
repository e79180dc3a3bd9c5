"""Optimizers of the user's own, declared ones, and several by parameter: equal to plain PyTorch, or refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import piper
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import RunOutcome, differences
from piper_ir.ground.errors import CompileError, JobError
from piper_runtime.rank import pack, with_declarations
from piper_runtime.rank.optimizers import optimizer as rank_optimizer
from piper_runtime.rank.optimizers import optimizer_groups, optimizer_kinds
from piper_runtime.rank.sending import shipping
from tests.helpers.cases import each_case

Named = list[tuple[str, nn.Parameter]]
WIDTH, STEPS, M = 8, 3, 2


class Net(nn.Module):
    """Layers with a matrix and a bias, over two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[
        rows.start : rows.stop
    ]
    return x, x.roll(1, 1)


class Lion(Optimizer):
    """The sign of a moving average, which counts its steps in a number and in a tensor."""

    def __init__(self, params: Any, lr: float = 0.01, wd: float = 0.1):
        super().__init__(params, dict(lr=lr, wd=wd))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"], state["steps"], state["count"] = (
                        torch.zeros_like(p),
                        0,
                        torch.zeros(()),
                    )
                state["steps"] += 1
                state["count"] += 1
                update = (state["average"] * 0.9 + p.grad * 0.1).sign_()
                p.mul_(1 - group["lr"] * group["wd"]).sub_(
                    update, alpha=group["lr"] / state["steps"]
                )
                state["average"].mul_(0.99).add_(p.grad, alpha=0.01 * float(state["count"]))


class Trust(Optimizer):
    """A step in proportion to the norm of its parameter."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class Coupled(Optimizer):
    """A step in proportion to the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        ps = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            p.sub_(p.grad / norm * 0.01)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has declarations of its own."""
    monkeypatch.setattr(optimizer_kinds, "_elementwise", set())
    monkeypatch.setattr(optimizer_kinds, "_per_parameter", set())


def made(kind: type[Optimizer], **options: Any) -> Callable[[Named], Optimizer]:
    return lambda named: kind([p for _, p in named], **options)


def job(optimizer: Any, **options: Any) -> piper.Job:
    precision = piper.Precision(params="float64")
    return piper.Job(
        Net,
        batch,
        nn.functional.mse_loss,
        optimizer,
        global_batch=8,
        precision=precision,
        **options,
    )


def compiled(of: piper.Job, pp: int = 2, dp: int = 2, zero: int = 0) -> piper.Compiled:
    recipe = (
        piper.recipes.one_f_one_b(pp=pp, microbatches=M)
        if pp > 1
        else piper.recipes.gpipe(pp=1, microbatches=M)
    )
    return piper.compile(
        of,
        piper.Strategy(
            piper.Mesh(pp=pp, dp=dp), (*recipe, *piper.recipes.data_parallel(zero=zero))
        ),
    )


def check(of: piper.Job, **mesh: int) -> None:
    """Train by a plan and by plain PyTorch; compare losses, gradients, parameters, and what the optimizer's step
    holds."""
    made_of = compiled(of, **mesh)
    run = piper.execute(made_of, steps=STEPS, launcher="inline", gradients=True)
    expected = reference(of, replicas=made_of.plan.replicas, microbatches=M, steps=STEPS)
    assert not differences(RunOutcome.of(run), expected)
    for role in made_of.plan.roles:
        kept = sum(s.nbytes for s in role.states)
        assert all(run.peak_bytes[r] >= kept for r in role.ranks)


def small_pieces(monkeypatch: pytest.MonkeyPatch, elements: int = 20) -> None:
    monkeypatch.setattr(rank_optimizer, "PIECE", elements)
    monkeypatch.setattr(optimizer_groups, "PIECE", elements)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_declared_elementwise_optimizer_shares_its_states(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    piper.elementwise(Lion)
    small_pieces(monkeypatch)
    check(
        job(made(Lion), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)), zero=zero
    )


def wide_job(optimizer: Any) -> piper.Job:
    """A job whose update is the peak: a large matrix, few rows."""
    return piper.Job(
        lambda: nn.Linear(200, 100, bias=False),
        lambda step, rows: (torch.ones(len(rows), 200), torch.zeros(len(rows), 100)),
        nn.functional.mse_loss,
        optimizer,
        global_batch=2,
    )


@pytest.mark.parametrize(("zero", "dp", "elements"), [(0, 1, 3000), (1, 2, 3000), (1, 2, 2**22)])
def test_what_a_declared_optimizer_keeps_and_holds_is_planned_to_the_byte(
    zero: int, dp: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    piper.elementwise(Lion)
    small_pieces(monkeypatch, elements)
    recipe = (
        piper.split(piper.where(), microbatches=1),
        *(piper.recipes.data_parallel(zero=zero) if dp > 1 else ()),
    )
    planned = piper.compile(wide_job(made(Lion)), piper.Strategy(piper.Mesh(dp=dp), recipe))
    run = piper.execute(planned, steps=2, launcher="inline")
    assert run.peak_bytes == dict.fromkeys(range(dp), planned.plan.roles[0].peak_bytes)
    optim = next(s.nbytes for s in planned.plan.roles[0].states if s.category == "optim")
    own = planned.plan.buckets[0].numel // (dp if zero else 1)
    assert optim == own * 4 + 4 * -(-own // elements)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp": 2, "zero": 3}, {"pp": 1, "dp": 1}),
        pytest.param({"pp": 1, "dp": 1}, {"zero": 1}, marks=pytest.mark.long),
    ],
)
def test_a_declared_optimizer_resumes_under_another_strategy(
    before: dict[str, int], after: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piper.elementwise(Lion)
    small_pieces(monkeypatch)
    of = job(made(Lion))
    saved = piper.Checkpoints(tmp_path, every=1)
    piper.execute(
        compiled(of, **before), steps=2, launcher="inline", checkpoint=saved, memory=False
    )
    run = piper.execute(
        compiled(of, **after),
        steps=2,
        launcher="inline",
        resume=tmp_path / "step-00000002",
        memory=False,
    )
    want = reference(of, steps=4).parameters
    assert all(
        torch.allclose(run.state_dict()[n], p, rtol=1e-9, atol=1e-12) for n, p in want.items()
    )


def test_a_declared_torch_optimizer_shares_its_states() -> None:
    piper.elementwise(torch.optim.RMSprop)
    check(job(made(torch.optim.RMSprop, lr=0.01)), zero=2)


def test_a_declared_whole_optimizer_runs_over_stages() -> None:
    of = job(made(Trust))
    with pytest.raises(
        JobError,
        match=r"Trust, which is not known .* declare it with piper.per_parameter\(Trust\), or "
        r"piper.elem",
    ):
        compiled(of)
    piper.per_parameter(Trust)
    check(of)
    with pytest.raises(
        CompileError,
        match=r"zero=1.*Trust works on whole parameters here; .*piper.elementwise\(Trust\)",
    ):
        compiled(of, zero=1)


@each_case(
    ("declare", "kind", "says"),
    [
        (
            piper.elementwise,
            Trust,
            r"piper.elementwise\(Trust\): it was tried .* declare it with "
            r"piper.per_parameter\(Trust\)",
        ),
        (
            piper.elementwise,
            torch.optim.Adafactor,
            r"piper.elementwise\(Adafactor\): it was tried .* needs whole parameters",
        ),
        (
            piper.per_parameter,
            Coupled,
            r"piper.per_parameter\(Coupled\): it was tried .* a step on both is not that on each "
            r"alone",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(declare: Any, kind: Any, says: str) -> None:
    declare(kind)
    with pytest.raises(JobError, match=says):
        compiled(job(made(kind, lr=0.01)))


def test_what_is_no_optimizer_cannot_be_declared() -> None:
    with pytest.raises(
        JobError,
        match=r"piper.elementwise\(.*\): a class of optimizers is needed, such as "
        r"piper.elementwise",
    ):
        piper.elementwise(lambda named: None)  # type: ignore[type-var]  # on purpose
    with pytest.raises(JobError, match=r"LBFGS.*calls the loss several times"):
        piper.per_parameter(torch.optim.LBFGS)


def test_declarations_travel_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    piper.elementwise(Lion)
    parcel = pickle.dumps(pack(with_declarations(made(Lion))))
    monkeypatch.setattr(optimizer_kinds, "_elementwise", set())  # as in another process
    function = pickle.loads(parcel).open()
    optimizer = function([("w", nn.Parameter(torch.zeros(2)))])
    assert optimizer_kinds.declared_elementwise(optimizer)
    assert with_declarations(piper.Mesh) is not piper.Mesh


def test_declarations_are_made_in_the_module_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in a copy of it, also where the import system does not find Piper's files, as beside a folder of that
    name."""
    monkeypatch.setattr(shipping, "origin_of", lambda name: None)
    piper.elementwise(Lion)
    function = pickle.loads(pickle.dumps(pack(with_declarations(made(Lion))))).open()
    optimizer_kinds._elementwise.clear()
    assert optimizer_kinds.declared_elementwise(function([("w", nn.Parameter(torch.zeros(2)))]))


MIXED = {"layers.*.weight": made(torch.optim.Muon, lr=0.05), "*": made(AdamW, lr=0.01)}


def by_hand(named: Named) -> list[Optimizer]:
    """The same as MIXED, as a function."""
    muon = torch.optim.Muon([p for _, p in named if p.ndim == 2], lr=0.05)
    return [muon, AdamW([p for _, p in named if p.ndim != 2], lr=0.01)]


@pytest.mark.parametrize("optimizer", [MIXED, by_hand], ids=["mapping", "function"])
def test_several_optimizers_by_parameter(optimizer: Any) -> None:
    check(
        job(
            optimizer, clip_norm=0.1, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
        )
    )


def test_a_mapping_is_two_optimizers_of_plain_pytorch() -> None:
    model = Net().double()
    torch.manual_seed(0)
    model.load_state_dict(Net().double().state_dict())
    optimizers = by_hand(list(model.named_parameters()))
    for step in range(STEPS):
        x, y = batch(step, range(8))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run = piper.execute(compiled(job(MIXED)), steps=STEPS, launcher="inline", memory=False)
    assert all(
        torch.allclose(run.state_dict()[n], p, rtol=1e-9) for n, p in model.state_dict().items()
    )


def test_several_optimizers_resume(tmp_path: Path) -> None:
    of = job(MIXED, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    saved = piper.Checkpoints(tmp_path, every=2)
    piper.execute(compiled(of), steps=2, launcher="inline", checkpoint=saved, memory=False)
    run = piper.execute(
        compiled(of, pp=1, dp=1),
        steps=1,
        launcher="inline",
        checkpoint=saved,
        resume="latest",
        memory=False,
    )
    want = reference(of, steps=3).parameters
    assert all(
        torch.allclose(run.state_dict()[n], p, rtol=1e-9, atol=1e-12) for n, p in want.items()
    )
    other = replace(of, optimizer=made(AdamW, lr=0.01))
    with pytest.raises(JobError, match=r"holds the state of Muon \+ AdamW, the job has AdamW"):
        piper.execute(
            compiled(other),
            steps=1,
            launcher="inline",
            resume=tmp_path / "step-00000002",
            memory=False,
        )


def test_what_needs_matrices_does_not_share_states() -> None:
    with pytest.raises(
        CompileError,
        match=r"Muon works on whole parameters here \(it makes the updates .*; use one that",
    ):
        compiled(job(MIXED), zero=1)


@each_case(
    ("optimizer", "says"),
    [
        ({}, "is empty: a mapping from patterns"),
        ({"*": 3}, r"an object of type int for '\*': a mapping"),
        ({3: by_hand}, "has 3 as a pattern"),
    ],
)
def test_mappings_that_are_none(optimizer: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        job(optimizer)


@each_case(
    ("optimizer", "says"),
    [
        (
            {"*": made(AdamW), "head.*": made(AdamW)},
            r"no parameter is left for the pattern 'head.\*'.*layers.0.weight",
        ),
        ({"*.weight": made(AdamW)}, "puts layers.0.bias, layers.1.bias in no parameter group"),
        (
            {"*": made(torch.optim.Muon)},
            r"Muon only supports 2D.*Job\(optimizer=\{.layers.\*.weight.: muon",
        ),
        (lambda named: [], "returned no optimizer"),
        (
            lambda named: [made(AdamW)(named), made(AdamW)(named)],
            "gives parameter 'layers.0.weight' to two optimizers",
        ),
        (lambda named: [made(AdamW)(named), 3], "returned a list with a int"),
    ],
)
def test_several_optimizers_that_cannot_run_are_refused(optimizer: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        compiled(job(optimizer))


@pytest.mark.long
def test_declared_and_several_optimizers_in_processes() -> None:
    piper.elementwise(Lion)
    for of, zero in ((job(made(Lion)), 3), (job(MIXED), 0)):
        run = piper.execute(
            compiled(of, zero=zero), steps=STEPS, launcher="processes", gradients=True
        )
        assert not differences(
            RunOutcome.of(run), reference(of, replicas=2, microbatches=M, steps=STEPS)
        )


class Slowing(Optimizer):
    """Steps by gradients over the number of steps, which the group counts: state, and no setting."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, dict(lr=lr, k=0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            group["k"] += 1
            for p in [p for p in group["params"] if p.grad is not None]:
                p.sub_(p.grad, alpha=group["lr"] / group["k"])


def slowing(*groups: tuple[int, float]) -> Callable[[Named], Optimizer]:
    """Return groups of parameters by their dimensions, each with a learning rate."""
    return lambda named: Slowing(
        [dict(params=[p for _, p in named if p.dim() == d], lr=lr) for d, lr in groups]
    )


def test_groups_resume_with_their_state_and_the_jobs_settings(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Also if the job lists them in another order, and with another learning rate."""
    piper.per_parameter(Slowing)
    one, other = job(slowing((2, 0.1), (1, 0.01))), job(slowing((1, 0.01), (2, 0.1)))
    saved = piper.Checkpoints(tmp_path, every=2)
    whole = piper.execute(compiled(one), steps=4, launcher="inline", memory=False)
    first = dict(launcher="inline", checkpoint=saved, memory=False)
    piper.execute(compiled(one), steps=2, **first)
    again = dict(first, resume=tmp_path / "step-00000002", checkpoint=None)
    for of in (one, other):
        assert piper.execute(compiled(of), steps=2, **again).losses == whole.losses[2:]
    assert not [w for w in recwarn if "k=" in str(w.message) or "lr=" in str(w.message)]
    rates: list[tuple[float, ...]] = []
    slower = job(slowing((2, 0.05), (1, 0.01)))
    piper.execute(
        compiled(slower), steps=1, on_step=lambda r: rates.append(r.learning_rates), **again
    )
    assert rates == [(0.05, 0.01)]
