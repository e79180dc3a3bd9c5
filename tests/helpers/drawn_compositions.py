"""Random compositions of the long parity suite: a row of any values that may meet, and fields beside its factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from tests.helpers import composition_cover as covers
from tests.helpers import transformers
from tests.helpers.compositions import MIXED, PIPELINES, Composition, captured
from tests.helpers.cover import Row


def wide_row(seed: int) -> Row:
    """Return the row of a number, of any values that may meet."""
    return covers.WIDE.drawn(Random(seed))


def _dropless(model: str) -> bool:
    """Return whether a model has a dropless mixture; it is then one of tests/helpers/transformers.py, or steered."""
    if model.startswith("any "):
        return transformers.drawn(int(model.removeprefix("any ")))[0].mixture
    return model in ("steered", "mixture", "shared_experts", "biased_experts")


TOKENS: Mapping[str, dict[str, Any]] = {
    "tp": dict(tp=2, stream="tokens"),
    "cp": dict(cp=2, order="blocks"),
}
"""How devices have tokens of their own along the axes that cut experts, or have experts of their own."""


def shared_experts(row: Row, rng: Random) -> dict[str, Any]:
    """Return the fields by which devices share a dropless mixture; none where the row has no room.

    They cut each expert along one of `TOKENS`, or along two of the replicas ("etp"); or they have experts of their own
    along one of `TOKENS`, too.
    """
    mixture = row["model"] if row["model"] in covers.MIXTURES else "mixture"
    if not _dropless(row["model"]) or row["sharing"]:
        return {}
    if not covers.WIDE.allows({**row, "model": mixture, "ep": 2}, "ep"):
        return {}
    most = 8 if row["launcher"] == "inline" else 4
    room = 2 * row["pp"] * row["dp"] <= most
    ways = [(way, axis) for way in ("hidden", "folded") for axis in TOKENS] * room
    ways += [("hidden", "etp")] * (row["dp"] == 4)
    if row["optimizer"] in covers.OF_WHOLE:  # they take whole matrices
        ways = [("folded", ""), *[("folded", "cp")] * room]
    if not ways:
        return {}
    way, axis = rng.choice(ways)
    exact = {} if row["precision"] == "float64" else {"optimizer": "sgd"}
    return {"ep": 2, way: axis, **TOKENS.get(axis, {}), **exact}


def drawn(seed: int) -> tuple[Composition, str]:
    """Return the composition of a number, with its launcher."""
    row, rng = wide_row(seed), Random(seed)
    made = covers.composition(row, seed)
    if rng.random() < 0.75:
        made = replace(made, **shared_experts(row, rng))
    more: dict[str, Any] = dict(
        tiles=2 if row["model"] in covers.TILED and rng.random() < 0.3 else 1,
        waits="all" if rng.random() < 0.25 else "",
        ahead=rng.randrange(3),
        scaled=rng.random() < 0.2 and not captured(made.model, made.precision).auxiliary,
        over_cp=made.cp > 1 and made.zero > 0 and rng.random() < 0.5,
        beside=made.ep > 1 and made.model == "shared_experts" and rng.random() < 0.5,
        sized=_by_recipe(made) and rng.random() < 0.3,
    )
    if rng.random() < 0.15:
        more["hosted"] = rng.choice(("states", "optim") if made.zero in (0, 3) else ("optim",))
    if len(made.at) > 1 and made.model == "deep" and rng.random() < 0.5:
        more["at"] = (made.at[0], *made.at[:1], *made.at[2:])  # stage 1 is empty
    if _dropless(made.model) and (made.clip or more["scaled"]):  # norms over the same axes for all
        more["over_cp"] = False
    if made.precision in MIXED:  # steps of Adam take the rounding of a small gradient for its sign
        more["optimizer"] = "sgd"
    if _orders_messages(made) and rng.random() < 0.6:
        more["messages"] = rng.choice(("reduce", *["gather"] * made.zero))
        more["bucket_mb"] = 1e-4
    return with_axes(replace(made, **more), rng), row["launcher"]


def _by_recipe(c: Composition) -> bool:
    return c.schedule in PIPELINES or (
        c.pp > 1
        and c.schedule in covers.BASIC[1:3]
        and (c.placement, c.backward) == ("recipe", "whole")
    )


def _orders_messages(c: Composition) -> bool:
    """Return whether a device has several layers, whose gradients or parameters it reduces or gathers once."""
    layers = ("deep", "gpt_untied", "llama")
    return c.model in layers and c.pp == 1 < c.dp and c.zero < 2 and c.rep == 1


def with_axes(c: Composition, rng: Random) -> Composition:
    """Return a composition with, in some cases, axes of its mesh in an order of their own."""
    axes = [axis for axis in ("pp", "dp", "tp", "cp", "ep") if getattr(c, axis) > 1]
    if c.ep > 1 and c.dp // c.ep // (2 if c.hidden == "etp" else 1) == 1:
        axes.remove("dp")
    rng.shuffle(axes)
    return replace(c, axes=tuple(axes)) if len(axes) > 1 and rng.random() < 0.3 else c
