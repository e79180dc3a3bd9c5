"""A capture is used again only while its custom operators are registered as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.captures import capturing
from piper.api.content.content import content_of
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import bind
from piper_ops.costing import costs
from tests.helpers.capture_jobs import ONE, WIDTH, job

FACTOR = 2.0


@pytest.fixture(autouse=True)
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_CAPTURES", {})


def registered(factor: float, gradient: Callable[[Any, Tensor], Tensor] | None = None) -> None:
    """Register an operator as a cell of a notebook does that is run again; its true gradient has the factor 2."""

    @torch.library.custom_op("piper_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    twice.register_autograd(
        gradient or (lambda ctx, grad: grad * factor),
        setup_context=lambda ctx, inputs, output: None,
    )


class ByPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.piper_tests.twice(self.layer(x))
        return found


class ByAttribute(ByPath):
    def __init__(self) -> None:
        super().__init__()
        self.op = torch.ops.piper_tests.twice.default

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.op(self.layer(x))
        return found


def trained(model: Callable[[], nn.Module]) -> list[float]:
    losses: list[float] = piper.execute(
        piper.compile(job(model), ONE), steps=2, launcher="inline"
    ).losses
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [ByPath, lambda: ByPath(), ByAttribute])
def test_a_gradient_that_is_registered_anew_is_captured_again(
    model: Callable[[], nn.Module],
) -> None:
    registered(20.0)
    wrong = trained(model)
    registered(2.0)
    right = trained(model)
    assert right[0] == wrong[0] and right[1] != wrong[1]
    assert verify_strategy(job(model), ONE).equal


@pytest.mark.long
def test_what_a_gradient_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(0.0, lambda ctx, grad: grad * FACTOR)
    before = trained(ByPath)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert trained(ByPath)[1] != before[1]


def test_the_same_registration_is_captured_once() -> None:
    for _ in range(2):
        registered(2.0)
        trained(ByPath)
    assert len(capturing._CAPTURES) == 1


def of_torch(x: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.relu(torch.ops.piper.rms_norm(x, None, 1e-5)[0])
    return found


def by_a_name_that_is_not_there(x: Tensor) -> Any:
    return getattr(torch.ops, "piper" + "_tests").twice(x)


def in_pieces(x: Tensor) -> Any:
    return torch.ops.piper_pieces.same(x)


def of_a_file(ctx: Any, grad: Tensor) -> Tensor:
    with open("factor") as file:
        return grad * float(file.read())


def test_an_operator_has_a_content_only_where_all_of_it_can_be_seen() -> None:
    assert content_of(of_torch) is not None
    assert content_of(by_a_name_that_is_not_there) is None
    library = torch.library.Library("piper_pieces", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    assert content_of(in_pieces, torch.ops.piper_pieces.same) is None
    registered(0.0, of_a_file)
    assert content_of(ByPath) is None
    registered(2.0)
    assert content_of(ByPath) is not None


def test_a_registered_cost_holds_for_a_job_that_was_compiled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        costs, "_OWN", dict(costs._OWN)
    )  # the captures of all later tests would depend on it
    registered(2.0)

    def flops() -> set[int]:
        plan = piper.compile(job(ByPath), ONE).plan
        kernels = [
            k for chunk in plan.chunks for k in chunk.steps["F"].cost.kernels if "twice" in k.op
        ]
        return {bind(k.flops, 1) for k in kernels}

    before = flops()
    piper.op_cost("piper_tests::twice", flops=lambda call: 10**6)
    assert before != flops() == {10**6}
    piper.op_cost("piper_tests::twice", flops=lambda call: 10**7)
    assert flops() == {10**7}


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (lambda call: call.outs[0].numel() * 5 // 3, ""),
        (lambda call: call.outs[0].numel() / 7, ""),
        (
            lambda call: call.outs[0].shape[0] ** 2 * 10**6,
            r"'piper_tests::twice'.*formula of flops gives .* at 2, 3, 5 rows",
        ),
        (
            lambda call: call.tensor("y").numel(),
            r"'piper_tests::twice'.*formula of flops fails: KeyError: 'y'.* for x",
        ),
        (lambda call: None, r"'piper_tests::twice'.*formula of flops gives None; a number"),
    ],
)
def test_a_formula_gives_any_number_or_its_fault_is_named(
    formula: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_OWN", dict(costs._OWN))
    registered(2.0)
    piper.op_cost("piper_tests::twice", flops=formula)
    if said:
        with pytest.raises(CaptureError, match=said):
            piper.compile(job(ByPath), ONE)
    else:
        kernels = [
            k
            for c in piper.compile(job(ByPath), ONE).plan.chunks
            for k in c.steps["F"].cost.kernels
            if "twice" in k.op
        ]
        assert [bind(k.flops, 1) for k in kernels] == [pytest.approx(formula(Outs()), abs=8)]


class Outs:
    """Stand for a call whose result is that of the whole batch."""

    outs = (torch.empty(8, WIDTH),)
