"""Say how many devices can share a nest of indexes evenly, and which steps of it each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from piper_capture.layouts.names import Nested


def steps_of(nest: Nested, degree: int) -> tuple[int, ...] | None:
    """Return how many of `degree` places each index of a nest takes, or None if they do not divide evenly."""
    steps = []
    for index in nest:
        taken = gcd(degree, index.size)
        steps.append(taken)
        degree //= taken
        if taken < index.size:
            break
    return tuple(s for s in steps if s > 1) if degree == 1 else None


def refined(steps: Sequence[tuple[int, ...]], degree: int) -> tuple[int, ...]:
    """Return the degrees into which an axis is split so that each of `steps` is made of some of them."""
    points = {1, degree}
    for sizes in steps:
        points |= {prod(sizes[:k]) for k in range(1, len(sizes))}
    ordered = sorted(points)
    return tuple(b // a for a, b in pairwise(ordered))


def uneven(nest: Nested, degree: int) -> str:
    """Return that `degree` devices cannot share a nest evenly, with the nearest degree that can; "" if they can."""
    if steps_of(nest, degree) is not None:
        return ""
    return (
        f"{degree} devices cannot share {prod(i.size for i in nest)} evenly{instead(nest, degree)}"
    )


def instead(nest: Nested, degree: int) -> str:
    """Return the nearest degree that can share a nest evenly, as the end of an error; "" if none can."""
    size = prod(i.size for i in nest)
    others = [d for d in range(2, max(size, degree) + 1) if steps_of(nest, d) is not None]
    nearest = min(others, key=lambda d: (abs(d - degree), d), default=0)
    return f"; {nearest} can" if nearest else ""


def tokens_text(nest: Nested) -> str:
    """Return the number of tokens, and the model's view of them if it reshapes them."""
    size = prod(i.size for i in nest)
    return f"{size} tokens" + (
        f", which the model views as {' x '.join(str(i.size) for i in nest)},"
        if len(nest) > 1
        else ""
    )
