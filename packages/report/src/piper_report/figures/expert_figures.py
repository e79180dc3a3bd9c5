"""Draw the load of experts: over the steps of a run, and of each expert."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator

from piper_report.facts.expert_history import RECENT, ExpertHistory, LayerLoad, over_mean
from piper_report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    SMALLER,
    WIDTH,
    Picture,
    ink_on,
    new_figure,
    panels,
    picture,
)

LINES = ((BLUE, "-"), (ORANGE, "-"), (GREEN, "-"), (PURPLE, "--"), (SKY, "--"), (RED, ":"))
"""The colours and dashes of layers; of more layers than these, their range is drawn."""
MOST_POINTS = 300
"""The most points of a line; of more steps, several in a row are one point."""
MOST_NUMBERS = 16
"""The most experts of a layer, and the most layers, at which each cell has its number."""
FEW_RANKS = 8
"""The most ranks between whose experts lines are thick."""
MOST_ROWS = 32
"""The most layers of which each has a name at the axis."""


@dataclass(frozen=True)
class Curve:
    """Hold a load by step, with as many steps in one point as needed; nan if none has a load.

    Attributes:
        steps: the first step of each point.
        mean: the mean of each point's steps.
        low: their least.
        high: their highest.
    """

    steps: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def curve(
    steps: Sequence[int], loads: Sequence[Sequence[float]], points: int = MOST_POINTS
) -> Curve:
    """Return the loads of one or several layers by step, in at most so many points."""
    each = -(-len(steps) // points) or 1
    starts = range(0, len(steps), each)
    groups = [[v for of in loads for v in of[k : k + each] if not isnan(v)] for k in starts]
    mean, low, high = (
        [of(values) if values else nan for values in groups] for of in (_mean, min, max)
    )
    return Curve([steps[k] for k in starts], mean, low, high)


def load_figure(history: ExpertHistory) -> Picture | None:
    """Draw by step the fullest expert over the mean and, if ranks share experts, the fullest rank.

    Layers that got no token in any step are left out; without any other there is no figure.
    """
    layers = [layer for layer in history.layers.values() if layer.expert.known()]
    if not layers:
        return None
    names = layer_names([layer.module for layer in layers])
    shared = [
        (name, layer.rank.values)
        for name, layer in zip(names, layers, strict=True)
        if layer.ranks > 1
    ]
    kinds = {
        "expert": [(name, layer.expert.values) for name, layer in zip(names, layers, strict=True)]
    }
    kinds |= {"rank": shared} if shared else {}
    figure = new_figure(0.7 + 2.2 * len(kinds), SMALLER)
    axes = panels(figure, len(kinds), sharex=True)
    for ax, (kind, loads) in zip(axes, kinds.items(), strict=True):
        _curves(ax, history, loads)
        ax.axhline(1.0, color=INK, linewidth=0.8)
        ax.set_ylabel(f"fullest {kind} / mean")
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False
    )
    each = -(-len(history.steps) // MOST_POINTS)
    caption = "Tokens over the mean of all; 1 is even."
    if len(layers) > len(LINES):
        caption += f" The band is from the least to the fullest of {len(layers)} layers."
    if each > 1:
        caption += (
            f" A point is {each:,} steps: their mean, and in a pale band their least and highest."
        )
    said = "; ".join(
        f"fullest {kind} {_ends(curve(history.steps, [v for _, v in loads]))}"
        for kind, loads in kinds.items()
    )
    alt = f"Load of the experts of {len(layers)} layers by step, mean of layers: {said}."
    return picture(figure, "expert_load", "Load of experts by step", alt, caption)


def _curves(ax: Axes, history: ExpertHistory, loads: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Draw a line per layer, or of many layers their mean in the band of all."""
    if len(loads) > len(LINES):
        of_all = [("mean of layers", curve(history.steps, [v for _, v in loads]))]
    else:
        of_all = [(name, curve(history.steps, [values])) for name, values in loads]
    for (name, drawn), (colour, dash) in zip(of_all, LINES):
        marker = "o" if len(drawn.steps) <= 60 else ""
        ax.plot(
            drawn.steps,
            drawn.mean,
            color=colour,
            linestyle=dash,
            linewidth=1.4,
            marker=marker,
            markersize=3,
            label=name,
        )
        if drawn.low != drawn.high:
            ax.plot(drawn.steps, drawn.high, color=colour, linewidth=0.5, alpha=0.6)
            ax.fill_between(
                drawn.steps, drawn.low, drawn.high, color=colour, alpha=0.18, linewidth=0
            )


