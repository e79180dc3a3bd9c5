"""The tables: predicted and measured mean the same, errors are theirs, and the CSV files have the numbers."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pandas
import pytest

from packages.report.tests import samples
from piper_ir.ground.trace import BUSY_MACHINE
from piper_report import load
from piper_report.facts.results import Results
from piper_report.tables.tables import (
    Column,
    cost_sheet,
    headline,
    owner_sheet,
    rank_sheet,
    sheet,
    source_sheet,
    step_sheet,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load(samples.whole_folder(tmp_path_factory.mktemp("results")))


def test_the_headline_compares_like_with_like(results: Results) -> None:
    frame = headline(results).frame.set_index("figure")
    assert results.measured is not None and results.predicted is not None
    ratio = results.predicted.period_s / results.measured.period_s  # type: ignore[operator]  # the sample has six steps
    assert frame.loc["step in steady state", "error"] == pytest.approx(ratio - 1)
    assert frame.loc["model FLOP utilisation", "measured"] == pytest.approx(
        results.predicted.mfu * ratio
    )
    for name in (
        "bubble, global",
        "bubble, span",
    ):  # the sample took SLOWER times as long everywhere
        assert frame.loc[name, "error"] == pytest.approx(1 / samples.SLOWER - 1)
    assert frame.loc["exposed communication", "error"] == pytest.approx(1 / samples.SLOWER - 1)
    assert frame.loc["peak memory, allocated", "error"] == 0


def test_the_first_step_has_no_error_and_utilisations_say_what_they_count(results: Results) -> None:
    assert results.predicted is not None
    found = headline(replace(results, predicted=replace(results.predicted, hfu=0.5)))
    first = found.frame.set_index("figure").loc["first step, alone"]
    assert first["measured"] > 0 and first["error"] is None and "with all warm-up" in first["note"]
    assert {r[0]: r[3] for r in found.table.rows}["first step, alone"] == "-"
    counted = ("6 N + 12 L h s", "those that run")
    assert all(
        text in note
        for text, note in zip(("with all warm-up", *counted), found.table.notes, strict=True)
    )


def test_the_headline_on_the_page(results: Results) -> None:
    rows = {r[0]: r[1:] for r in headline(results).table.rows}
    assert rows["peak memory, allocated"][2] == "+0.0 %" and rows["peak memory, device"][1:] == (
        "-",
        "-",
    )
    assert rows["step in steady state"][2] == "-23.1 %"


def test_allocated_memory_has_the_buffers_of_a_stack(results: Results) -> None:
    """The page shows the same number as `piper simulate`, which may be more or less than the plan's tensors."""
    assert results.predicted is not None
    more = replace(results.predicted, allocated_bytes=results.predicted.peak_bytes + 2**20)
    found = headline(replace(results, predicted=more)).frame.set_index("figure")
    assert found.loc["peak memory, allocated", "predicted"] == more.allocated_bytes


def test_the_headline_names_a_busy_machine(results: Results) -> None:
    assert results.measured_trace is not None
    busy = replace(results.measured_trace, notes={BUSY_MACHINE: "ranks waited"})
    said = headline(replace(results, measured_trace=busy)).table.notes
    assert said == (*headline(results).table.notes, "busy machine: ranks waited")


def test_of_a_prediction_alone_nothing_was_measured(results: Results) -> None:
    alone = replace(results, measured=None, measured_trace=None, metrics=())
    assert (
        headline(alone).table.columns == ("", "predicted") and "measured" in headline(alone).frame
    )
    found = rank_sheet(alone)
    assert found is not None and step_sheet(alone) is None
    assert not any("measured" in title for title in found.table.columns)
    assert list(found.frame["rank"]) == ["0-1", "2-3"], "replicas do the same"


def test_of_a_run_alone_nothing_was_predicted(results: Results) -> None:
    alone = replace(results, predicted=None, predicted_trace=None, plan=None)
    assert headline(alone).table.columns == ("", "measured")
    assert "exposed communication" not in headline(alone).frame["figure"].tolist(), (
        "without a plan nobody knows"
    )
    assert owner_sheet(alone) is None and source_sheet(alone) is None


def test_a_run_that_was_not_traced_and_measured_no_memory(results: Results) -> None:
    bare = replace(
        results,
        measured_trace=None,
        measured=replace(results.measured, peak_bytes={}, period_s=None),
    )
    rows = {r[0]: r[2] for r in headline(bare).table.rows}
    assert (
        rows["bubble, global"]
        == rows["peak memory, allocated"]
        == rows["step in steady state"]
        == "-"
    )


def test_every_rank_has_a_row(results: Results) -> None:
    found = rank_sheet(results)
    assert found is not None and list(found.frame["rank"]) == [0, 1, 2, 3]
    busy = found.frame["busy_measured_s"] / found.frame["busy_predicted_s"]
    assert list(busy) == pytest.approx([samples.SLOWER] * 4)


def test_the_owners_file_has_all_and_the_page_the_top(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper_report.tables.tables.TOP_OWNERS", 2)
    found = owner_sheet(results)
    assert found is not None and len(found.table.rows) == 4 < len(found.frame)
    assert found.frame.groupby("role")["share"].sum().tolist() == pytest.approx([1, 1])
    assert "further owners hold" in found.table.notes[0]


def test_costs_of_any_shape_are_listed_with_what_they_are_of(results: Results) -> None:
    found = cost_sheet(results)
    assert found is not None
    assert [r[:3] for r in found.table.rows] == [
        ("compute", "stage0, F", "1 ms"),
        ("compute", "stage0, W", "2 ms"),
        ("comm", "op p2p, bytes 4096, group 2", "50 us"),
    ]
    assert (
        list(found.frame["source"]) == ["measured", "given", "measured"]
        and "rows: 4" in found.table.notes
    )


def test_a_long_table_is_cut_on_the_page_only() -> None:
    found = sheet("x", "X", [Column("a", "A"), Column("b", "B")], [(i, None) for i in range(500)])
    assert (
        len(found.table.rows) == 200 and len(found.frame) == 500 and found.table.rows[0] == ("0",)
    )
    assert found.table.notes == ("200 of 500 rows are shown; x.csv has all.",)
    assert pandas.read_csv(StringIO(found.frame.to_csv(index=False)))["b"].isna().all()


def test_steps_come_from_the_metrics_else_from_the_run(results: Results, tmp_path: Path) -> None:
    with_rate, without = step_sheet(results), step_sheet(replace(results, metrics=()))
    assert with_rate is not None and without is not None
    assert list(with_rate.frame["loss"]) == list(without.frame["loss"])
    assert (
        with_rate.table.rows[0][3] == "100,000" and "tokens per second" not in without.table.columns
    )
