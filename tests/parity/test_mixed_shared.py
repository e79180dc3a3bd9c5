"""Mixed precision on devices that share chunks: parts of masters in the wide dtype, and messages in the narrow one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ir.verify import check
from tests.faults import runtime_faults as faults
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition, fitted
from tests.predictions.test_memory_truth import lies

BASE = Composition("gpt", 1, 2, 2, bucket_mb=0.002, precision="mixed", clip=0.05, tp=2)
CASES = (
    BASE,
    replace(BASE, stream="tokens"),
    replace(BASE, stream="tokens", zero=3),
    replace(BASE, pp=2, schedule="zbv", zero=1),
    Composition("llama", 1, 1, 2, precision="mixed", tp=4, stream="tokens", optimizer="adamw"),
    replace(BASE, tp=1, cp=2, attention="ring", zero=3),
)
LONG = (replace(BASE, stream="tokens", cp=2, attention="gather"),)


@pytest.mark.parametrize(
    "c", [*CASES, *(pytest.param(c, marks=pytest.mark.long) for c in LONG)], ids=str
)
def test_sharers_train_as_the_plain_loop_in_the_memory_of_the_plan(c: Composition) -> None:
    """Sums over devices add in another order than one product, so that narrow numbers differ in their last bits."""
    c = fitted(c)
    plan = compositions.compiled(c).plan
    assert check(plan) == [] and all(b.mastered for b in plan.buckets)
    run = compositions.run(c, plan, memory=True)
    parity.assert_parity(run, compositions.expected(c), parity.FLOAT32, label=repr(c))
    assert not (found := lies(plan, dict(run.memory))), "\n".join(found[:6])


def test_negative_control_copies_that_are_not_written_are_seen() -> None:
    with faults.inject("stale_copies"):
        found = parity.differences(
            parity.RunOutcome.of(compositions.run(BASE)),
            compositions.expected(BASE),
            parity.FLOAT32,
        )
    assert found and found[0].step == 1


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
