"""Draw the paper's schedules and meshes of mixtures beside its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.schedule_changes import UNBOUND, Change, Changed
from benchmarks.paper.schedule_lines import POINTS, RATE, RATIOS, Line, Tuned, ratio

OURS, TUNED, THEIRS, PALE = "#33658a", "#f6ae2d", "#999999", "#86bbd8"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw7(
    found: Sequence[Line], changes: Sequence[Changed], best: Sequence[Tuned], path: Path
) -> None:
    """Draw the rates of each model's schedules and of the tuner's plan, and the gains beside the published ones."""
    pyplot = _pyplot()
    widths = [*[4.6] * len(best), 7.3]
    figure, axes = pyplot.subplots(
        1, len(widths), figsize=(sum(widths), 4.3), width_ratios=widths, layout="constrained"
    )
    for axis, tuned in zip(axes, best, strict=False):
        own = [x for x in found if x.setup.model == tuned.setup.model]
        names = [x.schedule for x in own] + ["tuned"]
        rates = [x.tokens_per_s / 1e3 for x in own] + [(tuned.found.tokens_per_s or 0.0) / 1e3]
        bars = axis.bar(names, rates, 0.6, color=[OURS] * len(own) + [TUNED])
        axis.bar_label(
            bars,
            [f"{r:,.0f}\n{100 * (r / rates[0] - 1):+.1f} %" for r in rates],
            padding=3,
            fontsize=9,
        )
        axis.set_ylim(0, 1.2 * max(rates))
        axis.set_ylabel("thousand tokens per second")
        axis.set_title(
            f"{tuned.setup.model}, {tuned.setup.pp * tuned.setup.width} A100", fontsize=10
        )
    _gains(axes[-1], found, changes)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _gains(axis: Any, found: Sequence[Line], changes: Sequence[Changed]) -> None:
    """Draw each ratio beside the published one, with what other assumptions make of it."""
    at = range(len(RATIOS))
    published, ours = [p.percent for p in RATIOS], [ratio(found, p) for p in RATIOS]
    axis.bar(
        [k - 0.2 for k in at],
        published,
        0.38,
        color=THEIRS,
        label=f"published, and {POINTS:g} points around it",
    )
    axis.errorbar(
        [k - 0.2 for k in at],
        published,
        yerr=POINTS,
        fmt="none",
        ecolor="black",
        elinewidth=0.8,
        capsize=4,
    )
    axis.bar([k + 0.2 for k in at], ours, 0.38, color=PALE, label="simulated")
    if changes:
        least, most = ([pick(x.ratios[k] for x in changes) for k in at] for pick in (min, max))
        down, up = (
            [o - a for o, a in zip(ours, least, strict=True)],
            [b - o for o, b in zip(ours, most, strict=True)],
        )
        axis.errorbar(
            [k + 0.2 for k in at], ours, yerr=[down, up], fmt="none", ecolor=OURS, elinewidth=1.5, capsize=6,
            label="under all rows of the table of assumptions",
        )  # fmt: skip
    for x in (x for x in changes if x.change == UNBOUND):
        axis.plot(
            [k + 0.3 for k in at],
            x.ratios,
            "D",
            color=TUNED,
            markeredgecolor="black",
            label="dropless experts",
        )
    named = [
        f"{p.model}, {p.faster}\nover {p.than}: {p.percent:+.0f} %, ours {r:+.1f} %"
        for p, r in zip(RATIOS, ours, strict=True)
    ]
    axis.set_xticks([*at], named, fontsize=8)
    axis.set_ylabel("faster by, %")
    axis.set_ylim(0, 1.35 * max([POINTS + max(published), *(r for x in changes for r in x.ratios)]))
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    axis.set_title("gains beside the paper's", fontsize=10)


def draw9(found: Sequence[Line], others: Sequence[tuple[Change, Line]], path: Path) -> None:
    """Draw the rates by stages, a line for each number of replicas, the paper's number, and the rows of assumptions."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    for width, colour in zip(
        sorted({x.setup.width for x in found}), ("#86bbd8", "#33658a"), strict=False
    ):
        own = [x for x in found if x.setup.width == width]
        axis.plot(
            [x.setup.pp for x in own],
            [x.tokens_per_s / 1e3 for x in own],
            "o-",
            color=colour,
            label=f"{width} replicas",
        )
        for x in own:
            at = (x.setup.pp, x.tokens_per_s / 1e3)
            axis.annotate(
                f"{at[1]:,.0f}",
                at,
                textcoords="offset points",
                xytext=(-6, 7),
                ha="right",
                fontsize=8,
            )
    pp, width, published = RATE
    axis.plot(
        [pp],
        [published / 1e3],
        "x",
        color="black",
        label=f"the paper, {width} replicas: about {published / 1e3:,.0f}",
    )
    if others:
        rates = [x.tokens_per_s / 1e3 for _, x in others]
        axis.plot(
            [pp + 0.25] * len(rates),
            rates,
            "_",
            color=TUNED,
            label="the largest mesh under other assumptions",
        )
    axis.set_xticks(sorted({x.setup.pp for x in found}))
    axis.set_xlabel("stages")
    axis.set_ylabel("thousand tokens per second")
    axis.set_ylim(
        0,
        1.1
        * max(RATE[2] / 1e3, *(x.tokens_per_s / 1e3 for x in (*found, *[x for _, x in others]))),
    )
    axis.set_xlim(min(x.setup.pp for x in found) - 0.8, max(x.setup.pp for x in found) + 0.6)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
