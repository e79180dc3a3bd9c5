"""One training session as the command line runs it: predict, train, and put the two beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from piper.display import show
from piper.frontdoor import Compiled, compile, execute
from piper.results import new_folder, save_plan, save_prediction
from piper_compiler import Strategy
from piper_report.summary import beside_table
from piper_runtime import Job, Run
from piper_runtime.run import check_request
from piper_simulator import Cluster, Simulation, simulate


@dataclass(frozen=True)
class Session:
    """A run with the prediction that was made before it, and the folder that holds both."""

    compiled: Compiled
    prediction: Simulation
    run: Run
    folder: Path | None


def train(
    job: Job,
    strategy: Strategy,
    *,
    steps: int,
    launcher: str = "processes",
    out: Path | None = None,
    name: str = "run",
    timeout_s: float = 60,
    log: Iterable[str] = (),
) -> Run:
    """Compile, predict on this machine, train, print loss by step and predicted beside measured. With `out`, results go to a
    new folder below it. log: see `piper.execute`. Returns the run."""
    return session(job, strategy, steps=steps, launcher=launcher, out=out, name=name, timeout_s=timeout_s, log=log).run


def session(
    job: Job, strategy: Strategy, *, steps: int, launcher: str, out: Path | None, name: str, timeout_s: float,
    log: Iterable[str] = (), ranges: bool = False,
) -> Session:  # fmt: skip
    """As `train`; returns prediction and run. ranges: see `piper_runtime.execute`."""
    compiled = compile(job, strategy)
    check_request(compiled.plan, job, steps, launcher, timeout_s)
    folder = new_folder(out, name) if out is not None else None  # before hours of training, not after
    cluster = local_cluster()
    prediction = simulate(compiled.plan, cluster)
    print(
        f"{strategy.mesh}: {compiled.plan.microbatches} microbatches of {compiled.plan.rows} rows, "
        f"{steps} steps, launcher {launcher}"
    )
    run = execute(
        compiled, steps=steps, launcher=launcher, timeout_s=timeout_s, trace=True, folder=folder, log=log, ranges=ranges
    )
    for step, value in enumerate(run.losses):
        print(f"step {step:4d}  loss {value:.4f}  {run.step_s[step] * 1e3:8.1f} ms")
    title = f"predicted ({cluster.name}: constants from a short measurement at start) beside measured"
    show(beside_table(prediction, run, title=title))
    if folder is not None:
        save_plan(folder, compiled.plan, strategy)
        save_prediction(folder, prediction)
        print(f"traces and results are in {folder}")
    return Session(compiled, prediction, run, folder)


def local_cluster() -> Cluster:
    """This machine, measured now."""
    from piper.local import measured_cpu

    return measured_cpu()