def _ends(drawn: Curve) -> str:
    known = [v for v in drawn.mean if not isnan(v)]
    return f"from {known[0]:.2f} to {known[-1]:.2f}, at most {max(v for v in drawn.high if not isnan(v)):.2f}"


def layer_names(modules: Sequence[str]) -> list[str]:
    """Return short names: "layer 3" if modules differ in one number alone, else their own."""
    parts = [re.split(r"(\d+)", module) for module in modules]
    varying = {k for k in range(1, min(map(len, parts)), 2) if len({p[k] for p in parts}) > 1}
    rest = {tuple(x for k, x in enumerate(p) if k not in varying) for p in parts}
    if len(rest) > 1 or len(varying) != 1:
        return [*modules]
    (place,) = varying
    return [f"layer {p[place]}" for p in parts]


def token_figure(history: ExpertHistory) -> Picture | None:
    """Draw how full each expert of each layer was in the last steps, with lines between ranks; None without tokens."""
    layers = [layer for layer in history.layers.values() if over_mean(layer.recent_tokens())]
    if not layers:
        return None
    loads = [over_mean(layer.recent_tokens()) for layer in layers]
    experts, most = max(map(len, loads)), max(map(max, loads))
    height = 0.9 + min(
        6.0, max(0.24 if len(layers) <= MOST_NUMBERS else 0.12, 0.6 / len(layers)) * len(layers)
    )
    figure = new_figure(height, WIDTH if experts > MOST_NUMBERS else SMALLER)
    (ax,) = panels(figure, 1)
    ax.grid(False)
    scale = TwoSlopeNorm(1.0, 0.0, max(2.0, most))
    colours = colormaps["PuOr_r"]
    cells = [[*of, *[nan] * (experts - len(of))] for of in loads]
    ax.imshow(cells, aspect="auto", cmap=colours, norm=scale, interpolation="nearest")
    if experts <= MOST_NUMBERS and len(layers) <= MOST_NUMBERS:
        for row, of in enumerate(loads):
            for k, load in enumerate(of):
                ink = ink_on(colours(scale(load))[:3])
                ax.text(
                    k, row, f"{load:.2f}", ha="center", va="center_baseline", fontsize=7, color=ink
                )
    _edges(ax, layers)
    names = layer_names([layer.module for layer in layers])
    each = -(-len(names) // MOST_ROWS)
    ax.set_yticks(range(0, len(names), each), names[::each])
    ax.tick_params(length=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("expert")
    figure.colorbar(
        ScalarMappable(scale, colours), ax=ax, pad=0.01, label="tokens / mean", ticks=MaxNLocator(4)
    )
    steps = min(RECENT, len(history.steps))
    unused = sum(load == 0 for of in loads for load in of)
    alt = (
        f"Tokens of {experts} experts in each of {len(layers)} layers over the mean, last {steps} "
        f"steps: up to {most:.2f}"
    )
    caption = f"In the last {steps} steps; white is even, orange more, purple less."
    caption += " An expert that is full in one step and empty in the next looks even here, and not in the figure above."
    caption += " A line is between ranks." if any(layer.ranks > 1 for layer in layers) else ""
    caption += f" Experts without a token: {unused}." if unused else ""
    return picture(
        figure, "expert_tokens", "Tokens of each expert over the mean", f"{alt}.", caption, marks=0
    )


def _edges(ax: Axes, layers: Sequence[LayerLoad]) -> None:
    """Draw a line between the experts of neighbouring ranks."""
    for row, layer in enumerate(layers):
        size = len(layer.tokens) // layer.ranks
        between = [r * size - 0.5 for r in range(1, layer.ranks)]
        ax.vlines(
            between,
            row - 0.5,
            row + 0.5,
            color=INK,
            linewidth=1.2 if layer.ranks <= FEW_RANKS else 0.3,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
