"""Search over variants of a plan: each has a problem of its own, with the programs of its kernels and precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from piper.api.problems.tuning_problem import Conditions, problem_of
from piper.api.problems.variants import PlanVariant, VariantChoices
from piper_autotune import JobCase, JobCases, TuningProblem
from piper_ir.ground.errors import TuneError

if TYPE_CHECKING:
    from piper_runtime import Job


class VariantCases:
    """Keep the problem of each variant of a job, made once."""

    def __init__(
        self,
        job: Job,
        conditions: Conditions,
        finished: Callable[[TuningProblem], TuningProblem],
    ) -> None:
        self._job, self._conditions, self._finished = job, conditions, finished
        self._cases: dict[PlanVariant, JobCase] = {}

    def case(self, variant: PlanVariant) -> JobCase:
        """Return the problem of a variant; the same object for the same one."""
        if variant not in self._cases:
            kernels, graphs = variant.kernels, variant.cuda_graph
            conditions = replace(self._conditions, kernels=kernels, cuda_graph=graphs)
            problem, more = problem_of(variant.job(self._job), conditions)
            self._cases[variant] = JobCase(self._finished(problem), **more)
        return self._cases[variant]

    def case_of(self, params: Mapping[str, Any]) -> JobCase:
        """Return the problem of the variant that a strategy's params say."""
        return self.case(PlanVariant.of(params))


def variant_search(
    job: Job,
    choices: VariantChoices,
    conditions: Conditions,
    finished: Callable[[TuningProblem], TuningProblem] = lambda problem: problem,
) -> tuple[TuningProblem, dict[str, Any]]:
    """Return the problem of a search over variants of a job, and the keywords that lead to the one of each strategy.

    Args:
        job: The job.
        choices: The variants; none stands for the job as it is, with the usual kernels.
        conditions: The cluster and the limit.
        finished: Completes each problem, such as with an objective.

    Raises TuneError for measured durations, which hold for one variant, beside several.
    """
    if not choices:
        problem, more = problem_of(job, conditions)
        return finished(problem), more
    variants = list(choices.every())
    if conditions.costs is not None and len(variants) > 1:
        raise TuneError(
            f"tune(costs=...): measured durations hold for one precision and its kernels, and the space has "
            f"{len(variants)} variants; fix one, or leave costs out"
        )
    cases = VariantCases(job, conditions, finished)
    return cases.case(variants[0]).problem, {"cases": JobCases(cases.case_of)}
