"""Run `piper run` and `piper launch`: train, emulate, or print the command lines that start the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Literal, cast

import typer

from piper.api.running.metrics import check_logs
from piper.cli.loading import JobFile
from piper.cli.pipes import show_json
from piper.cli.run_arguments import OF_TRAINING, LaunchArguments, RunArguments
from piper.sessions.emulated import emulated_session
from piper.sessions.training import Settings, as_numbers, first_step, session
from piper_ir.ground.errors import JobError
from piper_runtime.launch import RunOptions, is_first, launch_sections, launch_text


def print_launch(arguments: RunArguments) -> None:
    """Print the command lines that start the ranks of a file; raise JobError for options that only a run has."""
    if wrong := arguments.changed("address", "emulate"):
        raise JobError(
            "--print-launch prints how to start a training with torchrun, with Slurm or in a Ray of its own: leave out "
            f"{' and '.join(wrong)}"
        )
    launch(arguments)


def launch(arguments: LaunchArguments) -> None:
    """Print the command lines that start the ranks of a file, and run nothing."""
    a = arguments
    a.checkpoints()
    sections = launch_sections(a.launch(a.loaded().strategy.mesh.world))
    lines = {name: section.lines for name, section in sections.items()}
    if a.as_json:
        show_json(lines)
    else:
        print(launch_text(sections), end="")


def run(arguments: RunArguments) -> None:
    """Train with a file's strategy, or emulate it if that was asked for."""
    first = is_first()  # of the processes that torchrun started, one prints and writes
    logs = check_logs(arguments.log.split(",")) if first and arguments.emulate is None else ()
    job_file = arguments.loaded()
    if arguments.emulate is not None:
        _emulate(arguments, job_file, arguments.emulate)
    elif arguments.nodes is not None:
        raise JobError(
            "--nodes belongs to --print-launch; a run takes its nodes from --address or from torchrun"
        )
    else:
        _train(arguments, job_file, logs, first)


def _emulate(arguments: RunArguments, job_file: JobFile, cluster: str) -> None:
    """Simulate and emulate on a cluster; with --json print JSON and nothing else."""
    a = arguments
    if wrong := a.changed(*OF_TRAINING):
        raise JobError(f"--emulate trains nothing: leave out {' and '.join(wrong)}")
    options, settings = a.options(a.steps or 1), _settings(a, job_file)
    with redirect_stdout(StringIO()) if a.as_json else nullcontext():
        simulated, emulated = emulated_session(
            job_file.job, job_file.strategy, cluster, options, settings
        )
    if a.as_json:
        numbers = {"step_s": emulated.step_s, "period_s": emulated.period_s, **emulated.trace.notes}
        show_json({"predicted": simulated.summary(), "emulated": numbers})


def _settings(arguments: RunArguments, job_file: JobFile) -> Settings:
    """Return the settings of a session that writes its results."""
    a, how = arguments, job_file.asked_options(arguments.kernels, arguments.cuda_graph)
    return Settings(
        costs=a.costs,
        out=a.out,
        name=a.file.stem,
        on_loss=cast(Literal["restart", "replan"], a.on_loss),
        fallbacks=job_file.function,
        kernels=how.kernels,
        cuda_graph=how.cuda_graph,
    )


def _steps_left(options: RunOptions) -> RunOptions:
    """Return the options of a run that does the rest of a file's steps; raise JobError when there are none."""
    begin = first_step(options)
    if begin >= options.steps:
        raise JobError(
            f"the training is complete: {begin} of the file's {options.steps} steps are done; give --steps "
            f"to train more"
        )
    return replace(options, steps=options.steps - begin)


def _train(arguments: RunArguments, job_file: JobFile, logs: Sequence[str], first: bool) -> None:
    """Predict and train; only the first of the processes that torchrun started prints and writes."""
    a = arguments
    options = a.options(a.steps or job_file.steps)
    if a.steps is None:
        options = _steps_left(options)
    settings = replace(_settings(a, job_file), log=logs)
    if not first:
        settings = replace(settings, out=None)
    with redirect_stdout(StringIO()) if a.as_json or not first else nullcontext():
        done = session(job_file.job, job_file.strategy, options, settings)
    if a.as_json and first:
        show_json(as_numbers(done))
    if done.lost:  # its losses and report are there, and a script must not take it for done
        raise typer.Exit(1)
