"""Tensors of a batch in mixed precision: what the loss reads is exact, and so are times that forward computes with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Job, Mesh, Precision, Strategy, recipes
from piper_ir.ground.errors import CaptureError
from tests.helpers import parity
from tests.helpers.memory_judge import lies

ONE = Strategy(Mesh(), [piper.split(piper.where(), microbatches=2)])
STAGES = Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2))
TWO_KINDS = Precision("float32", compute="bfloat16")
ROWS, LENGTH, TARGET = 4, 257, 1000.37


class Identities(nn.Module):
    """Layers that compute nothing, so that only the batch can be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, dict[str, Tensor]]:
    n = len(rows)
    return torch.ones(n, LENGTH, 2), {
        "wanted": torch.full((n, LENGTH, 2), TARGET),
        "mask": torch.ones(n, LENGTH),
    }


def uneven(step: int, rows: range) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the batch with weights that bfloat16 does not have."""
    inputs, targets = batch(step, rows)
    return inputs, {**targets, "mask": targets["mask"] * 1.003}


def masked(output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = (output - targets["wanted"]).abs().mean(-1)
    return (each * targets["mask"]).sum(), targets["mask"].sum()


def still(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.0)


@pytest.mark.parametrize(
    "precision",
    [TWO_KINDS, pytest.param(Precision("bfloat16"), marks=pytest.mark.long)],
    ids=["mixed", "bfloat16"],
)
def test_what_the_loss_reads_is_exact_and_its_bytes_are_planned(precision: Precision) -> None:
    job = Job(Identities, batch, masked, still, global_batch=ROWS, precision=precision)
    compiled = piper.compile(job, STAGES)
    assert [t.spec.dtype for t in compiled.program.batch] == ["bfloat16", "float32", "float32"]
    run = piper.execute(compiled, steps=1, launcher="inline")
    assert run.losses[0] == pytest.approx(TARGET - 1, rel=1e-6)
    assert parity.reference(job, microbatches=2, steps=1).losses[0] == pytest.approx(
        TARGET - 1, rel=1e-6
    ), "the judge rounds a target"
    assert not lies(compiled.plan, dict(run.memory))


class Labelled(Identities):
    """A model with a loss of its own, which reads labels, or the inputs themselves if there are none."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return nn.functional.l1_loss(super().forward(x), x if labels is None else labels)


@pytest.mark.parametrize("rounded", [False, True], ids=["exact", "control"])
@pytest.mark.parametrize(
    ("labelled", "loss"), [(True, TARGET - 1), (False, TARGET - 1000)], ids=["labels", "inputs"]
)
def test_a_model_with_its_own_loss_compares_with_exact_numbers(
    labelled: bool, loss: float, rounded: bool
) -> None:
    """The control has the labels that a cast of all inputs would make."""

    def rows_of(step: int, rows: range) -> dict[str, Tensor]:
        inputs, targets = batch(step, rows)
        wanted = targets["wanted"]
        wanted = wanted.bfloat16().float() if rounded else wanted
        return {"x": inputs, "labels": wanted} if labelled else {"x": wanted}

    job = Job(Labelled, rows_of, None, still, global_batch=ROWS, precision=TWO_KINDS)
    run = piper.execute(piper.compile(job, STAGES), steps=1, launcher="inline", memory=False)
    judged = parity.reference(job, microbatches=2, steps=1)
    for found in (run.losses[0], judged.losses[0]):
        assert (found == pytest.approx(loss, abs=1e-4)) is not rounded


class Timed(nn.Module):
    """A layer of the sines of a time, with weights of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, time: Tensor) -> Tensor:
        return self.layer(torch.sin(time))


def test_a_time_is_exact_until_a_layer_reads_what_was_made_of_it() -> None:
    time = torch.tensor([[100.3], [1000.37]])
    job = Job(
        Timed, lambda step, rows: (time[rows.start : rows.stop], time[rows.start : rows.stop] * 0), nn.functional.l1_loss, still,
        global_batch=2, precision=TWO_KINDS,
    )  # fmt: skip
    run = piper.execute(piper.compile(job, ONE), steps=1, launcher="inline", memory=False)
    assert run.losses[0] == pytest.approx(
        float(time.sin().bfloat16().float().abs().mean()), rel=1e-6
    )


class Masking(Identities):
    """A model that hides a part of its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, :1] = 0
        return super().forward(x)


WHOLE = torch.arange(4 * 2 * 3, dtype=torch.float32).view(4, 2, 3)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (WHOLE[..., :2], WHOLE[..., :2]),
        pytest.param(WHOLE[..., :2], WHOLE[..., 1:], marks=pytest.mark.long),
    ],
    ids=["one", "views"],
)
def test_a_batch_in_one_memory_that_forward_changes_is_refused(
    inputs: Tensor, targets: Tensor
) -> None:
    def job(model: type[nn.Module], *, copies: bool = False) -> Job:
        def rows_of(step: int, rows: range) -> tuple[Tensor, Tensor]:
            x, y = inputs[rows.start : rows.stop], targets[rows.start : rows.stop]
            return (x.clone(), y) if copies else (x, y)

        return Job(model, rows_of, nn.functional.mse_loss, still, global_batch=4)

    piper.compile(job(Identities), ONE)  # which changes nothing
    piper.compile(job(Masking, copies=True), ONE)
    with pytest.raises(
        CaptureError,
        match=r"x\[:, :1\] = 0.*changes inputs of the batch in place, and targets lies in the same",
    ):
        piper.compile(job(Masking), ONE)


@pytest.mark.long
def test_negative_control_mutants_of_backwards_and_batches_have_no_difference_without_their_fault() -> (
    None
):
    from tests.faults import backward_faults

    mixed = Job(Identities, uneven, masked, still, global_batch=ROWS, precision=TWO_KINDS)
    auxiliary = backward_faults.own_backwards
    exact = auxiliary.job(auxiliary.mean_square, nn.functional.mse_loss)
    for job, tolerance in ((mixed, parity.FLOAT32), (exact, parity.FLOAT64)):
        run, expected = backward_faults.judged(job)
        parity.assert_parity(run, expected, tolerance)
