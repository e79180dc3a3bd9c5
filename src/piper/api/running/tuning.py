"""Search the parameters of a strategy for a job, which is captured once; the best candidates can be run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from piper.api.captures.capturing import captured_once
from piper.api.compiling.compiling import compile
from piper.api.ground.clusters import chosen_cluster
from piper.api.ground.results import new_folder, unless_empty
from piper.api.problems.job_space import JobSpace
from piper.api.problems.spaces import StrategySpace
from piper.api.problems.spaces import space as job_space
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper.api.problems.variant_search import variant_search
from piper.api.problems.variants import PlanVariant, VariantChoices
from piper_autotune import (
    OBJECTIVES,
    Confirmation,
    JobCase,
    JobCases,
    Objective,
    SearchError,
    SearchProgress,
    Study,
    TuningProblem,
    check_objective,
)
from piper_autotune import tune as search
from piper_compiler import Options, Strategy
from piper_ir.ground.errors import JobError, TuneError
from piper_ir.ground.keywords import checked_call
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource
from piper_ir.program.program import Program
from piper_simulator import CPU, Cluster, CostModelFactory, DeviceModel, GivenLoad, load_text

if TYPE_CHECKING:
    from piper_runtime import Job
    from piper_runtime.launch import Launcher, RunOptions, Workers

CONFIRM_STEPS = 8
"""The steps of a confirming run: three warm up, the median of the others counts."""
MOST_BYTES = 2**60
"""The largest memory limit in bytes; no device has more."""
LEAST_BARE = 2**20
"""The least number of bytes that text without a unit may say."""
UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}


@checked_call(TuneError)
@captured_once()
def tune(
    source: Job | Program | Callable[[Any], Job],
    strategy: Callable[[Any], Strategy] | None = None,
    *,
    cluster: str | Cluster | None,
    trials: int = 100,
    confirm: int = 0,
    memory_limit: int | str | None = None,
    seed: int = 0,
    storage: Any = None,
    sampler: Any = None,
    costs: Costs | None = None,
    workers: int | str = 1,
    launcher: Launcher = "ray",
    pool: Workers | None = None,
    steps: int = CONFIRM_STEPS,
    out: str | Path | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
    timeout_s: float = 60.0,
    global_batch: int | None = None,
    model: CostModelFactory = DeviceModel,
    objective: Objective | None = None,
    load: GivenLoad | None = None,
    kernels: KernelSource = "eager",
) -> Study:
    """Search the strategy with the least predicted `period_s` whose plan fits the memory of every device.

    `period_s` is seconds per step in steady state. `strategy(trial)` chooses with Optuna's `suggest_int`,
    `suggest_float` and `suggest_categorical` and returns a Strategy. Ctrl-C returns the results so far.

    Args:
        source: A Job, captured once; a Program, for which nothing can be confirmed; or a function `job(trial)` that
            chooses a job, too, whose choices are captured once each.
        strategy: The function of a trial. Without one the search is over `piper.space(source, cluster)`.
        cluster: The cluster of the predictions.
        trials: Candidates, as in `piper_autotune.tune`; so are `seed`, `storage`, `sampler`, `timeout_s`.
        confirm: How many of the best are run; the best is then the one measured to be fastest. Refused unless `cluster`
            is this machine.
        memory_limit: Bytes, or text such as "20GiB", compared with `Simulation.device_bytes`. The default is the memory
            of the cluster's devices.
        costs: Measured durations.
        workers: Processes (0: this one), "ray", "local" (a Ray of its own) or the address of a Ray cluster. The same
            seed and number of workers give the same study.
        launcher: The launcher of confirming runs.
        pool: Workers of confirming runs to use again.
        steps: Steps of a confirming run.
        out: study.json and best.json go to a new folder below this one.
        progress: Called while the search goes on.
        global_batch: With a Program only, as in `compile`.
        model: The cost model, as in `simulate`.
        objective: "period", "tokens_per_s_per_device" (the most) or "dollars_per_token" (the fewest, by
            `price_per_hour` of the cluster's devices). The default is the period; for `job(trial)`, since periods of
            different jobs would be compared, tokens per second and device.
        load: Of experts that ranks share, as in `simulate`. Without one all ranks have equally many tokens, and of
            several bounds on dropless experts' rows the least is the fastest.
        kernels: Of confirming runs, as in `piper.Options`. Predictions are for the kernels that the stack of `cluster`
            names, such as h100x8@inductor, or that `piper.space(..., kernels=...)` chooses.

    Raises:
        TuneError: for arguments, for the storage, or for a space that contradicts itself.
        SearchError: a TuneError: the storage failed in mid-search. Its `study` holds the results.
        NothingFoundError: a SearchError: no candidate can be used. The message says why, or names the smallest limit
            that fits one.
    """
    from piper_runtime.launch import RunOptions, launcher_kind

    device = chosen_cluster(cluster)
    if strategy is None:
        strategy = _space_of(source, device)
    conditions = Conditions(device, costs, _limit(memory_limit, device), model)
    if kernels != "eager" and not confirm:
        raise TuneError(
            f"tune(kernels={kernels!r}): they are of confirming runs, and none is asked for; give confirm=2, or, for "
            f"predictions, the cluster with a stack, such as h100x8@inductor"
        )
    if load is not None and model is not DeviceModel:
        raise TuneError(
            "tune(load=...): a cost model of your own decides itself how long experts take; leave the load out"
        )
    if load is not None:
        load_text(load)  # a log that cannot be read is no reason to refuse each candidate
    space: JobSpace | None = None
    more: dict[str, Any]
    variants = strategy.variants if isinstance(strategy, StrategySpace) else VariantChoices()
    if variants:
        varied = _varied_job(source, variants, storage, kernels)
        goal = objective or "period"
        problem, more = variant_search(
            varied, variants, conditions, lambda one: _finished(one, goal, load)
        )
    elif callable(source):
        goal = _goal_of_jobs(objective, storage, global_batch)
        space = JobSpace(source, lambda job: _case(job, conditions, goal, load))
        first = space.first()
        problem, more = first.problem, {"cases": JobCases(space.case_of)}
        strategy = space.with_job(strategy)
    else:
        problem, more = problem_of(source, conditions, global_batch)
        problem = replace(problem, objective=objective or "period", load=load)
    if storage is not None:
        from piper.api.content.content import content_of  # which imports torch

        problem = replace(problem, model_content=content_of(model, runs=True))
        more["content"] = content_of(strategy, runs=True)
    kind = launcher_kind(launcher)
    if confirm:
        _check_local(device)
    measure = None
    if confirm and not isinstance(source, Program):
        options = RunOptions(
            steps=steps, launcher=launcher, timeout_s=timeout_s, memory=True, pool=pool
        )
        measure = _measure(_jobs(source, space, kernels), costs, options)
    folder = new_folder(Path(out), "tune") if out is not None else None
    with saved(folder), _joined(workers):
        if measure is not None and pool is None:
            kind.check()  # before the search, not after it
        study = search(
            problem,
            strategy,
            trials=trials,
            confirm=confirm,
            measure=measure,
            seed=seed,
            storage=storage,
            sampler=sampler,
            workers="ray" if isinstance(workers, str) else workers,
            timeout_s=timeout_s,
            progress=progress,
            **more,
        )
    if folder is not None:
        study.save(folder)
    return study


def _space_of(source: Any, cluster: Cluster | None) -> Callable[[Any], Strategy]:
    """Return the space of a job's strategies; raise TuneError if there is no job, or no cluster."""
    from piper_runtime import Job

    if not isinstance(source, Job) or cluster is None:
        raise TuneError(
            "tune: without a strategy(trial) a piper.Job and a cluster are needed, whose strategies piper.space makes"
        )
    return job_space(source, cluster)


@contextmanager
def _joined(workers: int | str) -> Iterator[None]:
    """Connect this process to Ray inside of the `with`, if workers are a cluster.

    It joins the cluster at an address; "ray" joins the one that is there, else starts one. Raises ExecutionError when
    none answers.
    """
    if not isinstance(workers, str):
        yield
        return
    from piper_runtime.launch import RayWording, connect

    wording = RayWording(f'workers="{workers}"', "workers", 'workers="ray"', "workers=1")
    link = connect("auto" if workers == "ray" else workers, os.cpu_count() or 1, wording)
    try:
        yield
    finally:
        link.close()


@contextmanager
def saved(folder: Path | None) -> Iterator[None]:
    """Save the study of a search that fails inside of the `with`, or that finds nothing, with results and reasons.

    A search that is refused before it begins leaves no folder.
    """
    with unless_empty(folder):
        try:
            yield
        except SearchError as e:
            if folder is not None:
                e.study.save(folder)
            raise


def _limit(given: int | str | None, cluster: Cluster | None) -> int | None:
    """Return a memory limit in bytes; raise TuneError unless it is a positive number of bytes or text with a unit."""
    if given is None:
        return None if cluster is None else max(kind.device.memory_bytes for kind in cluster.kinds)
    number: float = given if isinstance(given, int) and not isinstance(given, bool) else 0
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given)
        unit = UNITS.get(match[2].upper()) if match else None
        number = float(match[1]) * unit if match and unit else 0
        if match and not match[2] and number < LEAST_BARE:  # which is meant in another unit
            number = 0
    if not 1 <= number < MOST_BYTES:
        raise TuneError(
            f"memory_limit={given!r}: a positive number of bytes, or text such as '20GiB' or '512MiB', is accepted"
        )
    return int(number)


