"""Run `piper import`: read a job of another system, give the verdict on its options, write it, and predict it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from piper.api.captures.capturing import captured_once
from piper.api.ground.clusters import cluster_named
from piper.api.ground.results import writing
from piper.cli.actions.predicting import Target
from piper.cli.arguments import ForeignJobArguments, ImportArguments
from piper.cli.loading import JobFile
from piper.cli.pipes import show_json
from piper.planning.foreign import ForeignJob, foreign_job, sizes_of
from piper.planning.sources import job_facts
from piper_interop import Asked, Judgement
from piper_ir.ground.errors import ClusterError, JobError, PiperWarning
from piper_ir.tools import count_text, size_text, time_text, working, write_whole
from piper_simulator import Simulation, Stack

DOES_NOT_FIT = 2
"""The exit code if the job does not fit its cluster."""
SHOWN = 8
"""The most ignored options that are named; --all names all of them."""


def imported(arguments: ImportArguments) -> int:
    """Print the verdicts on a job's options and its prediction, write the FILE.py, and return the exit code."""
    a = arguments
    with working(f"asking {a.system}"):
        foreign = foreign_job(a.system, a.source, asked_of(a, a.gpus))
    facts = job_facts(foreign.job)  # before a file is written: the model may be another one
    file = a.out
    if file is not None:
        if file.exists():
            raise JobError(f"--out {file}: there is such a file already; give another name")
        with writing(file.parent):
            write_whole(file, foreign.text)
            print(f"written: {file}", file=sys.stderr)  # also if its prediction is refused
    if not a.as_json:
        print("\n".join(_said(foreign, facts, every=a.every)), flush=True)
    simulation = None if a.cluster is None else _predicted(foreign, a.cluster)
    if a.as_json:
        show_json(_numbers(foreign, simulation, file))
    elif simulation is not None:
        print(_prediction(foreign, simulation, str(a.cluster)))
    if file is None and not a.as_json:
        print("", foreign.text, sep="\n")
    return DOES_NOT_FIT if simulation is not None and not simulation.fits else 0


def asked_of(a: ForeignJobArguments, devices: int | None) -> Asked:
    """Return the user's statements about a job of another system, on so many devices."""
    return Asked(
        devices=devices,
        sets=tuple(a.sets or ()),
        python=a.python or "",
        sizes=None if a.model is None else sizes_of(a.model),
        length=a.length,
        rows=a.global_batch,
        stand_ins=frozenset(a.stand_ins or ()),
        skip_unknown=a.skip_unknown,
    )


def _said(foreign: ForeignJob, facts: str, *, every: bool) -> list[str]:
    """Return the job as understood, and the verdicts on options that are not mapped."""
    imported, judgement = foreign.imported, foreign.imported.judgement
    described = imported.described
    head = f"{imported.foreign.system} {imported.foreign.version}".rstrip()
    lines = [
        f"{head}, {imported.foreign.source}, {count_text(described.layout.devices, 'device')}",
        f"understood   {facts}; {_layout(foreign)}",
    ]
    lines += [f"stand-in     {line.text}" for line in judgement.stand_ins]
    lines += [f"as nearest   {note}" for note in described.notes]
    lines += [f"unknown      {line.text}: passed over" for line in judgement.unknown]
    return [*lines, *_ignored(judgement, every=every)]


def _ignored(judgement: Judgement, *, every: bool) -> list[str]:
    if every:
        return [f"ignored      {line.text}" for line in judgement.ignored]
    names = [line.option for line in judgement.ignored]
    if not names:
        return []
    more = ", ..." if len(names) > SHOWN else ""
    return [f"ignored {len(names):<4} {', '.join(names[:SHOWN])}{more} (--all says why)"]


def _layout(foreign: ForeignJob) -> str:
    """Return the devices' shares in a few words."""
    from piper.views.strategy_facts import facts_of

    facts = facts_of(foreign.strategy, foreign.imported.described.global_batch)
    rows = "" if facts.rows is None else f", {count_text(facts.rows, 'row')} per microbatch"
    return f"{facts.mesh}: {facts.schedule}{rows}"


def _predicted(foreign: ForeignJob, cluster: str) -> Simulation:
    """Return the simulation on a cluster; raise ClusterError for one with another number of devices."""
    described = foreign.imported.described
    target = Target(cluster, None, cuda_graph=described.cuda_graph)
    devices, wanted = target.cluster.devices, described.layout.devices
    if devices != wanted:
        raise ClusterError(
            f"--cluster {cluster} has {count_text(devices, 'device')}, and the job is for {wanted}; give such a cluster"
        )
    if other := _other_kernels(described.stack, target.cluster.device.stack):
        name = cluster.partition("@")[0]
        warnings.warn(
            f"--cluster {cluster}: the job runs {described.stack} kernels, but {other} are predicted; "
            f"{name}@{described.stack} predicts them, or a stack of such software (docs/accuracy.md)",
            PiperWarning,
            stacklevel=2,
        )
    with captured_once(), working("simulating"):
        file = JobFile(Path(foreign.imported.foreign.source), foreign.job, foreign.strategy, 3)
        return target.simulated(target.compiled(file).plan)


def _other_kernels(job: str, stack: Stack | None) -> str:
    """Return the kernels that a cluster's stack runs if a job says that it runs others; "" if they go together."""
    if stack is None:
        return "those of no software" if job == "inductor" else ""
    if job == "inductor" and stack.lowering == "torch":
        return "eager ones"
    return "compiled ones" if job == "eager" and "elementwise" in stack.fused else ""


def _prediction(foreign: ForeignJob, simulation: Simulation, cluster: str) -> str:
    peak = max(simulation.device_bytes)
    limit = cluster_named(cluster).device.memory_bytes
    fits = "fits" if simulation.fits else "does not fit"
    tokens = foreign.job.tokens_per_row or 0
    rate = foreign.job.global_batch * tokens / simulation.period_s / cluster_named(cluster).devices
    return (
        f"prediction   {time_text(simulation.period_s)} per step, {rate:,.0f} tokens/s/device, {size_text(peak)} of "
        f"{size_text(limit)} on {cluster}: {fits}"
    )


def _numbers(
    foreign: ForeignJob, simulation: Simulation | None, file: Path | None
) -> dict[str, Any]:
    imported, judgement = foreign.imported, foreign.imported.judgement
    kinds = {
        kind: [line.text for line in getattr(judgement, kind)]
        for kind in ("mapped", "ignored", "nearest", "stand_ins", "unknown")
    }
    return {
        "system": imported.foreign.system,
        "version": imported.foreign.version,
        "source": imported.foreign.source,
        "devices": imported.described.layout.devices,
        "options": kinds,
        "warnings": list(imported.described.notes),
        "file": None if file is None else str(file),
        "prediction": None
        if simulation is None
        else {**simulation.summary(), "fits": simulation.fits},
    }
