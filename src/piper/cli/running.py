"""Run `piper run` and `piper launch`: train, emulate, or print the command lines that start the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Literal, cast

from piper.api.ground.costs_file import load_costs
from piper.api.running.metrics import check_logs
from piper.cli.loading import JobFile
from piper.cli.options import loader_of
from piper.cli.run_arguments import LaunchArguments, RunArguments
from piper.sessions.emulated import emulated_session
from piper.sessions.training import Settings, as_numbers, session
from piper_ir.ground.errors import JobError
from piper_runtime.launch import is_first, launch_sections, launch_text

if TYPE_CHECKING:
    from piper_runtime.launch import Launcher


OF_RUNS = (
    "strategy", "steps", "costs", "log", "timeout_s", "out", "ranges", "checkpoint", "every", "snapshot", "resume", "loader",
    "restarts",
)  # fmt: skip
"""The options that command lines of `piper launch` hand on to `piper run`."""
OF_RAY = ("on_loss", "spares")
"""The options that they hand on under Ray."""


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
    world = a.loaded().strategy.mesh.world
    given = [
        *(word for p in a.params or () for word in ("-p", p)),
        *_words(a.changed(*OF_RUNS)),
    ]
    sections = launch_sections(
        a.file,
        world,
        nodes=a.nodes,
        arguments=given,
        restarts=a.restarts,
        of_ray=_words(a.changed(*OF_RAY)),
    )
    lines = {name: section.lines for name, section in sections.items()}
    print(json.dumps(lines) if a.as_json else launch_text(sections), end="\n" * a.as_json)


def _words(options: Mapping[str, object]) -> list[str]:
    """Return the words of the options that were given."""
    words: list[str] = []
    for flag, value in options.items():
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words


def run(arguments: RunArguments) -> None:
    """Train with a file's strategy, or emulate it if that was asked for."""
    first = is_first()  # of the processes that torchrun started, one prints and writes
    logs = check_logs(arguments.log.split(",")) if first and arguments.emulate is None else ()
    job_file = arguments.loaded()
    if arguments.emulate is not None:
        _emulate(arguments, job_file, arguments.emulate)
    elif arguments.nodes is not None:
        raise JobError(
            "--nodes belongs to --print-launch; a run takes its nodes from --address or from "
            "torchrun"
        )
    else:
        _train(arguments, job_file, logs, first)


OF_TRAINING = (
    "launcher", "address", "log", "ranges", "checkpoint", "every", "snapshot", "resume", "loader", *OF_RAY, "restarts",
)  # fmt: skip
"""The options that an emulated run does not take."""


def _emulate(arguments: RunArguments, job_file: JobFile, cluster: str) -> None:
    """Simulate and emulate on a cluster; with --json print JSON and nothing else."""
    a = arguments
    if wrong := a.changed(*OF_TRAINING):
        raise JobError(f"--emulate trains nothing: leave out {' and '.join(wrong)}")
    costs = load_costs(a.costs) if a.costs else None
    with redirect_stdout(StringIO()) if a.as_json else nullcontext():
        simulated, emulated = emulated_session(
            job_file.job, job_file.strategy, cluster, steps=a.steps or 1, out=a.out, name=a.file.stem, timeout_s=a.timeout_s,
            costs=costs,
        )  # fmt: skip
    if a.as_json:
        numbers = {"step_s": emulated.step_s, "period_s": emulated.period_s, **emulated.trace.notes}
        print(json.dumps({"predicted": simulated.summary(), "emulated": numbers}))


def _steps_left(steps: int, settings: Settings) -> int:
    """Return how many of a file's steps are still to be done; raise JobError when there are none."""
    begin = settings.first_step()
    if begin >= steps:
        raise JobError(
            f"the training is complete: {begin} of the file's {steps} steps are done; give --steps "
            f"to train more"
        )
    return steps - begin


def _train(arguments: RunArguments, job_file: JobFile, logs: Sequence[str], first: bool) -> None:
    """Predict and train; only the first of the processes that torchrun started prints and writes."""
    a = arguments
    settings = Settings(
        launcher=cast("Launcher", a.launcher), address=a.address, costs=a.costs, out=a.out if first else None, name=a.file.stem,
        timeout_s=a.timeout_s, log=logs, ranges=a.ranges, checkpoint=a.checkpoints(), resume=a.resume,
        loader=loader_of(a.loader), restarts=a.restarts, on_loss=cast(Literal["restart", "replan"], a.on_loss),
        fallbacks=job_file.function,
        spares=a.spares,
    )  # fmt: skip
    steps = a.steps or _steps_left(job_file.steps, settings)
    with redirect_stdout(StringIO()) if a.as_json or not first else nullcontext():
        done = session(job_file.job, job_file.strategy, steps=steps, settings=settings)
    if a.as_json and first:
        print(json.dumps(as_numbers(done)))
