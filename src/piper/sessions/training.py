"""Run sessions of training: predict, train, and put the two beside each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from piper.api.compiling.compiling import Compiled, compile
from piper.api.content.origin import save_origin
from piper.api.ground.costs_file import load_costs
from piper.api.ground.results import (
    failures,
    new_folder,
    save_explanation,
    save_plan,
    save_prediction,
    save_weights,
    unless_empty,
)
from piper.api.running.execution import Records, execute_with
from piper.api.running.metrics import check_logs
from piper.api.running.replanning import Fallbacks, Replanner, check_on_loss
from piper.views.display import show
from piper.views.reporting import report_at_end
from piper.views.why_tables import why_tables
from piper_compiler import Options, Strategy
from piper_ir.fold.memory import on_device
from piper_ir.ground.errors import OutputError, PiperWarning
from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource
from piper_ir.tools import count_text, size_text, working
from piper_report import beside_table
from piper_runtime import Job, Run
from piper_runtime.checkpoint import chosen_checkpoint, open_checkpoint
from piper_runtime.launch import Interrupted, RunOptions, StepRecord, check_request
from piper_simulator import Cluster, Simulation, device_type, simulate, why


@dataclass(frozen=True)
class Settings:
    """Say how a session predicts, where its results go, and how it goes on after a loss of devices.

    Attributes:
        costs: Measured durations, or a file of them.
        out: Results go to a new folder NAME-001, ... below it.
        folder: Results go into this folder.
        name: The name of the new folder.
        log: As in `piper.execute`, and so is `on_loss`.
        fallbacks: The `strategy` of `piper.execute`.
        kernels: As in `piper.Options`, and so is `cuda_graph`.
    """

    costs: Costs | Path | None = None
    out: Path | None = None
    folder: Path | None = None
    name: str = "run"
    log: Iterable[str] = ()
    on_loss: Literal["restart", "replan"] = "restart"
    fallbacks: Fallbacks | None = None
    kernels: KernelSource = "eager"
    cuda_graph: bool = False

    @property
    def options(self) -> Options:
        """Return the options of the compiler."""
        return Options(kernels=self.kernels, cuda_graph=self.cuda_graph)

    def durations(self) -> Costs | None:
        """Return the costs, from their file if they are one."""
        return load_costs(self.costs) if isinstance(self.costs, Path) else self.costs

    def new_folder(self) -> Path | None:
        """Return the folder of the results, a new one if they go below `out`; None without one."""
        if self.folder is None and self.out is not None:
            return new_folder(self.out, self.name)
        return self.folder


DEFAULTS = Settings()


@dataclass(frozen=True)
class Session:
    """Hold a run with the prediction that was made before it, and the folder that holds both.

    Attributes:
        lost: whether the trained weights could not be written into the folder.
    """

    compiled: Compiled
    prediction: Simulation
    run: Run
    folder: Path | None
    lost: bool = False


def first_step(options: RunOptions) -> int:
    """Return the step with which a run begins; raise JobError or FormatError if it cannot be resumed."""
    if options.resume is None:
        return options.first
    return open_checkpoint(chosen_checkpoint(options.resume, options.checkpoint)).meta.step


def train(job: Job, strategy: Strategy, options: RunOptions, settings: Settings = DEFAULTS) -> Run:
    """Compile, predict on this machine, train, print loss by step and predicted beside measured; return the run."""
    return session(job, strategy, options, settings).run


def session(
    job: Job, strategy: Strategy, options: RunOptions, settings: Settings = DEFAULTS
) -> Session:
    """Run `train` and return prediction and run; with a folder for results, write a report there.

    Of the options, `trace`, `memory`, `on_step` and `replan` are chosen here.
    """
    from piper.api.ground.this_machine import devices_of_runs

    check_logs(settings.log)
    costs = settings.durations()
    fallbacks = settings.fallbacks if settings.on_loss == "replan" else None
    check_on_loss(settings.on_loss, fallbacks, options)
    with working("compiling"):
        compiled = compile(job, strategy, costs=costs, options=settings.options)
    check_request(compiled.plan, job, options)
    begin = first_step(options)
    folder = settings.new_folder()  # made before hours of training, not after
    with unless_empty(folder):
        cluster = devices_of_runs(compiled.plan.mesh.world)
        compiled = replace(compiled, plan=on_device(compiled.plan, device_type(cluster)))
        prediction = _predicted(compiled, cluster, costs, folder)
        if folder is not None:
            save_plan(folder, compiled.plan, strategy)
            save_origin(folder, job.seed)
        print(
            f"{strategy.mesh}: {_microbatches(compiled)}, "
            f"{count_text(options.steps, 'step')}{f' from step {begin} on' if begin else ''}, launcher {options.launcher}"
        )
        if compiled.evaluation is not None:
            print(_evaluation_text(job, compiled, compiled.evaluation))
        replanner = (
            Replanner(compiled, job, fallbacks, costs) if settings.on_loss == "replan" else None
        )
        options = replace(options, trace=True, memory=True, on_step=_print_step, replan=replanner)
        run = _executed(compiled, job, options, Records(folder=folder, log=settings.log))
        if replanner is not None and replanner.strategy is not None:
            compiled, prediction = _replanned(replanner, folder, costs)
    counted = folder is not None and any(counts_tokens(b.name) for b in compiled.plan.buffers)
    show(
        beside_table(
            prediction, run, title=f"predicted for {cluster.name} beside measured", counted=counted
        )
    )
    lost = folder is not None and not _keep_weights(folder, run)
    if folder is not None:
        print(f"results are in {folder}")
        report = report_at_end(folder)
        if report is not None and report.experts is not None:
            show(report.experts)
    return Session(compiled, prediction, run, folder, lost)


def _predicted(
    compiled: Compiled, cluster: Cluster, costs: Costs | None, folder: Path | None
) -> Simulation:
    """Return the prediction; write it, and why, into a folder."""
    with working("predicting"):
        prediction = simulate(compiled.plan, cluster, costs=costs)
        if folder is not None:
            _save_predicted(folder, compiled, prediction, cluster, costs)
    return prediction


def _evaluation_text(job: Job, compiled: Compiled, evaluation: Compiled) -> str:
    """Return how often a run evaluates its model, on how many batches, and the memory that it takes."""
    most, of_training = (
        max(role.peak_bytes for role in c.plan.roles) for c in (evaluation, compiled)
    )
    beside, count = "below" if most <= of_training else "ABOVE", job.evaluated.eval_batches
    if compiled.plan.cuda_graph:  # whose pool is held meanwhile
        beside = "beside"
    batches = (
        f"{count_text(count or 0, 'batch', 'batches')} of {count_text(job.global_batch, 'row')}"
    )
    return (
        f"evaluation every {job.eval_every} steps: {batches}, at most {size_text(most)} of a device, {beside} the "
        f"{size_text(of_training)} of training"
    )


def _save_predicted(
    folder: Path, compiled: Compiled, prediction: Simulation, cluster: Cluster, costs: Costs | None
) -> None:
    """Write the prediction and its explanation."""
    save_prediction(folder, prediction, compiled.plan)
    explanation = why(compiled.plan, cluster, costs=costs)
    save_explanation(folder, explanation, why_tables(explanation))


def _replanned(
    replanner: Replanner, folder: Path | None, costs: Costs | None
) -> tuple[Compiled, Simulation]:
    """Predict the plan on fewer devices that a run went on with, and put it in place of the one that it began with."""
    from piper.api.ground.this_machine import devices_of_runs

    compiled, strategy = replanner.compiled, replanner.strategy
    assert strategy is not None
    cluster = devices_of_runs(compiled.plan.mesh.world)
    prediction = _predicted(compiled, cluster, costs, folder)
    if folder is not None:
        save_plan(folder, compiled.plan, strategy)
    print(f"{strategy.mesh}: {_microbatches(compiled)}, since devices were lost")
    return compiled, prediction


def _microbatches(compiled: Compiled) -> str:
    """Return how many microbatches a step has, and their rows."""
    plan = compiled.plan
    return f"{count_text(plan.microbatches, 'microbatch', 'microbatches')} of {count_text(plan.rows, 'row')}"


def _executed(compiled: Compiled, job: Job, options: RunOptions, records: Records) -> Run:
    """Execute; keep the weights of a run that was interrupted and ended with a whole step, and say where it is."""
    try:
        return execute_with(compiled, job, options, records)
    except Interrupted as e:
        if records.folder is not None:
            _keep_weights(Path(records.folder), e.run)
            print(f"results are in {records.folder}; `piper report` shows them")
        raise


def _keep_weights(folder: Path, run: Run) -> bool:
    """Write the trained weights, and return whether they are there, or warn: a report is still to be written."""
    try:
        print(f"weights are in {save_weights(folder, run.state_dict())}")
    except OutputError as e:
        warnings.warn(f"{e}. The weights of this run are lost", PiperWarning, stacklevel=2)
        return False
    return True


def _print_step(record: StepRecord) -> None:
    values = {
        **record.metrics,
        **{f"eval_{name}": value for name, value in record.evaluation.items()},
    }
    more = "".join(f"  {name} {value:.4f}" for name, value in values.items())
    print(f"step {record.step:4d}  loss {record.loss:.4f}  {record.step_s * 1e3:8.1f} ms{more}")


def as_numbers(done: Session) -> dict[str, Any]:
    """Return a session for programs."""
    run = done.run
    measured: dict[str, Any] = {
        "losses": run.losses,
        "step_s": run.step_s,
        "period_s": run.period_s,
        "peak_bytes": dict(run.peak_bytes),
        **failures(run),
    }
    return {
        "predicted": done.prediction.summary(),
        "measured": measured,
        "folder": str(done.folder) if done.folder else None,
    }
