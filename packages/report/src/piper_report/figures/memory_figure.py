"""Draw memory over the step: by category as predicted, in total as measured, with the peak marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from piper_ir.ground.shards import SharedState
from piper_ir.ground.trace import MemSample, Trace
from piper_ir.plan.plan import Plan
from piper_ir.tools import named_ranks, size_text
from piper_report.facts.alike import alike_ranks
from piper_report.facts.idle import makespan
from piper_report.facts.results import RankPrediction
from piper_report.facts.summary import CATEGORY_NAMES
from piper_report.figures.style import (
    CATEGORIES,
    INK,
    RED,
    SHORTEST,
    Picture,
    SizeUnit,
    TimeUnit,
    new_figure,
    panels,
    picture,
    size_unit,
    time_unit,
)

MOST_PANELS = 8
STATES = ("param", "master", "grad", "optim", "buffer")
IN_ALL, HAS = "in all on the device", "what the device has"
BESIDE = (
    "In all, a device also holds what torch has not allocated: the reserve of its allocator, the "
    "context, and communicators."
)
NEAR = 1.6
"""The most of the curve's height at which a line is still drawn; higher ones would make the curve flat."""
MOST_SAMPLES = 800
"""The most samples drawn per rank; of more, the fullest in each of as many equal stretches of time is drawn."""


