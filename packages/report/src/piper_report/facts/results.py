"""Read the files of a result folder strictly.

`piper.api.ground.results` describes the files; a folder has the files of the commands that wrote to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from piper_ir.ground.codec import loads, read_json
from piper_ir.ground.errors import FormatError
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import Plan
from piper_ir.plan.plan_file import read_plan
from piper_ir.program.costs import Costs
from piper_ir.study.study import StudyDocument
from piper_ir.verify import check
from piper_report.facts.expert_history import ExpertHistory
from piper_report.facts.metrics_file import Metric, read_metrics
from piper_report.facts.reading import checked, text_of

T = TypeVar("T")

HANG_FILE = "hang.txt"
FILES = {
    "plan.json": "piper simulate or piper run, each with --out DIR",
    "strategy.json": "the same",
    "origin.json": "the same",
    "predicted.json": "piper simulate --out DIR, piper run",
    "spans-predicted.json": "piper simulate --out DIR, piper run",
    "why.json": "piper simulate --why --out DIR",
    "answer.json": "piper plan",
    "measured.json": "piper run",
    "spans-measured.json": "piper run",
    "metrics.jsonl": "piper run",
    "study.json": "piper tune",
    "costs.json": "piper profile",
    HANG_FILE: "piper run, when it hung",
}
"""The files that are read, and the commands that write them."""


@dataclass(frozen=True)
class RankPrediction:
    """Hold the prediction for one rank, in seconds and bytes.

    `limit_bytes` is its device's memory, `host_bytes` the most bytes that it has in its host's memory.
    """

    bubble_s: float
    peak_bytes: int
    device_bytes: int
    peak_by_category: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int | None = None
    host_bytes: int = 0


@dataclass(frozen=True)
class RolePrediction(RankPrediction):
    """Hold the prediction that all of `ranks` share."""

    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class OomOwner:
    """Name an owner of memory in a plan that does not fit."""

    owner: str
    category: str
    microbatches: int
    bytes: int


@dataclass(frozen=True)
class Oom:
    """Say why a plan does not fit; `text` is all of it in one line."""

    ranks: tuple[int, ...]
    role: str
    needs_bytes: int
    limit_bytes: int
    over_bytes: int
    instruction: int
    at: str
    time_s: float
    fullest: str
    owners: tuple[OomOwner, ...]
    beside_bytes: int
    text: str


@dataclass(frozen=True)
class PredictedLoad:
    """Hold the load of experts that a prediction is for: tokens of the fullest rank over the mean."""

    mean: float
    worst: float
    source: str
    text: str
    worst_step_s: float | None = None


@dataclass(frozen=True)
class Predicted:
    """Hold predicted.json: `Simulation.summary()`, and `ranks` or, if there are many, `roles`."""

    step_s: float
    period_s: float
    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None
    exposed_comm_s: float
    global_bubble_s: float
    span_bubble_s: float
    peak_bytes: int
    device_bytes: int
    allocated_bytes: int = 0
    inside_comm_s: float = 0.0
    host_bytes: int = 0
    load: PredictedLoad | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    oom: Oom | None = None
    sources: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ranks: tuple[RankPrediction, ...] = ()
    roles: tuple[RolePrediction, ...] = ()

    def by_rank(self) -> dict[int, RankPrediction]:
        """Return the prediction of each rank."""
        return dict(enumerate(self.ranks)) | {
            rank: role for role in self.roles for rank in role.ranks
        }


@dataclass(frozen=True)
class SavedRestart:
    """Hold one failure of a run that went on.

    Attributes:
        step: the first step that was not finished.
        error: the class of the error.
        message: the message of the error.
        lost: the ranks whose process died.
        resumed: the step with which the run went on.
        ranks: how many ranks went on.
        seconds: until the end of the next step.
        source: from which state it went on.
    """

    step: int
    error: str
    message: str
    lost: tuple[int, ...]
    resumed: int
    ranks: int
    seconds: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Measured:
    """Hold measured.json.

    Attributes:
        period_s: the median seconds per step in steady state; None for short runs.
        tokens_per_s: tokens per second in steady state.
        restarts: the failures after which the run went on.
        steps_asked: the steps that an interrupted run was to take; None for a complete one.
    """

    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    period_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    restarts: tuple[SavedRestart, ...] = ()
    steps_asked: int | None = None


@dataclass(frozen=True)
class ResultOrigin:
    """Hold origin.json: the machine, versions, time and command of the results.

    Attributes:
        commit: the commit of the repository that the user's file is in; "" outside of one.
        seed: of the job's weights and random numbers.
    """

    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    seed: int | None = None
    time: str = ""
    command: str = ""


@dataclass(frozen=True)
class SavedTable:
    """Hold a table that a command saved as it printed it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WhyTables:
    """Hold why.json: the explanation of a step, as `piper simulate --why` prints it."""

    tables: tuple[SavedTable, ...] = ()


