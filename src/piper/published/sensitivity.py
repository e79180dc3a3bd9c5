"""Say how a predicted step depends on each constant of its stack."""

from __future__ import annotations

import math
from dataclasses import replace

from piper.published.scoring import predict
from piper.published.table import PublishedRow
from piper_simulator import Stack

CHANGE = 0.05
"""The share by which a constant is changed; that of hidden messages, which may be 0, changes by so much."""


def sensitivities(row: PublishedRow, stack: Stack | None) -> dict[str, float]:
    """Return by constant d log step / d log constant; of `hidden`, which may be 0, d log step / d hidden."""
    if stack is None or not stack.constants:
        return {}
    base = predict(row, stack=stack, memory=False).step_s
    found = {}
    for name, one in stack.constants.items():
        value = one.value + CHANGE if name == "hidden" else one.value * (1 + CHANGE)
        changed = {**stack.constants, name: replace(one, value=value)}
        step = predict(row, stack=replace(stack, constants=changed), memory=False).step_s
        found[name] = math.log(step / base) / (CHANGE if name == "hidden" else math.log1p(CHANGE))
    return found
