"""What a model puts under torch.utils.checkpoint is made again by the plan, unless the strategy says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import piper
from piper import where
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import explain
from piper_compiler import compile as compiler
from piper_ir.ground.errors import CaptureError
from tests.helpers.block_nets import LENGTH, ROWS, WIDTH, BlockNet, batch
from tests.helpers.capture_jobs import sgd
from tests.helpers.cases import each_case
from tests.predictions.test_memory_truth import lies

PIPELINE = piper.recipes.one_f_one_b(pp=2, microbatches=2)
BOTH = piper.Strategy(piper.Mesh(pp=2, dp=2), (*PIPELINE, *piper.recipes.data_parallel(zero=2)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def inside(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(torch.tanh(self.up(x))), 0.25, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class Reentrant(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=True)  # type: ignore[no-any-return]  # torch has no types there


class Nested(Inner):
    def outside(self, x: Tensor) -> Tensor:
        return torch.sin(checkpoint(self.inside, x, use_reentrant=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.outside, x, use_reentrant=False)  # type: ignore[no-any-return]  # torch has no types there


class InARow(nn.Module):
    """The first two of three parts in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
                for _ in range(3)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.parts, 2, x, use_reentrant=False) + x  # type: ignore[no-any-return]  # as above


class Whole(Inner):
    """The whole layer, as `gradient_checkpointing` of transformers does it: around the call of the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)


class Selective(Inner):
    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return x + checkpoint(self.inside, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]  # as above


class Normed(nn.Module):
    """Plain PyTorch brings running averages nearer to a microbatch in the forward, and once more in the backward."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, LENGTH), nn.BatchNorm1d(LENGTH, momentum=0.3), nn.Linear(LENGTH, WIDTH)
        )
        self.inner.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]  # as above


class Averaging(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def inside(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9)
        return x - self.average

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]  # as above


class Counting(Inner):
    """PyTorch makes a region again as far as the backward needs it: not the counter behind the last kept tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def inside(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.up(x))
        self.calls.add_(1)
        return made[..., :WIDTH]

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]  # as above


class CountingInAView(Counting):
    def inside(self, x: Tensor) -> Tensor:
        self.calls[0].add_(1)
        return torch.tanh(self.up(x))[..., :WIDTH]


def job(*blocks: Callable[[], nn.Module], embed: bool = True) -> piper.Job:
    def model() -> BlockNet:
        return BlockNet((block() for block in blocks), embed)

    return piper.Job(
        model, batch, F.cross_entropy, sgd, ROWS, precision=piper.Precision(params="float64")
    )


ALL = (Reentrant, Nested, Whole, Inner)
"""One layer for each way, and one without."""


def repeated(found: piper.Compiled) -> set[str]:
    """The chunks that a plan makes again."""
    parts = [p.op for r in found.plan.roles for i in r.program for p in i.parts]
    return {op.chunk for op in parts if getattr(op, "step", "") == "R"}


@pytest.mark.long
def test_equal_to_one_device_with_the_memory_of_the_plan() -> None:
    report = verify_strategy(job(*ALL), BOTH, steps=2)
    assert report.equal, report.text()
    found = piper.compile(job(*ALL), BOTH)
    assert repeated(found) == {"layer0_checkpoint1", "layer1_checkpoint1", "layer2_checkpoint1"}
    run = piper.execute(found, steps=1, launcher="inline", memory=True)
    assert not lies(found.plan, run.memory)
    said = explain(found)
    assert (
        "recompute(where(chunk=('layer0_checkpoint1', 'layer1_checkpoint1'," in said
        and "checkpoint in the model" in said
    )
    line = Reentrant.forward.__code__.co_firstlineno + 1
    assert (
        "note: torch.utils.checkpoint (" in said and f"test_checkpointed_models.py:{line}" in said
    )


@pytest.mark.long
def test_checkpoint_sequential() -> None:
    strategy = piper.Strategy(piper.Mesh(), (piper.split(where(), microbatches=2),))
    report = verify_strategy(job(InARow, InARow), strategy, steps=1)
    assert report.equal, report.text()
    found = piper.compile(job(InARow, InARow), strategy)
    assert repeated(found) == {"layer0_checkpoint1", "layer1_checkpoint1"}
    line = InARow.forward.__code__.co_firstlineno + 1
    assert f"test_checkpointed_models.py:{line}" in explain(found)


def test_the_strategy_may_say_otherwise() -> None:
    """Also the negative control: a plan that keeps everything keeps more."""
    asked = piper.compile(job(*ALL), BOTH)
    for keep, chunks in (("all", set()), ("products", {"layer2_checkpoint1"})):
        selected = where(checkpoint=1) if keep == "all" else where(layer=(0, 1, 3))
        strategy = piper.Strategy(
            BOTH.mesh, (*BOTH.directives, piper.recompute(selected, keep="all"))
        )
        other = piper.compile(job(*ALL), strategy)
        assert repeated(other) == chunks
        assert [
            a.peak_bytes < b.peak_bytes for a, b in zip(asked.plan.roles, other.plan.roles)
        ] == [True, keep == "all"]


def test_without_the_default_everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "asked_by_model", lambda graph, directives: ())
    assert not repeated(piper.compile(job(*ALL), BOTH))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            job(Selective),
            r"checkpointed_models.py:\d+.* a context_fn .*recompute\(where\(checkpoint=1\), "
            r"keep='products'\)",
        ),
        (
            job(Reentrant, embed=False),
            r"test_checkpointed_models.py:\d+.*need no gradient trains none .*use_reentrant=False",
        ),
    ],
)
def test_what_trains_something_else_is_refused(made: piper.Job, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        piper.compile(made, BOTH)


@pytest.mark.long
def test_running_averages_move_twice_as_in_plain_pytorch() -> None:
    """Not so without a backward: the first layer is frozen, and gets the batch."""
    made = piper.Job(
        lambda: BlockNet([Normed(trained=False), Normed()], embed=False),
        batch,
        F.cross_entropy,
        sgd,
        ROWS,
        batch_norm="microbatch",
    )
    report = verify_strategy(made, BOTH, steps=2)
    assert report.equal, report.text()


@each_case(("layer", "below"), [(Averaging, 1), (Counting, 2), (CountingInAView, 1)])
def test_other_changes_of_buffers_are_refused_with_their_line(layer: type[Any], below: int) -> None:
    line = layer.inside.__code__.co_firstlineno + below
    with pytest.raises(
        CaptureError,
        match=rf"checkpointed_models.py:{line} .*does twice.*Change it outside of the checkpointed",
    ):
        piper.compile(
            piper.Job(lambda: BlockNet([layer()]), batch, F.cross_entropy, sgd, ROWS), BOTH
        )
