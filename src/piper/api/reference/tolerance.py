"""Find how far a run in float64 may differ from one device, if the model computes in a narrower type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper.api.reference.reference_differences import FLOAT32, FLOAT64
from piper_capture import Captured

BY_DTYPE = {"float32": FLOAT32, "float16": 5e-3, "bfloat16": 4e-2}
"""The relative tolerances by dtype: some ten roundings of the narrow ones."""


@dataclass(frozen=True)
class Tolerance:
    """Hold a relative tolerance.

    Attributes:
        value: The relative difference that is allowed.
        why: The dtype and the line that ask for a tolerance above float64's.
    """

    value: float = FLOAT64
    why: str = ""

    def __str__(self) -> str:
        return f"relative tolerance {self.value:g}{self.why and f' ({self.why})'}"


STRICT = Tolerance()


def tolerances(captured: Captured) -> Iterator[Tolerance]:
    """Yield the tolerances to try, the strictest first.

    Results in a narrower type are equal all the same if both sides compute in the same order.
    """
    from piper_capture import narrowest

    yield STRICT
    narrow = narrowest(captured.forward)
    if narrow is not None:
        value = BY_DTYPE.get(narrow.dtype, max(BY_DTYPE.values()))
        yield Tolerance(value, f"{narrow.line} computes in {narrow.dtype}, whatever the precision")
