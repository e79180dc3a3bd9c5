"""Text summaries: the figures, their units, and predicted beside measured."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from piper_ir.ground.trace import BUSY_MACHINE, Span, Trace
from piper_report.facts.summary import (
    beside_table,
    compute_seconds,
    memory_line,
    prediction_table,
)

NO_SPANS = Trace("k", "executed", ())


def spans(*busy: float) -> Trace:
    out = [Span(r, "compute", 0, "F", 0.0, s) for r, s in enumerate(busy)]
    return Trace("k", "executed", (*out, Span(0, "0>1", 1, "send", 0.0, 99.0)))


@dataclass
class Predicted:
    step_s: float = 0.2
    period_s: float = 0.1
    peak_bytes: tuple[int, ...] = (2048, 1024)
    trace: Trace = field(default_factory=lambda: spans(0.08, 0.06))

    def summary(self) -> Mapping[str, Any]:
        rates = {"tokens_per_s": 1234.0, "mfu": 0.415, "hfu": None, "exposed_comm_s": 0.0}
        bubbles = {"global_bubble_s": 0.02, "span_bubble_s": 0.01}
        sizes = {
            "peak_bytes": 2048,
            "device_bytes": 3 << 20,
            "sources": {"formula": 0.25, "measured": 0.75},
            "notes": ["h100x8: not calibrated"],
        }
        return {"step_s": self.step_s, "period_s": self.period_s} | rates | bubbles | sizes


@dataclass
class Run:
    step_s: list[float] = field(default_factory=lambda: [0.4, 0.2, 0.2])
    period_s: float | None = 0.2
    peak_bytes: dict[int, int] = field(default_factory=lambda: {0: 2048, 1: 2048})
    trace: Trace = field(default_factory=lambda: spans(0.16, 0.06))


def cells(text: str, name: str) -> list[str]:
    """The columns of the row that starts with a name."""
    (line,) = [x for x in text.splitlines() if x.startswith(name)]
    return [c for c in line.removeprefix(name).split("  ") if c]


def test_the_headline_of_a_prediction() -> None:
    text = prediction_table(Predicted(), title="gpt.py on h100x8").plain()
    assert text.splitlines()[0] == "gpt.py on h100x8"
    assert cells(text, "step in steady state")[-1].strip() == "100 ms"
    assert cells(text, "model FLOP utilisation")[-1].strip() == "41.5 %"
    assert cells(text, "hardware FLOP utilisation")[-1].strip() == "-"
    assert cells(text, "peak memory, device")[-1].strip() == "3 MiB"
    assert cells(text, "durations from")[-1].strip() == "measured 75 %, formula 25 %"
    assert text.splitlines()[-2:] == [
        "model FLOPs: 6 N + 12 L h s per token, N with all embeddings, causal attention in full",
        "warning: h100x8: not calibrated",
    ], "the hardware's is not known"


def test_a_line_of_memory_has_the_words_of_its_documentation() -> None:
    names = ("stack_buffers", "context", "group_communicators")
    words = ["buffers of the software stack", "CUDA context", "group communicators"]
    documented = Path("docs/memory.md").read_text(encoding="utf-8")
    assert [memory_line(name) for name in names] == words
    assert all(f"| {word} |" in documented for word in words)


def test_predicted_beside_measured() -> None:
    text = beside_table(Predicted(), Run(), title="t").plain()
    row = {
        name: [c.strip() for c in cells(text, name)]
        for name in ("step in steady", "first step", "compute, rank 0")
    }
    assert row["step in steady"][-3:] == ["100 ms", "200 ms", "0.50"]
    assert (
        row["first step"][-3:] == ["200 ms", "400 ms", "-"]
        and "with all warm-up, which is not predicted" in text
    )
    assert row["compute, rank 0"] == ["80 ms", "160 ms", "0.50"]
    assert [c.strip() for c in cells(text, "peak memory, rank 1")] == ["1 KiB", "2 KiB", "0.50"]
    assert text.endswith(
        "predicted durations from: measured 75 %, formula 25 %\nwarning: h100x8: not calibrated"
    )
    assert (
        "compute is of the last step, the one that was traced, which took 200 ms"
        in text.splitlines()[-3]
    )
    assert len({len(line) for line in text.splitlines()[1:-4]}) == 1, "columns are aligned"


def test_a_busy_machine_is_named() -> None:
    said = "busy machine: ranks waited"
    assert said not in beside_table(Predicted(), Run(), title="t").plain()
    busy = replace(Run().trace, notes={BUSY_MACHINE: "ranks waited"})
    assert said in beside_table(Predicted(), Run(trace=busy), title="t").plain().splitlines()


def test_what_was_not_measured_is_a_dash() -> None:
    text = beside_table(
        Predicted(), Run(step_s=[], period_s=None, peak_bytes={}, trace=NO_SPANS), title="t"
    ).plain()
    assert [c.strip() for c in cells(text, "step in steady state")] == ["100 ms", "-", "-"]
    assert [c.strip() for c in cells(text, "peak memory, rank 0")] == ["2 KiB", "-", "-"]
    assert "first step" not in text and "compute" not in text


def test_of_many_ranks_the_worst_is_shown() -> None:
    text = beside_table(Predicted(peak_bytes=tuple(range(100))), Run(), title="t").plain()
    assert "peak memory, rank 99" in text and "peak memory, rank 98" not in text


def test_compute_seconds_counts_the_compute_stream_only() -> None:
    assert compute_seconds(spans(1.0, 2.0)) == {0: 1.0, 1: 2.0}


def test_a_text_summary_needs_no_drawing() -> None:
    script = "import sys, piper_report, piper_report.facts.summary, piper_report.pages.chrome; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"pandas", "numpy", "matplotlib"} & set(done.stdout.split())


def test_a_prediction_that_is_far_off_and_not_measured_says_what_to_do() -> None:
    class Formula(Predicted):
        def summary(self) -> Mapping[str, Any]:
            return {**super().summary(), "sources": {"formula": 1.0}}

    text = beside_table(Formula(period_s=0.022), Run(), title="t").plain()
    assert (
        "warning: predicted / measured is 0.11, and 100% of the predicted durations were not measured"
        in text
    )
    assert "piper profile FILE.py --out costs.json" in text
    for fine in (
        beside_table(Formula(period_s=0.2), Run(), title="t"),
        beside_table(Predicted(period_s=0.022), Run(), title="t"),
    ):
        assert "piper profile" not in fine.plain()
