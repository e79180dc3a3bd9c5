"""Run the `emulated` launcher for users: real processes sleep for the durations of the simulator's cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from piper.api.compiling.compiling import Compiled
from piper.api.ground.clusters import chosen_cluster, local_cluster
from piper.api.ground.results import new_folder, save_run, unless_empty
from piper_ir.fold.timing import Prepared, prepare
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_runtime.launch import Durations, Emulation, RunOptions
from piper_runtime.launch import emulate as run
from piper_simulator import (
    Cluster,
    CostModelFactory,
    DeviceModel,
    given_only,
    issue_of,
    model_for,
    split,
    work_of,
)

if TYPE_CHECKING:
    from piper_runtime.launch import Pool


def emulate(
    compiled: Compiled,
    *,
    steps: int = 1,
    cluster: str | Cluster | None = "auto",
    costs: Costs | None = None,
    model: CostModelFactory = DeviceModel,
    timeout_s: float = 60,
    trace: bool = False,
    out: str | Path | None = None,
    pool: Pool | None = None,
) -> Emulation:
    """Run a compiled strategy on real processes of this machine that sleep instead of computing.

    An instruction sleeps for its duration in `simulate` on `cluster` with `costs` and `model`.

    Args:
        compiled: The compiled strategy.
        steps: Steps to run.
        cluster: The cluster to imitate. "auto" is this machine; a program with given durations needs none.
        costs: Measured durations.
        model: The cost model.
        timeout_s: As in `piper_runtime.launch.processes.emulation.emulate`.
        trace: As in `piper_runtime.launch.processes.emulation.emulate`.
        out: Times and trace go to a new folder below this one.
        pool: Processes to use again.

    Errors come from `simulate` and from `piper_runtime.launch.processes.emulation.emulate`.
    """
    from piper_ir.verify import verify

    verify(compiled.plan)
    options = RunOptions(steps=steps, timeout_s=timeout_s, trace=trace, pool=pool)
    device = emulated_cluster(compiled.plan, cluster)
    plan = split(
        compiled.plan, device, shared=False
    ).plan  # slow ranks sleep longer than others of their role
    durations = durations_on(plan, device, costs, model)
    folder = new_folder(Path(out), "emulated") if out is not None else None
    with unless_empty(folder):
        result = run(plan, durations, options)
    if plan is not compiled.plan:
        result = replace(result, trace=replace(result.trace, plan_key=compiled.plan.key))
    if folder is not None:
        save_run(folder, result, compiled.plan)
    return result


def emulated_cluster(plan: Plan, cluster: str | Cluster | None) -> Cluster | None:
    """Return the cluster to imitate, None if the plan needs none; raise ClusterError for an unknown name."""
    if cluster == "auto" and given_only(plan):
        return None
    return local_cluster() if cluster == "auto" else chosen_cluster(cluster)


def durations_on(
    plan: Plan,
    cluster: Cluster | None,
    costs: Costs | None = None,
    model: CostModelFactory = DeviceModel,
) -> Durations:
    """Return durations and times of hosts as in `simulate`; a communication's duration is that on its first member."""
    cost_model = model_for(plan, cluster, costs, model)
    prepared, work = prepare(plan), work_of(cost_model, plan)
    issue, seconds = issue_of(prepared, cost_model.issue_s, work), [w.seconds for w in work]
    for members in prepared.groups:
        for node in members:
            seconds[node] = seconds[members[0]]
    by_role = _by_role(prepared, seconds)
    if issue is None:
        return Durations(by_role, plan.hop)
    host_s = dict(zip(prepared.roles, issue.step_s))
    return Durations(by_role, plan.hop, _by_role(prepared, issue.at), host_s)


def _by_role(prepared: Prepared, by_node: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """Return numbers per node as numbers per instruction of each role."""
    bounds = zip(prepared.roles, pairwise(prepared.offsets))
    return {role: tuple(by_node[first:end]) for role, (first, end) in bounds}
