"""Protect mixed precision on devices that share chunks: stale copies are seen, and bfloat16 is as exact as on one
device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import runtime_faults as faults
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition

BASE = Composition("gpt", 1, 2, 2, bucket_mb=0.002, precision="mixed", clip=0.05, tp=2)


def test_negative_control_copies_that_are_not_written_are_seen() -> None:
    with faults.inject("stale_copies"):
        found = parity.differences(
            parity.RunOutcome.of(compositions.run(BASE)),
            compositions.expected(BASE),
            parity.FLOAT32,
        )
    assert found and found[0].step == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "c",
    [
        BASE,
        replace(BASE, stream="tokens"),
        pytest.param(replace(BASE, tp=1, cp=2, attention="ring"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_bfloat16_is_as_near_to_exact_numbers_as_on_one_device(c: Composition) -> None:
    """Rounding differs, and no more than on one device: the loss of either is as far from that in float64."""
    c = replace(c, precision="bfloat16 mixed", clip=None)
    wanted = compositions.expected(replace(c, precision="float64")).losses
    one = compositions.expected(c).losses
    found = compositions.run(c).losses
    bound = 2 * max(abs(a - b) for a, b in zip(one, wanted, strict=True)) + 2**-9 * max(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= bound
    assert found == pytest.approx(one, rel=2**-7)
