"""Run `piper plan`: understand a source, search its strategies, print the best that fit, and write the best."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import isfinite
from pathlib import Path

from piper.api.content.origin import save_origin
from piper.api.ground.clusters import cluster_named
from piper.api.ground.results import new_folder, save_answer, save_prediction, unless_empty
from piper.cli.actions.importing import asked_of
from piper.cli.arguments import PlanArguments
from piper.cli.interrupts import INTERRUPTED
from piper.cli.loading import load_job
from piper.cli.pipes import show_json
from piper.cli.variant_options import tried_parameters, tried_variants
from piper.planning.answer_text import failure_text, numbers, table
from piper.planning.answers import TrainingBudget, answer
from piper.planning.goodput import Failures
from piper.planning.rehearsal import rehearse
from piper.planning.sources import (
    PlanSource,
    StepSize,
    check_there,
    count,
    is_foreign,
    of_file,
    of_system,
    understand,
)
from piper.planning.written import write
from piper.views.display import show
from piper.views.reporting import report_at_end
from piper.views.study_view import bar
from piper_interop import system
from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text, working
from piper_simulator import CPU

NOTHING_FITS = 2
"""The exit code if no strategy fits."""
DIFFERS = 1
"""The exit code if the rehearsal is not equal to one device."""


def planned(arguments: PlanArguments) -> int:
    """Print the answer or its JSON, write its files, and return the exit code."""
    a = arguments
    check_there(a.source)  # before all else: it is the first word of the command
    if a.cluster == CPU:
        raise JobError(f"--cluster {CPU}: a plan is for a cluster, such as h100x8 or 'h100x8*16'")
    _check_finite(a)
    _check_together(a)
    tried = tried_variants(a.kernels, a.precision, a.cuda_graph) | tried_parameters(a.params)
    name = _cluster_name(a)
    cluster = cluster_named(name)
    tokens = None if a.tokens is None else count(a.tokens, "--tokens")
    with working("reading the source"):
        source = _source(a, cluster.devices)
    if not a.as_json:
        print(f"{source.name}: {source.facts}", flush=True)
    if a.rehearse and source.config is None:
        raise JobError(
            f"--rehearse: the model of {a.source} is not one of piper.models, so that there is no small twin of it; "
            f"`piper verify FILE.py` compares a small job of your own with one device"
        )
    folder = new_folder(a.out, f"plan-{source.name}") if a.out else None
    with unless_empty(folder), bar(a.trials) as progress:
        found = answer(
            source.job,
            cluster,
            TrainingBudget(tokens, a.price, _failures(a)),
            source.strategy,
            source.options,
            tried=tried,
            trials=a.trials,
            seed=a.seed,
            workers=a.workers,
            progress=progress,
        )
    rehearsal = None
    best = None if found.best is None else found.best.strategy
    if a.rehearse and source.config is not None and best is not None:
        rehearsal = rehearse(source.config, best, found.space)
    if a.as_json:
        told = {} if rehearsal is None else {"rehearsal": rehearsal.as_dict()}
        show_json({**numbers(source, found, name), **told})
    else:
        if found.strategies or found.own is not None:
            show(table(source, found, name))
        else:
            print(failure_text(source, found, name))
        if rehearsal is not None:
            print(rehearsal.text())
    if folder is not None:
        found.study.save(folder)
        save_origin(folder, a.seed, Path(a.source) if a.source.endswith(".py") else None)
        save_answer(folder, table(source, found, name))
        if found.best is not None and found.simulation is not None:
            print(f"written: {write(folder, source, found, name)}", file=sys.stderr)
            save_prediction(folder, found.simulation, found.best.plan)
        else:
            print(f"written: {folder}, the candidates with the reason of each", file=sys.stderr)
        report_at_end(folder, None if found.best is None else found.best.plan)
    if found.study.interrupted:
        return INTERRUPTED
    if rehearsal is not None and not rehearsal.equal:
        return DIFFERS
    return 0 if found.strategies else NOTHING_FITS


def _check_finite(a: PlanArguments) -> None:
    """Raise JobError for a number without an end, which has no answer."""
    if not isfinite(a.price):
        raise JobError(f"--price {a.price}: dollars per device and hour are needed, such as 2.5")
    if a.mtbf is not None and not isfinite(a.mtbf * 3600):
        raise JobError(
            f"--mtbf {a.mtbf}: hours are needed, such as 50; leave it out if nothing fails"
        )


def _check_together(a: PlanArguments) -> None:
    """Raise JobError for an option that has no effect without another one."""
    if a.price and a.tokens is None:
        raise JobError(
            "--price: dollars are of a whole training; give its tokens, such as --tokens 15T"
        )
    usual = PlanArguments(source=a.source)
    for flag, value, own in (
        ("--checkpoint-rate", a.checkpoint_rate, usual.checkpoint_rate),
        ("--restart-s", a.restart_s, usual.restart_s),
    ):
        if a.mtbf is None and value != own:
            raise JobError(
                f"{flag}: it counts where devices fail; give --mtbf, the hours between failures"
            )


def _failures(a: PlanArguments) -> Failures | None:
    """Return how often the training fails; None unless it is asked for."""
    if a.mtbf is None:
        return None
    return Failures(a.mtbf * 3600, a.checkpoint_rate * 1e9, a.restart_s)


def _cluster_name(a: PlanArguments) -> str:
    """Return the name of a cluster with as many devices as asked: whole nodes of the one that --cluster names."""
    if a.gpus is None:
        return a.cluster
    whole, at, stack = a.cluster.partition("@")
    kind = whole.partition("*")[0]
    if "*" in whole:
        if (devices := cluster_named(whole).devices) != a.gpus:
            raise JobError(
                f"--gpus {a.gpus}: {whole} has {count_text(devices, 'device')}; leave --gpus out, or give --cluster {kind} alone"
            )
        return a.cluster
    per_node = cluster_named(kind).per_node
    if a.gpus % per_node and a.gpus > per_node:
        raise JobError(
            f"--gpus {a.gpus}: nodes of {kind} have {count_text(per_node, 'device')}; give a multiple of {per_node}"
        )
    if a.gpus < per_node:
        return f"{kind.removesuffix(str(per_node))}{a.gpus}{at}{stack}"
    return f"{kind}*{a.gpus // per_node}{at}{stack}" if a.gpus > per_node else a.cluster


def _source(a: PlanArguments, devices: int) -> PlanSource:
    per_step = None if a.tokens_per_step is None else count(a.tokens_per_step, "--tokens-per-step")
    wanted = StepSize(a.length, per_step, a.global_batch)
    if is_foreign(a.source):
        if a.tokens_per_step is not None:
            complete = system(a.source.partition(":")[0]).complete
            raise JobError(
                f"--tokens-per-step: {a.source} says how large a step is; to change it give "
                + (
                    "the rows of the system's own option, by --set"
                    if complete
                    else "rows, --global-batch"
                )
            )
        return of_system(a.source, asked_of(a, devices))
    of_systems = {
        "--model": a.model,
        "--set": a.sets,
        "--as": a.stand_ins,
        "--python": a.python,
        "--skip-unknown": a.skip_unknown,
    }
    if given := [name for name, value in of_systems.items() if value]:
        raise JobError(
            f"{given[0]}: {a.source} is no job of another system; those are given as SYSTEM:FILE, such as deepspeed:ds.json"
        )
    path = Path(a.source)
    if path.suffix != ".py":
        return understand(a.source, wanted)
    job, strategy, options = load_job(path)
    return replace(of_file(path, job, strategy, wanted), options=options)
