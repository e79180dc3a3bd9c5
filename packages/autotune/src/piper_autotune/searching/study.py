"""Hold the result of a search, and write and read its files study.json and best.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from piper_autotune.space.objective import Objective, value_text
from piper_compiler import Strategy, load_strategy, save_strategy
from piper_ir.ground.codec import loads
from piper_ir.ground.errors import FormatError, OutputError, TuneError
from piper_ir.study.study import Row, StudyDocument, objective_of
from piper_ir.study.study_groups import FoldedRows, folded, indifferent, interval_text
from piper_ir.tools import Brief, time_text, unread, write_whole


@dataclass(frozen=True, repr=False)
class Study(Brief):
    """Hold the result of a search.

    Attributes:
        memory_limit: bytes per device; None when there was no limit.
        rows: the candidates by number, one per distinct candidate.
        rules: the rules that reject before compiling, each with how often it did.
        interrupted: whether the search ended early, by Ctrl-C or because its storage failed.
        strategies: the strategies by number, with their params, of complete rows; of a study that was loaded, the best
            alone.
        advice: the effects of one more word in the best strategy.
        objective: the quantity that the search minimises.
        device_limits: limit of a rank by type of device, if a cluster has several types; never more than its own device
            has.
        interval_share: the share by which 80 % of published runs are at most longer than predicted, by
            `piper_simulator.interval_share`; 0 without an interval.
        interval_stack: name of the software stack whose runs say so; "" for none.
    """

    cluster: str
    memory_limit: int | None
    seed: int
    rows: tuple[Row, ...]
    rules: tuple[str, ...] = ()
    interrupted: bool = False
    strategies: Mapping[int, Strategy] = field(default_factory=dict, repr=False)
    device_limits: Mapping[str, int] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    objective: Objective = "period"
    repeated: int = 0
    exhausted: bool = False
    interval_share: float = 0.0
    interval_stack: str = ""

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield the cluster, how many candidates there were, and the best of them."""
        complete = sum(row.state == "complete" for row in self.rows)
        yield "cluster", self.cluster
        yield "candidates", f"{len(self.rows)}, of which {complete} fit"
        if (best := self.best_row) is not None:
            period = best.period_s if best.measured_period_s is None else best.measured_period_s
            known = "predicted" if best.measured_period_s is None else "measured"
            yield "best", "?" if period is None else f"{time_text(period)} per step, {known}"
            if best.value is not None:
                yield (
                    "that is",
                    value_text(
                        self.objective, objective_of(best, best.measured_period_s is not None)
                    ),
                )
            yield (
                "with",
                ", ".join(f"{name}={value}" for name, value in best.params.items())
                or "no parameters",
            )

    @property
    def best_row(self) -> Row | None:
        """Return the best complete row: by measurement if any candidate was measured, else by prediction."""
        return min((r for r in self.rows if r.state == "complete"), key=_rank, default=None)

    @property
    def best(self) -> Strategy | None:
        """Return the strategy of `best_row`; None when nothing is complete."""
        row = self.best_row
        return None if row is None else self.strategies.get(row.number)

    def table(self) -> list[dict[str, Any]]:
        """Return all complete rows, best first, as in study.json."""
        return [
            r.as_dict() for r in sorted((r for r in self.rows if r.state == "complete"), key=_rank)
        ]

    def folded(self) -> list[FoldedRows]:
        """Return the complete rows, best first, each group of rows equal to 0.1 % folded into its best."""
        return folded(sorted((r for r in self.rows if r.state == "complete"), key=_rank))

    def interval_text(self) -> str:
        """Return a line about the interval of the best prediction and the candidates within it; "" without one."""
        return interval_text(self.rows, self.best_row, self.interval_share, self.interval_stack)

    def indifferent(self) -> dict[str, int]:
        """Return the parameters that make no difference, with the pairs of candidates that show it."""
        return indifferent(self.rows)

    def rejected(self) -> list[dict[str, Any]]:
        """Return all rejected rows by number, each with its `reason`."""
        return [r.as_dict() for r in self.rows if r.state == "rejected"]

    def save(self, folder: str | Path) -> None:
        """Write study.json and, if there is a best strategy, best.json into an existing folder.

        Raises OutputError when that fails.
        """
        best = self.best_row
        number = None if best is None else best.number
        head = (
            self.cluster,
            self.memory_limit,
            self.seed,
            self.rows,
            number,
            self.rules,
            self.interrupted,
        )
        document = StudyDocument(
            *head, self.device_limits, self.advice, self.objective, self.repeated, self.exhausted,
            self.interval_share, self.interval_stack,
        )  # fmt: skip
        try:
            write_whole(Path(folder) / "study.json", document.dumps())
        except OSError as e:
            raise OutputError(
                f"cannot write the study to {folder}: {e.strerror}; choose a folder that is writable"
            ) from None
        if self.best is not None:
            save_strategy(self.best, Path(folder) / "best.json")

    @staticmethod
    def load(folder: str | Path) -> Study:
        """Return the study from `save`; raise FormatError, which names the file and the place."""
        path = Path(folder) / "study.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise FormatError(
                unread("the study", path, e, "give the folder of a `piper tune`")
            ) from None
        document = loads(StudyDocument, text, str(path))
        strategies = (
            {}
            if document.best is None
            else {document.best: load_strategy(path.with_name("best.json"))}
        )
        head = (
            document.cluster,
            document.memory_limit,
            document.seed,
            document.trials,
            document.rules,
            document.interrupted,
        )
        tail = (
            document.device_limits,
            document.advice,
            cast(Objective, document.objective),
            document.repeated,
            document.exhausted,
        )
        return replace(
            Study(*head, strategies, *tail),
            interval_share=document.interval_share,
            interval_stack=document.interval_stack,
        )


def _rank(row: Row) -> tuple[bool, float, int]:
    measured = row.measured_period_s is not None
    return not measured, objective_of(row, measured), row.number


class SearchError(TuneError):
    """Report a search that failed; `study` holds its results so far."""

    def __init__(self, message: str, study: Study) -> None:
        super().__init__(message)
        self.study = study


class NothingFoundError(SearchError):
    """Report a search that ended without a usable plan; its study holds every candidate with its reason."""
