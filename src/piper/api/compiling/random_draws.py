"""Refuse random operations whose numbers would depend on the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piper_ir.ground.draws import ANY_NUMBER
from piper_ir.ground.errors import CaptureError, JobError

if TYPE_CHECKING:
    from piper_ir.plan.plan import Plan
    from piper_ir.program.program import Program
    from piper_runtime import Job

OPT_OUT = 'Job(draws="microbatches") draws it by torch\'s own generator: other numbers at other rows per microbatch'
"""The way out for random operations that cannot be drawn by row."""


def check_draws(job: Job, program: Program) -> None:
    """Raise CaptureError for a random operation that cannot draw the numbers of the whole batch in parts."""
    if job.draws != "rows":
        return
    from piper.api.compiling.drawing_operators import drawing_operators  # it loads torch

    drawn = (d.refused for c in program.chunks for d in c.draws if d.refused)
    refused = next(drawn, "") or next(drawing_operators(program), "")
    if refused:
        raise CaptureError(f"{refused}, so that its numbers would depend on the plan. {OPT_OUT}")


def check_judged(plan: Plan) -> None:
    """Raise JobError for a module that runs as it is and draws by torch's generator, as plain PyTorch cannot."""
    unknown = next(
        (d.refused for c in plan.chunks for d in c.draws if d.place.endswith(ANY_NUMBER)), ""
    )
    if unknown:
        raise JobError(f"{plan.mesh}: cannot be judged: {unknown}. Verify with p=0")
