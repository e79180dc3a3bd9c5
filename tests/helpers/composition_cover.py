"""The compositions of the parity suite: their factors, which values of them may meet, and a pairwise cover.

`QUICK` is the product of `cover`, of whose rows `quick` takes some for `make test`; `WIDE` is that of `make test-long`,
of which tests/helpers/drawn_compositions.py draws any. What costs time is to capture a model, under a precision, a
policy of recomputation or shared by devices: so quick rows have each of these with a few models.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

from tests.helpers import models, transformers
from tests.helpers.compositions import PIPELINES, Composition, chunks_of
from tests.helpers.cover import Product, Row, Rule, part

SIZES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "gpt": (5, (1, 2, 3)),
    "gpt_untied": (5, (1, 2, 3)),
    "gpt_dropout": (5, (1, 2, 3)),
    "gpt_refilled": (6, (1, 2, 3, 4)),
    "llama": (4, (1, 2)),
    "skip": (4, (4,)),
    "branches": (4, ()),
    "slices": (6, (3,)),
    "frozen": (5, (1, 2)),
    "keywords": (4, (1, 2)),
    "buffers": (4, ()),
    "counter": (6, (1, 2, 3)),
    "custom_op": (3, (1, 2)),
    "in_place": (3, (3,)),
    "opaque": (7, (1, 2)),
    "deep": (10, (1, 2, 3, 4, 5, 6, 7, 8)),
    "moe": (4, (1, 2)),
    "steered": (4, (1, 2)),
    "sequential": (3, (1, 2, 4)),
    "dict": (6, (1, 2, 3, 4)),
    "pairs": (6, (1, 2, 3, 4)),
    "mixture": (6, (1, 2, 3, 4)),
    "own_loss": (6, (1, 2, 3, 4)),
}
"""The blocks of each model that can stand on devices of their own, and the numbers of stages in which recipes cut
it. nn.Sequential is one block until a recipe cuts it."""
DECODERS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "shared_experts": (4, (1, 2)),
    "biased_experts": (4, (1, 2)),
    "mtp": (5, (1, 2, 3)),
    "quantised": (4, (1, 2)),
}
"""The same for models that only random rows have."""
LAYERS = {
    "gpt": 3,
    "gpt_untied": 3,
    "gpt_dropout": 3,
    "deep": 8,
    "llama": 2,
    "dict": 4,
    "pairs": 4,
    "mixture": 4,
}
"""The layers of the models that stages of other sizes are tried with."""
STATEFUL = ("buffers", "counter")
MIXTURES = ("moe", "steered", "mixture", "shared_experts", "biased_experts")
EVERY_SCHEDULE = (
    "gpt",
    "skip",
    "keywords",
    "gpt_dropout",
    "frozen",
    "opaque",
    "llama",
    "moe",
    "deep",
)
"""Tied weights, values that skip stages, masked losses, dropout, frozen and opaque parts, and other families; all
models have the orders of BASIC."""
BASIC = ("default", "gpipe", "1f1b", "random")
SOME = (*BASIC, "zbv", "interleaved")
WRITTEN: Mapping[str, dict[str, Any]] = {
    "": {},
    "chunks, split": dict(placement="chunks", backward="split"),
    "v, split, overlap": dict(placement="v", backward="split", overlap=True),
    "v, mixed": dict(placement="v", backward="mixed"),
    "shared": dict(placement="shared"),
    "shared, mixed, overlap": dict(placement="shared", backward="mixed", overlap=True),
    "random, split, overlap": dict(placement="random", backward="split", overlap=True),
    "random": dict(placement="random"),
    "chunks, mixed, overlap": dict(placement="chunks", backward="mixed", overlap=True),
}
"""Placements and backwards that directives say without a recipe."""
FEW_WRITTEN = ("", "v, split, overlap", "shared", "random, split, overlap")
SHARING: Mapping[str, dict[str, Any]] = {
    "": {},
    "tp": dict(tp=2),
    "tp tokens": dict(tp=2, stream="tokens"),
    "tp tokens kept": dict(tp=2, stream="tokens", gathered=True),
    "tp pieces": dict(tp=2, stream="tokens", pieces=2),
    "tp cut": dict(tp=2, cut=True),
    "tp4": dict(tp=4),
    "tp4 tokens": dict(tp=4, stream="tokens"),
    "cp heads": dict(cp=2),
    "cp ring": dict(cp=2, attention="ring"),
    "cp gather": dict(cp=2, attention="gather", order="zigzag"),
    "cp blocks": dict(cp=2, attention="gather", order="blocks"),
    "tp cp": dict(tp=2, cp=2, attention="ring"),
}
"""How devices share chunks."""
SHARED: Mapping[str, tuple[str, ...]] = {
    "tp": ("gpt", "llama", "gpt_dropout", "slices", "buffers", "mixture", "gpt_refilled"),
    "tp tokens": ("gpt", "llama", "keywords", "frozen", "dict", "gpt_refilled"),
    "tp tokens kept": ("gpt",),
    "tp pieces": ("gpt", "llama"),
    "tp cut": ("gpt", "llama"),
    "tp4": ("llama",),
    "tp4 tokens": ("llama",),
    "cp heads": ("gpt", "pairs"),
    "cp ring": ("gpt", "llama", "gpt_dropout"),
    "cp gather": ("gpt", "own_loss"),
    "cp blocks": ("llama",),
    "tp cp": ("llama",),
}
"""Models whose chunks devices share in quick rows: heads, fewer heads of keys than devices, dropout, weights without
heads, buffers, a masked loss, frozen parameters."""
UNDER_EVERY_SCHEDULE = ("tp", "tp tokens", "cp ring")
OF_TRANSFORMERS = tuple(transformers.NAMED)
ANY = tuple(f"any {seed}" for seed in range(100))
FREE = (*OF_TRANSFORMERS, *ANY, "quantised")
WIDELY_SHARED: Mapping[str, tuple[str, ...]] = {
    "tp": (
        *(
            "gpt",
            "llama",
            "gpt_dropout",
            "keywords",
            "frozen",
            "buffers",
            "deep",
            "branches",
            "slices",
        ),
        *("gpt_refilled", "custom_op", "skip", "in_place", *FREE),
    ),
    "tp tokens": (
        *(
            "gpt",
            "llama",
            "gpt_dropout",
            "keywords",
            "frozen",
            "buffers",
            "deep",
            "gpt_untied",
            "slices",
        ),
        *("skip", "counter", "gpt_refilled", *FREE),
    ),
    "tp tokens kept": ("gpt", "llama", "keywords", "deep"),
    "tp pieces": ("gpt", "llama", "gpt_dropout", "deep", "slices", *FREE),
    "tp cut": ("gpt", "llama", "deep"),
    "tp4": ("gpt", "llama"),
    "tp4 tokens": ("gpt", "llama", "keywords", "frozen"),
    **dict.fromkeys(
        ("cp heads", "cp ring", "cp gather", "cp blocks"),
        ("gpt", "llama", "gpt_dropout", "deep", *FREE),
    ),
    "tp cp": ("gpt", "llama", "gpt_dropout"),
}
KEPT: Mapping[str, tuple[str, ...]] = {
    "inputs": ("gpt", "llama", "gpt_dropout", "opaque", "keywords", "dict", "mixture"),
    "products": ("gpt", "custom_op"),
    "products/2": ("gpt", "llama"),
    "attention": ("gpt", "pairs"),
}
"""Models under policies of recomputation in quick rows."""
PRECISE: Mapping[str, tuple[str, ...]] = {
    "mixed": ("gpt", "keywords", "skip", "frozen", "opaque"),
    "float32": ("gpt", "keywords"),
}
"""Models in other precisions in quick rows."""
TILED = ("gpt", "gpt_untied", "gpt_dropout", "llama", "deep", "frozen")
"""Models whose loss is computed in tiles in a third of the random rows."""
ROOMS = (
    (0, 0, 0, True),
    (0.003, "step", 0.0015, True),
    ("step", 0.003, 0, False),
    ("step", "step", 0.0015, False),
)
"""The MiB of parameters that may stay gathered, and of gradients that may wait for their reduce-scatter; the MiB up to
which a parameter stays whole; whether messages of states run beside compute."""

OF_WHOLE = ("adafactor", "muon")
"""Optimizers that update whole parameters, or matrices."""

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "model": tuple(SIZES),
    "schedule": (*BASIC, *PIPELINES),
    "written": tuple(WRITTEN),
    "chunks": (0, 2, 3),
    "uneven": (False, True),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "rep": (1, 2),
    "rooms": ROOMS,
    "prefetch": (0, 1, 2),
    "ep": (1, 2, 4),
    "sharing": tuple(SHARING),
    "keep": ("all", *KEPT),
    "precision": ("float64", *PRECISE),
    "microbatches": (1, 2, 3, 4),
    "rows": (1, 2, 3),
    "optimizer": ("sgd", "adam", "adamw", "rmsprop", "adafactor"),
    "clip": (None, 0.05),
    "scheduler": (False, True),
    "bucket_mb": (25, 0.002, 0.01),
    "shared_streams": (False, True),
    "fuse": (True, False),
    "recv_ahead": (1, 2, 5),
    "launcher": ("inline", "processes"),
}


@cache
def _stages(schedule: str, pp: int, chunks: int) -> int:
    one = schedule in BASIC
    return pp if one else pp * chunks_of(Composition("", schedule=schedule, chunks=chunks))


def _size(model: str) -> tuple[int, tuple[int, ...]]:
    return {**SIZES, **DECODERS}.get(model, (3, (1, 2)))


def has_stages(model: str, schedule: str, pp: int) -> bool:
    """Return whether a recipe cuts a model into stages for so many devices."""
    return _stages(schedule, pp, 0) in _size(model)[1]


def _devices(pp: int, dp: int, sharing: str) -> int:
    how = SHARING[sharing]
    return pp * dp * how.get("tp", 1) * how.get("cp", 1)


def devices_of(row: Row) -> int:
    """Return the number of devices of a row."""
    return _devices(row["pp"], row["dp"], row["sharing"])


def _fills_devices(model: str, schedule: str, written: str, pp: int, chunks: int) -> bool:
    """Return whether a model has a part for each device."""
    blocks, stages = _size(model)
    if schedule in PIPELINES:
        return _stages(schedule, pp, chunks) in stages
    placement = WRITTEN[written].get("placement", "recipe")
    return pp <= {"v": blocks // 2, "shared": blocks + 1}.get(placement, blocks)


RULES: tuple[Rule, ...] = (
    # schedules
    lambda schedule, written: not written or schedule in BASIC,
    lambda schedule, pp: pp > 1 or schedule not in ("gpipe", "1f1b"),
    lambda schedule, pp: schedule != "dualpipe" or pp % 2 == 0,
    lambda schedule, model: schedule != "dualpipe" or model not in STATEFUL,
    lambda model, schedule: (
        schedule in BASIC
        or any(_stages(schedule, pp, 0) in _size(model)[1] for pp in FACTORS["pp"])
    ),
    lambda model, schedule, pp: schedule in BASIC or _stages(schedule, pp, 0) in _size(model)[1],
    _fills_devices,
    lambda written, pp: WRITTEN[written].get("placement") != "shared" or pp > 1,
    lambda written, microbatches: WRITTEN[written].get("placement") != "shared" or microbatches > 1,
    lambda written, model: WRITTEN[written].get("placement") != "shared" or model not in STATEFUL,
    lambda chunks, schedule: (
        schedule == "zero_bubble"
        if chunks == 2
        else not chunks or schedule in ("interleaved", "looped_bfs", "interleaved_zb")
    ),
    lambda chunks, model: not chunks or model == "deep",
    lambda uneven, model: not uneven or model in LAYERS,
    lambda uneven, schedule: not uneven or schedule in ("gpipe", "1f1b", *PIPELINES),
    lambda uneven, written: not uneven or not written,
    lambda uneven, pp: not uneven or pp > 1,
    lambda uneven, model, schedule, pp, chunks: (
        not uneven or _stages(schedule, pp, chunks) <= LAYERS[model]
    ),
    # replicas
    lambda model, dp: model != "buffers" or dp == 1,
    lambda zero, dp: not zero or dp > 1,
    lambda zero, model: not zero or model != "buffers",
    lambda zero, rep: rep == 1 or zero > 0,
    lambda rep, dp: rep == 1 or dp == 4,
    lambda rep, model: rep == 1 or model != "buffers",
    lambda rooms, zero: rooms == ROOMS[0] or zero > 0,
    lambda rooms, dp: rooms == ROOMS[0] or dp > 1,
    lambda rooms, model: rooms == ROOMS[0] or model != "buffers",
    lambda optimizer, zero: optimizer not in OF_WHOLE or not zero,
    lambda optimizer, rep: optimizer not in OF_WHOLE or rep == 1,
    lambda optimizer, rooms: optimizer not in OF_WHOLE or rooms == ROOMS[0],
    lambda optimizer, sharing: optimizer not in OF_WHOLE or not sharing,
    # experts
    lambda ep, model: ep == 1 or model in MIXTURES,
    lambda ep, model: ep < 4 or model == "steered",
    lambda ep, dp: dp % ep == 0,
    lambda ep, rep: ep == 1 or rep == 1,
    lambda ep, written: (
        ep == 1 or not written
    ),  # chunks that are cut at experts have no place there
    lambda ep, schedule: ep == 1 or schedule != "random",
    lambda ep, model, pp: ep == 1 or pp in _size(model)[1],
    lambda ep, optimizer: ep == 1 or optimizer != "adafactor",
    lambda ep, sharing: ep == 1 or sharing in ("", "tp"),
    lambda ep, model, sharing: ep == 1 or not sharing or model == "mixture",
    # chunks that are cut where sharing begins have no place in orders that are written out
    lambda sharing, written: sharing != "tp cut" or not written,
    lambda sharing, schedule: sharing != "tp cut" or schedule != "random",
    lambda sharing, model, pp: sharing != "tp cut" or pp in _size(model)[1],
    # devices, two by two as well, so that a cover does not try what three exclude
    lambda pp, dp: pp * dp <= 8,
    lambda pp, sharing: _devices(pp, 1, sharing) <= 8,
    lambda dp, sharing: _devices(1, dp, sharing) <= 8,
    lambda rep, sharing: rep == 1 or _devices(1, 4, sharing) <= 8,
    lambda rep, pp: rep == 1 or pp <= 2,
    lambda ep, pp: ep * pp <= 8,
    lambda ep, sharing: ep < 4 or not sharing,
    lambda ep, uneven: ep < 4 or not uneven,
    lambda ep, chunks: ep == 1 or not chunks,
    lambda chunks, pp: chunks * pp <= 8,
    lambda chunks, written: not chunks or not written,
    lambda pp, dp, sharing: _devices(pp, dp, sharing) <= 8,
    lambda launcher, pp, dp, sharing: launcher == "inline" or _devices(pp, dp, sharing) <= 4,
    lambda launcher, sharing: launcher == "inline" or _devices(1, 1, sharing) <= 4,
    # recomputation would read a buffer that has changed
    lambda keep, model: keep == "all" or model not in STATEFUL,
    # batches
    lambda model, microbatches, dp: (
        not models.is_transformer(model) or microbatches * dp in (1, 2, 4)
    ),
    lambda model, dp: not models.is_transformer(model) or dp != 3,
    lambda model, microbatches: not models.is_transformer(model) or microbatches != 3,
    lambda model, rows: not models.is_transformer(model) or rows == 2,
    lambda model, rows, microbatches, dp: model != "keywords" or rows * microbatches * dp > 1,
    # what is accurate enough to be compared
    lambda precision, optimizer: precision == "float64" or optimizer in ("sgd", "adamw"),
    # sums of devices are rounded otherwise, and Adam makes a step of any size of what is left where a gradient is zero
    lambda precision, optimizer, sharing: (
        precision == "float64" or not sharing or optimizer == "sgd"
    ),
)


def _shares(which: Mapping[str, tuple[str, ...]]) -> Rule:
    return lambda model, sharing: not sharing or model in which[sharing]


FEW: tuple[Rule, ...] = (
    lambda model, schedule: (
        schedule in BASIC
        or model in EVERY_SCHEDULE
        or (model == "gpt_refilled" and schedule in SOME)
    ),
    lambda model, written: model in EVERY_SCHEDULE[:2] or written in FEW_WRITTEN,
    lambda written, pp: written != "v, mixed" or pp <= 2,
    lambda written, sharing: written in FEW_WRITTEN or "gpt" in SHARED.get(sharing, ("gpt",)),
    lambda ep, schedule: ep < 4 or schedule in BASIC,
    lambda ep, keep: ep == 1 or keep == "all" or (ep == 2 and keep == "inputs"),
    lambda ep, precision: ep == 1 or precision == "float64",
    lambda ep, rows: ep == 1 or rows == 2,
    lambda chunks, sharing: not chunks or not sharing,
    lambda chunks, keep: not chunks or keep == "all",
    lambda chunks, precision: not chunks or precision == "float64",
    lambda chunks, rows: not chunks or rows == 2,
    _shares(SHARED),
    lambda sharing, schedule: schedule in SOME or sharing in ("", *UNDER_EVERY_SCHEDULE),
    lambda keep, schedule: schedule in SOME or keep in ("all", "inputs"),
    lambda precision, schedule: schedule in SOME or precision == "float64",
    lambda rows, schedule: schedule in BASIC or rows == 2,
    lambda model, keep: keep == "all" or model in KEPT[keep],
    lambda model, precision: precision == "float64" or model in PRECISE[precision],
    lambda model, rows: rows == 2 or model in ("gpt", "keywords", "skip"),
    lambda sharing, keep: (
        not sharing
        or keep in ("all", "inputs")
        or sharing == {"products": "tp tokens", "attention": "cp gather"}.get(keep, "tp")
    ),
    lambda model, sharing, keep: keep == "all" or not sharing or model in ("gpt", "llama"),
    lambda sharing, precision: (
        precision == "float64"
        or not sharing
        or (precision == "mixed" and sharing in ("tp", "tp tokens", "cp ring"))
    ),
    lambda keep, precision: (
        precision == "float64" or keep == "all" or (keep, precision) == ("inputs", "mixed")
    ),
    lambda model, keep, precision: precision == "float64" or keep == "all" or model == "gpt",
    lambda sharing, keep, precision: precision == "float64" or keep == "all" or not sharing,
    lambda rows, sharing: rows == 2 or not sharing,
    lambda rows, keep: rows == 2 or keep == "all",
    lambda rows, precision: rows == 2 or precision == "float64",
)
"""The rules by which quick rows need few captures."""

WIDER: tuple[Rule, ...] = (
    _shares(WIDELY_SHARED),
    lambda keep, model: (
        keep != PARTS
        or model.startswith(("gpt", "any"))
        or model in ("llama", "deep", "moe", *DECODERS, *OF_TRANSFORMERS)
    ),
    lambda model, precision: (
        precision in ("float64", "float8")
        or (model in EVERY_SCHEDULE and model not in ("moe", "llama"))
    ),
    lambda model, precision: (model == "quantised") == (precision == "float8"),
    lambda rows, precision: rows > 1 or precision == "float64",
)
COSTLY: Mapping[str, tuple[Any, ...]] = {
    "pp": (3, 4),
    "dp": (3, 4),
    "microbatches": (4,),
    "rows": (1, 3),
    "keep": tuple(KEPT),
    "precision": tuple(PRECISE),
    "sharing": tuple(SHARED),
    "launcher": ("processes",),
}
QUICK = Product(FACTORS, (*RULES, *FEW), COSTLY)
PARTS = "inputs@*norm*"
"""Recomputation of some modules of each layer."""
WIDE = Product(
    {
        **FACTORS,
        "model": (*SIZES, *DECODERS, *ANY[: len(SIZES)]),
        "keep": (*FACTORS["keep"], PARTS),
        "precision": (*FACTORS["precision"], "narrow sums", "narrow messages", "float16", "float8"),
        "optimizer": (*FACTORS["optimizer"], "muon"),
    },
    (*RULES, *WIDER),
)


def composition(row: Row, seed: int) -> Composition:
    """Return the composition of a row; random orders are drawn by the seed."""
    said = {"written", "sharing", "rooms", "uneven", "launcher"}
    more: dict[str, Any] = {name: value for name, value in row.items() if name not in said}
    more |= {**WRITTEN[row["written"]], **SHARING[row["sharing"]]}
    kept = ("resident_mb", "reduced_mb", "whole_mb", "overlap_states")
    more |= dict(zip(kept, row["rooms"], strict=True))
    if models.is_transformer(row["model"]):  # their batches have eight rows
        more["rows"] = transformers.ROWS // (row["microbatches"] * row["dp"])
    if row["uneven"]:
        more["at"] = tuple(range(1, _stages(row["schedule"], row["pp"], row["chunks"])))
    if row["pp"] == 1 and row["schedule"] in BASIC[1:3]:
        more["schedule"] = "default"
    return Composition(seed=seed, **more)


@cache
def rows() -> list[Row]:
    """Return the pairwise cover."""
    return QUICK.pairwise()


SHARE = 0.7
"""The pairs of the cover, without `LATER`, that meet in the rows of `make test`."""
LATER = ("moe", "pairs")
"""The models that only `make test-long` has: mixtures and lists of losses are elsewhere too."""
LARGE = {
    **dict(moe=4, mixture=3, own_loss=3, dict=3, pairs=3, steered=3),
    **dict(sequential=2, opaque=2, deep=2),
}
"""The models that take longer to capture than others, and how many times as long."""


def _captures(row: Row) -> dict[Hashable, float]:
    """Return the captures that a row needs with the CPU seconds that each takes, or its forms under directives."""
    cost = LARGE.get(row["model"], 1)
    capture = row["model"], row["precision"]
    needed: dict[Hashable, float] = {capture: 2 * cost}
    form = row["sharing"], row["ep"], row["keep"]
    if form != ("", 1, "all"):
        needed[*capture, form] = cost
    if row["rows"] != 2:
        needed[*capture, row["rows"]] = cost
    return needed


@cache
def quick() -> frozenset[int]:
    """Return the numbers of the rows that `make test` runs: all values, most pairs, and few captures."""
    numbers = [k for k, row in enumerate(rows()) if row["model"] not in LATER]
    chosen = part(QUICK, [rows()[k] for k in numbers], SHARE, _captures)
    return frozenset(numbers[k] for k in chosen)


@cache
def cover() -> tuple[tuple[Composition, str], ...]:
    """Return the compositions of the pairwise cover, each with its launcher."""
    return tuple((composition(row, seed), row["launcher"]) for seed, row in enumerate(rows()))


COMPILED = ("gpt", "llama", "mixture")
"""The models of which `make test` compiles steps with Inductor."""


def compiled_as(row: Row) -> Row:
    """Return what decides the compiled code of a row's steps."""
    how = SHARING[row["sharing"]]
    return dict(
        model=row["model"],
        keep=row["keep"],
        precision=row["precision"],
        shared=tuple(axis for axis in ("tp", "cp") if axis in how) + ("ep",) * (row["ep"] > 1),
        backward=WRITTEN[row["written"]].get("backward", "whole"),
        gathered=row["zero"] == 3,
    )


@cache
def compiled() -> frozenset[int]:
    """Return the numbers of the rows that `make test` compiles: every two values that meet in a row of four devices."""
    numbers = [
        k for k, row in enumerate(rows()) if row["model"] in COMPILED and devices_of(row) <= 4
    ]
    found = [compiled_as(rows()[k]) for k in numbers]
    factors = {name: list(dict.fromkeys(row[name] for row in found)) for name in found[0]}
    chosen = part(Product(factors, ()), found, 1.0, lambda row: {tuple(row.items()): 1.0})
    return frozenset(numbers[k] for k in chosen)
