"""Study: what it answers, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packages.autotune.tests.tuner_spaces import problem, strategy
from piper_autotune import Study, tune
from piper_compiler import load_strategy
from piper_ir.ground.codec import loads
from piper_ir.ground.errors import FormatError, OutputError
from piper_ir.study.study import Row, StudyDocument
from tests.helpers.cases import each_case


@pytest.fixture(scope="module")
def found() -> Study:
    return tune(problem(2400), strategy, trials=10, workers=0)


def test_a_study_is_written_and_read(found: Study, tmp_path: Path) -> None:
    found.save(tmp_path)
    again = Study.load(tmp_path)
    assert again.rows == found.rows and again.rules == found.rules and again.best == found.best
    assert (
        again.best is not None
        and found.best_row is not None
        and again.best.params == found.best_row.params
    )
    assert load_strategy(tmp_path / "best.json") == found.best
    data = json.loads((tmp_path / "study.json").read_text())
    assert (
        data["best"] == found.best_row.number and data["memory_limit"] == 2400 and data["seed"] == 0
    )
    assert {
        "number",
        "state",
        "params",
        "period_s",
        "device_bytes",
        "reason",
        "kind",
        "error",
    } <= data["trials"][0].keys()


def test_a_study_without_a_best_has_no_best_file(tmp_path: Path) -> None:
    Study("c", None, 0, (Row(0, "rejected", {}, reason="why", kind="memory"),)).save(tmp_path)
    assert Study.load(tmp_path).best is None and not (tmp_path / "best.json").exists()


def test_a_search_that_was_interrupted_says_so_in_its_file(tmp_path: Path) -> None:
    Study("c", None, 0, (Row(0, "complete", {"m": 1}, period_s=1.0),), interrupted=True).save(
        tmp_path
    )
    assert json.loads((tmp_path / "study.json").read_text())["interrupted"] is True
    assert loads(StudyDocument, (tmp_path / "study.json").read_text()).interrupted


def test_measured_rows_come_before_predicted_ones() -> None:
    rows = (
        Row(0, "complete", period_s=1.0),
        Row(1, "complete", period_s=2.0, measured_period_s=4.0),
        Row(2, "complete", period_s=3.0, measured_period_s=3.5),
        Row(3, "rejected", period_s=0.5, reason="too big", kind="memory"),
    )
    study = Study("c", 5, 0, rows)
    assert (
        [r["number"] for r in study.table()] == [2, 1, 0]
        and study.best_row == rows[2]
        and study.best is None
    )
    assert [r["number"] for r in study.rejected()] == [3]


@each_case(
    "change",
    [
        lambda d: d.pop("rules"),
        lambda d: d.update(trials=[{}]),
        lambda d: d["trials"][0].update(state="odd"),
        lambda d: d["trials"][0].update(extra=1),
        lambda d: d.update(format="Plan"),
        lambda d: d.update(version=2),
    ],
)
def test_a_broken_file_is_refused(found: Study, tmp_path: Path, change: object) -> None:
    found.save(tmp_path)
    data = json.loads((tmp_path / "study.json").read_text())
    change(data)  # type: ignore[operator]  # parametrized with functions
    (tmp_path / "study.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"study\.json"):
        Study.load(tmp_path)


def test_folders_that_are_not_there_are_named(found: Study, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write the study to"):
        found.save(tmp_path / "none")
    with pytest.raises(FormatError, match="cannot read the study"):
        Study.load(tmp_path / "none")
