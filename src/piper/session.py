"""One training session as the command line runs it: predict, train, and put the two beside each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from piper_report.chrome import write_chrome
from piper_report.summary import beside

from piper.frontdoor import Compiled, compile, execute
from piper_compiler import Strategy
from piper_ir.codec import dumps
from piper_ir.errors import OutputError
from piper_runtime import Job, Run
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
) -> Run:
    """Compile, predict on this machine, train, print loss by step and predicted beside measured. With `out`, results go to a
    new folder below it. Returns the run."""
    return session(job, strategy, steps=steps, launcher=launcher, out=out, name=name, timeout_s=timeout_s).run


def session(job: Job, strategy: Strategy, *, steps: int, launcher: str, out: Path | None, name: str, timeout_s: float) -> Session:
    """As `train`; returns prediction and run."""
    folder = new_folder(out, name) if out is not None else None  # before hours of training, not after
    compiled = compile(job, strategy)
    cluster = local_cluster()
    prediction = simulate(compiled.plan, cluster)
    print(
        f"{strategy.mesh}: {compiled.plan.microbatches} microbatches of {compiled.plan.rows} rows, "
        f"{steps} steps, launcher {launcher}"
    )
    run = execute(compiled, steps=steps, launcher=launcher, timeout_s=timeout_s, trace=True)
    for step, value in enumerate(run.losses):
        print(f"step {step:4d}  loss {value:.4f}  {run.step_s[step] * 1e3:8.1f} ms")
    print(
        beside(prediction, run, title=f"predicted ({cluster.name}: constants from a short measurement at start) beside measured")
    )
    if folder is not None:
        save(folder, compiled, strategy, prediction, run)
        print(f"traces and results are in {folder}")
    return Session(compiled, prediction, run, folder)


def local_cluster() -> Cluster:
    """This machine, measured now."""
    from piper.local import measured_cpu

    return measured_cpu()


def new_folder(out: Path, name: str) -> Path:
    """A folder NAME-001, NAME-002, ... below `out` that did not exist before: no run overwrites another. OutputError when it
    cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name.rpartition("-")[2]) for p in out.glob(f"{name}-*") if p.name.rpartition("-")[2].isdigit()]
        number = max(taken, default=0) + 1
        while True:
            folder = out / f"{name}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took the number meanwhile
                number += 1
                continue
            return folder
    except OSError as e:
        raise OutputError(f"cannot make a folder for results in {out}: {e.strerror}; choose another with --out") from None


def save(folder: Path, compiled: Compiled, strategy: Strategy, prediction: Simulation, run: Run | None) -> None:
    """Write plan, strategy, traces and numbers. OutputError when a file cannot be written."""
    try:
        (folder / "plan.json").write_text(dumps(compiled.plan))
        (folder / "strategy.json").write_text(strategy.dumps())
        write_chrome(prediction.trace, folder / "trace-predicted.json")
        summary: dict[str, object] = {"predicted": prediction.summary()}
        if run is not None:
            if run.trace is not None:
                write_chrome(run.trace, folder / "trace-measured.json")
            measured = {
                "losses": run.losses,
                "step_s": run.step_s,
                "period_s": run.period_s,
                "peak_bytes": dict(enumerate(run.peak_bytes)),
            }
            summary["measured"] = measured
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    except OSError as e:
        raise OutputError(f"cannot write results to {folder}: {e.strerror}; choose another folder with --out") from None
