"""The closed forms of the recipes: for each, numbers that lie in its domain, and what the numbers must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from piper_compiler import Directive, recipes


@dataclass(frozen=True)
class Case:
    """p devices, m microbatches, v chunks per device, group size g; seconds of F, I, W and (None: F + B) O, all
    integers."""

    p: int
    m: int
    F: int
    I: int  # noqa: E741 - the field's name for the input gradient
    W: int
    v: int = 1
    g: int = 0
    overlap: int | None = None

    @property
    def B(self) -> int:
        return self.I + self.W

    @property
    def O(self) -> int:  # noqa: E743 - the field's name
        return self.F + self.B if self.overlap is None else self.overlap

    @property
    def times(self) -> dict[str, float]:
        return {"F": self.F, "I": self.I, "W": self.W}


@dataclass(frozen=True)
class Form:
    """`bubble`: the global one, of the device with most idle; `span`: the span bubble (None: no form is known); `peak`:
    units on device r. `cases`: the domain. `stages`: of p devices and v chunks."""

    make: Callable[..., tuple[Directive, ...]]
    cases: st.SearchStrategy[Case]
    bubble: Callable[[Case], int]
    peak: Callable[[Case, int], int]
    span: Callable[[Case], int] | None = None
    stages: Callable[[Case], int] = lambda c: c.p * c.v

    def directives(self, c: Case) -> tuple[Directive, ...]:
        more: dict[str, Any] = {"chunks": c.v} if self.make in CHUNKED else {}
        if c.g:
            more["group"] = c.g
        return self.make(pp=c.p, microbatches=c.m, **more)


CHUNKED = (recipes.interleaved, recipes.looped_bfs, recipes.interleaved_zb)
SECONDS = st.integers(1, 9)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    m: Callable[[int], int] = lambda p: 1,
    times: str = "any",
    chunks: tuple[int, int] = (1, 1),
    multiple: bool = False,
    group: bool = False,
    even: bool = False,
) -> Case:
    """p in 2..12 (`even`: even), at least m(p) microbatches (`multiple`: a multiple of the group, else of p); `times`:
    "any", "zb" (W <= F, W <= I), "unit" (F = I = W), "long I" (I >= F, I >= W), "pairs" (F = I, W <= F, O between F + W
    and F + B)."""
    p = draw(st.integers(1, 6)) * 2 if even else draw(st.integers(2, 12))
    v = draw(st.integers(*chunks))
    g = p + draw(st.integers(0, 3)) if group else 0
    fewest = m(p)
    count = draw(st.integers(1, 3)) * (g or p) if multiple else fewest + draw(st.integers(0, 2 * p))
    if even:
        count += count % 2
    f, i, w = draw(SECONDS), draw(SECONDS), draw(st.integers(0, 9))
    overlap = None
    match times:
        case "zb":
            w = min(f, i, w)
        case "unit":
            i = w = f
        case "long I":
            i = max(f, i, w)
        case "pairs":
            i, w = f, min(f, w)
            overlap = draw(st.none() | st.integers(f + w, 2 * f + w))
    return Case(p, count, f, i, w, v, g, overlap)


def _v(c: Case) -> int:
    return 2 * c.p


FORMS: dict[str, Form] = {
    "gpipe": Form(
        recipes.gpipe,
        cases(),
        lambda c: (c.p - 1) * (c.F + c.B),
        lambda c, r: c.m,
        lambda c: (c.p - 1) * (c.F + c.B),
    ),
    "one_f_one_b": Form(
        recipes.one_f_one_b,
        cases(),
        lambda c: (c.p - 1) * (c.F + c.B),
        lambda c, r: min(c.m, c.p - r),
        lambda c: (c.p - 1) * (c.F + c.B),
    ),
    "interleaved": Form(
        recipes.interleaved,
        cases(chunks=(1, 3), multiple=True, group=True),
        lambda c: (c.p - 1) * (c.F + c.B),
        lambda c, r: min(c.v * c.m, 2 * (c.p - 1 - r) + (c.v - 1) * c.g + 1),
        lambda c: (c.p - 1) * (c.F + c.B),
    ),
    "looped_bfs": Form(
        recipes.looped_bfs,
        cases(chunks=(1, 3), m=lambda p: p),
        lambda c: (c.p - 1) * (c.F + c.B),
        lambda c, r: c.v * c.m,
        lambda c: (c.p - 1) * (c.F + c.B),
    ),
    "zb_h1": Form(
        recipes.zb_h1,
        cases(m=lambda p: p, times="zb"),
        lambda c: (c.p - 1) * (c.F + c.I - c.W),
        lambda c, r: c.p,
        lambda c: (c.p - 1) * (c.F + c.I - c.W),
    ),
    "zb_h2": Form(
        recipes.zb_h2,
        cases(m=lambda p: 2 * p - 1, times="zb"),
        lambda c: (c.p - 1) * max(c.F, c.F + c.I - 2 * c.W),
        lambda c, r: 2 * c.p - 1,
        lambda c: (c.p - 1) * (c.F + c.I - 2 * c.W),
    ),
    "interleaved_zb": Form(
        recipes.interleaved_zb,
        cases(chunks=(1, 3), multiple=True, times="zb"),
        lambda c: (c.p - 1) * (c.F + c.I - c.W),
        lambda c, r: c.p * c.v,
        lambda c: (c.p - 1) * (c.F + c.I - c.W),
    ),
    "zbv, F = I = W": Form(
        recipes.zbv,
        cases(m=lambda p: 2 * p - 1, times="unit"),
        lambda c: (c.p - 1) * c.F,
        lambda c, r: 2 * c.p,
        lambda c: 0,
        _v,
    ),
    "zbv": Form(
        recipes.zbv,
        cases(m=lambda p: 2 * p - 1, times="long I"),
        lambda c: (c.p - 1) * max(c.I, 2 * (c.I - c.W)),
        lambda c, r: 2 * c.p,
        None,
        _v,
    ),
    "dualpipe_v": Form(
        recipes.dualpipe_v,
        cases(m=lambda p: 2 * p, times="pairs"),
        lambda c: (c.p - 1) * (c.O + c.B - 3 * c.W),
        lambda c, r: 2 * c.p + 1,
        None,
        _v,
    ),
    "dualpipe": Form(
        recipes.dualpipe,
        cases(m=lambda p: 2 * p, times="pairs", even=True),
        lambda c: (c.p // 2 - 1) * (c.O + c.B - 3 * c.W),
        lambda c, r: c.p + 1,
        None,
    ),
}
