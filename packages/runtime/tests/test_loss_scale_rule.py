"""The scale of a loss goes up and down as torch's GradScaler lets it, and with hysteresis as Megatron-LM's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.ground.errors import JobError
from piper_runtime import LossScale
from piper_runtime.rank.job.loss_scale import RunningScale


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_without_hysteresis_the_scale_is_torchs(steps: list[bool], interval: int) -> None:
    settings = LossScale(initial=64.0, interval=interval, least=2.0**-100)
    running, scale = RunningScale(settings), torch.tensor(64.0)
    good = torch.tensor(0, dtype=torch.int32)
    for finite in steps:
        assert running.value == scale.item()
        running.update(finite)
        found = torch.tensor(float(not finite))
        torch._amp_update_scale_(scale, good, found, settings.growth, settings.backoff, interval)
    assert running.value == scale.item()


def test_hysteresis_counts_overflows_until_the_scale_grows() -> None:
    running = RunningScale(LossScale(initial=64.0, interval=2, hysteresis=2))
    scales = []
    for finite in (False, True, False, False, True, True, False, True):
        running.update(finite)
        scales.append(running.value)
    assert scales == [64, 64, 32, 16, 16, 32, 32, 32]


def test_a_restored_scale_goes_on_as_it_would_have() -> None:
    settings = LossScale(initial=64.0, interval=3, hysteresis=2)
    one, other = RunningScale(settings), RunningScale(settings)
    for finite in (True, False, True, True):
        one.update(finite)
    other.load(one.state())
    for finite in (True, False, True):
        one.update(finite), other.update(finite)
    assert one.state() == other.state()


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("initial", 0.0, "a number above 0"),
        ("initial", float("inf"), "a number above 0"),
        ("growth", 0.5, "at least 1"),
        ("backoff", 2.0, "at most 1"),
        ("interval", 1.5, "an integer"),
        ("hysteresis", True, "an integer"),
        ("least", 1e9, "at most `initial`"),
    ],
)
def test_unusable_numbers_are_refused(field: str, value: float, needed: str) -> None:
    with pytest.raises(JobError, match=rf"LossScale\({field}=.*{needed}"):
        LossScale(**{field: value})  # type: ignore[arg-type]  # unusable numbers
