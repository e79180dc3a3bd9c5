"""Hold colours and fonts, and make figures with matplotlib's Figure alone, without pyplot and its global state.

Colours are Okabe and Ito's (Color Universal Design, 2008) and some more, told apart by colour-blind readers too.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from piper_ir.plan.phases import Phase

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
)
INK, GREY, PALE = "#222222", "#808080", "#D9D9D9"
NAVY, VIOLET, BROWN, MINT, DARK, LIGHT = (
    "#1B2A5C",
    "#7A3FD0",
    "#8C5A2B",
    "#A6E8A0",
    "#4E4E4E",
    "#CECECE",
)
PHASE_COLOURS: Mapping[Phase, str] = {
    "F": SKY, "B": ORANGE, "R": YELLOW, "I": GREEN, "W": PURPLE, "pair": MINT, "U": DARK, "fold": BROWN, "other": LIGHT,
    "gather": NAVY, "scatter": VIOLET, "comm": BLUE, "batch": RED,
}  # fmt: skip
"""The colours of phases: any two are told apart also by readers who see no red, no green or no blue."""
CATEGORIES = {
    "param": BLUE, "master": BROWN, "grad": SKY, "optim": GREEN, "buffer": GREY, "gathered": NAVY, "reduced": VIOLET,
    "activation": ORANGE, "gradient": RED, "batch": PURPLE, "scalar": PALE, "workspace": YELLOW,
}  # fmt: skip
"""The colours of memory by `piper_ir.plan.plan.Category`, from the bottom of the stack upwards."""
WIDTH = 11.0
"""The inches of a figure that is as wide as the page."""
SMALLER = 8.0
"""The inches of a plain plot."""
SHORTEST = 1e-6
"""The seconds of an axis of time on which nothing takes any."""
DPI = 110
READABLE = 0.68
"""The part of its full width down to which the letters of a figure can be read."""
MOST_SVG = 220_000
"""The most bytes of a vector drawing; a larger one goes into the page as pixels."""
MOST_MARKS = 2500
"""The most bars or points of a vector drawing; with more, none is tried."""
FONTS: Mapping[Any, Any] = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.labelsize": 9.0, "legend.fontsize": 8.0, "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0, "hatch.linewidth": 0.6, "svg.hashsalt": "piper", "axes.edgecolor": GREY, "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """Hold a rendered figure.

    Attributes:
        alt: a description for readers who cannot see it.
        caption: the text below it.
        png: the content of its file.
        uri: the data that the page embeds.
        least: the least width in pixels; a narrow screen scrolls the figure rather than shrinks it further.
        most: the largest width in pixels.
    """

    name: str
    title: str
    alt: str
    caption: str
    png: bytes
    uri: str
    least: int
    most: int


@contextmanager
def house_style() -> Iterator[None]:
    """Make and render figures in the report's style, and restore the user's matplotlib settings."""
    with rc_context(dict(FONTS)):
        yield


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure; sizes are in inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def panels(
    figure: Figure, rows: int, *, sharex: bool = False, heights: Sequence[float] | None = None
) -> list[Axes]:
    """Return axes one above the other, without a box and on a pale grid; `heights` are relative (default: equal)."""
    axes = [
        ax
        for (ax,) in figure.subplots(rows, 1, squeeze=False, sharex=sharex, height_ratios=heights)
    ]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#EBEBEB", linewidth=0.6)
        ax.set_axisbelow(True)
    return axes


def one_panel(height: float, x: str, y: str, *, numbered: bool = True) -> tuple[Figure, Axes]:
    """Make a smaller figure with one pair of axes of these labels; `numbered` axes tick at whole numbers only."""
    figure = new_figure(height, SMALLER)
    (ax,) = panels(figure, 1)
    ax.set(xlabel=x, ylabel=y)
    if numbered:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, ax


def picture(
    figure: Figure,
    name: str,
    title: str,
    alt: str,
    caption: str = "",
    *,
    least: int = 0,
    marks: int = 0,
) -> Picture:
    """Render a figure: PNG for its file, and for the page SVG, or the PNG if that would be too large.

    `marks` is the number of bars and points drawn.
    """
    png = rendered(figure, "png")
    figure.set_layout_engine("none")  # what the first rendering has laid out stays
    svg = rendered(figure, "svg") if marks <= MOST_MARKS else b""
    kind, data = ("svg+xml", svg) if 0 < len(svg) <= MOST_SVG else ("png", png)
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    most = round(figure.get_figwidth() * DPI)
    return Picture(name, title, alt, caption, png, uri, least or round(most * READABLE), most)


def rendered(figure: Figure, kind: str) -> bytes:
    """Return the file's content; the same figure gives the same bytes."""
    buffer = BytesIO()
    # `savefig` would draw everything once more, only for its layout, which drawing settles as well
    if kind == "svg":
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]  # matplotlib has no types here
    else:
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})  # type: ignore[no-untyped-call]  # likewise
    return buffer.getvalue()


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """Return a colour mixed with white; strength 1 leaves it as it is."""
    r, g, b = (1 - strength * (1 - x) for x in to_rgb(colour))
    return r, g, b


def ink_on(colour: tuple[float, float, float] | str) -> str:
    """Return black or white, whichever is read better on a colour (relative luminance, WCAG 2)."""
    r, g, b = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour))
    return INK if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 else "white"


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """Hold a unit for an axis of times: multiply seconds by `scale`."""

    name: str
    scale: float


@dataclass(frozen=True, slots=True)
class SizeUnit:
    """Hold a unit for an axis of sizes: divide bytes by `scale`."""

    name: str
    scale: int


def size_unit(most: int) -> SizeUnit:
    """Return the unit in which the largest size is 4 or more, if there is one."""
    return next(
        (u for u in (SizeUnit("GiB", 1 << 30), SizeUnit("MiB", 1 << 20)) if most >= 4 * u.scale),
        SizeUnit("KiB", 1 << 10),
    )


def time_unit(most: float) -> TimeUnit:
    """Return the unit in which the longest time is 1 or more, if there is one."""
    if most >= 1:
        return TimeUnit("s", 1.0)
    return TimeUnit("ms", 1e3) if most >= 1e-3 else TimeUnit("us", 1e6)
