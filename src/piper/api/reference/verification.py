"""Compare a strategy in float64, with all ranks in this process, to plain PyTorch on one device (`piper verify`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.api.captures.capturing import captured_job, captured_once
from piper.api.compiling.compiling import Compiled, compile
from piper.api.compiling.random_draws import check_judged
from piper.api.reference.reference import Reference, reference
from piper.api.reference.reference_differences import Difference, RunOutcome, differences
from piper.api.reference.tolerance import STRICT, Tolerance, tolerances
from piper.api.running.execution import execute
from piper_capture import Captured
from piper_compiler import Options, Strategy
from piper_ir.tools import count_text, working
from piper_ir.verify import verify
from piper_runtime import Job, Precision


@dataclass(frozen=True)
class WholeBatch:
    """Hold the comparison of a run with the whole batch in one forward.

    Attributes:
        differences: The values that differ.
        advancing: Buffers that advance once per microbatch.
        random: A chunk that draws random numbers, for which there is no comparison.
        meant: Whether the job says that it depends on microbatches, or buffers advance with each.
    """

    differences: list[Difference]
    advancing: tuple[str, ...] = ()
    random: str = ""
    meant: bool = True

    def text(self) -> str:
        """Return the comparison as one sentence."""
        if self.random:
            return (
                f"the whole batch in one forward: not compared, since chunk {self.random} draws by "
                f"torch's own generator"
            )
        if not self.differences:
            return "the whole batch in one forward: equal as well"
        if self.advancing:
            why = f"buffers that advance once per microbatch: {', '.join(self.advancing)}"
        else:
            why = "the model or the loss combines rows, so it matters which of them are in a microbatch"
        return f"the whole batch in one forward: NOT equal ({why}); the first difference:\n    {self.differences[0]}"


@dataclass(frozen=True)
class VerificationReport:
    """Hold the comparison of a run with one device.

    Attributes:
        steps: How many were compared.
        tensors: How many the model's state has.
        differences: Those beyond the tolerance, in the order of steps.
        whole: The comparison with the whole batch in one forward, if the model ran on one microbatch after the other.
        tolerance: The tolerance that was allowed.
    """

    strategy: Strategy
    steps: int
    tensors: int
    differences: list[Difference]
    whole: WholeBatch | None = None
    tolerance: Tolerance = STRICT

    @property
    def equal(self) -> bool:
        """Return whether nothing differs, or only the whole batch, if the job means to depend on microbatches."""
        return not self.differences and (
            self.whole is None or self.whole.meant or not self.whole.differences
        )

    @property
    def equal_whole_batch(self) -> bool | None:
        """Return whether the whole batch in one forward is equal too; None if it was not compared."""
        if self.whole is None:
            return self.equal
        return None if self.whole.random else not self.whole.differences

    def text(self) -> str:
        """Return one line when all is equal, else the first difference and their number; then the whole batch."""
        return "\n  ".join(
            filter(None, (self._same_microbatches(), self.whole.text() if self.whole else ""))
        )

    def _same_microbatches(self) -> str:
        if not self.differences:
            return (
                f"{self.strategy.mesh}: equal to one device over {count_text(self.steps, 'step')} in float64: losses, gradients "
                f"before each update and parameters after, {self.tensors} tensors, {self.tolerance}"
            )
        count = len(self.differences)
        return (
            f"{self.strategy.mesh}: NOT what one device computes, {self.tolerance}; the first of {count} "
            f"differences:\n  {self.differences[0]}"
        )


@captured_once()
def verify_strategy(
    job: Job, strategy: Strategy, *, steps: int = 3, options: Options | None = None
) -> VerificationReport:
    """Run a strategy in float64 in this process and compare it with the unmodified module under autograd.

    The plan's rules are checked before it runs inline. Losses, gradients, parameters and buffers are compared. Raises
    the errors of `compile` and `execute`, PlanError for a plan that breaks a rule, and JobError for random operations
    whose numbers plain PyTorch cannot draw.
    """
    wide = replace(
        job.unevaluated, precision=Precision(params="float64", float8=job.precision.float8)
    )
    compiled = compile(wide, strategy, options=options)
    check_judged(compiled.plan)
    verify(compiled.plan)
    with working("running the plan in float64"):  # first: it refuses by name
        run = execute(compiled, steps=steps, launcher="inline", memory=False, gradients=True)
    plan = compiled.plan
    with working("training in plain PyTorch"):
        expected = reference(
            wide, replicas=plan.replicas, microbatches=plan.microbatches, steps=steps
        )
    outcome = RunOutcome.of(run)
    beyond, tolerance = compared(outcome, expected, captured_job(wide))
    whole = _whole_batch(wide, compiled, steps, outcome, tolerance) if expected.by_parts else None
    return VerificationReport(strategy, steps, len(expected.state_dict), beyond, whole, tolerance)


def _whole_batch(
    job: Job, compiled: Compiled, steps: int, outcome: RunOutcome, tolerance: Tolerance
) -> WholeBatch | None:
    """Compare with the whole batch in one forward.

    Parameters are left out: if a true gradient is zero, Adam makes steps from rounding, which differs here.
    """
    plan = compiled.plan
    if plan.microbatches * plan.replicas == 1:
        return None
    names = tuple(a.name for a in compiled.advancing)
    if job.draws != "rows" and (random := next((c.id for c in plan.chunks if c.random), "")):
        return WholeBatch([], names, random)
    with working("training the whole batch in plain PyTorch"):
        both = differences(outcome, reference(job, steps=steps), tolerance.value)
    meant = (
        bool(names)
        or job.batch_norm is not None
        or job.loss_over == "microbatch"
        or job.precision.float8 is not None
    )
    return WholeBatch(
        [d for d in both if d.what in ("loss", "gradient", "buffer")], names, meant=meant
    )


def compared(
    found: RunOutcome, expected: Reference, captured: Captured
) -> tuple[list[Difference], Tolerance]:
    """Return the differences by the strictest tolerance that finds none, and that tolerance.

    If each finds some, the tolerance of the narrowest dtype in the model counts.
    """
    for tolerance in tolerances(captured):
        beyond = differences(found, expected, tolerance.value)
        if not beyond:
            break
    return beyond, tolerance
