"""Declared optimizers, and several by parameter, where devices share chunks, experts or states: one device, or
refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper import ANY, Mesh, recipes, where
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import RunOutcome, differences
from piper_ir.ground.errors import CompileError
from piper_ir.program.ops import Update
from piper_runtime.rank.optimizers import optimizer_kinds
from piper_runtime.rank.optimizers.optimizer_trials import by_elements
from piper_simulator.durations.updates import updated
from tests.helpers import shared_jobs
from tests.helpers.cases import each_case
from tests.parity.test_own_optimizers import AdamW, Lion, Trust, batch, made

HEADS = piper.shard(where(), over="tp")
EXPERTS = piper.shard(where(experts=ANY), over="ep", index="experts", stream="rows")
PIPELINE = recipes.one_f_one_b(pp=2, microbatches=2)


class Wide(nn.Module):
    """Layers whose hidden elements two devices share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_kinds, "_elementwise", {Lion})
    monkeypatch.setattr(optimizer_kinds, "_per_parameter", {Trust})


def muon(lr: float = 0.05) -> Any:
    return made(torch.optim.Muon, lr=lr)


ADAMW = made(AdamW, lr=0.01)
LION_AND_ADAMW = {"*0.weight": made(Lion), "*": ADAMW}


def job(optimizer: Any) -> piper.Job:
    precision = piper.Precision(params="float64")
    return piper.Job(
        Wide,
        batch,
        nn.functional.mse_loss,
        optimizer,
        global_batch=8,
        precision=precision,
        clip_norm=0.1,
    )


def check(of: piper.Job, mesh: Mesh, *directives: Any) -> None:
    """Train by a plan and by plain PyTorch; compare numbers to 1e-9, and measured with planned memory to the byte."""
    made_of = piper.compile(of, piper.Strategy(mesh, directives))
    plan = made_of.plan
    run = piper.execute(made_of, steps=3, launcher="inline", gradients=True)
    assert not differences(
        RunOutcome.of(run),
        reference(of, replicas=plan.replicas, microbatches=plan.microbatches, steps=3),
    )
    assert run.peak_bytes == {
        rank: plan.role_of(rank).peak_bytes for rank in range(plan.mesh.world)
    }


@each_case("zero", [0, 1, 3])
@each_case("optimizer", [made(Lion), LION_AND_ADAMW], ids=["Lion", "Lion and AdamW"])
def test_elementwise_optimizers_take_parts_of_parameters(optimizer: Any, zero: int) -> None:
    replicas = recipes.data_parallel(zero=zero) if zero else ()
    mesh = Mesh(pp=2, dp=2, tp=2) if zero else Mesh(pp=2, tp=2)
    check(job(optimizer), mesh, HEADS, *PIPELINE, *replicas)


KINDS = {
    "layers.0.0.weight": made(torch.optim.RMSprop, centered=True, momentum=0.9, lr=0.01),
    "layers.0.0.bias": made(torch.optim.Adadelta, weight_decay=0.1),
    "layers.0.2.weight": made(torch.optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    "layers.0.2.bias": made(torch.optim.Adamax),
    "layers.1.0.weight": made(torch.optim.NAdam),
    "layers.1.0.bias": made(torch.optim.ASGD, t0=1),
    "layers.1.2.weight": made(torch.optim.RAdam),
    "layers.1.2.bias": made(torch.optim.Rprop),
}
"""Every optimizer of torch that updates each element by itself and has no fused kernel here."""


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_what_torch_updates_element_by_element_takes_parts(zero: int, tmp_path: Path) -> None:
    """Without a declaration: with states that ranks share and parameters in parts, and resumed where they are whole."""
    work, parts = (
        job(KINDS),
        piper.Strategy(Mesh(dp=2, tp=2), (HEADS, *recipes.data_parallel(zero=zero))),
    )
    check(work, parts.mesh, *parts.directives)
    saved = piper.Checkpoints(tmp_path, every=2)
    piper.execute(
        piper.compile(work, parts), steps=2, launcher="inline", checkpoint=saved, memory=False
    )
    whole = piper.compile(work, piper.Strategy(Mesh(), piper.split(where(), microbatches=2)))
    resumed = piper.execute(
        whole, steps=1, launcher="inline", checkpoint=saved, resume="latest", memory=False
    )
    expected = reference(work, replicas=2, microbatches=1, steps=3)
    assert resumed.losses == pytest.approx(expected.losses[2:], rel=1e-9)


@each_case(
    ("kind", "settings", "each"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, True),
        (torch.optim.Adafactor, {}, False),
        (Trust, {}, False),
    ],
)
def test_a_trial_finds_what_works_by_elements(
    kind: Any, settings: dict[str, Any], each: bool
) -> None:
    """SGD with a setting that its fused kernel lacks; one of torch that needs matrices; one of a user that may do
    anything."""

    def make() -> torch.optim.Optimizer:
        return kind([nn.Parameter(torch.empty(4, 4, device="meta"))], lr=0.1, **settings)  # type: ignore[no-any-return]  # any optimizer

    assert by_elements(make(), make) is each


