"""Show predictions as tables and as plain text, alone and beside measured values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any, Protocol

from piper_ir.ground.expert_tokens import LOAD_NOT_MEASURED
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.plan import COMPUTE
from piper_ir.tools import size_text, time_text
from piper_report.facts.idle import busy_note

ABSENT = "-"
FIRST_STEP = "first step, alone"
WAITING = "waiting for the batch"
MFU, HFU = "model FLOP utilisation", "hardware FLOP utilisation"
INSIDE = "communication in steps"
ON_HOST = "tensors on the fullest host"
WARM_UP = "the measured first step is with all warm-up, which is not predicted: no error is shown"
COUNTED = {
    MFU: "model FLOPs: 6 N + 12 L h s per token, N with all embeddings, causal attention in full",
    HFU: "hardware FLOPs: those that run, which may be fewer",
}
"""The FLOPs that a utilisation counts, in notes that begin unlike rows: programs find rows by their names."""
MEMORY_LINES = {"stack_buffers": "buffers of the software stack", "context": "CUDA context"}
"""The lines of a device's memory that tables name by other words than their keys, as docs/memory.md does."""
CATEGORY_NAMES = {
    "param": "parameters", "master": "master parameters", "grad": "gradients", "optim": "optimizer", "buffer": "buffers",
    "gathered": "gathered parameters", "reduced": "gradient buffers", "activation": "activations",
    "gradient": "gradients of activations", "scalar": "scalars", "measured": "measured", "workspace": "kernels",
}  # fmt: skip
"""The names of categories of memory for people, if they differ from the plan's."""
WIDTH = 120
"""The most columns of a terminal that the words below a row take."""
WIDEST = 8
"""The most ranks that are listed one by one; of more, only the one with the highest prediction is listed."""


@dataclass(frozen=True, slots=True)
class Table:
    """Hold rows of as many cells as there are columns; the first cell of a row is its name.

    `notes` are lines below the rows; one that should warn the reader begins with "warning: ". `below` has the words
    that stand under each row, which may be long; without any, rows stand alone.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    below: tuple[str, ...] = ()

    def plain(self) -> str:
        """Return the table as text, with its notes."""
        return "\n".join([*self.lines(), *self.notes])

    def lines(self, width: int = WIDTH) -> list[str]:
        """Return the title and aligned columns: the first to the left, the others to the right; words fill `width`."""
        widths = [
            max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))
        ]

        def line(row: tuple[str, ...]) -> str:
            others = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
            return "  ".join([row[0].ljust(widths[0]), *others]).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        said = [self.title, line(self.columns), rule]
        indent = " " * (widths[0] + 2)
        for row, words in zip_longest(self.rows, self.below, fillvalue=""):
            said.append(line(tuple(row)))
            said += wrap(words, width, initial_indent=indent, subsequent_indent=indent)
        return said


class Prediction(Protocol):
    """Describe the fields of a `piper_simulator.Simulation` that are read: seconds, and bytes by rank."""

    @property
    def step_s(self) -> float: ...
    @property
    def period_s(self) -> float: ...
    @property
    def peak_bytes(self) -> Sequence[int]: ...
    @property
    def trace(self) -> Trace: ...
    def summary(self) -> Mapping[str, Any]: ...


class MeasuredRun(Protocol):
    """Describe the fields of a `piper_runtime.Run` that are read: seconds per step, and bytes by rank, if any."""

    @property
    def step_s(self) -> Sequence[float]: ...
    @property
    def period_s(self) -> float | None: ...
    @property
    def peak_bytes(self) -> Mapping[int, int]: ...
    @property
    def trace(self) -> Trace: ...


def prediction_table(prediction: Prediction, *, title: str) -> Table:
    """Return the headline figures of a simulation, the sources of its durations, and the uncalibrated constants."""
    s = prediction.summary()
    rows = (
        (FIRST_STEP, time_text(s["step_s"])),
        ("step in steady state", time_text(s["period_s"]) + _interval(s)),
        ("tokens per second", ABSENT if s["tokens_per_s"] is None else f"{s['tokens_per_s']:,.0f}"),
        (MFU, percent(s["mfu"])),
        (HFU, percent(s["hfu"])),
        ("exposed communication", time_text(s["exposed_comm_s"])),
        *([(INSIDE, time_text(s["inside_comm_s"]))] if s.get("inside_comm_s") else []),
        ("bubble, global", time_text(s["global_bubble_s"])),
        ("bubble, span", time_text(s["span_bubble_s"])),
        ("peak memory, allocated", size_text(s.get("allocated_bytes") or s["peak_bytes"])),
        *([("peak memory, reserved", size_text(s["reserved_bytes"]))] if s.get("interval") else []),
        ("peak memory, device", size_text(s["device_bytes"])),
        *([(ON_HOST, size_text(s["host_bytes"]))] if s.get("host_bytes") else []),
        *_load(s),
        ("durations from", sources(s["sources"])),
    )
    counted = [
        COUNTED[name] for name, known in ((MFU, s["mfu"]), (HFU, s["hfu"])) if known is not None
    ]
    return Table(title, ("", "worst device"), rows, (*_verdict(s), *counted, *_warnings(s)))


def _interval(summary: Mapping[str, Any]) -> str:
    """Return the interval of a step in words; "" if there is none."""
    interval = summary.get("interval")
    if not interval:
        return ""
    whose = f"published runs of {interval['stack']}" if interval["stack"] else "published runs"
    ends = f"{time_text(interval['low'])} to {time_text(interval['high'])}"
    return f" ({ends}: 80 % of {whose} fall inside)"


def _load(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows about the load of experts; none for a model without experts."""
    load = summary.get("load")
    if not load:
        return []
    rows = [("load of experts", f"{load['mean']:.3g} ({load['source']}: {load['text']})")]
    if load["worst"] > load["mean"]:
        worst = load["worst_step_s"]
        rows.append(
            (
                "worst load",
                f"{load['worst']:.3g}"
                + ("" if worst is None else f", first step {time_text(worst)}"),
            )
        )
    return rows


