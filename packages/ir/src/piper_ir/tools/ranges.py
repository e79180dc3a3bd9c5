"""Write lists of numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 3
"""The numbers that are named of a list without a pattern."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text: "0", "0-3", "0, 2, ..., 30" if evenly spaced, "0, 2, 5 and 13 more"."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= NAMED:
        return ", ".join(map(str, ranks))
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return ", ".join(map(str, ranks[:NAMED])) + f" and {len(ranks) - NAMED} more"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks with the word for them: "rank 0", "ranks 0-3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
