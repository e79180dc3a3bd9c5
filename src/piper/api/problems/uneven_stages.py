"""Read how the layers of a pipeline's stages are counted in a search: even, by cost, or fewer at the ends."""

from __future__ import annotations

import re
from itertools import accumulate

from piper_compiler.directives import Boundaries
from piper_ir.ground.errors import TuneError

ACCEPTED = (
    "even, cost, first-N, last-N and ends-N (the first stage, the last or both have N layers fewer), and the layers of "
    "each stage, such as 3+4+4+1"
)
"""The values of the parameter `at` in words."""
_FEWER = re.compile(r"(first|last|ends)-([1-9]\d{0,3})", re.ASCII)
_COUNTS = re.compile(r"[1-9]\d{0,3}(\+\d{1,4})*\+[1-9]\d{0,3}", re.ASCII)


def is_cut(at: object) -> bool:
    """Return whether a value says how stages are cut."""
    if not isinstance(at, str):
        return False
    return at in ("even", "cost") or bool(_FEWER.fullmatch(at) or _COUNTS.fullmatch(at))


def counted(at: str) -> tuple[int, ...]:
    """Return the layers of each stage if a value gives them, else ()."""
    return tuple(map(int, at.split("+"))) if "+" in at else ()


def cut_stages(at: str, layers: int, stages: int) -> Boundaries:
    """Return the boundaries of stages for `partition`; raise TuneError for stages that layers do not fill so.

    The ends have as many layers fewer as if the model had so many more there, evenly cut: Megatron counts the embedding
    and the loss as layers in this way.
    """
    if not (fewer_at := _FEWER.fullmatch(at)) and "+" not in at:
        return "cost" if at == "cost" else "even"
    counts = counted(at)
    if fewer_at is not None:
        end, number = fewer_at[1], int(fewer_at[2])
        fewer = {0: number} if end != "last" else {}
        fewer |= {stages - 1: number} if end != "first" else {}
        own, rest = divmod(layers + sum(fewer.values()), stages)
        counts = tuple(own + (k < rest) - fewer.get(k, 0) for k in range(stages))
    if len(counts) != stages:
        raise TuneError(f"at={at!r} is for {len(counts)} stages, and there are {stages}")
    if min(counts[0], counts[-1]) < 1:
        raise TuneError(f"at={at!r}: {layers} layers leave none for an end of {stages} stages")
    return tuple(accumulate(counts[:-1]))