def memory_figure(
    predicted: Trace | None,
    measured: Trace | None,
    plan: Plan | None,
    devices: Mapping[int, RankPrediction] | None = None,
) -> Picture | None:
    """Draw one panel per role (its first rank), the fullest 8; None when no trace has memory.

    `devices` has by rank the predicted bytes on the device in all, and its memory; lines far above the curve are left
    to the title.

    Measured bytes stand at the predicted time of their instruction, so that the two curves can be laid on each other.
    """
    ranks = _ranks([t for t in (predicted, measured) if t is not None], plan)
    if not ranks:
        return None
    shown = predicted if predicted is not None and predicted.memory else measured
    length = (makespan(shown) if shown is not None else 0.0) or SHORTEST
    unit = time_unit(length)
    space = size_unit(
        max(_total(m) for t in (predicted, measured) if t is not None for m in t.memory)
    )
    figure = new_figure(0.9 + 2.1 * len(ranks))
    axes = panels(figure, len(ranks), sharex=True)
    used: dict[str, None] = {}
    lines: dict[str, Line2D] = {}
    groups = alike_ranks([t for t in (predicted, measured) if t is not None], plan)
    marks = 0
    for ax, rank in zip(axes, ranks):
        curve = _samples(predicted, rank)
        points = _moved(_samples(measured, rank), predicted, rank)
        used |= _stack(ax, _thinned(curve, length), length, unit, space)
        _line(ax, _thinned(points, length), length, unit, space)
        marks += 9 * len(curve) + len(points)
        role = f" ({plan.role_of(rank).role})" if plan is not None else ""
        device = (devices or {}).get(rank)
        lines |= _device_lines(ax, device, max([0, *map(_total, (*curve, *points))]), space)
        ax.set_title(
            f"{named_ranks(groups[rank])}{role}: {_peaks(curve, points, unit)}{_held(device)}",
            loc="left",
        )
        ax.set_ylabel(space.name)
        ax.set_ylim(bottom=0)
    axes[-1].set_xlim(0, length * unit.scale)
    axes[-1].set_xlabel(f"time since the step began ({unit.name})")
    shares = {category: part for category, part in _shares(plan).items() if category in used}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=CATEGORIES[c], label=CATEGORY_NAMES.get(c, c) + shares.get(c, ""))
        for c in CATEGORIES
        if c in used
    ]
    if measured is not None and measured.memory:
        handles.append(Line2D([], [], color=INK, linewidth=1.2, label="measured, in all"))
    handles += [Line2D([], [], color=RED, marker="v", linestyle="", label="peak"), *lines.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    return picture(
        figure, "memory", "Memory over the step",
        "Stacked areas of the bytes that each rank holds over one step, by category, with the peak marked: "
        + "; ".join(ax.get_title(loc="left") for ax in axes),
        "Each instruction stands at its start with the most bytes that are held while it runs."
        + (f" Of the states that ranks share this rank keeps a part: {_words(shares)}." if shares else "")
        + (f" {BESIDE}" if any(devices or {}) else "")
        + (" Measured bytes stand at the predicted time of their instruction." if predicted and measured else ""),
        marks=marks,
    )  # fmt: skip


def _device_lines(
    ax: Axes, device: RankPrediction | None, top: int, space: SizeUnit
) -> dict[str, Line2D]:
    """Draw the bytes on the device in all and its memory, if they are near the curve; return the lines by name."""
    if device is None:
        return {}
    lines = {}
    for name, nbytes, colour, dash in (
        (IN_ALL, device.device_bytes, INK, ":"),
        (HAS, device.limit_bytes, RED, "--"),
    ):
        if nbytes is not None and nbytes != top and nbytes <= NEAR * top:
            ax.axhline(
                nbytes / space.scale, color="white", linewidth=3
            )  # so that it can be seen on any colour
            lines[name] = ax.axhline(
                nbytes / space.scale, color=colour, linestyle=dash, linewidth=1.3, label=name
            )
    return lines


def _held(device: RankPrediction | None) -> str:
    if device is None or device.device_bytes <= device.peak_bytes:
        return ""
    has = "" if device.limit_bytes is None else f"; the device has {size_text(device.limit_bytes)}"
    return f", in all {size_text(device.device_bytes)}{has}"


def _shares(plan: Plan | None) -> dict[str, str]:
    """Return for each sharded state the part of it that one rank keeps, as text behind its name."""
    if plan is None:
        return {}
    kinds: tuple[SharedState, ...] = ("param", "master", "grad", "optim")
    degrees = {kind: {plan.mesh.degree(b.shard.of(kind)) for b in plan.buckets} for kind in kinds}
    return {
        kind: f" (1/{max(kind_degrees)})"
        if len(kind_degrees) == 1
        else f" (1 to 1/{max(kind_degrees)})"
        for kind, kind_degrees in degrees.items()
        if max(kind_degrees, default=1) > 1
    }


def _words(shares: dict[str, str]) -> str:
    return ", ".join(CATEGORY_NAMES[kind] + part for kind, part in shares.items())


def _ranks(traces: Sequence[Trace], plan: Plan | None) -> list[int]:
    most: dict[int, int] = {}
    firsts = {min(role.ranks) for role in plan.roles} if plan is not None else None
    for trace in traces:
        for m in trace.memory:
            if firsts is None or m.rank in firsts:
                most[m.rank] = max(most.get(m.rank, 0), sum(m.bytes.values()))
    return sorted(sorted(most, key=lambda r: (-most[r], r))[:MOST_PANELS])


def _samples(trace: Trace | None, rank: int) -> list[MemSample]:
    samples = [m for m in trace.memory if m.rank == rank] if trace is not None else []
    return sorted(samples, key=lambda m: m.time)


def _moved(points: list[MemSample], predicted: Trace | None, rank: int) -> list[MemSample]:
    """Return measured samples at the predicted start of the same instruction."""
    start = {m.instr: m.time for m in _samples(predicted, rank)}
    if not start:
        return points
    return [MemSample(m.rank, m.instr, start[m.instr], m.bytes) for m in points if m.instr in start]


def _thinned(samples: list[MemSample], length: float) -> list[MemSample]:
    if len(samples) <= MOST_SAMPLES:
        return samples
    fullest: dict[int, MemSample] = {}
    for m in samples:
        column = int(m.time / length * MOST_SAMPLES)
        if column not in fullest or _total(m) > _total(fullest[column]):
            fullest[column] = m
    return [fullest[c] for c in sorted(fullest)]


def _total(sample: MemSample) -> int:
    return sum(sample.bytes.values())


def _stack(
    ax: Axes, samples: list[MemSample], length: float, unit: TimeUnit, space: SizeUnit
) -> dict[str, None]:
    """Draw the categories on top of each other, and return the ones that occur."""
    used = [c for c in CATEGORIES if any(c in m.bytes for m in samples)]
    if samples and samples[0].time > 0:  # before its first instruction a rank holds its states
        states = {c: b for c, b in samples[0].bytes.items() if c in STATES}
        samples = [MemSample(samples[0].rank, -1, 0.0, states), *samples]
    times = [m.time * unit.scale for m in samples] + [length * unit.scale]
    below = [0.0] * len(times)
    for category in used:
        heights = [m.bytes.get(category, 0) / space.scale for m in samples]
        above = [b + h for b, h in zip(below, heights + heights[-1:])]
        ax.fill_between(times, below, above, step="post", color=CATEGORIES[category], linewidth=0)
        below = above
    if samples:
        top = max(samples, key=_total)
        ax.plot(
            [top.time * unit.scale],
            [_total(top) / space.scale],
            "v",
            color=RED,
            markersize=7,
            clip_on=False,
        )
    return dict.fromkeys(used)


def _line(
    ax: Axes, samples: list[MemSample], length: float, unit: TimeUnit, space: SizeUnit
) -> None:
    if samples:
        times = [m.time * unit.scale for m in samples] + [length * unit.scale]
        totals = [_total(m) / space.scale for m in samples]
        ax.step(times, totals + totals[-1:], where="post", color=INK, linewidth=1.2)
        top = max(samples, key=_total)
        ax.plot(
            [top.time * unit.scale],
            [_total(top) / space.scale],
            "v",
            color=RED,
            markersize=5,
            clip_on=False,
        )


def _peaks(curve: list[MemSample], points: list[MemSample], unit: TimeUnit) -> str:
    words = []
    for name, samples in (("predicted", curve), ("measured", points)):
        if samples:
            top = max(samples, key=_total)
            words.append(
                f"{name} peak {size_text(_total(top))} at {top.time * unit.scale:.3g} {unit.name}"
            )
    return ", ".join(words)
