"""examples/moe_text.py, small: two workers that share experts equal one device, and a report with the load of their
experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import piper
from examples import moe_text
from piper.api.reference.verification import verify_strategy
from piper.sessions.training import Settings
from piper_ir.program.ops import Collective
from piper_report import load
from piper_runtime.launch import RunOptions

SIZES = replace(moe_text.SIZES, layers=1, width=32, length=32).with_experts(number=4, hidden=32)
STEPS = 12


@pytest.mark.long
def test_it_equals_one_device_and_exchanges_tokens() -> None:
    report = verify_strategy(moe_text.mixture(SIZES, 8), moe_text.strategy, steps=2)
    assert report.equal, report.text()


@pytest.mark.long
def test_it_is_measured_predicted_trained_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(steps=STEPS, launcher="processes")
    settings = Settings(name="moe_text", out=tmp_path)
    done = moe_text.loop(moe_text.mixture(SIZES, 8), options, settings, repeats=1)
    kinds = [
        p.op.kind
        for _, _, i in done.compiled.plan.instructions()
        for p in i.parts
        if isinstance(p.op, Collective)
    ]
    assert kinds.count("all_to_all") == 4 * SIZES.layers * moe_text.MICROBATCHES
    printed = capsys.readouterr().out
    assert (
        "predicted" in printed
        and "measured" in printed
        and done.prediction.period_s > 0
        and done.folder is not None
    )
    assert sum(done.run.losses[-4:]) < sum(done.run.losses[:4])
    page = (done.folder / "report" / "report.html").read_text()
    printed += capsys.readouterr().out
    for text in (page, printed):
        assert (
            f"Load of experts in {STEPS} steps" in text
            and "predicted for 1 (assumed), measured 1." in text
        )
        assert "not measured" not in text
    experts, given = (
        load(done.folder).experts,
        piper.simulate(done.compiled.plan, "h100x8", load=done.folder).load,
    )
    assert (
        experts is not None
        and given is not None
        and (worst := experts.rank_of_step.worst()) is not None
    )
    assert (experts.rank_of_step.mean, worst[0]) == (pytest.approx(given.mean), given.worst), (
        "as --load takes it"
    )
    steps = [
        json.loads(line)["experts"]
        for line in (done.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert SIZES.experts is not None
    assert all(
        sum(of["tokens"]) == 8 * SIZES.length * SIZES.experts.top_k
        for step in steps
        for of in step.values()
    )
