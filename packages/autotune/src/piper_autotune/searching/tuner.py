"""Search, score the leaders again, confirm, and return the study, or raise an error that says why nothing was found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from optuna.exceptions import OptunaError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from piper_autotune.scoring.evaluators import Evaluator, Here, Processes
from piper_autotune.scoring.jobs import JobCases, PerJob
from piper_autotune.scoring.single_changes import one_word
from piper_autotune.searching.confirm import Confirmation, confirm_best
from piper_autotune.searching.diagnosis import nothing_found
from piper_autotune.searching.sampler import GuidedSampler
from piper_autotune.searching.search import LEADERS, SearchProgress, StrategySearch
from piper_autotune.searching.storage import open_study, quiet, storage_errors, unusable
from piper_autotune.searching.study import NothingFoundError, SearchError, Study
from piper_autotune.space.objective import check_objective
from piper_autotune.space.problem import Programs, TuningProblem, Under, wanted_by
from piper_autotune.space.rules import PruningRules
from piper_autotune.space.space import StrategyFunction, space_key
from piper_compiler import Strategy, compile_program, depends_on_costs, with_fixed_stages
from piper_ir.ground.errors import TuneError
from piper_ir.program.program import Program
from piper_simulator import DeviceModel, interval_share

MOST_SEED = 2**32 - 1
"""The largest seed of Optuna's generators."""
LEAST_WORKERS, PER_CORE = 16, 4
"""The worker processes that any machine may start, and processes per core."""
SEED_STEP = 1_000_003
"""The distance of a resumed search's seed, so that it does not draw the same candidates again."""


def tune(
    problem: TuningProblem,
    strategy: StrategyFunction,
    *,
    at_rows: Callable[[int], Program] | None = None,
    under: Under | None = None,
    trials: int = 100,
    confirm: int = 0,
    measure: Callable[[Strategy], Confirmation] | None = None,
    seed: int = 0,
    storage: str | BaseStorage | None = None,
    sampler: BaseSampler | None = None,
    workers: int | str = 1,
    timeout_s: float = 60.0,
    progress: Callable[[SearchProgress], None] | None = None,
    modules: Iterable[ModuleType] = (),
    evaluator: Evaluator | None = None,
    content: str | None = None,
    cases: JobCases | None = None,
    rescore: bool = True,
) -> Study:
    """Search the strategy with the least `period_s` that fits.

    Args:
        problem: the job, the cluster and the limit of the search.
        strategy: takes a trial, chooses with Optuna's `suggest_*`, and returns a Strategy. If it has `starts`, choices
            by name, a new search tries these first, in half of its trials, and others in between. In its last trials
            it tries one of each kind, as its `kind` says, of which none was tried.
        at_rows: as in `compile_program`.
        under: the program under policies of recomputation and shardings, at a number of rows.
        trials: candidates that are compiled and scored (or whose function raises). Known ones are free, and so are
            candidates that a rule rejects, up to four per trial; each one more costs a trial.
        confirm: how many of the best candidates are run by `measure`.
        measure: runs a strategy.
        seed: the seed of the sampler.
        storage: Optuna's; a search in one goes on where the last of the same space ended.
        sampler: Optuna's, in place of the default one.
        workers: processes (0: this one), or "ray": tasks of the cluster to which this process is connected.
        timeout_s: seconds per candidate.
        progress: is called after each candidate.
        modules: modules whose contents reach the workers by value.
        evaluator: scores in place of workers.
        content: a text that is equal only for strategy functions that do the same, if it is known; a storage then tells
            more of them apart.
        cases: finds the job of a strategy, if the search chooses jobs, too; `problem` is then the one of any of them.
        rescore: whether the event engine scores the leaders again; without, their scores are the sweep's.

    Raises:
        TuneError: for arguments, for the storage, or for a space that contradicts itself.
        SearchError: the storage failed in mid-search.
        NothingFoundError: no candidate can be used.
    """
    _check_trials(strategy, trials, confirm, measure)
    _check_workers(workers, timeout_s)
    if type(seed) is not int or not 0 <= seed <= MOST_SEED:
        raise TuneError(f"tune(seed={seed!r}): an integer from 0 to {MOST_SEED} is needed")
    check_objective(problem.objective, problem.cluster, problem.tokens_per_step)
    if storage is not None:
        problem.check_can_be_resumed()
    programs = Programs(problem, at_rows, under)
    with quiet(), storage_errors(storage):
        name = space_key(strategy, *problem.facts(), *([] if content is None else [content]))
        study = open_study(storage, f"piper-{name}", sampler or GuidedSampler(seed))
        if sampler is None:
            study.sampler = GuidedSampler(
                (seed + SEED_STEP * len(study.get_trials(deepcopy=False))) % (MOST_SEED + 1)
            )
        starts = () if study.get_trials(deepcopy=False) else getattr(strategy, "starts", ())
        ours = evaluator or (
            _evaluator(problem, programs, workers, timeout_s, modules)
            if cases is None
            else PerJob(
                cases,
                lambda case, own, more: _evaluator(case.problem, own, workers, timeout_s, more),
                1,
            )
        )
        try:
            search = StrategySearch(
                study,
                strategy,
                problem,
                cases or PruningRules(problem, programs),
                ours,
                trials,
                leaders=max(LEADERS, confirm),
                progress=progress,
                cases=cases,
                starts=tuple(starts),
                kind=getattr(strategy, "kind", _one_kind),
            )
            search.resume()
            search.run()
            if search.interrupted and evaluator is None:
                ours.close()  # before anything else is computed
            if not rescore and search.complete():
                return _study(search, problem, programs, seed)
            return _result(search, programs, seed, confirm, measure)
        except OptunaError as e:
            search.interrupted = True
            raise SearchError(
                str(unusable(storage, e)), _study(search, problem, programs, seed)
            ) from None
        finally:
            if evaluator is None:
                ours.close()


