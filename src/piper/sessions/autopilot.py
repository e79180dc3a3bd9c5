"""Run the whole loop on this machine: profile, search in simulation, confirm, train with the winner, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from piper.api.captures.capturing import captured_once
from piper.api.ground.costs_file import save_costs
from piper.api.ground.results import new_folder, unless_empty
from piper.api.problems.fixed_trial import FixedTrial
from piper.api.running.profiling import profile
from piper.api.running.tuning import saved, tune
from piper.sessions.training import DEFAULTS, Session, Settings, session
from piper.views.study_view import bar, show_study
from piper_compiler import Strategy
from piper_ir.ground.errors import TuneError
from piper_ir.tools import count_text, shown_while_working, working
from piper_runtime import Job
from piper_runtime.launch import RunOptions, open_pool
from piper_simulator import CPU


def loop(
    job: Job,
    strategy: Callable[[Any], Strategy],
    options: RunOptions,
    *,
    baseline: Mapping[str, Any],
    trials: int = 40,
    confirm: int = 2,
    seed: int = 0,
    out: Path = Path("runs"),
    settings: Settings = DEFAULTS,
) -> Session:
    """Measure a job, search its strategies, confirm the best, and train with the fastest.

    Everything goes to one new folder below `out`, the report included. Workers are started once.

    Args:
        job: The job to train.
        strategy: The function of a trial.
        options: How the fastest strategy is trained; the other runs have the same launcher.
        baseline: Parameters of the strategy that is measured. Its mesh is the largest that is searched.
        trials: Candidates to search with the measured costs.
        confirm: How many of the best are run for a few steps.
        seed: The seed of the search.
        out: The folder in which a new one is made.
        settings: The name of the folder, and the settings of the training.
    """
    first = strategy(FixedTrial({name: str(value) for name, value in baseline.items()}))
    folder = new_folder(out, settings.name)
    with (
        shown_while_working(),
        unless_empty(folder),
        captured_once(),
        open_pool(options.launcher, first.mesh.world, cluster=options.cluster) as pool,
    ):
        print(
            f"profile on {count_text(first.mesh.world, 'rank')}, launcher {options.launcher}",
            flush=True,
        )
        with working("measuring chunks, messages and instructions"):
            costs = profile(job, first, pool=pool)
        save_costs(folder / "costs.json", costs)
        print(
            f"search up to {count_text(trials, 'candidate')} in simulation, confirm {confirm}",
            flush=True,
        )
        with saved(folder), bar(trials) as progress:
            study = tune(
                job,
                strategy,
                cluster=CPU,
                costs=costs,
                trials=trials,
                confirm=confirm,
                seed=seed,
                pool=pool,
                progress=progress,
            )
        study.save(folder)
        show_study(study, settings.name, job.global_batch, profiled=True)
        if study.best is None:
            raise TuneError("no candidate can be trained; the table above says why")
        return session(
            job,
            study.best,
            replace(options, pool=pool),
            replace(settings, costs=costs, folder=folder),
        )
