"""Divide layers into the stages of a pipeline as Megatron-LM does, and read and write its layout strings.

Stages are in the order in which a microbatch passes them: stage s is on device s modulo the pipeline's size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from piper_ir.ground.errors import JobError

_REPEATED = re.compile(r"\(([^()]+)\)\*(\d+)")
_ONE_REPEATED = re.compile(r"([^()*\d])\*(\d+)")
_NAMES = {
    "E": "the embedding",
    "t": "a layer",
    "m": "a layer for further tokens (MTP)",
    "L": "the loss",
}


def unrolled(layout: str) -> list[str]:
    """Return the stages of a layout string, such as ["Et", "tt", "tL"] of "Et|tt|tL" or "Et|t*2|tL".

    `(tt|)*3` and `t*3` repeat the part before the star; commas and blanks mean nothing. Raises JobError for a
    string that is no layout, or whose embedding or loss stands elsewhere than first and last.
    """
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (_REPEATED, _ONE_REPEATED):
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    stages = text.split("|")
    for number, stage in enumerate(stages):
        for letter in stage:
            if letter not in _NAMES:
                known = ", ".join(f"{name} ({what})" for name, what in _NAMES.items())
                raise JobError(
                    f"layout {layout!r}: {letter!r} in stage {number} is none of {known}"
                )
    flat = "".join(stages)
    if not re.fullmatch(r"Et*m*L", flat) or not stages[0] or not stages[-1]:
        raise JobError(
            f"layout {layout!r}: its stages hold {flat!r}; one E first, then layers t, then m, and one L "
            f"last are needed"
        )
    return stages


def of_layout(layout: str, layers: int, further: int = 0) -> tuple[int, ...]:
    """Return the layers of each stage of a layout string, with the `further` ones for further tokens (MTP).

    Raises JobError if it has other numbers of them.
    """
    parts = unrolled(layout)
    for letter, number, what in (("t", layers, ""), ("m", further, " for further tokens")):
        found = sum(part.count(letter) for part in parts)
        if found != number:
            raise JobError(
                f"layout {layout!r}: it has {found} layers{what}, and the model has {number}"
            )
    return tuple(part.count("t") + part.count("m") for part in parts)


def even(
    layers: int, pp: int, chunks: int, *, embedding: bool = False, loss: bool = False
) -> tuple[int, ...]:
    """Return the layers of each stage where all stages have equally many.

    With `embedding` and `loss` these count as a layer, so that the first and the last stage have one layer fewer.
    """
    units = layers + embedding + loss
    if units % (pp * chunks):
        counted = [name for name, counts in (("embedding", embedding), ("loss", loss)) if counts]
        more = f" with {' and '.join(counted)}" if counted else ""
        raise JobError(
            f"{units} layers{more} do not divide into {pp} devices of {chunks} stages; give "
            "--pipeline-model-parallel-layout, or other numbers"
        )
    counts = [units // (pp * chunks)] * (pp * chunks)
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def uneven(
    layers: int, pp: int, chunks: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Return the layers of each stage where the first or the last device has a number of its own.

    `first` and `last` are the layers of these devices over all of their stages; None gives an equal share of the rest.
    """
    ends = {0: first, pp - 1: last}
    fixed = {device: number for device, number in ends.items() if number is not None}
    rest, others = layers - sum(fixed.values()), pp - len(fixed)
    if rest < 0 or (others and rest % others) or (not others and rest):
        raise JobError(
            f"{layers} layers with {first or 'no number'} on the first and {last or 'no number'} on the last device: "
            f"{rest} layers do not divide over the {others} devices between; give other numbers"
        )
    share = rest // others if others else 0
    devices = [fixed.get(device, share) for device in range(pp)]
    if uncut := [number for number in devices if number % chunks]:
        raise JobError(
            f"a device with {uncut[0]} layers cannot have {chunks} stages of equally many"
        )
    return tuple(number // chunks for _ in range(chunks) for number in devices)


def boundaries(counts: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Return the first units of the stages 1, 2, ..., and the units: "layers", or "all" with embedding and head.

    () stands for the even division of layers, in which the first stages have one more if they do not divide. A stage
    without a layer begins where the next one does.
    """
    stages, layers = len(counts), sum(counts)
    if stages == 1:
        return (), "layers"
    if counts[0] and counts[-1]:
        if tuple(counts) == evened(layers, stages):
            return (), "layers"
        return tuple(accumulate(counts[:-1])), "layers"
    units = [*counts]
    units[0] += 1
    return tuple(accumulate(units[:-1])), "all"


def counts_of(at: Sequence[int], units: str, layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, from which `boundaries` made these units."""
    if not at:
        return evened(layers, stages)
    whole = layers + 2 if units == "all" else layers
    counts = [end - start for start, end in zip((0, *at), (*at, whole), strict=True)]
    if units == "all":
        counts[0] -= 1
        counts[-1] -= 1
    return tuple(counts)


def evened(layers: int, stages: int) -> tuple[int, ...]:
    """Return as even a division as there is; the first stages have one layer more."""
    share, more = divmod(layers, stages)
    return tuple(share + (number < more) for number in range(stages))


def layout(counts: Sequence[int], further: int = 0) -> str:
    """Return the layout string of stages with so many layers, of which the last ones are for further tokens (MTP)."""
    whole, end, stages = sum(counts) - further, 0, list[str]()
    for number in counts:
        begin, end = end, end + number
        plain = max(0, min(end, whole) - begin)
        stages.append(_repeated("t", plain) + _repeated("m", number - plain))
    return (
        "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
        if len(stages) > 1
        else f"E{stages[0]}L"
    )


def _repeated(letter: str, layers: int) -> str:
    return f"{letter}*{layers}" if layers > 3 else letter * layers