def _one_kind(start: Mapping[str, Any]) -> None:
    """Let all starts be alike."""


def most_workers() -> int:
    """Return how many worker processes this machine may start: a few per core, each with its own interpreter."""
    return max(LEAST_WORKERS, PER_CORE * (os.cpu_count() or 1))


def _check_trials(strategy: Any, trials: int, confirm: int, measure: object) -> None:
    """Raise TuneError when no search can try and confirm candidates so."""
    if not callable(strategy):
        raise TuneError(
            f"tune: the strategy is a {type(strategy).__name__}; a function of a trial is needed that returns a "
            f"piper.Strategy"
        )
    for name, value, least in (("trials", trials, 1), ("confirm", confirm, 0)):
        if type(value) is not int or value < least:
            raise TuneError(f"tune({name}={value!r}): an integer of at least {least} is needed")
    if confirm and measure is None:
        raise TuneError(
            f"tune(confirm={confirm}): only a piper.Job can be run; a Program has no code and no data"
        )


def _check_workers(workers: int | str, timeout_s: float) -> None:
    """Raise TuneError for workers that cannot be started, and for no time to score a candidate."""
    if type(workers) is int and workers > most_workers():
        raise TuneError(
            f"tune(workers={workers!r}): at most {most_workers()} processes are started on this machine, which has "
            f'{os.cpu_count()} cores; workers="ray" uses a cluster'
        )
    if workers != "ray" and (type(workers) is not int or workers < 0):
        raise TuneError(
            f'tune(workers={workers!r}): a number of processes (0: this one) or "ray" is accepted'
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise TuneError(f"tune(timeout_s={timeout_s!r}): seconds above 0 are needed")


def _evaluator(
    problem: TuningProblem,
    programs: Programs,
    workers: int | str,
    timeout_s: float,
    modules: Iterable[ModuleType],
) -> Evaluator:
    if isinstance(workers, str):
        from piper_autotune.scoring.on_ray import OnRay

        return OnRay(problem, programs, timeout_s, modules)
    return (
        Processes(problem, programs, workers, timeout_s, modules)
        if workers
        else Here(problem, programs)
    )


def _result(
    search: StrategySearch,
    programs: Programs,
    seed: int,
    confirm: int,
    measure: Callable[[Strategy], Confirmation] | None,
) -> Study:
    """Return the study after the leaders are scored again and confirmed; an interrupted search is returned as it is."""
    problem = search.problem
    if search.interrupted:
        return _study(search, problem, programs, seed)
    if not search.complete():
        message = nothing_found(search, problem)
        raise NothingFoundError(message, _study(search, problem, programs, seed))
    advice: tuple[str, ...] = ()
    try:
        search.rescore()
        if measure is not None and confirm:
            confirm_best(search, confirm, measure)
        advice = _advice(search)
    except KeyboardInterrupt:
        search.interrupted = True
    study = replace(_study(search, problem, programs, seed), advice=advice)
    failed = [r for r in study.rows if r.kind == "confirmation"]
    if failed and not any(r.measured_period_s for r in study.rows):
        raise NothingFoundError(
            f"none of the {len(failed)} best could be run; the first: {failed[0].reason}", study
        )
    return study


def _advice(search: StrategySearch) -> tuple[str, ...]:
    """Return the effects of one more word in the best strategy, if it helps."""
    best = next(iter(search.complete()), None)
    strategy = None if best is None else search.strategies.get(best.number)
    if strategy is None:
        return ()
    return tuple(
        word.text for word in one_word(search.evaluator, strategy, engine=True) if word.helps
    )


def _study(search: StrategySearch, problem: TuningProblem, programs: Programs, seed: int) -> Study:
    rows = tuple(search.rows[n] for n in sorted(search.rows))
    kept = {n: s for n, s in search.strategies.items() if search.rows[n].state == "complete"}
    cluster = problem.cluster.name if problem.cluster is not None else "given durations"
    share, stack = 0.0, ""
    if (
        problem.costs is None and problem.model is DeviceModel
    ):  # the figures that published runs were compared with
        share, stack = interval_share(problem.program, problem.cluster)
    study = Study(
        cluster, problem.memory_limit, seed, rows, search.rule_lines(), search.interrupted, kept, problem.device_limits,
        objective=problem.objective, repeated=search.repeated, exhausted=search.exhausted,
        interval_share=share, interval_stack=stack,
    )  # fmt: skip
    if study.best is None or study.best_row is None:
        return study
    if search.cases is not None:
        case = search.cases.case(study.best)
        problem, programs = case.problem, search.cases.programs(case)
    return replace(
        study, strategies=kept | {study.best_row.number: _settled(study.best, problem, programs)}
    )


def _settled(strategy: Strategy, problem: TuningProblem, programs: Programs) -> Strategy:
    """Return the best strategy as it was scored and run, whatever costs its later users have.

    It is compiled for that only if its stages depend on costs.
    """
    if not depends_on_costs(strategy):
        return strategy

    def at(rows: int, runs: object = None) -> Program:
        return programs.exact(wanted_by(strategy, problem, rows)) or problem.program

    lowered = compile_program(
        at(0) if wanted_by(strategy, problem).special else problem.program,
        strategy,
        global_batch=problem.global_batch,
        training=problem.training,
        costs=problem.costs,
        at_rows=at,
    )
    return with_fixed_stages(strategy, lowered.graph)
