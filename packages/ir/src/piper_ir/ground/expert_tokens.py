"""Name the buffers in which a mixture counts the tokens of its experts, and add their counts up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EXPERT_TOKENS = "expert_tokens"
"""The name, within its module, of a buffer [2 x experts] to which forward writes the counts of a microbatch.

The first half says how many tokens chose each expert, the second how many of them it had no place for. A rank adds the
counts of a step's microbatches, and hands them on when the step is over. Nothing else may read the buffer.
"""
DROPPED_ROWS = "dropped_rows"
"""The name, beside such a buffer, under which a rank hands on how many rows its devices had no places for."""

LOAD_NOT_MEASURED = "the load of the experts is not measured"
"""The beginning of a note of a prediction for a load that nobody measured."""


def counts_tokens(buffer: str) -> bool:
    """Return whether a buffer counts the tokens of experts: then it is no part of the model's results."""
    return buffer.rpartition(".")[2] == EXPERT_TOKENS


def experts_of(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, Any]]:
    """Return the load of experts by module, from the buffers of all ranks by name.

    `tokens` is of each expert, `mean` and `max` over them, and `overflow` counts the tokens without a place. `dropped`
    counts the rows that were left out for want of places on a device, if ranks hand that on.
    """
    summed: dict[str, list[int]] = {}
    dropped: dict[str, int] = {}
    for of_rank in counts:
        for name, numbers in of_rank.items():
            module, _, kind = name.rpartition(".")
            if kind == DROPPED_ROWS:
                dropped[module] = dropped.get(module, 0) + numbers[0]
                continue
            summed[module] = [
                a + b for a, b in zip(summed.get(module, [0] * len(numbers)), numbers, strict=True)
            ]
    left = {module: {"dropped": rows} for module, rows in dropped.items()}
    return {
        module: _load(summed[module]) | left.get(module, {})
        for module in sorted(summed, key=_in_order)
    }


def _load(counts: list[int]) -> dict[str, Any]:
    tokens, over = counts[: len(counts) // 2], counts[len(counts) // 2 :]
    return {
        "mean": sum(tokens) / len(tokens),
        "max": max(tokens),
        "overflow": sum(over),
        "tokens": tokens,
    }


def _in_order(module: str) -> list[tuple[int, str]]:
    """Return a key that puts the layers in the order of their numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in module.split(".")]
