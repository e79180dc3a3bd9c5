"""Random compositions of the parity suite: a row of any values that may meet, and fields beside its factors.

Those of `make test` draw the same, but for the captures: they take these and their forms from few rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import count, islice
from random import Random
from typing import Any

from tests.helpers import composition_cover as covers
from tests.helpers import transformers
from tests.helpers.compositions import FLOAT8, MIXED, PIPELINES, Composition, captured, etp_of
from tests.helpers.cover import Row

FORM = ("model", "precision", "sharing", "ep", "keep", "rows")
"""The factors that a capture, or its form under directives, depends on."""
PLAIN: Row = dict(model="gpt", precision="float64", sharing="", ep=1, keep="all", rows=2)
DROPLESS = ("steered", "mixture", "shared_experts", "biased_experts")
FORMS: tuple[Row, ...] = (
    *({**PLAIN, "model": name} for name in ("mtp", "any 1")),
    *(
        {**PLAIN, "model": name, "ep": 2}
        for name in (*DROPLESS, "shared_experts", "biased_experts")
    ),
    *[{**PLAIN, "model": "llama", "keep": covers.PARTS}] * 2,
    *({**PLAIN, "precision": name} for name in ("narrow sums", "narrow messages")),
    *[{**PLAIN, "precision": "float16"}] * 2,
    *[{**PLAIN, "model": "quantised", "precision": "float8"}] * 2,
)
"""The captures and forms of `make test` that the rows of its cover lack, some of them twice."""
WAYS = {
    "steered": (("folded", "cp"),),
    "mixture": (("hidden", "tp"), ("hidden", "tp+cp")),
    "shared_experts": (("folded", "tp"),),
    "biased_experts": (("hidden", "cp"), ("hidden", "cp+etp")),
}
"""How devices share each dropless mixture in `make test`, where there is room."""
MOST = 8
"""The microbatches of all devices in `make test`, beside those by which a mixture has more devices."""

COSTLY = ("steered", "mixture", "shared_experts", "biased_experts", "quantised")
"""The models whose captures take the longest; `make test` has two random rows of each."""
NEEDED = (30, 69)
"""Numbers of rows that have the values of fields which the other random rows of `make test` lack."""
FIRST, NUMBERS = 194, 60
"""The number from which on `make test` takes random rows, and how many it takes in all."""


@cache
def _quick_forms() -> list[Row]:
    """Return the forms of the rows of the cover that `make test` runs, and `FORMS` half as often."""
    rows = [{name: covers.rows()[k][name] for name in FORM} for k in sorted(covers.quick())]
    return [*rows, *FORMS * (len(rows) // len(FORMS) // 2)]


def wide_row(seed: int, quick: bool = False) -> Row:
    """Return the row of a number, of any values that may meet; one in ten has a mixture that devices may share."""
    rng = Random(seed)
    if quick:
        row = covers.WIDE.drawn(rng, _quick_forms())
        while row["microbatches"] * covers.devices_of(row) > MOST:
            row = covers.WIDE.drawn(rng, _quick_forms())
        return {**row, "launcher": rng.choice((row["launcher"], *["inline"] * 3))}
    few = [{"model": name, "sharing": "", "ep": 2} for name in DROPLESS]
    return covers.WIDE.drawn(rng, few if rng.random() < 0.1 else ({},))


def _dropless(model: str) -> bool:
    """Return whether a model has a dropless mixture; it is then one of tests/helpers/transformers.py, or steered."""
    if model.startswith("any "):
        return transformers.drawn(int(model.removeprefix("any ")))[0].mixture
    return model in DROPLESS


TOKENS: Mapping[str, dict[str, Any]] = {
    "tp": dict(tp=2, stream="tokens"),
    "cp": dict(cp=2, order="blocks"),
}
"""How devices have tokens of their own along the axes that cut experts, or have experts of their own."""


def shared_experts(row: Row, rng: Random, quick: bool = False) -> dict[str, Any]:
    """Return the fields by which devices share a dropless mixture; none where the row has no room.

    They cut each expert along one of `TOKENS`, along two of the replicas ("etp"), or along two of these axes; or they
    have experts of their own along one of `TOKENS`, too.
    """
    mixture = row["model"] if row["model"] in covers.MIXTURES else "mixture"
    if not _dropless(row["model"]) or row["sharing"]:
        return {}
    if not covers.WIDE.allows({**row, "model": mixture, "ep": 2}, "ep"):
        return {}
    most = 8 if row["launcher"] == "inline" else 4
    room = 2 * row["pp"] * row["dp"] <= most
    ways = [(way, axis) for way in ("hidden", "folded") for axis in TOKENS] * room
    if row["dp"] == 4:
        ways += [("hidden", "etp"), *[("hidden", f"{axis}+etp") for axis in TOKENS] * 3 * room]
    ways += [("hidden", "tp+cp")] * 3 * (4 * row["pp"] * row["dp"] <= most)
    if row["optimizer"] in covers.OF_WHOLE:  # they take whole matrices
        ways = [("folded", ""), *[("folded", "cp")] * room]
    if quick:
        ways = [way for way in ways if way in (*WAYS.get(row["model"], ()), ("hidden", "etp"))]
    if not ways:
        return {}
    way, axes = rng.choice(ways)
    exact = {} if row["precision"] == "float64" else {"optimizer": "sgd"}
    tokens = [TOKENS[axis] for axis in axes.split("+") if axis in TOKENS]
    return {"ep": 2, way: axes, **dict(item for of in tokens for item in of.items()), **exact}


def drawn(seed: int, quick: bool = False) -> tuple[Composition, str]:
    """Return the composition of a number, with its launcher."""
    row, rng = wide_row(seed, quick), Random(seed)
    made = covers.composition(row, seed)
    if made.precision == "float8":
        made = replace(made, precision=list(FLOAT8)[seed % len(FLOAT8)])
    if quick or rng.random() < 0.75:
        made = replace(made, **shared_experts(row, rng, quick))
    more: dict[str, Any] = dict(
        tiles=2 if row["model"] in covers.TILED and rng.random() < 0.3 else 1,
        waits=rng.choice(_waiting(made)) if rng.random() < 0.25 else "",
        ahead=rng.randrange(3),
        scaled=rng.random() < 0.2 and not captured(made.model, made.precision).auxiliary,
        over_cp=made.cp > 1 and made.zero > 0 and rng.random() < 0.5,
        beside=made.ep > 1 and made.model == "shared_experts" and rng.random() < 0.5,
        sized=_by_recipe(made) and rng.random() < 0.3,
    )
    if rng.random() < 0.15:
        more["hosted"] = rng.choice(("states", "optim") if made.zero in (0, 3) else ("optim",))
    if len(made.at) > 1 and made.model in covers.TILED and rng.random() < 0.5:
        more["at"] = (made.at[0], *made.at[:1], *made.at[2:])  # stage 1 is empty
    if made.precision in MIXED:  # steps of Adam take the rounding of a small gradient for its sign
        more["optimizer"] = "sgd"
    if made.precision == "float16":  # which has a scale of its own
        more["scaled"] = False
    if made.dp > 1 and not made.zero and rng.random() < 0.3:
        more["overlap_states"] = False
    if made.keep != "all":
        more |= _made_again(made, rng)
    if _orders_messages(made) and rng.random() < 0.8:
        more["messages"] = rng.choice(("reduce", *["gather"] * 2 * made.zero))
        more["bucket_mb"] = 1e-4
    if _orders_sends(made) and rng.random() < 0.5:
        more["messages"] = "send"
    return with_axes(replace(made, **more), rng), row["launcher"]


def _waiting(c: Composition) -> tuple[str, ...]:
    """Return the kinds of tensors that a backward has: a layer that is made again reads its inputs."""
    return "all", {"inputs": "inputs", "all": "saved"}.get(c.keep, "all")


def _made_again(c: Composition, rng: Random) -> dict[str, Any]:
    """Return by which nodes and for how many layers tensors are made again."""
    if c.keep == covers.PARTS:
        return dict(keep=rng.choice((c.keep, "outputs@*norm*")), apart=rng.random() < 0.3)
    grouped = c.pp == 1 and c.model in ("gpt", "deep", "llama") and rng.random() < 0.5
    return dict(group=2) if grouped else dict(apart=rng.random() < 0.3)


def _by_recipe(c: Composition) -> bool:
    return c.schedule in PIPELINES or (
        c.pp > 1
        and c.schedule in covers.BASIC[1:3]
        and (c.placement, c.backward) == ("recipe", "whole")
    )


def _orders_messages(c: Composition) -> bool:
    """Return whether a device has several layers, whose gradients or parameters it reduces or gathers once."""
    layers = ("deep", "gpt", "gpt_untied", "llama")
    return c.model in layers and c.pp == 1 < c.dp and c.zero < 2 and c.rep == 1


SENDING = ("gpipe", "1f1b", "default", "looped_bfs", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
"""The schedules whose devices run two forwards of a stage before what needs the first one elsewhere."""


def _orders_sends(c: Composition) -> bool:
    """Return whether values of a stage may leave in another order than they are made in."""
    if c.schedule not in SENDING or not c.pp > 1 < c.microbatches:
        return False
    recipe = (c.placement, c.backward, c.overlap) == ("recipe", "whole", False)
    return recipe and covers.has_stages(c.model, c.schedule, c.pp)


def with_axes(c: Composition, rng: Random) -> Composition:
    """Return a composition with, in some cases, axes of its mesh in an order of their own."""
    axes = [axis for axis in ("pp", "dp", "tp", "cp", "ep") if getattr(c, axis) > 1]
    if c.ep > 1 and c.dp // c.ep // etp_of(c) == 1:
        axes.remove("dp")
    rng.shuffle(axes)
    return replace(c, axes=tuple(axes)) if len(axes) > 1 and rng.random() < 0.3 else c


def _numbers() -> Iterator[int]:
    """Generate the numbers of `make test`: all from FIRST on, but for further rows of COSTLY models."""
    yield from NEEDED
    rows = Counter[str]()
    for seed in count(FIRST):
        model = wide_row(seed, quick=True)["model"]
        rows[model] += 1
        if model not in COSTLY or rows[model] <= 2:
            yield seed


QUICK = tuple(islice(_numbers(), NUMBERS))
"""The numbers of the random rows of `make test`."""
