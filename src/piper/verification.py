"""`piper verify`: a strategy in float64, all ranks in this process, against plain PyTorch on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.frontdoor import compile, execute
from piper.reference import FLOAT64, Difference, Outcome, differences, reference
from piper_compiler import Strategy
from piper_ir.verify import verify
from piper_runtime import Job, Precision
from piper_runtime.rng import rng_place


@dataclass(frozen=True)
class Report:
    """What a comparison found; `differences` stand in the order of steps."""

    strategy: Strategy
    steps: int
    tensors: int
    differences: list[Difference]

    @property
    def equal(self) -> bool:
        return not self.differences

    def text(self) -> str:
        """One line when equal, else the first difference and how many there are."""
        if self.equal:
            return (
                f"{self.strategy.mesh}: equal to one device over {self.steps} steps in float64: losses, gradients before each "
                f"update and parameters after, {self.tensors} tensors, relative tolerance {FLOAT64:g}"
            )
        count = len(self.differences)
        return f"{self.strategy.mesh}: NOT what one device computes; the first of {count} differences:\n  {self.differences[0]}"


def verify_strategy(job: Job, strategy: Strategy, *, steps: int = 3) -> Report:
    """Compile in float64, check the plan's rules, run it inline and compare losses, gradients, parameters and buffers with
    those of the unmodified module under autograd. Raises what `compile` and `execute` raise, and PlanError for a plan that
    breaks a rule."""
    wide = replace(job, precision=Precision(params="float64"))
    compiled = compile(wide, strategy)
    verify(compiled.plan)
    run = execute(compiled, steps=steps, launcher="inline", memory=False, gradients=True)
    plan = compiled.plan
    head = rng_place(plan.chunks[-1])
    expected = reference(wide, replicas=plan.replicas, microbatches=plan.microbatches, steps=steps, head=head)
    return Report(strategy, steps, len(expected.state_dict), differences(Outcome.of(run), expected))
