"""Write metrics of a run while it goes on.

They are lines of JSON in the run's folder, and TensorBoard and Weights & Biases through their own libraries. A writer
that fails never ends a training: its losses are reported once, at the end.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self

from piper_ir.ground.errors import JobError, MissingPackageError, OutputError, PiperWarning
from piper_ir.plan.plan import Plan

if TYPE_CHECKING:
    from piper_runtime.launch import StepRecord

METRICS_FILE = "metrics.jsonl"
OPTIONAL = frozenset(
    {
        *("experts", "gradient_norm", "learning_rates", "metrics", "evaluation", "evaluation_s"),
        *("loss_scale", "skipped"),
    }
)
"""The metrics that a line lacks if a run has none."""
EVALUATED = "eval_"
"""The prefix of the names of an evaluation's metrics."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Hold the metrics of a step.

    Attributes:
        step: Number of the step, from 0.
        loss: Loss over the global batch.
        step_s: As in `StepRecord`.
        tokens_per_s: None when the job does not say how many tokens a row has.
        time: Unix seconds at which the step was known to be done.
        batch_s: As in `StepRecord`.
        experts: As in `StepRecord`.
        gradient_norm: As in `StepRecord`.
        learning_rates: As in `StepRecord`.
        metrics: Values of the functions in Job.metrics, by name.
        evaluation: Likewise with the loss, on Job.eval_data after this step; in files and logs as "eval_loss".
        evaluation_s: As `eval_s` in `StepRecord`.
        loss_scale: As in `StepRecord`.
        skipped: As in `StepRecord`; None if the loss is not scaled.
    """

    step: int
    loss: float
    step_s: float
    tokens_per_s: float | None
    time: float
    batch_s: float = 0.0
    experts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluation_s: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None

    def scalars(self) -> dict[str, float]:
        """Return the measured values by name, without missing ones."""
        values = {
            "loss": self.loss,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "batch_s": self.batch_s,
        }
        values |= {
            "gradient_norm": self.gradient_norm,
            **self._rates(),
            **self.metrics,
            **self.evaluated,
        }
        values |= {"evaluation_s": self.evaluation_s, "loss_scale": self.loss_scale}
        values |= {"skipped": None if self.skipped is None else float(self.skipped)}
        return {name: value for name, value in values.items() if value is not None} | self._loads()

    @property
    def evaluated(self) -> dict[str, float]:
        """Return the values of the evaluation under their names in files and logs."""
        return {EVALUATED + name: value for name, value in self.evaluation.items()}

    def _rates(self) -> dict[str, float]:
        """Return the learning rate by name, of each group if they differ."""
        if len(set(self.learning_rates)) == 1:
            return {"learning_rate": self.learning_rates[0]}
        return {f"learning_rate/{group}": rate for group, rate in enumerate(self.learning_rates)}

    def _loads(self) -> dict[str, float]:
        """Return the load by module of experts: the fullest over the mean, tokens without a place, and dropped rows."""
        loads = {
            f"experts/{name}/max over mean": of["max"] / of["mean"]
            for name, of in self.experts.items()
            if of["mean"]
        }
        for kind in ("overflow", "dropped"):
            loads |= {
                f"experts/{name}/{kind}": float(of[kind])
                for name, of in self.experts.items()
                if kind in of
            }
        return loads


class MetricsWriter(Protocol):
    """Write metrics to one place.

    Both methods may raise anything. A step that could not be written is lost; later ones are tried again.
    """

    def write(self, metrics: StepMetrics) -> None:
        """Write one step."""

    def close(self) -> None:
        """Write the metrics that are left, and close."""


class JsonLines:
    """Write one JSON object per step to metrics.jsonl, readable as soon as the step is done; never half a line."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS_FILE).open("ab", buffering=0)
        self._end = self._file.tell()

    def write(self, metrics: StepMetrics) -> None:
        record = {
            name: value
            for name, value in asdict(metrics).items()
            if name not in OPTIONAL or value not in (None, {}, ())
        }
        record.pop("evaluation", None)
        line = json.dumps(record | metrics.evaluated).encode() + b"\n"
        rest = line
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._end)  # a disk fills up in the middle of a line
            raise
        self._end += len(line)

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Write scalars to the folder's "tensorboard", by torch's own writer; this needs the package tensorboard."""

    def __init__(self, folder: Path, flush_s: int = 5) -> None:
        module = _library("tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), flush_secs=flush_s)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.scalars().items():
            self._writer.add_scalar(name, value, metrics.step, walltime=metrics.time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Write to a run of Weights & Biases, which is named like the folder and keeps its files there.

    This needs the package wandb. Its environment variables hold: WANDB_MODE=offline, WANDB_PROJECT (by default
    "piper").
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = _library("wandb")
        project = os.environ.get("WANDB_PROJECT", "piper")
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder.resolve()), config=dict(config)
        )

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        self._run.finish()


LIBRARIES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""The modules to import, by name of a log that is also that of the package it needs."""


def _library(package: str) -> ModuleType:
    try:
        return import_module(LIBRARIES[package])
    except ImportError as e:
        raise MissingPackageError(
            f'the log "{package}" needs the package {package}, which cannot be imported ({e}); '
            f"install it with `pip install {package}`, or leave it out of --log"
        ) from e


WRITERS: Mapping[str, Callable[[Path, Mapping[str, Any]], MetricsWriter]] = {
    "jsonl": lambda folder, config: JsonLines(folder),
    "tensorboard": lambda folder, config: TensorBoard(folder),
    "wandb": WeightsAndBiases,
}
"""The writers by name of a log; each takes a folder and a description of the run."""


