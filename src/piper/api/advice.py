"""Say what one word of a strategy would change, before anybody searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piper.api.tuning_problem import problem_of
from piper_autotune import OneWord, score_here
from piper_compiler import Strategy
from piper_ir.costs import Costs
from piper_simulator import Cluster

if TYPE_CHECKING:
    from piper_ir.plan import Plan
    from piper_runtime import Job

MOST_INSTRUCTIONS = 4_000
"""The most instructions of a plan that the event engine times again; the sweep, which is quicker, times larger ones."""


def advice(
    job: Job, strategy: Strategy, plan: Plan, cluster: Cluster, costs: Costs | None, *, contention: bool = True
) -> tuple[OneWord, ...]:
    """Return what each word would change, in the prediction for a cluster; `plan` is that of the strategy."""
    limit = max(kind.device.memory_bytes for kind in cluster.kinds)
    problem, more = problem_of(job, cluster, costs, limit, None)
    small = sum(len(role.program) for role in plan.roles) <= MOST_INSTRUCTIONS
    return score_here(problem, strategy, more["at_rows"], more["under"], engine=contention and small)
