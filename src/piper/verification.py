"""`piper verify`: a strategy in float64, all ranks in this process, against plain PyTorch on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.frontdoor import captured_job, compile, execute
from piper.reference import Difference, Outcome, Reference, differences, reference
from piper.tolerance import STRICT, Tolerance, tolerances
from piper_compiler import Strategy
from piper_compiler.capture import Captured
from piper_ir.errors import JobError
from piper_ir.plan import Plan
from piper_ir.verify import verify
from piper_runtime import Job, Precision
from piper_runtime.rng import rng_places


@dataclass(frozen=True)
class Report:
    """What a comparison found; `differences` stand in the order of steps and are beyond the tolerance."""

    strategy: Strategy
    steps: int
    tensors: int
    differences: list[Difference]
    tolerance: Tolerance = STRICT

    @property
    def equal(self) -> bool:
        return not self.differences

    def text(self) -> str:
        """One line when equal, else the first difference and how many there are."""
        if self.equal:
            return (
                f"{self.strategy.mesh}: equal to one device over {self.steps} steps in float64: losses, gradients before each "
                f"update and parameters after, {self.tensors} tensors, {self.tolerance}"
            )
        count = len(self.differences)
        return (
            f"{self.strategy.mesh}: NOT what one device computes, {self.tolerance}; the first of {count} differences:\n"
            f"  {self.differences[0]}"
        )


def verify_strategy(job: Job, strategy: Strategy, *, steps: int = 3) -> Report:
    """Compile in float64, check the plan's rules, run it inline and compare losses, gradients, parameters and buffers with
    those of the unmodified module under autograd. Raises what `compile` and `execute` raise, PlanError for a plan that breaks a
    rule, and JobError for random operations whose numbers plain PyTorch cannot draw."""
    wide = replace(job, precision=Precision(params="float64"))
    compiled = compile(wide, strategy)
    verify(compiled.plan)
    run = execute(compiled, steps=steps, launcher="inline", memory=False, gradients=True)  # first: it refuses by name
    plan = compiled.plan
    head = rng_places(plan.chunks)[plan.chunks[-1].id]
    expected = reference(wide, replicas=plan.replicas, microbatches=plan.microbatches, steps=steps, head=head)
    _check_random(plan, expected)
    found, tolerance = compared(Outcome.of(run), expected, captured_job(wide))
    return Report(strategy, steps, len(expected.state_dict), found, tolerance)


def compared(found: Outcome, expected: Reference, captured: Captured) -> tuple[list[Difference], Tolerance]:
    """Return the differences by the strictest tolerance that finds none, else by that of the narrowest dtype in the model."""
    for tolerance in tolerances(captured):
        beyond = differences(found, expected, tolerance.value)
        if not beyond:
            break
    return beyond, tolerance


def _check_random(plan: Plan, expected: Reference) -> None:
    """JobError when the reference drew other random numbers than the plan will, so that differences would say nothing.

    The plan sets the random state before each chunk, the reference before each layer: these are the same where every chunk
    that draws has a place that the reference knows, and no layer of the reference lies within a chunk."""
    places = rng_places(plan.chunks)
    inside = {p for p in expected.places if isinstance(p, int)} - set(places.values())
    other = [c for c in plan.chunks if c.random and (places[c.id] not in expected.places or (inside and "layer" in c.coords))]
    if other:
        named = min(other, key=lambda c: isinstance(places[c.id], int))  # rather the part of a layer than its first chunk
        raise JobError(
            f"{plan.mesh}: cannot be judged: dropout in chunk {named.id} (or another random operation). Plain PyTorch draws the "
            "same numbers only where random operations stand in layers that are one chunk each and run once, or before or after "
            "all layers without coordinates of their own. Verify with p=0"
        )
