"""The `emulated` launcher from the front door: durations from the simulator's cost model, slept by real processes."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from piper.display import show
from piper.frontdoor import Compiled, compile
from piper.reporting import report_at_end
from piper.results import new_folder, save_plan, save_prediction, save_run, unless_empty
from piper_compiler import Strategy
from piper_ir.costs import Costs
from piper_ir.plan import Plan
from piper_ir.timing import prepare
from piper_ir.tools import time_text
from piper_report import Table, percent
from piper_runtime import Job
from piper_runtime.launch import Durations, Emulation
from piper_runtime.launch import emulate as run
from piper_simulator import (
    Cluster,
    CostModelFactory,
    DeviceModel,
    Simulation,
    given_only,
    load_cluster,
    model_for,
    simulate,
    split,
)

if TYPE_CHECKING:
    from piper.loading import Recipe
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
    """Run a compiled strategy for `steps` steps on real processes of this machine, with sleeps of the time that `simulate` would
    give each instruction on `cluster` with `costs` and `model`. "auto" is this machine; a program with given durations needs no
    cluster. out: times and trace go to a new folder below this one. Other arguments and errors: `simulate`,
    `piper_runtime.launch.emulation.emulate`."""
    from piper_ir.verify import verify

    verify(compiled.plan)
    device = target(compiled.plan, cluster)
    plan = split(compiled.plan, device, shared=False).plan  # slow ranks sleep longer than others of their role
    durations = durations_on(plan, device, costs, model)
    folder = new_folder(Path(out), "emulated") if out is not None else None
    with unless_empty(folder):
        result = run(plan, durations, steps=steps, timeout_s=timeout_s, trace=trace, pool=pool)
    if plan is not compiled.plan:
        result = replace(result, trace=replace(result.trace, plan_key=compiled.plan.key))
    if folder is not None:
        save_run(folder, result, compiled.plan.tokens_per_step)
    return result


def target(plan: Plan, cluster: str | Cluster | None) -> Cluster | None:
    """The cluster that is meant; None for none. ClusterError for a name that is not known."""
    if cluster == "auto" and given_only(plan):
        return None
    if cluster in ("auto", "cpu-local"):
        from piper.session import local_cluster

        return local_cluster()
    return load_cluster(cluster) if isinstance(cluster, str) else cluster


def durations_on(
    plan: Plan, cluster: Cluster | None, costs: Costs | None = None, model: CostModelFactory = DeviceModel
) -> Durations:
    """What `simulate` takes for every instruction; a communication as long on each member as on the first."""
    costing = model_for(plan, cluster, costs, model)
    found = [costing.work(role, instr).seconds for role, _, instr in plan.instructions()]
    prepared = prepare(plan)
    for members in prepared.groups:
        for node in members:
            found[node] = found[members[0]]
    first = dict(zip(prepared.roles, prepared.offsets))
    by_role = {r.role: tuple(found[first[r.role] : first[r.role] + len(r.program)]) for r in plan.roles}
    return Durations(by_role, plan.hop, costing.issue_s)


def emulated_run(
    recipe: Recipe, cluster: str, *, steps: int, out: Path | None, timeout_s: float, costs: Costs | None, as_json: bool
) -> None:
    """The session of a FILE.py; with `as_json` it prints JSON and nothing else."""
    with redirect_stdout(StringIO()) if as_json else nullcontext():
        simulated, emulated = emulated_session(
            recipe.job, recipe.strategy, cluster, steps=steps, out=out, name=recipe.path.stem, timeout_s=timeout_s, costs=costs
        )
    if as_json:
        found = {"step_s": emulated.step_s, "period_s": emulated.period_s, **emulated.trace.notes}
        print(json.dumps({"predicted": simulated.summary(), "emulated": found}))


def emulated_session(
    job: Job, strategy: Strategy, cluster: str, *, steps: int, out: Path | None, name: str, timeout_s: float,
    costs: Costs | None = None,
) -> tuple[Simulation, Emulation]:  # fmt: skip
    """As the command line does it: compile, simulate, emulate, print one beside the other; with `out`, both traces and a report
    go to a new folder below it."""
    compiled = compile(job, strategy, costs=costs)
    device = target(compiled.plan, cluster)
    simulated = simulate(compiled.plan, device, costs=costs, contention=False)  # ranks that sleep take nothing from each other
    folder = new_folder(out, name) if out is not None else None
    with unless_empty(folder):
        emulated = emulate(compiled, steps=steps, cluster=device, costs=costs, timeout_s=timeout_s, trace=True)
    show(emulation_table(simulated, emulated, title=f"{name} on {cluster}, simulated beside emulated on this machine"))
    if folder is not None:
        save_plan(folder, compiled.plan, strategy)
        save_prediction(folder, simulated)
        save_run(folder, emulated, compiled.plan.tokens_per_step)
        print(f"results are in {folder}", file=sys.stderr)
        report_at_end(folder)
    return simulated, emulated


def emulation_table(simulated: Simulation, emulated: Emulation, *, title: str) -> Table:
    """Simulated beside emulated seconds, with the difference in percent of the simulated."""
    pairs = [("makespan of a step", simulated.step_s, emulated.step_s[0])]
    if emulated.period_s is not None:
        pairs.append(("step in steady state", simulated.period_s, emulated.period_s))
    rows = tuple((name, time_text(a), time_text(b), _difference(a, b)) for name, a, b in pairs)
    notes = emulated.trace.notes
    below = (f"{notes['time_scale']} s are slept for each simulated second", notes["host"])
    warnings = tuple(f"warning: {note}" for note in simulated.notes)
    return Table(title, ("", "simulated", "emulated", "difference"), rows, (*below, *warnings))


def _difference(simulated: float, emulated: float) -> str:
    return f"{'+' if emulated >= simulated else ''}{percent(emulated / simulated - 1 if simulated else None)}"
