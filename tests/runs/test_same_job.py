"""What is executed is what was compiled: plans, models and optimizers that differ are refused, where rules could not
tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Compiled, Job, Mesh, Precision, Strategy, recipes
from piper_ir.ground.errors import JobError, PlanError
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Update
from piper_ir.program.program import Chunk
from piper_ir.verify import check
from tests.helpers.cases import each_case
from tests.helpers.plan_edits import every_part, with_op

WIDTH, ROWS = 4, 4


class Twins(nn.Module):
    """Layers of equal shapes, so that their tensors can be exchanged."""

    def __init__(self, width: int = WIDTH, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2)
        )
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, width))
        self.layers[1][0].bias.requires_grad_(not frozen)  # type: ignore[index, union-attr]  # a Module has any attribute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + torch.sigmoid(x) * self.shift
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    made = [
        torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in rows
    ]
    return torch.stack(made)[:, 0], torch.stack(made)[:, 1]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


WIDE = Precision(params="float64")
JOB = Job(
    model=Twins,
    batch=batch,
    loss=loss,
    optimizer=sgd,
    global_batch=ROWS,
    clip_norm=0.5,
    precision=WIDE,
)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return piper.compile(JOB, Strategy(Mesh()))


def run(compiled: Compiled, job: Job | None = None) -> Any:
    return piper.execute(compiled, job, steps=1, launcher="inline", memory=False)


def exchanged(kind: str) -> Callable[[Plan], Plan]:
    """Exchange two inputs of a kind that have one spec, wherever they are."""

    def edit(plan: Plan) -> Plan:
        places = [
            (c, k)
            for c, chunk in enumerate(plan.chunks)
            for k, i in enumerate(chunk.inputs)
            if i.kind == kind
        ]
        for (c, k), (d, j) in ((a, b) for a in places for b in places):
            one, other = plan.chunks[c].inputs[k], plan.chunks[d].inputs[j]
            if one.ref != other.ref and one.spec == other.spec:
                return with_input(with_input(plan, c, k, other.ref), d, j, one.ref)
        raise AssertionError(f"no two {kind}s are alike")

    return edit


def with_chunk(plan: Plan, c: int, **fields: Any) -> Plan:
    changed: Chunk = replace(plan.chunks[c], **fields)
    return replace(plan, chunks=(*plan.chunks[:c], changed, *plan.chunks[c + 1 :]))


def with_input(plan: Plan, c: int, k: int, ref: str) -> Plan:
    inputs = plan.chunks[c].inputs
    return with_chunk(plan, c, inputs=(*inputs[:k], replace(inputs[k], ref=ref), *inputs[k + 1 :]))


def saved_crossed(plan: Plan) -> Plan:
    """A backward reads two saved tensors of one spec in the other order."""
    for c, chunk in enumerate(plan.chunks):
        for step in ("I", "W"):
            reads = list(chunk.steps[step].reads)  # type: ignore[index]  # the steps of a plan
            saved = [k for k, p in enumerate(reads) if p.startswith("saved")]
            for a, b in ((a, b) for a in saved for b in saved):
                if a < b and chunk.ports[reads[a]] == chunk.ports[reads[b]]:
                    reads[a], reads[b] = reads[b], reads[a]
                    crossed = replace(chunk.steps[step], reads=tuple(reads))  # type: ignore[index]  # the steps of a plan
                    return with_chunk(plan, c, steps={**chunk.steps, step: crossed})
    raise AssertionError("no two saved tensors are alike")


def code_of_another(plan: Plan) -> Plan:
    other = next(c.code for c in plan.chunks if c.code != plan.chunks[0].code)
    return with_chunk(plan, 0, code=other)


EDITS: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "parameters": ("chunks differ .* inputs of", exchanged("param")),
    "buffers": ("chunks differ .* inputs of", exchanged("buffer")),
    "inputs and targets": ("chunks differ .* inputs of", exchanged("batch")),
    "saved tensors": ("chunks differ .* steps of", saved_crossed),
    "code": ("chunks differ .* code of", code_of_another),
    "a chunk": ("chunks are", lambda plan: replace(plan, chunks=plan.chunks[:-1])),
    "program key": ("program_key is", lambda plan: replace(plan, program_key="0" * 16)),
    "loss kind": ("loss_kind is 'sum'", lambda plan: replace(plan, loss_kind="sum")),
    "a parameter": ("params differ", lambda plan: replace(plan, params=plan.params[1:])),
    "buffer names": (
        "buffers differ .* name of shift",
        lambda plan: replace(plan, buffers=plan.buffers[::-1]),
    ),
    "batch": (
        "batch differ .* name of targets",
        lambda plan: replace(plan, batch=plan.batch[::-1]),
    ),
}


@each_case("what", EDITS)
def test_a_plan_that_is_not_of_its_program_is_refused(what: str, compiled: Compiled) -> None:
    says, edit = EDITS[what]
    with pytest.raises(PlanError, match=f"the plan's {says}"):
        run(replace(compiled, plan=edit(compiled.plan)))


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_the_rules_alone_would_let_it_pass(what: str, compiled: Compiled) -> None:
    """Why the tables are compared: such a plan is a right one of another program."""
    assert check(EDITS[what][1](compiled.plan)) == []


@pytest.mark.parametrize("clip", [None, 0.25])
def test_a_plan_with_another_clip_is_refused(clip: float | None, compiled: Compiled) -> None:
    edited = every_part(
        compiled.plan, lambda r, p: isinstance(p.op, Update), lambda p: with_op(p, clip=clip)
    )
    assert edited is not None
    with pytest.raises(
        (JobError, PlanError), match=f"clips gradients to {clip}, the job's clip_norm is 0.5"
    ):
        run(replace(compiled, plan=edited))


class Coupled(torch.optim.SGD):
    """A subclass may do anything, such as divide by a norm over all parameters."""


def test_an_optimizer_that_couples_parameters_is_refused_at_execution_too() -> None:
    split = piper.compile(JOB, Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=2)))
    coupled = replace(JOB, optimizer=lambda named: Coupled([p for _, p in named], lr=0.1))
    with pytest.raises(
        JobError, match=r"Coupled, which is not known to update each parameter by itself.*2 roles"
    ):
        run(split, coupled)
    assert run(split, replace(JOB, seed=3)).losses


class Changing:
    """A constructor whose result depends on something else."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __call__(self) -> nn.Module:
        made = Twins(**{k: v for k, v in self.options.items() if k != "extra"})
        if "extra" in self.options:
            made.extra = nn.Parameter(torch.zeros(2))
        return made


@each_case(
    ("options", "says"),
    [
        (
            {"width": 6},
            r"'layers.0.0.weight' of shape \[6, 6\]; in the compiled one it has \[4, 4\]",
        ),
        (
            {"frozen": True},
            "'layers.1.0.bias' with requires_grad=False; in the compiled one it has requires_grad=True",
        ),
        ({"extra": True}, "'extra', which the compiled one has not"),
    ],
)
def test_a_model_that_has_changed_since_is_refused(options: dict[str, Any], says: str) -> None:
    model = Changing()
    before = piper.compile(replace(JOB, model=model), Strategy(Mesh()))
    assert run(before).losses
    model.options = options
    with pytest.raises(JobError, match=rf"Job.model\(\) now has parameter {says}"):
        run(before)
