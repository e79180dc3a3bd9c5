"""The timeline: kinds are told apart by all readers, and a bar has its whole label or none."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from packages.report.tests import samples
from piper_report.facts.phases import kinds
from piper_report.figures import gantt
from piper_report.figures.style import PHASE_COLOURS, house_style

VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""These matrices say what is left of linear red, green and blue (Machado, Oliveira, Fernandes, 2009, severity 1)."""
APART = 15.0
"""The least distance in CIE L*a*b*; 2.3 is just seen side by side."""


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
    r, g, b = (
        min(1.0, max(0.0, sum(a * c for a, c in zip(row, linear)))) for row in VISIONS[vision]
    )
    white = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (*white, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def alike(colours: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return the pairs of names whose colours are too close for a reader."""
    return [
        (a, b, vision)
        for (a, one), (b, other) in combinations(colours.items(), 2)
        for vision in VISIONS
        if math.dist(lab(one, vision), lab(other, vision)) < APART
    ]


def test_every_reader_tells_kinds_apart() -> None:
    colours = {str(phase): colour for phase, colour in PHASE_COLOURS.items()}
    assert alike(colours) == []
    assert ("scatter", "U", "no red") in alike({"scatter": "#2F8F8B", "U": "#808080"}), (
        "a control: teal beside grey"
    )
    assert len(alike({"F": "#D9D9D9", "comm": "#D9D9D9"})) == len(VISIONS), (
        "a control: what the legend had"
    )


def drawn(monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Return the timeline of a plan with 16 microbatches, predicted and measured, laid out."""
    found: list[Figure] = []
    monkeypatch.setattr(gantt, "picture", lambda figure, *_, **__: found.append(figure))
    plan = samples.plan_of(microbatches=16)
    trace = samples.simulate(
        plan, "h100x8", costs=samples.comm_costs(plan), tokens_per_row=64
    ).trace
    with house_style():
        gantt.timelines([trace, samples.executed(trace)], plan)
        FigureCanvasAgg(found[0]).draw()
    return found[0]


def room(text: Text) -> float:
    """Return the pixels of the bar below a text, less those of the text."""
    assert text.axes is not None
    at = text.get_position()
    bars = [
        path
        for c in text.axes.collections
        if isinstance(c, PolyCollection)
        for path in c.get_paths()
    ]
    (bar,) = (b.get_extents(text.axes.transData) for b in bars if b.get_extents().contains(*at))
    return float(bar.width - text.get_window_extent().width)


def test_a_bar_has_its_whole_label_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {k.label for k in kinds(samples.simulation().trace, samples.plan()).values()}
    assert {"F0", "B2", "U"} <= labels
    texts = [t for ax in drawn(monkeypatch).axes for t in ax.texts]
    assert len(texts) > 30 and min(map(room, texts)) >= 0
    assert {t.get_text()[0] for t in texts if t.get_text()[-1] in "0123456789"} <= {*"FB0123456789"}
    monkeypatch.setattr(gantt, "LETTER", 2.0)
    wider = [t for ax in drawn(monkeypatch).axes for t in ax.texts]
    assert len(wider) > len(texts) and min(map(room, wider)) < 0, (
        "a control: labels that do not care for room"
    )


def test_the_legend_has_the_colour_of_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch)
    (legend,) = figure.legends
    shown = {
        text.get_text(): patch.get_facecolor()[:3]
        for text, patch in zip(legend.get_texts(), legend.get_patches())
    }
    assert shown["forward"] == to_rgb(PHASE_COLOURS["F"]) and shown["communication"] == to_rgb(
        PHASE_COLOURS["comm"]
    )
    faces = {
        tuple(map(float, face[:3]))
        for ax in figure.axes
        for c in ax.collections
        for face in c.get_facecolor()
    }
    assert faces == {*shown.values(), (1.0, 1.0, 1.0)}, (
        "and white where a rank waits for the other side"
    )
