"""Run `piper run` and `piper launch`: train, emulate, or print the command lines that start the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from piper.api.ground.costs_file import load_costs
from piper.api.running.metrics import check_logs
from piper.cli.completion import LAUNCHERS
from piper.cli.loading import JobFile, load_file
from piper.cli.options import LOADER, LOG, RUNS, TIMEOUT_S, loader_of, pairs
from piper.sessions.emulated import emulated_session
from piper.sessions.training import Settings, as_numbers, session
from piper_ir.ground.errors import JobError
from piper_runtime import Checkpoints
from piper_runtime.launch import is_first, launch_sections, launch_text

if TYPE_CHECKING:
    from piper_runtime.launch import Launcher


@dataclass(frozen=True)
class RunArguments:
    """Hold the options of `piper run`; `piper launch` has some of them."""

    file: Path
    params: Sequence[str] = ()
    strategy: Path | None = None
    steps: int | None = None
    launcher: str = "ray"
    address: str = "auto"
    costs: Path | None = None
    out: Path | None = RUNS
    timeout_s: float = TIMEOUT_S
    nodes: int | None = None
    emulate: str | None = None
    log: str = LOG
    ranges: bool = False
    as_json: bool = False
    checkpoint: Path | None = None
    every: int | None = None
    resume: bool = False
    loader: str = LOADER
    restarts: int = 0
    on_loss: str = "restart"
    spares: int = 0
    snapshot: int | None = None

    def checkpoints(self) -> Checkpoints | None:
        """Return where and how often the run is saved; raise JobError for options that need a folder."""
        if self.checkpoint is not None:
            saved = Checkpoints(self.checkpoint, snapshot=self.snapshot)
            return saved if self.every is None else replace(saved, every=self.every)
        needing = (
            ("--every", self.every),
            ("--snapshot", self.snapshot),
            ("--resume", self.resume),
        )
        if given := [flag for flag, value in needing if value]:
            raise JobError(
                f"{' and '.join(given)} needs the folder of the checkpoints: give --checkpoint DIR"
            )
        return None

    def loaded(self) -> JobFile:
        """Run FILE.py and return its definitions."""
        return load_file(self.file, pairs(self.params), self.strategy)


def launch(arguments: RunArguments) -> None:
    """Print the command lines that start the ranks of a file, and run nothing."""
    a = arguments
    options: dict[str, object] = {
        "--strategy": a.strategy,
        "--steps": a.steps,
        "--costs": a.costs,
        "--log": a.log if a.log != LOG else None,
        "--timeout-s": a.timeout_s if a.timeout_s != TIMEOUT_S else None,
        "--out": a.out if a.out != RUNS else None,
        "--ranges": a.ranges,
        "--checkpoint": a.checkpoint,
        "--every": a.every,
        "--snapshot": a.snapshot,
        "--resume": a.resume,
        "--loader": a.loader if a.loader != LOADER else None,
        "--restarts": a.restarts or None,
    }
    of_ray: dict[str, object] = {
        "--on-loss": a.on_loss if a.on_loss != "restart" else None,
        "--spares": a.spares or None,
    }
    a.checkpoints()
    refused = {"--address": a.address != "auto", "--emulate": a.emulate is not None}
    world = a.loaded().strategy.mesh.world
    if wrong := [flag for flag, given in refused.items() if given]:
        raise JobError(
            f"--print-launch prints how to start a training with torchrun, with Slurm or in a Ray "
            f"of its own: leave "
            f"out "
            f"{' and '.join(wrong)}"
        )
    given = [*(word for p in a.params for word in ("-p", p)), *_words(options)]
    sections = launch_sections(
        a.file, world, nodes=a.nodes, arguments=given, restarts=a.restarts, of_ray=_words(of_ray)
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


def _emulate(arguments: RunArguments, job_file: JobFile, cluster: str) -> None:
    """Simulate and emulate on a cluster; with --json print JSON and nothing else."""
    a = arguments
    saved = a.checkpoint is not None or a.every is not None or a.snapshot is not None or a.resume
    recovers = a.restarts or a.on_loss != "restart" or a.spares
    if (
        a.launcher != LAUNCHERS[0]
        or a.address != "auto"
        or a.log != LOG
        or a.ranges
        or saved
        or a.loader != LOADER
        or recovers
    ):
        left = (
            "--launcher, --address, --log, --ranges, --checkpoint, --resume, --restarts, "
            "--on-loss, --spares and --loader"
        )
        raise JobError(f"--emulate trains nothing: leave out {left}")
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
