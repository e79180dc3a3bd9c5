"""Draw a tuning: the history of its objective, and the objective against memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from math import isfinite

from matplotlib.axes import Axes

from piper_ir.study.study import Row, StudyDocument, objective_of
from piper_ir.tools import size_text, time_text
from piper_report.figures import style
from piper_report.figures.style import Picture, one_panel, picture

WIDE_RANGE = 20
"""The factor between values from which on they stand on a logarithmic axis."""
MILLION = 1e6
ScoredTrials = list[tuple[Row, float]]
"""The complete trials with their objective, in the order in which they were made."""


def scored(study: StudyDocument) -> ScoredTrials:
    """Return the complete trials that have a predicted value of the objective."""
    complete = [
        (t, objective_of(t))
        for t in study.trials
        if t.state == "complete" and t.period_s is not None
    ]
    return [(t, value) for t, value in complete if isfinite(value)]


@dataclass(frozen=True)
class Goal:
    """Say how the objective of a search is drawn: `shown` turns its value into the number that people read.

    Attributes:
        name: of the value, for sentences.
        unit: the unit, on an axis.
        rises: whether more is better.
        better: a word for a better value.
        text: a text for sentences, of a value of the objective.
    """

    name: str
    unit: str
    rises: bool
    better: str
    shown: Callable[[float], float]
    text: Callable[[float], str]

    @property
    def label(self) -> str:
        """Return the label of an axis."""
        return f"{self.name} ({self.unit})"


def goal_of(study: StudyDocument) -> Goal:
    """Return how the objective of a study is drawn, in a unit in which its values are 1 or more."""
    match study.objective:
        case "tokens_per_s_per_device":
            name = "tokens per second and device"
            return Goal(
                name, "tokens/s", True, "better", _inverse, lambda v: f"{_inverse(v):,.0f} tokens/s"
            )
        case "dollars_per_token":
            text = "dollars per million tokens"
            return Goal(
                text,
                "dollars",
                False,
                "cheaper",
                lambda v: v * MILLION,
                lambda v: f"{v * MILLION:.4g} dollars",
            )
        case _:
            unit = style.time_unit(min((value for _, value in scored(study)), default=1.0))
            return Goal("period", unit.name, False, "quicker", lambda v: v * unit.scale, time_text)


def _inverse(value: float) -> float:
    return 1 / value if value else 0.0


def history_figure(study: StudyDocument) -> Picture | None:
    """Draw the predicted objective by trial; None when no trial has one.

    The best so far is a line, rejected candidates are crosses.
    """
    complete = scored(study)
    if not complete:
        return None
    goal = goal_of(study)
    figure, ax = one_panel(3.2, "trial", goal.label)
    numbers, values = [t.number for t, _ in complete], [goal.shown(value) for _, value in complete]
    ax.plot(numbers, values, "o", color=style.BLUE, markersize=4, label="complete")
    least = list(accumulate([value for _, value in complete], min))
    best = [goal.shown(value) for value in least]
    to_the_end = [*numbers, max(t.number for t in study.trials)]
    ax.step(
        to_the_end,
        best + best[-1:],
        where="post",
        color=style.ORANGE,
        linewidth=1.6,
        label="best so far",
    )
    confirmed = [
        (t.number, goal.shown(objective_of(t, True)))
        for t, _ in complete
        if t.measured_period_s is not None
    ]
    if confirmed:
        ax.plot(*zip(*confirmed), "D", color=style.GREEN, markersize=5, label="measured")
    rejected = [t.number for t in study.trials if t.state == "rejected"]
    if rejected:
        foot = ax.get_xaxis_transform()
        ax.plot(
            rejected,
            [0.03] * len(rejected),
            "x",
            color=style.RED,
            transform=foot,
            label="rejected",
            clip_on=False,
        )
        ax.margins(y=0.12)
    _log_if_wide(ax, values)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    goes = (
        f"{'rises' if goal.rises else 'falls'} from {goal.text(least[0])} to {goal.text(least[-1])}"
    )
    alt = (
        f"Predicted {goal.name} of {len(complete)} complete trials in order; the best {goes}; "
        f"{len(rejected)} were rejected."
    )
    caption = (
        "Rejected candidates are crosses at the foot, at their number; the table below says why."
        if rejected
        else ""
    )
    return picture(figure, "history", "Search history", alt, caption, marks=len(study.trials))


def pareto_figure(study: StudyDocument) -> Picture | None:
    """Draw the objective against the memory of the fullest device.

    The front are the candidates that no other beats in both.
    """
    candidates = [(b, value) for t, value in scored(study) if (b := held(t)) is not None]
    if not candidates:
        return None
    known = [t for t in study.trials if study.objective == "period" or t.value is not None]
    rejected = [t for t in known if t.state == "rejected" and t.period_s]
    over = [(b, objective_of(t)) for t in rejected if (b := held(t)) is not None]
    goal, space = goal_of(study), style.size_unit(max(b for b, _ in candidates + over))
    labels = f"peak memory of the fullest device ({space.name})", f"predicted {goal.label}"
    figure, ax = one_panel(3.6, *labels, numbered=False)

    def columns(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
        return [b / space.scale for b, _ in points], [goal.shown(value) for _, value in points]

    ax.plot(*columns(candidates), "o", color=style.BLUE, markersize=4, label="complete")
    if over:
        ax.plot(*columns(over), "x", color=style.RED, markersize=5, label="rejected")
    front = pareto_front(candidates)
    ax.step(
        *columns(front),
        "o-",
        where="post",
        color=style.ORANGE,
        linewidth=1.6,
        markersize=4,
        label="Pareto front",
    )
    if study.memory_limit is not None:
        limits = study.device_limits or {
            "": study.memory_limit
        }  # of several types of devices each has its own
        for dash, (device, limit) in zip(cycle(("--", ":", "-.")), limits.items()):
            label = " ".join(
                ["limit", device, size_text(limit)] if device else ["limit", size_text(limit)]
            )
            ax.axvline(
                limit / space.scale, color=style.INK, linestyle=dash, linewidth=1.2, label=label
            )
    best = [
        (b, p) for t, p in scored(study) if t.number == study.best and (b := held(t)) is not None
    ]
    if best:
        ax.plot(
            *columns(best),
            "*",
            color=style.ORANGE,
            markeredgecolor=style.INK,
            markersize=13,
            label="best",
        )
    _log_if_wide(ax, [goal.shown(value) for _, value in candidates])
    figure.legend(loc="outside lower center", ncols=3 if study.device_limits else 5, frameon=False)
    alt = (
        f"Predicted {goal.name} against peak memory of {len(candidates)} candidates; {len(front)} are "
        f"on the Pareto front."
    )
    where = "above" if goal.rises else "below"
    caption = f"Left and {where} is better; on the front nothing is both {goal.better} and smaller."
    title = (
        "Time against memory"
        if goal.name == "period"
        else f"{goal.name.capitalize()} against memory"
    )
    return picture(figure, "pareto", title, alt, caption, marks=len(study.trials))


def held(trial: Row) -> int | None:
    """Return the bytes that count against the limit: the bytes of the device, else of the plan alone."""
    return trial.device_bytes if trial.device_bytes is not None else trial.peak_bytes


def pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points (bytes, objective) that no other beats in both, by bytes."""
    front: list[tuple[int, float]] = []
    for b, p in sorted(set(points)):
        if not front or p < front[-1][1]:
            front.append((b, p))
    return front


def _log_if_wide(ax: Axes, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        ax.set_yscale("log")
