"""Make the problem of a search from a job or a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from piper.api.captures.capturing import program_at, rewritten
from piper.api.compiling.compiling import trained_job
from piper_autotune import TuningProblem, Wanted
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource
from piper_ir.program.program import Program
from piper_simulator import Cluster, CostModelFactory, DeviceModel

if TYPE_CHECKING:
    from piper_runtime import Job


@dataclass(frozen=True)
class Conditions:
    """Hold the conditions under which candidates are predicted.

    Attributes:
        cluster: The cluster; None if durations are given.
        costs: Measured durations.
        memory_limit: Bytes per device; None for no limit.
        model: The cost model.
        kernels: Of the plans, as in `piper.Options`, and so is `cuda_graph`.
    """

    cluster: Cluster | None
    costs: Costs | None = None
    memory_limit: int | None = None
    model: CostModelFactory = DeviceModel
    kernels: KernelSource = "eager"
    cuda_graph: bool = False


def problem_of(
    source: Job | Program, conditions: Conditions, global_batch: int | None = None
) -> tuple[TuningProblem, dict[str, Any]]:
    """Return the tuning problem, and the keywords that bring a job's programs to the workers."""
    cluster, costs, limit = conditions.cluster, conditions.costs, conditions.memory_limit
    model = conditions.model
    if isinstance(source, Program):
        return TuningProblem(
            source, global_batch, cluster=cluster, costs=costs, memory_limit=limit, model=model
        ), {}
    trained = trained_job("tune", source, global_batch)
    captured, spec = trained.captured, trained.spec
    one_role = (
        ""
        if spec.separable
        else f"Job.optimizer returned {spec.kind}, which needs all parameters on one role"
    )
    per_row = source.tokens_per_row
    tokens = None if per_row is None else per_row * source.global_batch
    # A worker has no torch to take a step over a stage's own parameters with: there, a step over all of them counts.
    sizes = replace(spec, whole_steps=None)
    training = replace(
        trained.training, state_bytes=sizes.state_bytes, update_bytes=sizes.update_bytes
    )
    known = captured.program, source.global_batch, training, cluster, costs, limit, one_role
    problem = TuningProblem(
        *known,
        model=model,
        tokens_per_step=tokens,
        kernels=conditions.kernels,
        cuda_graph=conditions.cuda_graph,
    )
    modules: tuple[ModuleType, ...] = (
        import_module(type(spec).__module__),
    )  # by value: a worker that imported it would import torch

    def under(wanted: Wanted) -> Program:
        if wanted.alone:
            return rewritten(captured, wanted.request, wanted.rows).bind(wanted.rows)
        asked = rewritten(captured, wanted.request, 1 if wanted.rows == 1 else None)
        if wanted.runs:
            fused = replace(asked, kernels=conditions.kernels)
            return program_at(fused, wanted.rows, dict(wanted.runs))
        return program_at(asked, wanted.rows) if wanted.rows else asked.program

    return problem, {
        "at_rows": lambda rows: program_at(captured, rows),
        "under": under,
        "modules": modules,
    }
