"""Protect mixed precision with states that ranks share: who keeps masters, dtypes of messages, equal bits of all
levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import Collective
from tests.faults import runtime_faults as faults
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition, fitted

BASE = Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002, precision="mixed", clip=0.05)


@pytest.mark.parametrize("zero", [1, 3])
def test_negative_control_copies_that_are_not_written_are_seen(zero: int) -> None:
    c = fitted(replace(BASE, zero=zero))
    with faults.inject("stale_copies"):
        found = parity.differences(
            parity.RunOutcome.of(compositions.run(c)), compositions.expected(c), parity.FLOAT32
        )
    assert found and found[0].step == 1


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_masters_are_shared_and_messages_have_the_dtype_of_what_they_carry(zero: int) -> None:
    plan = compositions.compiled(fitted(replace(BASE, zero=zero, precision="bfloat16 mixed"))).plan
    traffic = PlanBytes(plan)
    for role in plan.roles:
        held = {(s.category, s.name): s.nbytes for s in role.states if s.flat}
        for bucket in plan.buckets:
            if role.role in bucket.roles:
                assert held["master", bucket.id] == 4 * bucket.numel // 2
                assert held["param", bucket.id] == 2 * bucket.numel // (2 if zero == 3 else 1)
                assert held["grad", bucket.id] == 4 * bucket.numel // (2 if zero >= 2 else 1)
    parts = [
        part
        for _, _, instr in plan.instructions()
        for part in instr.parts
        if isinstance(part.op, Collective)
    ]
    seen: set[str] = set()
    for part in parts:
        assert isinstance(part.op, Collective)
        if part.op.kind != "all_reduce":
            seen.add(part.op.kind)
            bucket = plan.bucket(part.node.split(".")[1].split("#")[0])
            item = ITEM_BYTES["bfloat16" if part.op.kind == "all_gather" else "float32"]
            assert traffic.message_bytes(part.op, part) == item * bucket.numel
    assert seen == {"all_gather", "reduce_scatter"}
    dtypes = {
        (v.category, v.spec.dtype)
        for v in plan.values.values()
        if v.category in ("gathered", "reduced")
    }
    wanted = {("gathered", "bfloat16")} if zero == 3 else set()
    assert dtypes == wanted | ({("reduced", "float32")} if zero >= 2 else set())


@pytest.mark.long
def test_the_levels_have_equal_bits_in_bfloat16() -> None:
    """Gradients of a step are reduced once, so that there is one order of sums."""
    runs: dict[int, Any] = {}
    for zero in range(4):
        c = Composition(
            "gpt_untied",
            1,
            2,
            2,
            zero=zero,
            reduced_mb="step",
            precision="bfloat16 mixed",
            optimizer="adamw",
        )
        runs[zero] = compositions.run(fitted(c), steps=4)
    first = runs[0].state_dict()
    for zero in (1, 2, 3):
        assert runs[zero].losses == runs[0].losses, f"zero={zero}"
        assert all(
            bool((tensor == first[name]).all()) for name, tensor in runs[zero].state_dict().items()
        ), f"zero={zero}"
