"""A tuning as figures: its history, time against memory, and the parameters of every candidate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, log10
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from piper_report.results import Study, Trial
from piper_report.style import BLUE, GREY, INK, ORANGE, RED, Picture, TimeUnit, new_figure, panels, picture, time_unit
from piper_report.summary import seconds, size

WIDE_RANGE = 20
"""Values that differ by more than this factor stand on a logarithmic axis."""
MOST_TICKS = 10
FEW_TICKS = 5
"""Of an axis to scale."""
UNSET = "not set"
Scored = list[tuple[Trial, float]]
"""Complete trials with their predicted period in seconds, in the order in which they were made."""


def scored(study: Study) -> Scored:
    return [(t, t.period_s) for t in study.trials if t.state == "complete" and t.period_s is not None and isfinite(t.period_s)]


def history_figure(study: Study) -> Picture | None:
    """Predicted period by trial, the best so far as a line, rejected candidates as crosses. None when no trial has a period."""
    found = scored(study)
    if not found:
        return None
    unit = _unit(found)
    figure = new_figure(3.2)
    (ax,) = panels(figure, 1)
    ax.plot([t.number for t, _ in found], [p * unit.scale for _, p in found], "o", color=BLUE, markersize=4, label="complete")
    best = _best_so_far(found)
    last = max(t.number for t in study.trials)
    ax.step([t.number for t, _ in found] + [last], [b * unit.scale for b in best + best[-1:]], where="post", color=ORANGE,
            linewidth=1.6, label="best so far")  # fmt: skip
    rejected = [t.number for t in study.trials if t.state == "rejected"]
    if rejected:
        ax.plot(rejected, [0.03] * len(rejected), "x", color=RED, markersize=5, transform=ax.get_xaxis_transform(),
                label="rejected", clip_on=False)  # fmt: skip
        ax.margins(y=0.12)
    _log_if_wide(ax, [p for _, p in found])
    ax.set_xlabel("trial")
    ax.set_ylabel(f"predicted period ({unit.name})")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    alt = (
        f"Predicted period of {len(found)} complete trials in their order; the best falls from {seconds(best[0])} to "
        f"{seconds(best[-1])}. {len(rejected)} trials were rejected."
    )
    caption = "Rejected candidates are crosses at the foot, at their number; the table below says why." if rejected else ""
    return picture(figure, "history", "Search history", alt, caption, marks=len(study.trials))


def pareto_figure(study: Study) -> Picture | None:
    """Period against memory of the fullest device; the front are the candidates that no other beats in both."""
    found = [(t, p, b) for t, p in scored(study) if (b := held(t)) is not None]
    if not found:
        return None
    unit = _unit([(t, p) for t, p, _ in found])
    figure = new_figure(3.8)
    (ax,) = panels(figure, 1)
    ax.plot(
        [b / 2**20 for *_, b in found], [p * unit.scale for _, p, _ in found], "o", color=BLUE, markersize=4, label="complete"
    )
    over = [(held(t), t.period_s) for t in study.trials if t.state == "rejected" and t.period_s and held(t) is not None]
    if over:
        xs, ys = [b / 2**20 for b, _ in over if b], [p * unit.scale for b, p in over if b and p]
        ax.plot(xs, ys, "x", color=RED, markersize=5, label="rejected")
    front = pareto_front([(b, p) for _, p, b in found])
    ax.step([b / 2**20 for b, _ in front], [p * unit.scale for _, p in front], where="post", color=ORANGE, linewidth=1.6,
            label="Pareto front")  # fmt: skip
    if study.memory_limit is not None:
        ax.axvline(
            study.memory_limit / 2**20, color=INK, linestyle="--", linewidth=1.2, label=f"limit {size(study.memory_limit)}"
        )
    if best := next(((p, b) for t, p, b in found if t.number == study.best), None):
        ax.plot([best[1] / 2**20], [best[0] * unit.scale], "*", color=ORANGE, markeredgecolor=INK, markersize=13, label="best")
    _log_if_wide(ax, [p for _, p, _ in found])
    ax.set_xlabel("peak memory of the fullest device (MiB)")
    ax.set_ylabel(f"predicted period ({unit.name})")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    alt = f"Predicted period against peak memory of {len(found)} candidates; {len(front)} are on the Pareto front."
    caption = "Left and below is better; on the front nothing is both quicker and smaller."
    return picture(figure, "pareto", "Time against memory", alt, caption, marks=len(study.trials))


def parallel_figure(study: Study) -> Picture | None:
    """One vertical axis per parameter; a line per complete candidate, coloured by its period; the best on top. None without
    parameters."""
    found = scored(study)
    names = list(dict.fromkeys(n for t, _ in found for n in t.params))
    if not names:
        return None
    unit = _unit(found)
    figure = new_figure(4.0)
    (ax,) = panels(figure, 1)
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    scale = Normalize(min(p for _, p in found) * unit.scale, max(p for _, p in found) * unit.scale)
    colours = colormaps["cividis"]
    places = [Axis([t.params.get(n) for t, _ in found]) for n in names]
    for t, p in sorted(found, key=lambda x: (x[0].number == study.best, -x[1])):  # the quick ones above the slow ones
        heights = [axis.place(t.params.get(n)) for axis, n in zip(places, names)]
        best = t.number == study.best
        colour, width = (RED, 2.4) if best else (colours(scale(p * unit.scale)), 1.0)
        xs = range(len(names)) if len(names) > 1 else (-0.2, 0.2)
        ax.plot(xs, heights if len(names) > 1 else heights * 2, color=colour, linewidth=width, alpha=1.0 if best else 0.75)
    for x, axis in enumerate(places):
        ax.axvline(x, color=GREY, linewidth=0.8)
        for height, text in axis.ticks():
            ax.annotate(text, (x, height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5,
                        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6})  # fmt: skip
    ax.set_xticks(range(len(names)), names)
    ax.set_yticks([])
    ax.set_xlim(-0.3, max(len(names) - 1, 0) + 0.45)
    figure.colorbar(ScalarMappable(scale, colours), ax=ax, label=f"predicted period ({unit.name})", pad=0.01)
    alt = f"Parallel coordinates of {len(found)} complete candidates over {', '.join(names)}, coloured by predicted period."
    caption = "A line is a candidate; the darker, the quicker." + (" The best one is red." if study.best is not None else "")
    return picture(
        figure, "parameters", "Parameters", alt, caption, wide=max(760, 110 * len(names)), marks=len(found) * len(names)
    )


class Axis:
    """Where the values of one parameter stand on an axis of height 1: many numbers to scale (logarithmic when they spread wide),
    everything else at equal distances."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.unset = any(v is None for v in values)
        given = [v for v in values if v is not None]
        numbers = [v for v in given if isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v)]
        kinds = sorted(set(numbers)) if len(numbers) == len(given) else sorted({_text(v) for v in given})
        self.texts = [_text(k) for k in kinds]
        self.range = (kinds[0], kinds[-1]) if len(kinds) > MOST_TICKS and len(numbers) == len(given) else None

    def place(self, value: Any) -> float:
        if value is None:
            return -0.15
        if self.range is None:
            return self.texts.index(_text(value)) / max(1, len(self.texts) - 1)
        low, high = self.range
        return log10(value / low) / log10(high / low) if self.wide else (value - low) / (high - low)

    @property
    def wide(self) -> bool:
        return self.range is not None and 0 < self.range[0] * WIDE_RANGE < self.range[1]

    def ticks(self) -> list[tuple[float, str]]:
        """Height and text."""
        unset = [(-0.15, UNSET)] if self.unset else []
        if self.range is None:
            every = max(1, -(-len(self.texts) // MOST_TICKS))
            return [(self.place(t), t if len(t) <= 16 else t[:15] + "…") for t in self.texts[::every]] + unset
        low, high = self.range
        heights = [i / (FEW_TICKS - 1) for i in range(FEW_TICKS)]
        return [(h, f"{low * (high / low) ** h if self.wide else low + h * (high - low):.3g}") for h in heights] + unset


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def held(trial: Trial) -> int | None:
    """Bytes that count against the limit: of the device, else of the plan alone."""
    return trial.device_bytes if trial.device_bytes is not None else trial.peak_bytes


def pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of (bytes, seconds) those that no other beats in both, by bytes."""
    out: list[tuple[int, float]] = []
    for b, p in sorted(set(points)):
        if not out or p < out[-1][1]:
            out.append((b, p))
    return out


def _best_so_far(found: Scored) -> list[float]:
    out: list[float] = []
    for _, p in found:
        out.append(min(p, out[-1]) if out else p)
    assert all(a >= b for a, b in pairwise(out))
    return out


def _unit(found: Scored) -> TimeUnit:
    return time_unit(min(p for _, p in found))


def _log_if_wide(ax: Axes, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        ax.set_yscale("log")