def _check_local(cluster: Cluster | None) -> None:
    """Raise TuneError unless runs on this machine can confirm candidates for the cluster."""
    import torch

    asked = "given durations" if cluster is None else cluster.name
    if not torch.cuda.is_available():
        if cluster is None or cluster.device.name != CPU:
            raise TuneError(
                f"confirm runs candidates on this machine, which is {CPU}; the cluster is {asked}: "
                f"leave confirm out"
            )
        return
    here = torch.cuda.get_device_name(0)
    if cluster is None or cluster.device.name.partition("-")[0] not in here.lower():
        raise TuneError(
            f"confirm runs candidates on this machine, which has {here}; the cluster is {asked}: leave confirm out"
        )


def _varied_job(source: Any, variants: VariantChoices, storage: Any, kernels: KernelSource) -> Job:
    """Return the job of a space of variants; raise TuneError for arguments of `tune` that do not go with one."""
    from piper_runtime import Job

    if not isinstance(source, Job):
        raise TuneError(
            f"tune: a {type(source).__name__} beside a space with kernels, precision or cuda_graph; such a space is "
            f"one of a piper.Job"
        )
    if storage is not None:
        raise TuneError(
            "tune(storage=...): a search over kernels, precision or cuda_graph is kept in memory only; leave storage "
            "out"
        )
    if variants.kernels and kernels != "eager":
        raise TuneError(
            f"tune(kernels={kernels!r}): confirming runs have the kernels that the space chooses; leave kernels out"
        )
    return source