def memory_line(name: str) -> str:
    """Return the words for a line of a device's memory, such as "group communicators"."""
    return MEMORY_LINES.get(name, name.replace("_", " "))


def memory_table(prediction: Prediction) -> Table:
    """Return the memory of the fullest device at its peak: tensors by use, and the rest."""
    s = prediction.summary()
    lines: Mapping[str, int] = s["memory"]
    total = sum(lines.values()) or 1
    rows = [(memory_line(name), size_text(b), percent(b / total)) for name, b in lines.items() if b]
    tensors = s["peak_bytes"]
    allocated = s.get("allocated_bytes") or tensors
    rows += [
        *([("tensors of the plan", size_text(tensors), ABSENT)] if allocated != tensors else []),
        ("allocated", size_text(allocated), ABSENT),
        ("device", size_text(s["device_bytes"]), percent(1.0)),
    ]
    return Table("memory of the fullest device at its peak", ("", "size", "share"), tuple(rows))


def _verdict(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line if the plan does not fit."""
    oom = summary.get("oom")
    return (f"DOES NOT FIT: {oom['text']}",) if oom else ()


def beside_table(
    prediction: Prediction, measured: MeasuredRun, *, title: str, counted: bool = False
) -> Table:
    """Return a table of predicted beside measured, with predicted / measured.

    `counted` says that the run logs the load of its experts: that nobody measured it is then not said. The table has
    the step time, the compute and the waits for Job.batch of each rank (when spans were recorded), the peak
    memory of each rank (when it was measured), the sources of the predicted durations, and the uncalibrated constants.
    """
    rows = [_compared("step in steady state", prediction.period_s, measured.period_s, time_text)]
    if measured.step_s:
        rows.append(
            (FIRST_STEP, time_text(prediction.step_s), time_text(measured.step_s[0]), ABSENT)
        )
    busy, did = compute_seconds(prediction.trace), compute_seconds(measured.trace)
    rows += [
        _compared(f"compute, rank {r}", busy[r], did.get(r), time_text) for r in _ranks(busy) if did
    ]
    waited = _seconds(measured.trace.waits)
    rows += [(f"{WAITING}, rank {r}", ABSENT, time_text(waited[r]), ABSENT) for r in _ranks(waited)]
    peaks = dict(enumerate(prediction.peak_bytes))
    measured_peaks = measured.peak_bytes
    rows += [
        _compared(f"peak memory, rank {r}", peaks[r], measured_peaks.get(r), size_text)
        for r in _ranks(peaks)
    ]
    s = prediction.summary()
    notes = (
        *_verdict(s),
        *_warm_up(measured),
        *_traced(measured, bool(did)),
        *busy_note(measured.trace),
        *far_from_measured(prediction.period_s, measured.period_s, s["sources"]),
        f"predicted durations from: {sources(s['sources'])}",
        *(
            w
            for w in _warnings(s)
            if not (counted and w.startswith(f"warning: {LOAD_NOT_MEASURED}"))
        ),
    )
    return Table(title, ("", "predicted", "measured", "predicted / measured"), tuple(rows), notes)


def _warm_up(measured: MeasuredRun) -> tuple[str, ...]:
    return (WARM_UP,) if measured.step_s else ()


FAR = 1.5
"""The factor beyond which an error makes a prediction unreliable."""
MEASURED = ("measured", "interpolated", "given")
"""The sources of durations that were measured here, or that are not predicted at all."""


def far_from_measured(
    predicted: float, measured: float | None, shares: Mapping[str, float]
) -> tuple[str, ...]:
    """Return advice if a prediction is far from the measurement and rests on formulas."""
    known = sum(shares.get(name, 0.0) for name in MEASURED)
    if not measured or not predicted or known > 0.5 or 1 / FAR <= predicted / measured <= FAR:
        return ()
    return (
        f"warning: predicted / measured is {predicted / measured:.2f}, and {1 - known:.0%} of the predicted "
        f"durations were not measured on this machine: run `piper profile FILE.py --out costs.json` once, then "
        f"predict with --costs costs.json",
    )


def _traced(measured: MeasuredRun, traced: bool) -> tuple[str, ...]:
    """Return the step that compute is of; on a shared machine it may be far from the steady state, a median."""
    if not traced or not measured.step_s:
        return ()
    return (
        f"compute is of the last step, the one that was traced, which took {time_text(measured.step_s[-1])}",
    )


def _warnings(summary: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"warning: {note}" for note in summary["notes"])


def compute_seconds(trace: Trace) -> dict[int, float]:
    """Return the seconds of compute by rank; empty for a trace without spans."""
    return _seconds(s for s in trace.spans if s.stream == COMPUTE)


def _seconds(spans: Iterable[Span]) -> dict[int, float]:
    """Return the seconds of spans by rank, of ranks that have any."""
    seconds_by_rank: dict[int, float] = {}
    for span in spans:
        seconds_by_rank[span.rank] = seconds_by_rank.get(span.rank, 0.0) + span.end - span.start
    return seconds_by_rank


def percent(value: float | None) -> str:
    """Return a fraction as text in per cent."""
    return ABSENT if value is None else f"{value * 100:.1f} %"


def sources(shares: Mapping[str, float]) -> str:
    """Return text such as "formula 98 %, measured 2 %": by share of seconds, largest first."""
    parts = sorted(shares.items(), key=lambda s: (-s[1], s[0]))
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in parts) or ABSENT


def _compared(
    name: str, predicted: float, measured: float | None, form: Callable[[float], str]
) -> tuple[str, str, str, str]:
    if measured is None:
        return name, form(predicted), ABSENT, ABSENT
    return (
        name,
        form(predicted),
        form(measured),
        f"{predicted / measured:.2f}" if measured else ABSENT,
    )


def _ranks(figures: Mapping[int, float]) -> list[int]:
    if len(figures) <= WIDEST:
        return sorted(figures)
    return [max(figures, key=lambda r: (figures[r], -r))]
