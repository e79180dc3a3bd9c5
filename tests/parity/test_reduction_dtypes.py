"""Protect sums over microbatches and reductions over ranks in dtypes of their own, against a plain loop that casts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Job, Mesh, Precision, Strategy
from piper.views.explained.explain import explain
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import Collective
from piper_ir.verify import verify
from tests.helpers.memory_judge import lies

ROWS, MICROBATCHES, WIDTH = 16, 4, 64
WIDE = Precision(params="float64", reduce="float32", accumulate="float64")
HALF = Precision(params="float32", compute="bfloat16", reduce="bfloat16", accumulate="float32")
UP = Precision(params="float32", compute="bfloat16", reduce="float32", accumulate="bfloat16")


class Net(nn.Module):
    """Two layers, so that buckets of a layer each are summed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    number = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=number, dtype=torch.float64)
    return x[rows.start : rows.stop], y[rows.start : rows.stop]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def job_of(precision: Precision) -> Job:
    return Job(Net, batch, loss, sgd, global_batch=ROWS, precision=precision, seed=3)


def plain(precision: Precision, ranks: int, each: bool) -> dict[str, Tensor]:
    """Return the gradients of one step: ranks reduce them in each microbatch, or once they are summed."""
    torch.manual_seed(3)
    model = Net().to(precision.dtype).to(precision.compute_dtype)
    start = {n: p.detach() for n, p in piper_start(precision).items()}
    summed, reduced = precision.accumulate_dtype, precision.reduce_dtype
    kept = {n: torch.zeros(p.shape, dtype=summed) for n, p in start.items()}
    for name, p in model.named_parameters():
        p.data.copy_(start[name])
    rows = ROWS // ranks // MICROBATCHES
    by_rank: list[list[dict[str, Tensor]]] = []
    for rank in range(ranks):
        mine = []
        for mb in range(MICROBATCHES):
            first = (rank * MICROBATCHES + mb) * rows
            x, y = batch(0, range(first, first + rows))
            output = model(x.to(precision.compute_dtype))
            error = loss(output.to(precision.batch_dtype), y.to(precision.batch_dtype))
            scaled = error / (ranks * MICROBATCHES)
            grads = torch.autograd.grad(scaled, list(model.parameters()))
            mine.append(dict(zip(start, grads, strict=True)))
        by_rank.append(mine)
    turns = [[mb] for mb in range(MICROBATCHES)] if each else [list(range(MICROBATCHES))]
    for turn in turns:
        for name, total in kept.items():
            sums = []
            for mine in by_rank:
                own = torch.zeros(total.shape, dtype=summed)
                for mb in turn:
                    own.add_(mine[mb][name])
                sums.append(own.to(reduced))
            total.add_(torch.stack(sums).sum(0, dtype=reduced) if ranks > 2 else sums[0] + sums[1])
    return kept


def piper_start(precision: Precision) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return dict(Net().to(precision.dtype).named_parameters())


def run_of(precision: Precision, **settings: Any) -> tuple[Any, Any]:
    layer = WIDTH * WIDTH * precision.reduce_dtype.itemsize
    pieces = (
        piper.split(piper.where(), microbatches=MICROBATCHES),
        *piper.recipes.data_parallel(bucket_mb=layer / 2**20, **settings),
    )
    compiled = piper.compile(job_of(precision), Strategy(Mesh(dp=2), pieces))
    verify(compiled.plan)
    run = piper.execute(compiled, steps=1, launcher="inline", gradients=True, memory=True)
    return compiled, run


ROWS_OF_TABLE = [
    (WIDE, 0, False), (HALF, 1, False), (HALF, 2, True), (UP, 3, True),
    *[pytest.param(p, z, z > 1, marks=pytest.mark.long) for p, z in ((HALF, 0), (WIDE, 1), (WIDE, 3), (UP, 0))],
]  # fmt: skip


@pytest.mark.parametrize(("precision", "zero", "each"), ROWS_OF_TABLE)
def test_ranks_reduce_as_a_plain_loop_that_casts(
    precision: Precision, zero: int, each: bool
) -> None:
    compiled, run = run_of(precision, zero=zero)
    expected = plain(precision, 2, each=each)
    other = plain(replace(precision, accumulate=None), 2, each=each)
    for name, grad in expected.items():
        found = run.gradients[0][name]
        assert torch.equal(found, grad.to(found.dtype)), name
        assert not torch.equal(found, other[name].to(found.dtype)), f"{name}: no negative control"
    assert not lies(compiled.plan, dict(run.memory))
    sums, sent = (
        str(d).removeprefix("torch.") for d in (precision.accumulate_dtype, precision.reduce_dtype)
    )
    assert f"gradients are summed in {sums}, and reduced in {sent}" in explain(compiled)


@pytest.mark.parametrize("zero", [0, 3])
def test_messages_have_the_bytes_of_the_dtype_in_which_ranks_reduce(zero: int) -> None:
    """A buffer of several microbatches is summed in the other dtype, and cast once."""
    compiled, run = run_of(HALF, zero=zero, **({"reduced_mb": "step"} if zero else {}))
    plan, traffic = compiled.plan, PlanBytes(compiled.plan)
    parts = [instr.parts[0] for _, _, instr in plan.instructions() if instr.comm]
    reductions = [p for p in parts if isinstance(p.op, Collective) and p.op.kind != "all_gather"]
    assert [traffic.message_bytes(p.op, p) for p in reductions] == [WIDTH * WIDTH * 2] * 2
    expected = plain(HALF, 2, each=False)
    assert all(torch.equal(run.gradients[0][name], grad) for name, grad in expected.items())
    assert sum(s.nbytes for s in plan.roles[0].states if s.category == "grad") == (
        2 * WIDTH * WIDTH * 4 // (2 if zero else 1)
    )


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_processes_reduce_as_one_process_does(zero: int) -> None:
    compiled, inline = run_of(HALF, zero=zero)
    run = piper.execute(compiled, steps=1, launcher="processes", gradients=True, memory=True)
    for name, grad in inline.gradients[0].items():
        assert torch.equal(run.gradients[0][name], grad)
    assert not lies(compiled.plan, dict(run.memory))


def test_one_rank_casts_nothing() -> None:
    compiled = piper.compile(job_of(HALF), Strategy(Mesh(), ()))
    assert not any(b.casts for b in compiled.plan.buckets)
    assert {b.accumulate_dtype for b in compiled.plan.buckets} == {"float32"}
