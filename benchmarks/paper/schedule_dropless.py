"""Say what dropless experts cost the paper's schedules of mixtures, and why, for docs/paper.md."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from benchmarks.paper.page import items, markdown
from benchmarks.paper.schedule_changes import CHANGES, MEAN, UNBOUND, Changed
from benchmarks.paper.schedule_lines import POINTS, RATIOS, Line
from piper_ir.tools import time_text

HEADER = (
    "model",
    "experts",
    "schedule",
    "step",
    "fullest device computes",
    "of it exchanges",
    "it pauses",
)
KINDS = (CHANGES[0], UNBOUND, MEAN)
"""The experts with places, and the dropless ones by their bound."""
NAMES = ("with places", "dropless, bound 1.25", "dropless, bound 1.0")
TEXT = """\
**Dropless experts.** The paper trains without a bound on the tokens of an expert. In our dropless plans devices exchange
tokens inside of steps, on the stream that computes ([experts.md](experts.md)): nothing hides these
exchanges under any schedule, DualPipeV included, and they count as compute. With places they are instructions, which
computing can hide. A device has places for `bound` times the rows that come on average: its products are of the rows,
its element-wise work and its messages of the places. A pause of the fullest device is all that another schedule can
win. Bound 1.0 is a best case: tokens of a router that prefers no expert scatter, so that each step needs a further
round there.
"""


def dropless_text(found: Sequence[Changed]) -> str:
    """Return what the rows of dropless experts say, and where their time goes; "" where rows of `KINDS` are missing."""
    of = {x.change: x for x in found}
    rows = [x for x in found if dict(x.change.fields).get("bound") is not None]
    if not all(change in of for change in KINDS):
        return ""
    kinds = [of[change] for change in KINDS]
    models = dict.fromkeys(x.setup.model for x in kinds[0].lines)
    table = markdown(HEADER, [row for model in models for row in _cells(kinds, model)])
    reasons = [reason(*[_base(x, model) for x in kinds]) for model in models]
    return "\n\n".join(
        [_filled(TEXT), items([judged(of[UNBOUND]), counted(rows)]), table, items(reasons)]
    )


def judged(x: Changed) -> str:
    """Return, as an item of a list, how far the ratios of a row are from the published ones."""
    ratios = zip(RATIOS, x.ratios, x.apart, strict=True)
    shown = [f"{p.model} {p.faster} {r:+.1f} % ({_points(apart)})" for p, r, apart in ratios]
    near = sum(apart <= POINTS for apart in x.apart)
    return (
        f"- {x.change.what}: {', '.join(shown)}. {near} of {len(shown)} are within {POINTS:g} "
        f"points of the paper."
    )


def counted(found: Sequence[Changed]) -> str:
    """Return, as an item of a list, how many rows of dropless experts have all ratios as published, and the nearest
    row."""
    near, best = sum(max(x.apart) <= POINTS for x in found), min(found, key=lambda x: max(x.apart))
    nearest = f"nearest is '{best.change.what}', {max(best.apart):.1f} points apart at most"
    return (
        f"- All three ratios are within {POINTS:g} points in {near} of {len(found)} rows of "
        f"dropless experts; {nearest}."
    )


def _points(apart: float) -> str:
    return f"{apart:.1f} points apart" if apart <= POINTS else f"**{apart:.1f} points apart**"


def _filled(text: str) -> str:
    return fill(text.replace("\n", " "), 118)


def _than(model: str) -> str:
    """Return the schedule that DualPipeV is compared with."""
    return next(p.than for p in RATIOS if (p.model, p.faster) == (model, "DualPipeV"))


def _line(x: Changed, model: str, schedule: str) -> Line:
    return next(line for line in x.lines if (line.setup.model, line.schedule) == (model, schedule))


def _base(x: Changed, model: str) -> Line:
    return _line(x, model, _than(model))


def _pause(x: Line) -> float:
    return x.found.step_s - x.fullest_s


def _cells(kinds: Sequence[Changed], model: str) -> list[tuple[str, ...]]:
    out = []
    for name, kind in zip(NAMES, kinds, strict=True):
        for x in (_base(kind, model), _line(kind, model, "DualPipeV")):
            sent = time_text(x.found.inside_comm_s) if x.found.inside_comm_s else "-"
            out.append(
                (
                    model,
                    name,
                    x.schedule,
                    time_text(x.found.step_s),
                    time_text(x.fullest_s),
                    sent,
                    time_text(_pause(x)),
                )
            )
    return out


def reason(places: Line, dropless: Line, mean: Line) -> str:
    """Return, as an item of a list, of what the difference of the fullest devices consists."""
    own = [x.fullest_s - x.found.inside_comm_s for x in (places, dropless, mean)]
    counting = dropless.counting_s - places.counting_s
    parts = (dropless.found.inside_comm_s, own[1] - own[2], counting, own[2] - own[0] - counting)
    sent, more, counted_up, rest = (f"{1e3 * s:+.1f} ms" for s in parts)
    return (
        f"- {places.setup.model}, {places.schedule}: the fullest device computes "
        f"{time_text(dropless.fullest_s)} and "
        f"not "
        f"{time_text(places.fullest_s)}: exchanges {sent}, 1.25 x as many places {more}, no "
        f"counting of choices into "
        f"places {counted_up}, all else {rest}. It pauses {time_text(_pause(dropless))} and not "
        f"{time_text(_pause(places))}."
    )
