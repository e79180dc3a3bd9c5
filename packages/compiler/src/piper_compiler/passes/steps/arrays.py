"""Define columns of numbers: numpy's arrays of 64-bit integers, and operations on them for the passes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEVER = 1 << 60
"""A position after all others."""


def int_array(values: Iterable[int]) -> Ints:
    """Return numbers as a column."""
    return np.fromiter(values, np.int64)


def run_starts(lengths: Ints) -> Ints:
    """Return the start of each run, for consecutive runs of these lengths."""
    return np.cumsum(lengths) - lengths


def index_in_run(lengths: Ints) -> Ints:
    """Return for each entry its index within its run, for consecutive runs of these lengths."""
    return np.arange(int(lengths.sum())) - np.repeat(run_starts(lengths), lengths)


def within(instrs: Ints, numbers: Ints, a: int, b: int) -> dict[int, tuple[int, ...]]:
    """Return the numbers of each instruction from a to b, counted from a; `instrs` are ascending."""
    first, end = np.searchsorted(instrs, (a, b)).tolist()
    numbers_by_instr: dict[int, tuple[int, ...]] = {}
    for i, one in zip(
        (instrs[first:end] - a).tolist(), zip(numbers[first:end].tolist()), strict=True
    ):
        numbers_by_instr[i] = numbers_by_instr[i] + one if i in numbers_by_instr else one
    return numbers_by_instr