def _jobs(
    source: Any, space: JobSpace | None, kernels: KernelSource
) -> Callable[[Mapping[str, Any]], tuple[Job, Options]]:
    """Return a function that finds the job of a strategy's params, and the options of its run."""

    def made(params: Mapping[str, Any]) -> tuple[Job, Options]:
        variant = PlanVariant.of(params)
        options = (
            variant.options if kernels == "eager" else replace(variant.options, kernels=kernels)
        )
        return variant.job(source if space is None else space.job_of(params)), options

    return made


def _goal_of_jobs(objective: Objective | None, storage: Any, global_batch: int | None) -> Objective:
    """Return the objective of a search over jobs; raise TuneError for arguments that are for one job."""
    if objective == "period":
        others = " or ".join(f"objective={name!r}" for name in OBJECTIVES if name != "period")
        raise TuneError(
            f"tune(objective='period'): the steps of different jobs hold different numbers of tokens; use {others}"
        )
    if storage is not None:
        raise TuneError(
            "tune(storage=...): a search over jobs is kept in memory only; leave storage out, or give one job"
        )
    if global_batch is not None:
        raise TuneError("tune(global_batch=...): a job has its own; choose it in job(trial)")
    return objective or "tokens_per_s_per_device"


def _case(
    job: Job, conditions: Conditions, objective: Objective, load: GivenLoad | None
) -> JobCase:
    problem, more = problem_of(job, conditions)
    return JobCase(_finished(problem, objective, load), **more)


def _finished(
    problem: TuningProblem, objective: Objective, load: GivenLoad | None
) -> TuningProblem:
    """Return a problem with the objective and the load of a search; raise TuneError if they do not go together."""
    check_objective(objective, problem.cluster, problem.tokens_per_step)
    return replace(problem, objective=objective, load=load)


def _measure(
    made: Callable[[Mapping[str, Any]], tuple[Job, Options]],
    costs: Costs | None,
    options: RunOptions,
) -> Callable[[Strategy], Confirmation]:
    if type(options.steps) is not int or options.steps < 2:
        raise JobError(
            f"tune(steps={options.steps!r}): a confirming run needs at least 2 steps; the first warms up"
        )

    def measured(strategy: Strategy) -> Confirmation:
        from piper.api.running.execution import Records, execute_with

        job, how = made(strategy.params)
        job = job.unevaluated
        compiled = compile(job, strategy, costs=costs, options=how)
        run = execute_with(compiled, job, options, Records())
        period_s = run.period_s if run.period_s is not None else median(run.step_s[1:])
        return Confirmation(period_s, max(run.peak_bytes.values(), default=None))

    return measured
