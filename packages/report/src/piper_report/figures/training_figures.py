"""Draw a run step by step: the loss, and the seconds."""

from __future__ import annotations

from math import inf, isfinite

from piper_ir.tools import time_text
from piper_report.facts.results import Results
from piper_report.figures.style import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Picture,
    one_panel,
    picture,
    time_unit,
)

WARMUP_STEPS = 3
"""The number of steps before steady state, which is the median of the later ones, as in piper_runtime."""


def steps_of(results: Results) -> list[tuple[int, float, float]]:
    """Return step, loss and seconds, from metrics.jsonl, else from measured.json."""
    if results.metrics:
        return [(m.step, m.loss, m.step_s) for m in results.metrics]
    if results.measured is None:
        return []
    return [
        (i, loss, s)
        for i, (loss, s) in enumerate(
            zip(results.measured.losses, results.measured.step_s, strict=False)
        )
    ]


def loss_figure(results: Results) -> Picture | None:
    """Draw the loss by step; None without a finite loss."""
    points = [(step, loss) for step, loss, _ in steps_of(results) if isfinite(loss)]
    if not points:
        return None
    figure, ax = one_panel(3.0, "step", "loss")
    ax.plot(
        *zip(*points),
        color=BLUE,
        linewidth=1.4,
        marker="o" if len(points) <= 60 else "",
        markersize=3,
    )
    first, last = points[0][1], points[-1][1]
    alt = f"Loss by step, from {first:.4g} at step {points[0][0]} to {last:.4g} at step {points[-1][0]}."
    note = "Over the global batch of each step."
    evaluated = [
        (m.step, m.evaluation["loss"])
        for m in results.metrics
        if isfinite(m.evaluation.get("loss", inf))
    ]
    if evaluated:
        ax.lines[0].set_label("training")
        ax.plot(
            *zip(*evaluated),
            color=ORANGE,
            linewidth=1.4,
            marker="s",
            markersize=4,
            label="evaluation",
        )
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        alt += (
            f" In evaluation {evaluated[0][1]:.4g} after step {evaluated[0][0]}, "
            f"{evaluated[-1][1]:.4g} after {evaluated[-1][0]}."
        )
        note += " Evaluation is over Job.eval_data, in eval mode."
    return picture(figure, "loss", "Loss", alt, note, marks=len(points) + len(evaluated))


def gradient_figure(results: Results) -> Picture | None:
    """Draw the norm of the gradient by step, before it was clipped; None if it was not logged."""
    points = [
        (m.step, m.gradient_norm)
        for m in results.metrics
        if m.gradient_norm is not None and isfinite(m.gradient_norm)
    ]
    if not points:
        return None
    figure, ax = one_panel(3.0, "step", "norm of the gradient")
    ax.plot(
        *zip(*points),
        color=BLUE,
        linewidth=1.4,
        marker="o" if len(points) <= 60 else "",
        markersize=3,
    )
    first, last = points[0], points[-1]
    alt = f"Norm of the gradient by step, from {first[1]:.4g} at step {first[0]} to {last[1]:.4g} at step {last[0]}."
    return picture(
        figure, "gradient_norm", "Gradient norm", alt, "Before it was clipped.", marks=len(points)
    )


def step_time_figure(results: Results) -> Picture | None:
    """Draw the seconds of each step, with the median of steady state and the prediction as lines."""
    points = steps_of(results)
    if not points:
        return None
    measured = results.measured.period_s if results.measured is not None else None
    predicted = results.predicted.period_s if results.predicted is not None else None
    lines = [v for v in (measured, predicted) if v is not None]
    unit = time_unit(max([s for *_, s in points] + lines))
    figure, ax = one_panel(3.0, "step", f"time of the step ({unit.name})")
    for name, colour, some in (
        ("warm-up", GREY, points[:WARMUP_STEPS]),
        ("steady state", BLUE, points[WARMUP_STEPS:]),
    ):
        if some:
            ax.plot(
                [p[0] for p in some],
                [p[2] * unit.scale for p in some],
                "o",
                color=colour,
                markersize=4,
                label=name,
            )
    for name, colour, dash, value in (
        ("measured, median", RED, "-", measured),
        ("predicted", ORANGE, "--", predicted),
    ):
        if value is not None:
            ax.axhline(
                value * unit.scale,
                color=colour,
                linestyle=dash,
                linewidth=1.4,
                label=f"{name}: {time_text(value)}",
            )
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    said = " and ".join(
        f"{n} {time_text(v)}"
        for n, v in (("measured", measured), ("predicted", predicted))
        if v is not None
    )
    alt = f"Time of each of {len(points)} steps" + (f"; in steady state {said}." if said else ".")
    return picture(
        figure,
        "step_time",
        "Time per step",
        alt,
        "Between completions, on the slowest rank.",
        marks=len(points),
    )
