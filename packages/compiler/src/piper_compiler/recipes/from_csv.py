"""Make a schedule from a CSV file of torch.distributed.pipelining."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from piper_compiler.directives import Boundaries

if TYPE_CHECKING:
    from piper_compiler.directives import Directive


def from_csv(path: str | Path, *, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Return the directives for a file, compute-only or lowered; raise FormatError for a file that is no schedule.

    `at` cuts the model into stages, as in `partition`.
    """
    from piper_compiler.interchange import (
        read_schedule_csv,
    )  # it knows strategies, and strategies are made of recipes

    return read_schedule_csv(path).directives(at=at)
