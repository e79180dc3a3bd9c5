"""Reading result folders: what is there is read, what is broken is named with its place."""

import json
from pathlib import Path

import pytest

from packages.report.tests import samples
from piper_ir.ground.errors import FormatError
from piper_report import load
from tests.helpers.cases import each_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.whole_folder(tmp_path_factory.mktemp("results") / "all")


def test_everything_that_is_there_is_read(folder: Path) -> None:
    found = load(folder)
    assert found.plan == samples.plan() and found.predicted_trace == samples.simulation().trace
    assert found.predicted is not None and found.predicted.period_s == samples.simulation().period_s
    assert found.predicted.ranks[3].peak_bytes == samples.simulation().peak_bytes[3]
    assert (
        found.measured is not None
        and found.measured_trace is not None
        and found.measured_trace.kind == "executed"
    )
    assert [m.step for m in found.metrics] == list(range(6)) and found.metrics[1].loss == 1.5
    assert (
        found.study is not None and found.study.trials[7].kind == "memory" and found.study.best == 1
    )
    assert found.costs is not None and found.params == {"m": 3}


@each_case(
    "write",
    [samples.write_simulation, samples.write_run, samples.write_tuning, samples.write_costs],
)
def test_a_part_is_enough(write, tmp_path: Path) -> None:
    write(tmp_path)
    assert load(str(tmp_path)).folder == tmp_path


def test_an_empty_folder_says_which_files_and_commands(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"(?s)holds no results.*measured.json +piper run.*study.json +piper tune"
    ):
        load(tmp_path)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no-such is not a folder"):
        load(tmp_path / "no-such")


@each_case(
    "name",
    ["plan.json", "strategy.json", "predicted.json", "spans-predicted.json", "measured.json", "spans-measured.json", "study.json",
     "costs.json", "metrics.jsonl"],
)  # fmt: skip
def test_a_file_that_is_cut_off_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    text = (folder / name).read_text().rstrip()
    (tmp_path / name).write_text(text[: len(text) - 5])
    with pytest.raises(FormatError, match=rf"{name}.*line \d+ column \d+ \(is the file"):
        load(tmp_path)


@each_case(
    ("name", "text", "found"),
    [
        ("metrics.jsonl", '{"step": 0, "loss": 1, "step_s": 1}\n{"step": "x", "loss": 1, "step_s": '
                          '1}', "line 2.step: an int"),
        ("metrics.jsonl", '{"step": 0}', "line 1: lacks loss, step_s"),
        ("measured.json", "[]", "a JSON object is expected"),
        ("measured.json", '{"losses": [], "step_s": [null]}', r"measured.json.step_s\[0\]: a number is expected"),
        ("predicted.json", "{}", "lacks step_s, period_s"),
        ("strategy.json", '{"params": 3}', "a JSON object of a Strategy"),
        ("study.json", '{"format": "Study", "version": 2}', '"version" is 2'),
        ("study.json", '{"format": "Study", "version": 1, "cluster": "c", "memory_limit": 1, '
                       '"seed": 0, "best": 1, '
                       '"rules": [], '
         '"trials": [{"number": 0, "state": "gone"}]}', r"trials\[0\].state: 'gone' is not one of"),
        ("study.json", '{"format": "Study", "version": 1, "cluster": '
                       '"c"}', "Study lacks best, memory_limit, rules, seed"),
        ("plan.json", "[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_wrong_content_is_named_with_its_place(
    name: str, text: str, found: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=found) as e:
        load(tmp_path)
    assert name in str(e.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_bytes(b"{\xff")
    with pytest.raises(FormatError, match=r"measured.json: it is not UTF-8 text at byte 1"):
        load(tmp_path)
    (tmp_path / "measured.json").unlink()
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "loss": 1, "step_s": 1}\n{\xff')
    with pytest.raises(FormatError, match=r"metrics.jsonl, line 2: it is not UTF-8 text at byte 1"):
        load(tmp_path)


def test_a_trace_of_another_plan(folder: Path, tmp_path: Path) -> None:
    samples.write_simulation(tmp_path)
    document = json.loads((folder / "spans-measured.json").read_text()) | {"plan_key": "other"}
    (tmp_path / "spans-measured.json").write_text(json.dumps(document))
    with pytest.raises(
        FormatError, match=r"spans-measured.json is of plan other, but plan.json there is plan"
    ):
        load(tmp_path)


def test_a_later_summary_may_say_more(tmp_path: Path) -> None:
    samples.write_simulation(tmp_path)
    document = json.loads((tmp_path / "predicted.json").read_text()) | {"novel": 1}
    (tmp_path / "predicted.json").write_text(json.dumps(document))
    assert load(tmp_path).predicted is not None
