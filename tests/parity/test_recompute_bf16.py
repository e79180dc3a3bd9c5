"""Recomputation in bfloat16: what is computed again is rounded as it was, so that no bit of what is trained changes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper_compiler import Strategy
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.verify import check
from piper_runtime import Run
from piper_runtime.rank.binding import parts
from tests.helpers import compositions
from tests.helpers.compositions import Composition, fitted, job_of, strategy_of
from tests.parity.test_recompute import (
    CASES,
    PIPELINES,
    POLICIES,
    differing,
    dropout_job,
    judged,
    trained,
)

MIXED = "bfloat16 mixed"
QUICK = (("zbv", "inputs"),)


@functools.cache
def mixed_job() -> piper.Job:
    return replace(dropout_job(), precision=compositions.MIXED[MIXED])


@functools.cache
def without(schedule: str) -> Run:
    return trained(piper.compile(mixed_job(), Strategy(Mesh(pp=2), PIPELINES[schedule]())))


def again(schedule: str, keep: Any) -> piper.Compiled:
    directives = (
        *PIPELINES[schedule](),
        piper.recompute(where(), keep=keep, apart=keep == "attention"),
    )
    return piper.compile(mixed_job(), Strategy(Mesh(pp=2), directives))


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "keep"),
    [
        pytest.param(
            schedule,
            keep,
            marks=[pytest.mark.long] * ((schedule, keep) not in QUICK),
            id=f"{schedule}-{keep}",
        )
        for schedule in PIPELINES
        for keep in POLICIES
    ],
)
def test_every_schedule_under_every_policy_in_bfloat16(schedule: str, keep: Any) -> None:
    """Activations are in bfloat16, parameters in float32."""
    judged(again(schedule, keep), without(schedule))


def test_a_value_that_is_rounded_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: R gives its first result with the last bit of one number changed."""
    bound = parts._compute

    def off_by_a_bit(part: Any, rank: Any) -> Any:
        run = bound(part, rank)
        return (
            run if part.op.step != "R" else lambda: (run(), flip(rank.store.values[part.writes[0]]))
        )

    monkeypatch.setattr(parts, "_compute", off_by_a_bit)
    found = differing(trained(again("zbv", "inputs")), without("zbv"))
    assert any("weight" in name for name in found)


def flip(tensor: Tensor) -> None:
    """Change the lowest bit of the first number."""
    tensor.view(-1)[:1].view(torch.int16)[0] ^= 1


@pytest.mark.long
@pytest.mark.parametrize(
    "c", [c for c in CASES if c.model != "llama"], ids=str
)  # its tables of float32 are not cast
def test_every_kind_of_model_in_bfloat16(c: Composition) -> None:
    """Bits only: of so few elements, alignment and casts inside of an op are more than 5 % of what an instruction
    adds."""
    compositions.captured(c.model, MIXED)
    c = fitted(replace(c, precision=MIXED))
    base, pipeline = compositions.run(c, steps=2), strategy_of(c)
    for keep, apart in (("inputs", False), ("products", True)):
        strategy = Strategy(
            pipeline.mesh, (*pipeline.directives, piper.recompute(where(), keep=keep, apart=apart))
        )
        made = piper.compile(job_of(c), strategy)
        assert check(made.plan) == []
        assert differing(trained(made), base) == []
