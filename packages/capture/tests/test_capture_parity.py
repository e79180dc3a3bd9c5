"""Captured chunks against plain eager autograd in float64, model by model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from packages.capture.tests.chunk_dag import ChunkDag, Run
from piper_capture import flatten_batch, named_tensors
from tests.helpers.models import CASES, Case, captured, cast

TOLERANCE = 1e-12


def build(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return case.model().double()


def eager(case: Case, model: nn.Module, rows: range) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = cast(case.batch(3, rows), torch.float64)
    output = (
        model(**inputs)
        if isinstance(inputs, dict)
        else model(*inputs)
        if isinstance(inputs, tuple)
        else model(inputs)
    )
    result = case.loss(output, targets)
    loss = result[0] / result[1] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def chunks(case: Case, name: str, model: nn.Module, rows: range) -> Run:
    state = {n: t.detach().clone() for n, t, _ in named_tensors(model)}
    batch = flatten_batch(*cast(case.batch(3, rows), torch.float64))
    return ChunkDag(captured(name), len(rows), state).run(batch)


def of_batch(run: Run) -> Run:
    """Return the loss and gradients of a mean: of a sum they are divided by its weight."""
    weight = run.weight if run.weight is not None else torch.ones(())
    return replace(run, loss=run.loss / weight, grads={n: g / weight for n, g in run.grads.items()})


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).double().norm() <= TOLERANCE * (1 + b.double().norm()))


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((n, 3) for n, c in CASES.items() if not c.random), ("gpt", 1), ("slices", 1), ("skip", 1)],
)
def test_loss_gradients_and_buffers_equal_autograd(name: str, rows: int) -> None:
    case, model = CASES[name], build(CASES[name])
    run = of_batch(chunks(case, name, model, range(2, 2 + rows)))
    loss, grads = eager(case, model, range(2, 2 + rows))
    assert close(run.loss, loss)
    assert run.grads.keys() == grads.keys()
    assert {n: close(run.grads[n], g) for n, g in grads.items()} == dict.fromkeys(grads, True)
    trained = {p.name for p in captured(name).program.params if p.trained}
    assert trained == grads.keys()
    updated = dict(model.named_buffers())
    assert all(close(value, updated[n]) for n, value in run.buffers.items())
    assert bool(run.buffers) == case.buffers


def test_dropout_draws_the_numbers_of_eager_dropout_from_the_same_state() -> None:
    """The state is set where a layer starts, as the runtime does it from seed, step, row and layer."""
    case, model = CASES["gpt_dropout"], build(CASES["gpt_dropout"])
    for index, layer in enumerate(model.get_submodule("layers").children()):
        layer.register_forward_pre_hook(
            lambda *_, index=index: torch.manual_seed(100 + index) and None
        )
    state = {n: t.detach().clone() for n, t, _ in named_tensors(model)}
    batch = flatten_batch(*cast(case.batch(3, range(3)), torch.float64))
    dag = ChunkDag(
        captured("gpt_dropout"),
        3,
        state,
        lambda c: torch.manual_seed(100 + c.coords["layer"]) and None,
    )
    run = of_batch(dag.run(batch))
    loss, grads = eager(case, model, range(3))
    assert close(run.loss, loss)
    assert {n: close(run.grads[n], g) for n, g in grads.items()} == dict.fromkeys(grads, True)
    assert [c.random for c in dag.program.chunks] == [False, True, True, True, False]
    other = ChunkDag(
        captured("gpt_dropout"), 3, state, lambda c: torch.manual_seed(7) and None
    ).run(batch)
    assert not close(other.loss, loss)


def test_a_weight_is_returned_beside_the_sum() -> None:
    case, model = CASES["keywords"], build(CASES["keywords"])
    run = chunks(case, "keywords", model, range(5))
    assert run.weight is not None
    mask = case.batch(3, range(5))[1]["mask"]
    assert run.weight.dtype == torch.float64 and run.weight.item() == mask.sum() > 0
    assert not mask[0].any()


def test_a_buffer_read_before_its_update_is_kept_for_the_backward() -> None:
    """layer0 reads `mean`, part 1 replaces it: without a snapshot the backward of layer0 would see the new content."""
    case, model = CASES["buffers"], build(CASES["buffers"])
    before = model.get_buffer("mean").clone()
    run = chunks(case, "buffers", model, range(3))
    first = captured("buffers").bind(3).chunks[0]
    saved = [run.ports[first.id, w] for w in first.steps["F"].writes if w.startswith("saved")]
    assert any(s.shape == before.shape and torch.equal(s, before) for s in saved)
    assert not torch.equal(run.buffers["mean"], before)
