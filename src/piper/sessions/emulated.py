"""Run a session that trains nothing: simulated beside emulated on this machine."""

from __future__ import annotations

import sys

from piper.api.compiling.compiling import compile
from piper.api.content.origin import save_origin
from piper.api.ground.results import save_plan, save_prediction, save_run, unless_empty
from piper.api.running.emulation import emulate, emulated_cluster
from piper.sessions.training import Settings
from piper.views.display import show
from piper.views.emulation_table import emulation_table
from piper.views.reporting import report_at_end
from piper_compiler import Strategy
from piper_runtime import Job
from piper_runtime.launch import Emulation, RunOptions
from piper_simulator import Simulation, simulate


def emulated_session(
    job: Job, strategy: Strategy, cluster: str, options: RunOptions, settings: Settings
) -> tuple[Simulation, Emulation]:
    """Compile, simulate and emulate, and print one beside the other; with a folder, write traces and a report."""
    costs, name = settings.durations(), settings.name
    compiled = compile(job, strategy, costs=costs, options=settings.options)
    device = emulated_cluster(compiled.plan, cluster)
    simulated = simulate(
        compiled.plan, device, costs=costs, contention=False
    )  # ranks that sleep take nothing from each other
    folder = settings.new_folder()
    with unless_empty(folder):
        emulated = emulate(
            compiled,
            steps=options.steps,
            cluster=device,
            costs=costs,
            timeout_s=options.timeout_s,
            trace=True,
        )
    show(
        emulation_table(
            simulated,
            emulated,
            title=f"{name} on {cluster}, simulated beside emulated on this machine",
        )
    )
    if folder is not None:
        save_plan(folder, compiled.plan, strategy)
        save_prediction(folder, simulated, compiled.plan)
        save_origin(folder, job.seed)
        save_run(folder, emulated, compiled.plan)
        print(f"results are in {folder}", file=sys.stderr)
        report_at_end(folder)
    return simulated, emulated