@dataclass(frozen=True)
class Results:
    """Hold the contents of a folder; None or empty for missing files.

    Attributes:
        plan: plan.json.
        params: the values that made the strategy.
        directives: the directives in strategy.json, as they stand there.
        predicted: predicted.json.
        predicted_trace: spans-predicted.json.
        measured: measured.json.
        measured_trace: spans-measured.json.
        metrics: the lines of metrics.jsonl.
        experts: the load of experts in these; None if a model has none.
        study: study.json.
        costs: costs.json.
        hung: whether the run hung; hang.txt then says where every rank was.
        origin: origin.json.
        why: why.json.
        answer: answer.json, the ranked strategies of `piper plan`.
    """

    folder: Path
    plan: Plan | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    directives: tuple[Mapping[str, Any], ...] = ()
    predicted: Predicted | None = None
    predicted_trace: Trace | None = None
    measured: Measured | None = None
    measured_trace: Trace | None = None
    metrics: tuple[Metric, ...] = ()
    experts: ExpertHistory | None = None
    study: StudyDocument | None = None
    costs: Costs | None = None
    hung: bool = False
    origin: ResultOrigin | None = None
    why: WhyTables | None = None
    answer: SavedTable | None = None


def load(folder: str | Path, plan: Plan | None = None) -> Results:
    """Read the folder of a simulation, a run, a tuning, a profile, or several in one.

    `plan` is the content of plan.json, if it is known already: then it is not read.

    Raises:
        FormatError: the folder has none of the files, a file is broken or cut off (with its place in the file), or
            files do not belong together.
    """
    folder = Path(folder)
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError):  # a name that nothing can have
        is_folder = False
    if not is_folder:
        raise FormatError(
            f"{folder} is not a folder; the folder of a run, simulation, tuning or profile is expected"
        )
    if not any((folder / name).is_file() for name in FILES):
        known = "\n".join(f"  {name:22} {command}" for name, command in FILES.items())
        raise FormatError(
            f"{folder} holds no results; a folder with some of these files is expected:\n{known}"
        )
    said = _read(folder, "strategy.json", _strategy) or {}
    plan = _read(folder, "plan.json", _plan) if plan is None else plan
    steps = folder / "metrics.jsonl"
    metrics, experts = read_metrics(steps, plan) if steps.is_file() else ((), None)
    results = Results(
        folder,
        plan=plan,
        params=said.get("params", {}),
        directives=tuple(said.get("directives", ())),
        predicted=_read(folder, "predicted.json", _plain(Predicted)),
        predicted_trace=_read(folder, "spans-predicted.json", _document(Trace)),
        measured=_read(folder, "measured.json", _plain(Measured)),
        measured_trace=_read(folder, "spans-measured.json", _document(Trace)),
        metrics=metrics,
        experts=experts,
        study=_read(folder, "study.json", _document(StudyDocument)),
        costs=_read(folder, "costs.json", _document(Costs)),
        hung=(folder / HANG_FILE).is_file(),
        origin=_read(folder, "origin.json", _plain(ResultOrigin)),
        why=_read(folder, "why.json", _plain(WhyTables)),
        answer=_read(folder, "answer.json", _plain(SavedTable)),
    )
    _check_together(results)
    return results


Reader = Callable[[str, str], T]
"""A function that takes a text and the name of its file for errors, and returns the content."""


def _read(folder: Path, name: str, reader: Reader[T]) -> T | None:
    path = folder / name
    if not path.is_file():
        return None
    return reader(text_of(path), str(path))


def _plan(text: str, where: str) -> Plan:
    """Return the plan of a file, which may have been edited, if it keeps all rules of plans."""
    plan = read_plan(text, where)
    if violations := check(plan):
        raise FormatError(f"{where}: the plan is not valid. {violations[0]}")
    return plan


def _document(kind: type[T]) -> Reader[T]:
    return lambda text, where: loads(kind, text, where)


def _plain(kind: type[T]) -> Reader[T]:
    """Return a reader for objects without format and version, which ignores unknown keys and checks the others."""

    def read(text: str, where: str) -> T:
        return checked(kind, read_json(text, where), where)

    return read


def _strategy(text: str, where: str) -> Mapping[str, Any]:
    """Return the strategy as it is written: a report shows directives, and only the compiler knows their meaning."""
    data = read_json(text, where)
    directives = data.get("directives", []) if isinstance(data, dict) else None
    params = data.get("params", {}) if isinstance(data, dict) else None
    if (
        not isinstance(params, dict)
        or not isinstance(directives, list)
        or not all(isinstance(d, dict) for d in directives)
    ):
        raise FormatError(f"{where}: a JSON object of a Strategy is expected")
    said: Mapping[str, Any] = data
    return said


def _check_together(results: Results) -> None:
    """Refuse a trace of another plan, since its instructions would get the wrong names."""
    plan = results.plan
    for name, trace in (
        ("spans-predicted.json", results.predicted_trace),
        ("spans-measured.json", results.measured_trace),
    ):
        if plan is not None and trace is not None and trace.plan_key != plan.key:
            raise FormatError(
                f"{results.folder / name} is of plan {trace.plan_key}, but plan.json there is plan {plan.key}; put "
                f"the files of different runs into different folders"
            )
