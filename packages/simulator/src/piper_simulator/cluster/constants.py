"""Hold the constants of software stacks.

Each has its value, the range that is physical, the value that was believed before any run was seen, and a source.

    matmul              fraction of the 16-bit peak that large matrix products reach, as a mean over a model's shapes
    memory              fraction of the memory's bandwidth that kernels reach that read and write many bytes
    attention_forward   fraction of the 16-bit peak that attention reaches forward with long rows
    attention_backward  the same backward
    launch_s            seconds of the host per kernel of a plan, in which a stack may call several functions
    intra               messages within a node, over the bandwidth that the device's file gives
    inter               messages between nodes, likewise
    hidden              share of the messages of tensor parallelism that run beside products

These eight are all that a fit may change (`piper accuracy --fit`). Everything else of a stack is a fact that somebody
has read or counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piper_simulator.cluster.checks import (
    NOT_NEGATIVE,
    TEXT,
    KeyPath,
    NotNegative,
    Text,
    mapping,
    one_of,
    table,
)

NAMES = (
    "matmul",
    "memory",
    "attention_forward",
    "attention_backward",
    "launch_s",
    "intra",
    "inter",
    "hidden",
)
"""The names of constants, in the order of tables."""


@dataclass(frozen=True, slots=True)
class StackConstant:
    """Hold a constant of a stack.

    Attributes:
        value: the value in use.
        low: the smallest value that is physical.
        high: the largest.
        prior: the value that was believed before any run was seen; a fit is drawn to it.
        source: where value and range come from; of a fitted value, from how many runs.
        fitted: whether runs decided the value.
    """

    value: NotNegative
    low: NotNegative
    high: NotNegative
    prior: NotNegative
    source: Text
    fitted: bool = False

    @property
    def at_bound(self) -> bool:
        """Return whether the value is at an end of its range, so that something else must be wrong."""
        room = 0.01 * (self.high - self.low)
        return self.fitted and not self.low + room < self.value < self.high - room


_ONE = table(
    dict.fromkeys(("value", "low", "high", "prior"), NOT_NEGATIVE)
    | {"source": TEXT, "fitted": one_of(True, False)}
)
CONSTANTS = mapping(_ONE)
"""The check of the table `constants` of a stack."""


def read_constants(written: Mapping[str, Any], where: KeyPath) -> dict[str, StackConstant]:
    """Return the constants of a file's table; raise ClusterError with the key for an unknown one or a bad range."""
    constants = {}
    for name, entry in written.items():
        at = where.at(name)
        if name not in NAMES:
            raise at.error(f"no such constant; known are {', '.join(NAMES)}")
        needed = [k for k in ("value", "low", "high", "prior", "source") if k not in entry]
        if needed:
            raise at.error(f"{', '.join(needed)} missing")
        one = StackConstant(**entry)
        if not one.low <= one.value <= one.high or not one.low <= one.prior <= one.high:
            raise at.error(
                f"value {one.value:g} and prior {one.prior:g} must be from low to high, {one.low:g} to {one.high:g}"
            )
        constants[name] = one
    return constants
