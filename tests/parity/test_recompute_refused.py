"""Protect that recomputation which cannot be is refused by name: unknown ops, two policies, buffers that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.compiling.compiling import Compiled
from piper_compiler import Strategy, split
from piper_compiler.directives.recompute import Recompute
from piper_ir.ground.errors import DirectiveError, PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.verify import verify
from tests.helpers import compositions, models
from tests.helpers.compositions import Composition, job_of
from tests.parity.test_recompute import FLOAT64, PIPELINES, dropout_job, judged, trained


def refused(*directives: Any, pp: int = 2) -> str:
    with pytest.raises(DirectiveError) as error:
        piper.compile(dropout_job(), Strategy(Mesh(pp=pp), directives))
    return str(error.value)


def test_what_is_refused() -> None:
    pipeline = PIPELINES["1f1b"]()
    assert "[recompute condition 1]" in refused(*pipeline, piper.recompute(where(phase="F")))
    text = refused(*pipeline, piper.recompute(where(), keep="matmuls"))
    assert (
        "'matmuls', which is no op of the selected chunks" in text
        and "addmm" in text
        and "'products'" in text
    )
    assert "keep=3" in refused(*pipeline, piper.recompute(where(), keep=3))  # type: ignore[arg-type]  # what is tested
    text = refused(
        *pipeline, piper.recompute(where(stage=0)), piper.recompute(where(), keep="products")
    )
    assert "is under a policy already" in text and "[recompute condition 3]" in text
    assert "group=0" in refused(*pipeline, piper.recompute(where(), group=0))
    assert "matches no node" in _selector(piper.recompute(where(stage=7)))


def _selector(item: Any) -> str:
    with pytest.raises(LookupError) as error:
        piper.compile(dropout_job(), Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), item)))
    return str(error.value)


def test_a_synthetic_program_has_nothing_to_make_again() -> None:
    with pytest.raises(DirectiveError, match=r"a synthetic program has it for .inputs., with R="):
        piper.compile(
            piper.synthetic(stages=2, F=1, I=1, W=1),
            Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), piper.recompute(where()))),
        )


def test_a_changed_buffer_is_refused_by_name() -> None:
    compositions.captured("buffers")
    c = Composition("buffers", 1, 1, 2)
    with pytest.raises(
        DirectiveError,
        match=r"reads buffer 'mean', which the model changes .* \[recompute condition 5\]",
    ):
        piper.compile(
            job_of(c), Strategy(Mesh(), (split(where(), microbatches=2), piper.recompute(where())))
        )


class Counting(nn.Module):
    """A layer whose output moves by a buffer that changes in every forward."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.D, models.D)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.tanh(torch.tanh(self.inner(x))) + self.seen


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Counting(), nn.Sequential(nn.Linear(models.D, models.D), nn.Tanh(), nn.Tanh())]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_changed_buffer_is_refused_in_a_group_whose_outputs_it_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward does not need the buffer, and the output that a group makes again does."""
    case = models.CASES["skip"]
    job = piper.Job(
        Counted,
        case.batch,
        case.loss,
        compositions.OPTIMIZERS["sgd"],
        global_batch=4,
        precision=FLOAT64,
    )

    def made(*directives: Any) -> Compiled:
        return piper.compile(job, Strategy(Mesh(), (split(where(), microbatches=2), *directives)))

    judged(made(piper.recompute(where())), trained(made()))
    with pytest.raises(
        DirectiveError,
        match=r"reads buffer 'layers.0.seen', which the model changes .* \[recompute condition 5\]",
    ):
        made(piper.recompute(where(), group=2))
    monkeypatch.setattr(Recompute, "_check_buffers", lambda *_: None)
    with pytest.raises(
        PlanError,
        match=r"R33-recompute: chunk .* R reads buffer layers.0.seen, which is changed while it "
        r"waits",
    ):
        verify(made(piper.recompute(where(), group=2)).plan)