def log_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the requested logs: "jsonl" always and first, each once; raise JobError for an unknown one."""
    wanted = tuple(dict.fromkeys(["jsonl", *(name.strip() for name in names)]))
    for name in wanted:
        if name not in WRITERS:
            raise JobError(f"log {name!r} is not known; there are {', '.join(WRITERS)}")
    return wanted


def check_logs(names: Iterable[str]) -> tuple[str, ...]:
    """Return the logs as `log_names` does; raise MissingPackageError for one whose library is not installed.

    This is called before a job is captured and before there is a folder.
    """
    wanted = log_names(names)
    for name in wanted:
        if name in LIBRARIES:
            _library(name)
    return wanted


def about(plan: Plan) -> dict[str, Any]:
    """Return a description of a run for people who compare many."""
    return {
        "plan": plan.key,
        **{f"mesh_{axis}": plan.mesh.size(axis) for axis in plan.mesh.axes},
        "microbatches": plan.microbatches,
        "rows": plan.rows,
        "global_batch": plan.global_batch,
    }


@dataclass
class _Loss:
    """Count the steps that a writer could not write, with the first reason."""

    steps: int
    first: str


class Metrics:
    """Hand every finished step to its writers.

    Give it as `on_step`, and close it when the run is over, or use it in a `with`. Closing warns once about all lost
    steps.
    """

    def __init__(
        self,
        writers: Mapping[str, MetricsWriter],
        tokens_per_step: int | None = None,
        functions: Mapping[str, Callable[[float], float]] | None = None,
    ) -> None:
        self._writers = dict(writers)
        self._functions = dict(functions or {})
        self._tokens = tokens_per_step
        self._lost: dict[str, _Loss] = {}

    def __call__(self, record: StepRecord) -> None:
        rate = self._tokens / record.step_s if self._tokens and record.step_s > 0 else None
        metrics = StepMetrics(
            record.step, record.loss, record.step_s, rate, time.time(), record.batch_s, record.experts, record.gradient_norm,
            record.learning_rates, _finite({**record.metrics, **self._values(record.step, record.loss)}),
            _finite(self._evaluated(record)), record.eval_s or None, record.loss_scale,
            None if record.loss_scale is None else record.skipped,
        )  # fmt: skip
        for name, writer in self._writers.items():
            try:
                writer.write(metrics)
            except (
                Exception
            ) as e:  # a full disk, or whatever a library raises: the training is worth more
                lost = self._lost.setdefault(
                    name, _Loss(0, f"step {record.step}: {type(e).__name__}: {e}")
                )
                lost.steps += 1

    def _evaluated(self, record: StepRecord) -> dict[str, float]:
        """Return the results of the evaluation after a step; nothing without one."""
        if not record.evaluation:
            return {}
        return {**record.evaluation, **self._values(record.step, record.evaluation["loss"])}

    def _values(self, step: int, loss: float) -> dict[str, float]:
        """Return the values of the user's functions of the loss; functions that fail are reported at the end."""
        values: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                values[name] = float(function(loss))
            except (
                Exception
            ) as e:  # a function of the user's may fail in any way: the training is worth more
                lost = self._lost.setdefault(
                    f"metric {name}", _Loss(0, f"step {step}: {type(e).__name__}: {e}")
                )
                lost.steps += 1
        return values

    def close(self) -> None:
        """Close all writers; warn when any of them has lost steps, or could not be closed."""
        for name, writer in self._writers.items():
            try:
                writer.close()
            except Exception as e:  # as in __call__
                self._lost.setdefault(name, _Loss(0, f"at the end: {type(e).__name__}: {e}"))
        self._writers.clear()
        if self._lost:
            losses = "; ".join(
                f"{name}: {x.steps} steps lost, first {x.first}" for name, x in self._lost.items()
            )
            warnings.warn(f"not all metrics could be written. {losses}", PiperWarning, stacklevel=2)
            self._lost.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that are numbers: JSON has no others."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def open_metrics(
    folder: Path,
    names: Iterable[str],
    plan: Plan,
    functions: Mapping[str, Callable[[float], float]] | None = None,
) -> Metrics:
    """Open the metrics of a run of a plan in the folder of its results.

    `names` are as in `log_names`; `functions` come from Job.metrics. Raises MissingPackageError for a log whose library
    is not installed, and OutputError when a log cannot be opened.
    """
    writers: dict[str, MetricsWriter] = {}
    for name in log_names(names):
        try:
            writers[name] = WRITERS[name](folder, about(plan))
        except Exception as e:
            Metrics(writers).close()
            if isinstance(e, MissingPackageError):
                raise
            # Libraries have errors of their own, such as that nobody is logged in.
            raise OutputError(
                f'the log "{name}" cannot be opened in {folder}: {type(e).__name__}: {e}'
            ) from e
    return Metrics(writers, plan.tokens_per_step, functions)


@contextmanager
def recorded(
    folder: Path | None,
    names: Iterable[str] | None,
    plan: Plan,
    on_step: Callable[[StepRecord], object] | None = None,
    functions: Mapping[str, Callable[[float], float]] | None = None,
) -> Iterator[Callable[[StepRecord], object] | None]:
    """Yield a function for a run to call with every finished step, and close the metrics at the end.

    It writes metrics into the folder of the run's results, then calls the caller's own `on_step`. Without a folder
    there are no metrics, and JobError when they were asked for.
    """
    if folder is None:
        if names:
            raise JobError(
                f"log={','.join(names)!r} needs a folder: give out=DIR (at the command line --out DIR)"
            )
        yield on_step
        return
    with open_metrics(folder, names or (), plan, functions) as metrics:
        if on_step is None:
            yield metrics
            return

        def both(record: StepRecord) -> None:
            metrics(record)
            on_step(record)

        yield both