@pytest.mark.parametrize(
    ("optimizer", "kind"), [({"*.weight": muon(), "*": ADAMW}, "Muon"), (made(Trust), "Trust")]
)
def test_whole_parameters_are_not_taken_apart(optimizer: Any, kind: str) -> None:
    said = rf"a part of parameter 'layers.0.0.weight' \(by shard\), and {kind} works on whole parameters here.*leave shard out"
    with pytest.raises(CompileError, match=said):
        piper.compile(job(optimizer), piper.Strategy(Mesh(pp=2, tp=2), (HEADS, *PIPELINE)))


def test_what_stays_whole_may_have_an_optimizer_of_matrices() -> None:
    optimizer = {"layers.1.*.weight": muon(), "*": ADAMW}
    one = piper.shard(where(), over="tp", index="layers.0.0.weight:0")
    check(job(optimizer), Mesh(tp=2), one, piper.split(where(), microbatches=2))


OF_EXPERTS = {
    "*feed_forward*": made(torch.optim.RMSprop, centered=True, momentum=0.9, lr=0.01),
    "*": made(torch.optim.Adagrad, lr_decay=0.1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts", "dropless"])
def test_what_torch_updates_element_by_element_takes_shared_experts(name: str) -> None:
    of = replace(shared_jobs.job(name), optimizer=OF_EXPERTS)
    check(of, Mesh(ep=2), EXPERTS, *recipes.data_parallel(over=("ep",), zero=1))


@pytest.mark.long
def test_nesterov_in_half_precision_beside_dropless_experts() -> None:
    nesterov = made(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    of = replace(
        shared_jobs.job("dropless"), optimizer=nesterov, precision=piper.Precision("bfloat16")
    )
    strategy = piper.Strategy(Mesh(ep=2), (EXPERTS, *recipes.data_parallel(over=("ep",), zero=1)))
    run = piper.execute(piper.compile(of, strategy), steps=2, launcher="inline", memory=False)
    assert run.losses == pytest.approx(reference(of, replicas=2, steps=2).losses, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(
    "optimizer",
    [made(Lion), {"*feed_forward*": made(Lion), "*": ADAMW}],
    ids=["Lion", "Lion and AdamW"],
)
def test_elementwise_optimizers_beside_shared_experts(optimizer: Any, zero: int) -> None:
    of = replace(shared_jobs.job("experts"), optimizer=optimizer)
    check(of, Mesh(dp=2, ep=2), EXPERTS, *recipes.data_parallel(over=("dp", "ep"), zero=zero))


class MuonOnEach(torch.optim.Optimizer):
    """The judge: torch's Muon, which takes each matrix of a stack as a parameter of its own.

    `flat` is the control: it takes a stack as one matrix of all rows.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, flat: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.own = [(p, k, nn.Parameter(m)) for p in params for k, m in self.split(p, flat)]
        self.flat, self.plain = flat, torch.optim.Muon([m for *_, m in self.own], lr=lr)

    @staticmethod
    def split(p: torch.Tensor, flat: bool) -> list[tuple[int, torch.Tensor]]:
        last = p.detach()
        return [*enumerate([last.flatten(0, -2)] if flat else last.view(-1, *p.shape[-2:]))]

    def step(self, closure: Any = None) -> None:
        for p, k, matrix in self.own:
            assert p.grad is not None
            matrix.grad = self.split(p.grad, self.flat)[k][1]
        self.plain.step()


MATRICES = ("*attention*weight", "*feed_forward.gate", "*feed_forward.up", "*feed_forward.down")
MUON_MESHES: dict[str, tuple[str, Mesh, tuple[Any, ...], tuple[str, ...]]] = {
    "capacity": ("experts", Mesh(ep=2), (), ("ep",)),
    "dropless": ("dropless", Mesh(ep=2), (), ("ep",)),
    "pipeline": ("experts", Mesh(pp=2, dp=2, ep=2), PIPELINE, ("dp", "ep")),
}


def products(r: int, c: int) -> int:
    """Return the FLOPs by which five iterations make a matrix orthogonal."""
    return 5 * (4 * r * r * c + 2 * r**3)


def with_muon(name: str, kind: Any, **settings: Any) -> piper.Job:
    """Return a job whose attention and experts have an optimizer of matrices, and all else AdamW."""
    taken = dict.fromkeys(MATRICES, made(kind, lr=0.05, **settings))
    return replace(shared_jobs.job(name), optimizer={**taken, "*": ADAMW})


def judged(name: str, run: Any, plan: Any, **settings: Any) -> Any:
    one = reference(
        with_muon(name, MuonOnEach, **settings),
        replicas=plan.replicas, microbatches=plan.microbatches, steps=3,
    )  # fmt: skip
    return differences(RunOutcome.of(run), one)


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.long] * (n != "capacity")) for n in MUON_MESHES]
)
def test_muon_makes_each_matrix_of_shared_experts_orthogonal(case: str, tmp_path: Path) -> None:
    """Also where it goes on from a checkpoint of devices that share experts on one that has all of them."""
    name, mesh, pipeline, over = MUON_MESHES[case]
    of = with_muon(name, piper.BatchedMuon)
    compiled = piper.compile(
        of, piper.Strategy(mesh, (EXPERTS, *pipeline, *recipes.data_parallel(over=over)))
    )
    plan, saved = compiled.plan, piper.Checkpoints(tmp_path, every=2)
    run = piper.execute(compiled, steps=3, launcher="inline", gradients=True, checkpoint=saved)
    assert not judged(name, run, plan)
    assert run.peak_bytes == {r: plan.role_of(r).peak_bytes for r in range(plan.mesh.world)}
    whole = piper.compile(of, piper.Strategy(Mesh(), piper.split(where(), microbatches=2)))
    resumed = piper.execute(whole, steps=1, launcher="inline", resume=tmp_path / "step-00000002")
    assert resumed.losses == pytest.approx(run.losses[2:], rel=1e-9)
    if case == "capacity":  # the control: all matrices of a stack as one are another optimizer
        assert judged(name, run, plan, flat=True)
        layer = 2 * products(16, 16) + 2 * products(8, 16)  # q and out, k and v
        layer += 2 * 3 * products(16, 16)  # a device has two of the four experts
        op = next(p.op for i in plan.roles[0].program for p in i.parts if isinstance(p.op, Update))
        made = updated(plan, plan.roles[0], op).products
        assert sum(int(k.flops) * k.count for k in made) == 4 * layer
        alone = [replace(bucket, newton_schulz=0) for bucket in plan.buckets]
        faster = piper.simulate(replace(plan, buckets=tuple(alone)), "h100x8").step_s
        assert faster < piper.simulate(plan, "h100x8").step_s


@pytest.mark.long
def test_matrices_beside_shared_experts_have_an_optimizer_of_their_own() -> None:
    of = replace(shared_jobs.job("experts"), optimizer={"*attention*": muon(), "*": ADAMW})
    check(of, Mesh(pp=2, ep=2), EXPERTS, *PIPELINE, *recipes.data_parallel(over=("ep",)))
    with pytest.raises(
        CompileError,
        match=r"a part of parameter 'layers.0.feed_forward.gate' .* Trust works on whole",
    ):
        other = replace(of, optimizer={"*feed_forward*": made(Trust), "*": ADAMW})
        piper.compile(
            other, piper.Strategy(Mesh(ep=2), (EXPERTS, *recipes.data_parallel(over=("ep",))))
        )
