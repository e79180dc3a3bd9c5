"""Captured chunks against plain eager autograd in float64, model by model."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from packages.compiler.tests.chunk_dag import ChunkDag, Run
from piper_compiler.capture import Captured, capture, flatten_batch, named_tensors
from torch import Tensor, nn

from tests.models import CASES, Case, cast

TOLERANCE = 1e-12


@cache
def captured(name: str) -> Captured:
    case = CASES[name]
    return capture(case.model, partial(case.batch, 0), case.loss, dtype=torch.float64)


def build(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return case.model().double()


def eager(case: Case, model: nn.Module, rows: range) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = cast(case.batch(3, rows), torch.float64)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    result = case.loss(output, targets)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def chunks(case: Case, name: str, model: nn.Module, rows: range) -> Run:
    state = {n: t.detach().clone() for n, t, _ in named_tensors(model)}
    batch = flatten_batch(*cast(case.batch(3, rows), torch.float64))
    return ChunkDag(captured(name), len(rows), state).run(batch)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).double().norm() <= TOLERANCE * (1 + b.double().norm()))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c.random])
def test_loss_gradients_and_buffers_equal_autograd(name: str, rows: int) -> None:
    case, model = CASES[name], build(CASES[name])
    run = chunks(case, name, model, range(2, 2 + rows))
    loss, grads = eager(case, model, range(2, 2 + rows))
    assert close(run.loss, loss)
    assert run.grads.keys() == grads.keys()
    assert {n: close(run.grads[n], g) for n, g in grads.items()} == dict.fromkeys(grads, True)
    trained = {p.name for p in captured(name).program.params if p.trained}
    assert trained == grads.keys()
    updated = dict(model.named_buffers())
    assert all(close(value, updated[n]) for n, value in run.buffers.items())
    assert bool(run.buffers) == case.buffers
