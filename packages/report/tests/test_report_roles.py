"""The page by role: ranks that are alike once, stages and directives, what a device holds in all, where results are
from."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from packages.report.tests import samples
from piper_ir.ground.codec import dumps
from piper_ir.ground.trace import Trace
from piper_ir.tools import named_ranks, ranks_text
from piper_report import load, schedule_table, write_beside, write_report
from piper_report.facts.alike import alike_ranks
from piper_report.facts.results import RankPrediction, ResultOrigin, SavedTable, WhyTables
from piper_report.figures.gantt import shown_ranks
from piper_report.pages.beside import _told
from piper_report.pages.chrome import chrome_trace
from piper_report.pages.report import _summary
from piper_report.tables.stage_tables import stage_sheet, strategy_sheet
from piper_simulator import simulate
from tests.helpers.cases import each_case


@each_case(
    ("ranks", "text"),
    [
        ((4,), "4"), ((0, 1), "0-1"), (tuple(range(16)), "0-15"), ((0, 2), "0, 2"), ((0, 2, 4), "0, 2, 4"),
        ((0, 2, 4, 6), "0, 2, ..., 6"), ((0, 1, 5, 6, 9), "0, 1, 5 and 2 more"),
    ],
)  # fmt: skip
def test_ranks_as_text(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text
    assert named_ranks(ranks) == ("rank " if len(ranks) == 1 else "ranks ") + text


def test_simulated_ranks_are_alike_by_role_and_measured_ones_never() -> None:
    made, plan = samples.simulation(), samples.plan()
    groups = {0: (0, 1), 2: (2, 3)}
    assert alike_ranks([made.trace], plan) == groups == alike_ranks([made.role_trace], plan)
    assert list(alike_ranks([made.trace, samples.executed(made.trace)], plan)) == [0, 1, 2, 3]
    late = replace(
        made.trace,
        spans=tuple(replace(s, end=s.end + 1e-6 * (s.rank == 1)) for s in made.trace.spans),
    )
    assert alike_ranks([late], plan) == {0: (0,), 1: (1,), 2: (2, 3)}, (
        "one that is slower is not like the others"
    )


def test_measured_ranks_are_drawn_beside_the_prediction_of_one_that_is_alike() -> None:
    made = samples.simulation()
    traces = [made.role_trace, samples.executed(made.trace)]
    assert list(shown_ranks(traces, samples.plan())) == [0, 1, 2, 3]


def test_of_many_roles_the_first_and_the_last_are_drawn() -> None:
    plan = samples.plan_of(pp=10, microbatches=2)
    assert list(shown_ranks([simulate(plan).trace], plan)) == [0, 1, 3, 4, 5, 6, 8, 9]


def test_schedules_and_traces_name_ranks_that_are_alike_together() -> None:
    made, plan = samples.simulation(), samples.plan()
    assert [
        line[:9] for line in schedule_table(made.role_trace, plan, width=80).splitlines()[:2]
    ] == ["ranks 0-1", "ranks 2-3"]
    names = [
        e["args"]["name"]
        for e in chrome_trace(made.role_trace)["traceEvents"]
        if e["name"] == "process_name"
    ]
    assert names == ["ranks 0-1", "ranks 2-3"]


def test_stages_and_directives(tmp_path: Path) -> None:
    samples.write_simulation(tmp_path)
    places = [
        {"is": "Place", "selection": {"terms": [["stage", s]]}, "on": [["pp", s]]} for s in range(5)
    ]
    split = {"is": "SplitBackward", "selection": {"terms": []}}
    document = {"format": "Strategy", "version": 1, "params": {}, "directives": [*places, split]}
    (tmp_path / "strategy.json").write_text(json.dumps(document))
    results = load(tmp_path)
    directives, stages = strategy_sheet(results), stage_sheet(results)
    assert directives is not None and stages is not None
    assert directives.table.rows == (
        ("place", "5", "selection=where(stage=0), on=pp=0; ...; selection=where(stage=4), on=pp=4"),
        ("split_backward", "1", "selection=where()"),
    )
    assert [row[:5] for row in stages.table.rows] == [
        ("0", "pp0", "0-1", "stage0", "262,144"),
        ("1", "pp1", "2-3", "stage1", "262,144"),
    ]
    assert "layers" not in stages.table.columns and "layers" in stages.frame


def test_a_slow_stage_is_seen(tmp_path: Path) -> None:
    plan = samples.plan_of(pp=2, dp=2, F=(1e-3, 3e-3), I=(1e-3, 3e-3), W=(1e-3, 3e-3))
    samples.write_simulation(
        tmp_path, simulate(plan, "h100x8", costs=samples.comm_costs(plan)), plan
    )
    stages = stage_sheet(load(tmp_path))
    assert stages is not None
    seconds = [plan.microbatches * per_microbatch for per_microbatch in (3e-3, 9e-3)]
    assert stages.frame["compute_predicted_s"].tolist() == pytest.approx(seconds)
    assert [row[-1] for row in stages.table.rows] == ["-50.0 %", "+50.0 %"]
    assert "compute, measured" not in stages.table.columns


def test_the_page_says_what_a_device_holds_and_where_results_are_from(tmp_path: Path) -> None:
    samples.write_simulation(tmp_path)
    predicted = json.loads((tmp_path / "predicted.json").read_text())
    for rank in predicted["ranks"]:
        rank["limit_bytes"] = 80 << 30
    (tmp_path / "predicted.json").write_text(json.dumps(predicted))
    made_by = "2026-01-01 00:00 UTC", "piper simulate x.py"
    origin = ResultOrigin(
        "Abacus, 2 cores", {"piper": "1.2.3"}, "0123abcd with changes", 7, *made_by
    )
    (tmp_path / "origin.json").write_text(json.dumps(origin.__dict__))
    why = {
        "tables": [
            {
                "title": "what if",
                "columns": ["", "step"],
                "rows": [["no <launch> cost", "1 s"]],
                "notes": ["a note"],
            }
        ]
    }
    (tmp_path / "why.json").write_text(json.dumps(why | {"numbers": {}}))
    html = write_report(tmp_path).html.read_text()
    said = (
        "Abacus, 2 cores",
        "piper 1.2.3",
        "0123abcd with changes",
        "piper simulate x.py",
        "no &lt;launch&gt; cost",
        "a note",
    )
    assert all(text in html for text in said)
    assert "in all" in html and "the device has 80 GiB" in html and "what the device has" in html
    assert load(tmp_path).why == WhyTables(
        (SavedTable("what if", ("", "step"), (("no <launch> cost", "1 s"),), ("a note",)),)
    )
    assert re.findall(r'<section id="(\w+)">', html) == [
        "summary",
        "strategy",
        "timeline",
        "why",
        "memory",
    ]


def test_a_plan_that_does_not_fit_is_said_first(tmp_path: Path) -> None:
    plan = samples.plan_of(activation=60 << 30)
    samples.write_simulation(tmp_path, simulate(plan, "h100x8"), plan)
    assert _summary(load(tmp_path)).warnings[0].startswith("DOES NOT FIT: out of memory")


def test_lines_near_the_curve_are_drawn_and_far_ones_are_not() -> None:
    from piper_report.figures.memory_figure import HAS, IN_ALL, _device_lines
    from piper_report.figures.style import house_style, new_figure, panels, size_unit

    with house_style():
        (ax,) = panels(new_figure(2.0), 1)
        found = [
            set(
                _device_lines(
                    ax,
                    RankPrediction(0.0, 10 << 30, total << 30, {}, limit << 30),
                    10 << 30,
                    size_unit(10 << 30),
                )
            )
            for total, limit in ((12, 80), (12, 14), (40, 80), (12, 4))
        ]
    assert found == [{IN_ALL}, {IN_ALL, HAS}, set(), {IN_ALL, HAS}]


@each_case(
    ("change", "text"),
    [(-0.5, "-50.0 %"), (8.9, "+890.0 %"), (9.0, "10 times"), (249.4, "250 times")],
)
def test_large_changes_are_factors(change: float, text: str) -> None:
    assert _told(change) == text


def test_two_folders_beside_each_other(tmp_path: Path) -> None:
    a, b = tmp_path / "first", tmp_path / "second"
    for folder, times in ((a, {}), (b, {"microbatches": 6})):
        folder.mkdir()
        plan = samples.plan_of(pp=2, dp=2, **times)
        samples.write_simulation(
            folder, simulate(plan, "h100x8", costs=samples.comm_costs(plan)), plan
        )
    made = write_beside(a, b)
    assert made.html.parent == b / "report-beside-first"
    figures = pandas.read_csv(made.html.parent / "headline.csv", index_col="figure")
    step = figures.loc["step in steady state"]
    assert step["b_predicted"] > step["a_predicted"]
    assert step["change_predicted"] == pytest.approx(step["b_predicted"] / step["a_predicted"] - 1)
    html = made.html.read_text()
    assert (
        "What differs" in html
        and "the same in both" in html
        and "12 rows" in html
        and "6 rows" in html
    )
    assert {p.stem for p in made.figures} == {"timeline_a", "timeline_b"}
    assert {p.stem for p in made.tables} == {
        "differences",
        "headline",
        "stages_a",
        "stages_b",
        "memory_lines",
    }


def test_two_runs_have_their_losses_on_one_axis(tmp_path: Path) -> None:
    for name in "ab":
        samples.whole_folder(tmp_path / name)
    made = write_beside(tmp_path / "a", tmp_path / "b", out=tmp_path / "there")
    assert "loss" in {p.stem for p in made.figures} and made.html.parent == tmp_path / "there"
    changes = (
        pandas.read_csv(tmp_path / "there" / "headline.csv")[
            ["change_predicted", "change_measured"]
        ]
        .stack()
        .dropna()
    )
    assert len(changes) > 8 and (changes == 0).all(), "a folder is equal to its copy"


def test_a_trace_without_spans_has_no_groups() -> None:
    assert alike_ranks([Trace("k", "simulated", ())], None) == {} and dumps(
        Trace("k", "simulated", ())
    )
