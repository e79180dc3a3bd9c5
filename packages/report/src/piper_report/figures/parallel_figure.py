"""Draw parallel coordinates: the parameters of every candidate of a tuning, coloured by the objective."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite, log10
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from piper_ir.study.study import StudyDocument
from piper_report.figures.style import GREY, RED, Picture, new_figure, panels, picture
from piper_report.figures.tuning_figures import WIDE_RANGE, ScoredTrials, goal_of, scored

MOST_TICKS = 10
FEW_TICKS = 5
"""The number of ticks on an axis to scale."""
UNSET = "not set"
BELOW = -0.15
"""The height at which a candidate without this parameter crosses the axis."""
LONGEST = 16
"""The most letters of a value."""


def parallel_figure(study: StudyDocument) -> Picture | None:
    """Draw one vertical axis per parameter, and a line per complete candidate with the best on top.

    Lines are coloured by the objective. None without parameters.
    """
    trials = scored(study)
    names = list(dict.fromkeys(n for t, _ in trials for n in t.params))
    if not names:
        return None
    goal = goal_of(study)
    values = {t.number: goal.shown(value) for t, value in trials}
    figure = new_figure(4.0)
    (ax,) = panels(figure, 1)
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    scale = Normalize(min(values.values()), max(values.values()))
    colours = colormaps["cividis"]
    axes = {n: Axis([t.params.get(n) for t, _ in trials]) for n in names}
    _lines(
        ax,
        trials,
        axes,
        study.best,
        {number: colours(scale(value)) for number, value in values.items()},
    )
    _ticks(ax, axes)
    figure.colorbar(
        ScalarMappable(scale, colours), ax=ax, label=f"predicted {goal.label}", pad=0.01
    )
    alt = (
        f"Parallel coordinates of {len(trials)} complete candidates over {', '.join(names)}, "
        f"coloured by predicted {goal.name}."
    )
    shade = "lighter" if goal.rises else "darker"
    caption = f"A line is a candidate; the {shade}, the {goal.better}." + (
        " The best one is red." if study.best is not None else ""
    )
    least, marks = max(760, 110 * len(names)), len(trials) * len(names)
    return picture(figure, "parameters", "Parameters", alt, caption, least=least, marks=marks)


def _lines(
    ax: Axes, found: ScoredTrials, axes: dict[str, Axis], best: int | None, colours: dict[int, Any]
) -> None:
    """Draw the quick candidates above the slow ones and the best on top; with a single parameter a line is level."""
    xs = list(range(len(axes))) if len(axes) > 1 else [-0.2, 0.2]
    for trial, _ in sorted(found, key=lambda x: (x[0].number == best, -x[1])):
        heights = [axis.place(trial.params.get(name)) for name, axis in axes.items()] * (
            1 if len(axes) > 1 else 2
        )
        if trial.number == best:
            ax.plot(xs, heights, color=RED, linewidth=2.4)
        else:
            ax.plot(xs, heights, color=colours[trial.number], linewidth=1.0, alpha=0.75)


def _ticks(ax: Axes, axes: dict[str, Axis]) -> None:
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
    for x, axis in enumerate(axes.values()):
        ax.axvline(x, color=GREY, linewidth=0.8)
        for height, text in axis.ticks():
            ax.annotate(
                text,
                (x, height),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                bbox=ground,
            )
    ax.set_xticks(range(len(axes)), list(axes))
    ax.set_yticks([])
    ax.set_xlim(-0.3, len(axes) - 1 + 0.45)


class Axis:
    """Place the values of one parameter on an axis of height 1.

    Many numbers stand to scale (logarithmic when they spread wide), everything else at equal distances.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.unset = any(v is None for v in values)
        present = [v for v in values if v is not None]
        finite = [
            v
            for v in present
            if isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v)
        ]
        numbers, numeric = sorted(set(finite)), len(finite) == len(present)
        names = sorted({_text(v) for v in present} - {_text(n) for n in numbers})
        self.texts = [*map(_text, numbers), *names]
        self.range = (numbers[0], numbers[-1]) if numeric and len(numbers) > MOST_TICKS else None

    def place(self, value: Any) -> float:
        if value is None:
            return BELOW
        if self.range is None:
            return self.texts.index(_text(value)) / max(1, len(self.texts) - 1)
        low, high = self.range
        return log10(value / low) / log10(high / low) if self.wide else (value - low) / (high - low)

    @property
    def wide(self) -> bool:
        return self.range is not None and 0 < self.range[0] * WIDE_RANGE < self.range[1]

    def ticks(self) -> list[tuple[float, str]]:
        """Return the height and the text of each tick."""
        unset = [(BELOW, UNSET)] if self.unset else []
        if self.range is None:
            every = max(1, -(-len(self.texts) // MOST_TICKS))
            return [
                (self.place(t), t if len(t) <= LONGEST else t[: LONGEST - 1] + "…")
                for t in self.texts[::every]
            ] + unset
        low, high = self.range
        heights = [i / (FEW_TICKS - 1) for i in range(FEW_TICKS)]
        return [
            (h, f"{low * (high / low) ** h if self.wide else low + h * (high - low):.3g}")
            for h in heights
        ] + unset


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
