"""Draw a tuning: its history, and time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from math import isfinite

from matplotlib.axes import Axes

from piper_ir.study import Row, StudyDocument
from piper_ir.tools import size_text, time_text
from piper_report import style
from piper_report.style import Picture, one_panel, picture

WIDE_RANGE = 20
"""The factor between values from which on they stand on a logarithmic axis."""
ScoredTrials = list[tuple[Row, float]]
"""The complete trials with their predicted period in seconds, in the order in which they were made."""


def scored(study: StudyDocument) -> ScoredTrials:
    return [(t, t.period_s) for t in study.trials if t.state == "complete" and t.period_s is not None and isfinite(t.period_s)]


def history_figure(study: StudyDocument) -> Picture | None:
    """Draw the predicted period by trial; None when no trial has a period.

    The best so far is a line, rejected candidates are crosses.
    """
    found = scored(study)
    if not found:
        return None
    unit = unit_of(found)
    figure, ax = one_panel(3.2, "trial", f"period ({unit.name})")
    numbers, periods = [t.number for t, _ in found], [p * unit.scale for _, p in found]
    ax.plot(numbers, periods, "o", color=style.BLUE, markersize=4, label="complete")
    best = list(accumulate(periods, min))
    to_the_end = [*numbers, max(t.number for t in study.trials)]
    ax.step(to_the_end, best + best[-1:], where="post", color=style.ORANGE, linewidth=1.6, label="best so far")
    confirmed = [(t.number, t.measured_period_s * unit.scale) for t, _ in found if t.measured_period_s is not None]
    if confirmed:
        ax.plot(*zip(*confirmed), "D", color=style.GREEN, markersize=5, label="measured")
    rejected = [t.number for t in study.trials if t.state == "rejected"]
    if rejected:
        foot = ax.get_xaxis_transform()
        ax.plot(rejected, [0.03] * len(rejected), "x", color=style.RED, transform=foot, label="rejected", clip_on=False)
        ax.margins(y=0.12)
    _log_if_wide(ax, periods)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    fall = f"{time_text(best[0] / unit.scale)} to {time_text(best[-1] / unit.scale)}"
    alt = f"Predicted period of {len(found)} complete trials in order; the best falls from {fall}; {len(rejected)} were rejected."
    caption = "Rejected candidates are crosses at the foot, at their number; the table below says why." if rejected else ""
    return picture(figure, "history", "Search history", alt, caption, marks=len(study.trials))


def pareto_figure(study: StudyDocument) -> Picture | None:
    """Draw the period against the memory of the fullest device.

    The front are the candidates that no other beats in both.
    """
    found = [(b, p) for t, p in scored(study) if (b := held(t)) is not None]
    if not found:
        return None
    over = [(b, t.period_s) for t in study.trials if t.state == "rejected" and t.period_s and (b := held(t)) is not None]
    unit, space = unit_of(scored(study)), style.size_unit(max(b for b, _ in found + over))
    labels = f"peak memory of the fullest device ({space.name})", f"predicted period ({unit.name})"
    figure, ax = one_panel(3.6, *labels, numbered=False)

    def columns(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
        return [b / space.scale for b, _ in points], [p * unit.scale for _, p in points]

    ax.plot(*columns(found), "o", color=style.BLUE, markersize=4, label="complete")
    if over:
        ax.plot(*columns(over), "x", color=style.RED, markersize=5, label="rejected")
    front = pareto_front(found)
    ax.step(*columns(front), "o-", where="post", color=style.ORANGE, linewidth=1.6, markersize=4, label="Pareto front")
    if study.memory_limit is not None:
        limits = study.device_limits or {"": study.memory_limit}  # of several types of devices each has its own
        for dash, (device, limit) in zip(cycle(("--", ":", "-.")), limits.items()):
            label = " ".join(["limit", device, size_text(limit)] if device else ["limit", size_text(limit)])
            ax.axvline(limit / space.scale, color=style.INK, linestyle=dash, linewidth=1.2, label=label)
    best = [(b, p) for t, p in scored(study) if t.number == study.best and (b := held(t)) is not None]
    if best:
        ax.plot(*columns(best), "*", color=style.ORANGE, markeredgecolor=style.INK, markersize=13, label="best")
    _log_if_wide(ax, [p for _, p in found])
    figure.legend(loc="outside lower center", ncols=3 if study.device_limits else 5, frameon=False)
    alt = f"Predicted period against peak memory of {len(found)} candidates; {len(front)} are on the Pareto front."
    caption = "Left and below is better; on the front nothing is both quicker and smaller."
    return picture(figure, "pareto", "Time against memory", alt, caption, marks=len(study.trials))


def held(trial: Row) -> int | None:
    """Return the bytes that count against the limit: those of the device, else those of the plan alone."""
    return trial.device_bytes if trial.device_bytes is not None else trial.peak_bytes


def pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return those of (bytes, seconds) that no other beats in both, by bytes."""
    out: list[tuple[int, float]] = []
    for b, p in sorted(set(points)):
        if not out or p < out[-1][1]:
            out.append((b, p))
    return out


def unit_of(found: ScoredTrials) -> style.TimeUnit:
    """Return the unit in which the shortest period is 1 or more."""
    return style.time_unit(min(p for _, p in found))


def _log_if_wide(ax: Axes, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        ax.set_yscale("log")
