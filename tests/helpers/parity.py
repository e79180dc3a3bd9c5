"""The judge: a run of a plan against what plain PyTorch computes on one device.

The reference and the comparison are those of `piper verify`, in src/piper/api/reference/reference.py. It imports torch
and nothing of Piper (tests/parity/test_parity_judge.py checks that, and that the judge can tell right from wrong).
"""

from __future__ import annotations

from typing import Any

from piper.api.reference.reference import STEPS, Reference, reference
from piper.api.reference.reference_differences import (
    FLOAT32,
    FLOAT64,
    Difference,
    RunOutcome,
    differences,
)

__all__ = [
    "FLOAT32",
    "FLOAT64",
    "STEPS",
    "Difference",
    "RunOutcome",
    "Reference",
    "assert_parity",
    "differences",
    "outcome_of",
    "reference",
]


def assert_parity(
    run: Any,
    expected: Reference,
    tolerance: float = FLOAT64,
    *,
    parameters: bool = True,
    label: str = "",
) -> None:
    """AssertionError with the first differences when a run did not compute what one device computes."""
    found = differences(RunOutcome.of(run), expected, tolerance, parameters=parameters)
    if found:
        lines = "\n  ".join(str(d) for d in found[:8])
        more = f"\n  and {len(found) - 8} more" if len(found) > 8 else ""
        raise AssertionError(
            f"{label + ': ' if label else ''}not what one device computes\n  {lines}{more}"
        )


def outcome_of(found: Reference) -> RunOutcome:
    """The outcome of a run that computed what the reference did."""
    gradients = [dict(g) for g in found.gradients]
    return RunOutcome(
        list(found.losses),
        {0: gradients},
        {0: {**found.parameters, **found.buffers}},
        dict(found.state_dict),
    )
