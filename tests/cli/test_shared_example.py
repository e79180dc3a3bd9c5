"""examples/gpt_zero3.py: shared states, a V of stages, split backward and recomputation together equal one device."""

from __future__ import annotations

from pathlib import Path

import pytest

import piper
from piper.api.reference.verification import verify_strategy
from piper.cli.loading import load_file
from piper_ir.program.ops import Collective, Compute

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt_zero3.py"


@pytest.mark.long
def test_it_equals_one_device_and_does_what_it_says() -> None:
    loaded = load_file(EXAMPLE)
    report = verify_strategy(loaded.job, loaded.strategy, steps=2)
    assert report.equal, report.text()
    ops = [
        p.op
        for _, _, i in piper.compile(loaded.job, loaded.strategy).plan.instructions()
        for p in i.parts
    ]
    assert {"all_gather", "reduce_scatter"} <= {op.kind for op in ops if isinstance(op, Collective)}
    assert {op.step for op in ops if isinstance(op, Compute)} >= {"F", "I", "W"}
    assert {op.keep.removesuffix("!") for op in ops if isinstance(op, Compute)} == {
        "inputs",
        "products",
        "all",
    }
