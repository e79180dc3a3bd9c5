"""Study: what a search found, and its files study.json and best.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piper_autotune.rows import Row, row_from
from piper_compiler import Strategy, load_strategy, save_strategy
from piper_ir.codec import read_document
from piper_ir.errors import FormatError, OutputError, TuneError

STUDY_VERSION = 1


@dataclass(frozen=True)
class Study:
    """`rows` by number, one per distinct candidate. `rules`: the rules that rejected before compiling, each with how often.
    `interrupted`: the search was ended by Ctrl-C."""

    cluster: str
    memory_limit: int | None
    seed: int
    rows: tuple[Row, ...]
    rules: tuple[str, ...] = ()
    interrupted: bool = False
    strategies: Mapping[int, Strategy] = field(default_factory=dict, repr=False)
    """Number -> strategy with its params, of complete rows; of a study that was loaded, the best alone."""

    @property
    def best_row(self) -> Row | None:
        """The fastest complete row: by measurement where any candidate was measured, else by prediction."""
        return min((r for r in self.rows if r.state == "complete"), key=_rank, default=None)

    @property
    def best(self) -> Strategy | None:
        """The strategy of `best_row`; None when nothing is complete."""
        row = self.best_row
        return None if row is None else self.strategies.get(row.number)

    def table(self) -> list[dict[str, Any]]:
        """All complete rows, best first, as in study.json."""
        return [r.as_dict() for r in sorted((r for r in self.rows if r.state == "complete"), key=_rank)]

    def rejected(self) -> list[dict[str, Any]]:
        """All rejected rows by number, each with its `reason`."""
        return [r.as_dict() for r in self.rows if r.state == "rejected"]

    def save(self, folder: str | Path) -> None:
        """Write study.json and, if there is a best strategy, best.json into a folder that exists. OutputError when that fails."""
        best = self.best_row
        head = {"format": "Study", "version": STUDY_VERSION, "cluster": self.cluster, "memory_limit": self.memory_limit}
        head |= {"seed": self.seed, "best": None if best is None else best.number, "rules": list(self.rules)}
        rows = ",\n  ".join(json.dumps(r.as_dict()) for r in self.rows)
        try:
            (Path(folder) / "study.json").write_text(f'{json.dumps(head)[:-1]}, "trials": [\n  {rows}\n]}}\n')
        except OSError as e:
            raise OutputError(f"cannot write the study to {folder}: {e.strerror}; choose a folder that is writable") from None
        if self.best is not None:
            save_strategy(self.best, Path(folder) / "best.json")

    @staticmethod
    def load(folder: str | Path) -> Study:
        """Read what `save` wrote. FormatError names the file and the place."""
        path = Path(folder) / "study.json"
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise FormatError(f"cannot read the study {path}: {e}") from None
        data = read_document("Study", STUDY_VERSION, text, str(path))
        keys = {"cluster", "memory_limit", "seed", "trials", "best", "rules"}
        if data.keys() != keys or not isinstance(data["trials"], list) or not isinstance(data["rules"], list):
            raise FormatError(f"{path}: a study is an object with {', '.join(sorted(keys))}; trials and rules are arrays")
        rows = tuple(row_from(r, f"{path}.trials[{i}]") for i, r in enumerate(data["trials"]))
        best = data["best"]
        strategies = {} if best is None else {best: load_strategy(path.with_name("best.json"))}
        return Study(data["cluster"], data["memory_limit"], data["seed"], rows, tuple(data["rules"]), strategies=strategies)


def _rank(row: Row) -> tuple[bool, float, int]:
    if row.measured_period_s is not None:
        return False, row.measured_period_s, row.number
    return True, row.period_s if row.period_s is not None else float("inf"), row.number


class NothingFoundError(TuneError):
    """A search ended without a plan that can be used; `study` holds every candidate with its reason."""

    def __init__(self, message: str, study: Study) -> None:
        super().__init__(message)
        self.study = study
