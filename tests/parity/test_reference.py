"""The reference trains what the user wrote: memory that is shared, complex buffers and float64 files are kept as they
are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Job, Mesh, Precision, Strategy, recipes
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import differences, typical_norm
from piper.api.reference.verification import verify_strategy
from tests.helpers.parity import outcome_of

WIDTH, LENGTH, ROWS, STEPS = 4, 6, 2, 3


class Rotated(nn.Module):
    """Rotary positions as a complex buffer, as in Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LENGTH).float(), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).reshape(*x.shape[:-1], WIDTH // 2, 2))
            x = x + torch.view_as_real(pairs * self.turns).flatten(-2)
        return x


class SharedMemory(nn.Module):
    """Two parameters and a plain attribute over the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = nn.Parameter(self.a.weight.data)
        self.first = self.a.weight.data[0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) * self.first
        return out


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    made = [
        torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + r))
        for r in rows
    ]
    return torch.stack(made)[:, 0], torch.stack(made)[:, 1]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9)


def job(model: Callable[[], nn.Module], **more: Any) -> Job:
    fields: dict[str, Any] = {"precision": Precision(params="float64"), **more}
    return Job(model=model, batch=batch, loss=loss, optimizer=sgd, global_batch=ROWS, **fields)


def trained(model: nn.Module) -> nn.Module:
    """The module after some steps of the plainest loop there is."""
    optimizer = sgd(list(model.named_parameters()))
    for step in range(STEPS):
        inputs, targets = batch(step, range(ROWS))
        optimizer.zero_grad()
        loss(model(inputs.double()), targets.double()).backward()
        optimizer.step()
    return model


def assert_trained(found: dict[str, Tensor], model: nn.Module) -> None:
    wanted = trained(model).state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == found[name].dtype and torch.allclose(
            found[name], tensor, rtol=1e-12, atol=1e-15
        ), name


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def test_tensors_that_share_memory_still_do() -> None:
    wide = made(SharedMemory)
    wide.a.weight.data = wide.a.weight.data.double()  # type: ignore[union-attr]  # a Module has any attribute
    wide.b.weight.data, wide.first = wide.a.weight.data, wide.a.weight.data[0]  # type: ignore[union-attr]  # a Module has any attribute
    found = reference(job(SharedMemory), steps=STEPS)
    assert torch.equal(found.parameters["a.weight"], found.parameters["b.weight"])
    assert_trained(dict(found.state_dict), wide)


def test_complex_buffers_stay_complex() -> None:
    wide = made(Rotated)
    wide.layers.double()  # type: ignore[operator]  # a Module has any attribute
    found = reference(job(Rotated), steps=STEPS)
    assert found.buffers["turns"].dtype is torch.complex64
    assert_trained(dict(found.state_dict), wide)


def test_a_plan_with_complex_buffers_equals_one_device() -> None:
    report = verify_strategy(
        job(Rotated), Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2))
    )
    assert report.equal, report.text()


def test_gradients_may_be_rounding_alone() -> None:
    """Where branches begin with weights of zero, only the last parameter here has a gradient in exact numbers."""
    assert (
        typical_norm({}) == 0 and typical_norm({"head": 3.0, "a": 0.0, "b": 0.0, "c": 0.0}) == 1.5
    )
    truth = reference(job(Rotated), steps=1)
    *others, last = truth.gradients[0]

    def rounded(noise: float) -> dict[str, Tensor]:
        return {n: torch.full_like(truth.gradients[0][n], noise) for n in others} | {
            last: truth.gradients[0][last]
        }

    wanted, found = (replace(truth, gradients=[rounded(noise)]) for noise in (1e-18, -1e-18))
    assert differences(outcome_of(found), wanted) == []
    assert differences(outcome_of(replace(truth, gradients=[rounded(1e-9)])), wanted)


def test_another_imaginary_part_is_a_difference() -> None:
    truth = reference(job(Rotated), steps=1)
    assert differences(outcome_of(truth), truth) == []
    bent = {**truth.state_dict, "turns": truth.state_dict["turns"] + 1e-3j}
    (found,) = differences(replace(outcome_of(truth), state_dict=bent), truth)
    assert found.name == "turns"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file in float64 whose numbers float32 cannot hold."""
    generator = torch.Generator().manual_seed(5)
    state = Rotated().state_dict()
    wide = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for n, t in state.items()
        if n != "turns"
    }
    torch.save({**state, **wide}, tmp_path / "wide.pt")
    return tmp_path / "wide.pt"


def test_a_float64_file_is_trained_as_it_is(saved: Path) -> None:
    from_file = job(Rotated, init=saved)
    plain = made(Rotated)
    plain.layers.double()  # type: ignore[operator]  # a Module has any attribute
    plain.load_state_dict(torch.load(saved, weights_only=True))
    run = piper.execute(
        piper.compile(from_file, Strategy(Mesh())), steps=STEPS, launcher="inline", memory=False
    )
    assert_trained(dict(reference(from_file, steps=STEPS).state_dict), plain)
    plain.load_state_dict(torch.load(saved, weights_only=True))
    assert_trained(run.state_dict(), plain)


class Renamed(Rotated):
    """Saves its layers under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, found: dict[str, Tensor], prefix: str, _: object) -> None:
        for name in list(found):
            found[name.replace("layers", "blocks")] = found.pop(name)


def test_the_state_dict_of_a_run_has_the_names_of_the_model() -> None:
    compiled = piper.compile(job(Renamed), Strategy(Mesh()))
    found = piper.execute(compiled, steps=1, launcher="inline", memory=False).state_dict()
    assert found.keys() == Renamed().state_dict().keys() and "blocks.1.bias" in found
    assert verify_strategy(job(Renamed), Strategy(Mesh())).equal
