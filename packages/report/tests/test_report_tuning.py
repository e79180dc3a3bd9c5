"""A tuning as numbers: the front, the best so far, the places on an axis."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests import samples
from piper_ir.study.study import Row, StudyDocument
from piper_report import load, write_report
from piper_report.figures import tuning_figures
from piper_report.figures.parallel_figure import UNSET, Axis, parallel_figure
from piper_report.figures.tuning_figures import (
    goal_of,
    history_figure,
    pareto_figure,
    pareto_front,
    scored,
)
from piper_report.tables.tables import Sheet
from piper_report.tables.tuning_tables import tuning_sheets

POINTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8).map(float)), max_size=20)


@given(POINTS)
def test_the_front_is_what_no_other_beats(points: list[tuple[int, float]]) -> None:
    beaten = {
        (b, p) for b, p in points if any((x, y) != (b, p) and x <= b and y <= p for x, y in points)
    }
    assert pareto_front(points) == sorted(set(points) - beaten)


@given(
    st.lists(
        st.one_of(
            st.none(), st.integers(-5, 99), st.floats(0.5, 1e4), st.text(max_size=3), st.booleans()
        ),
        min_size=1,
    )
)
def test_every_value_has_a_place_on_its_axis(values: list[Any]) -> None:
    axis = Axis(values)
    assert all((v is None) == (axis.place(v) < 0) and axis.place(v) <= 1 + 1e-9 for v in values)
    assert (UNSET in [text for _, text in axis.ticks()]) == (None in values)


def test_few_numbers_stand_at_equal_distances_and_many_to_scale() -> None:
    assert [Axis([1, 2, 16]).place(v) for v in (1, 2, 16)] == [0, 0.5, 1]
    many = Axis([*range(1, 12), 1000])
    assert many.place(1000) == 1 and many.place(10) == pytest.approx(1 / 3)
    assert [t for _, t in many.ticks()] == ["1", "5.62", "31.6", "178", "1e+03"]
    assert [t for _, t in Axis(["step", 500, 0, 25.5]).ticks()] == ["0", "25.5", "500", "step"], (
        "names follow on numbers"
    )


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sheet]:
    folder = tmp_path_factory.mktemp("tune")
    samples.write_tuning(folder)
    return {s.name: s for s in tuning_sheets(load(folder))}


def test_confirmed_candidates_by_measurement(sheets: dict[str, Sheet]) -> None:
    rows = sheets["confirmed"].table.rows
    assert rows[0] == (
        "1",
        "schedule=1f1b, m=4",
        "110 ms",
        "100 ms",
        "+10.0 %",
        "50 MiB",
        "50 MiB",
        "+0.0 %",
    )
    assert [r[0] for r in rows] == ["1", "2"]
    assert sheets["confirmed"].frame["error"][1] == pytest.approx(-0.2)


def test_rejected_candidates_by_reason_with_an_example(sheets: dict[str, Sheet]) -> None:
    rows = sheets["rejected"].table.rows
    assert [r[:3] for r in rows] == [("illegal", "2", "8"), ("memory", "1", "7")]
    assert rows[1][4] == "rank 0 is 10 MiB over the limit at instruction 3"


def test_all_candidates_the_quickest_first(sheets: dict[str, Sheet]) -> None:
    assert list(sheets["trials"].frame["trial"]) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(sheets["trials"].frame["state"])[-3:] == ["rejected"] * 3


def test_a_study_in_which_nothing_fits_has_no_figures_but_its_reasons(tmp_path: Path) -> None:
    document = samples.study()
    document["trials"] = [t for t in document["trials"] if t["state"] == "rejected"]
    (tmp_path / "study.json").write_text(json.dumps(document | {"best": None}))
    results = load(tmp_path)
    assert results.study is not None and scored(results.study) == []
    assert [f(results.study) for f in (history_figure, pareto_figure, parallel_figure)] == [
        None
    ] * 3
    assert [s.name for s in tuning_sheets(results)] == ["rejected", "rules", "trials"]


def test_candidates_without_memory_or_parameters_leave_figures_out() -> None:
    study = StudyDocument("c", None, 0, (Row(0, "complete", period_s=1.0),), None, ())
    assert pareto_figure(study) is None and parallel_figure(study) is None


def test_a_single_candidate_with_names_of_any_kind_is_drawn(tmp_path: Path) -> None:
    """Dollar signs are formulas to matplotlib unless it is told otherwise."""
    document = samples.study()
    document["trials"] = [document["trials"][0] | {"params": {r"$\frac{$": "$$x_", "ключ": None}}]
    (tmp_path / "study.json").write_text(json.dumps(document | {"best": 0}))
    assert {p.stem for p in write_report(tmp_path).figures} == {"history", "pareto", "parameters"}


def priced(objective: str, values: list[float]) -> StudyDocument:
    """Return a study whose quickest candidate is the worst by another objective."""
    rows = tuple(
        Row(k, "complete", params={"m": k}, period_s=1.0 + k, value=v, peak_bytes=2**20)
        for k, v in enumerate(values)
    )
    late = Row(9, "rejected", period_s=0.5, peak_bytes=2**21, kind="memory")
    return StudyDocument("c", None, 0, (*rows, late), 2, (), objective=objective)


@pytest.mark.parametrize(
    ("objective", "values", "shown", "label", "said"),
    [
        (
            "tokens_per_s_per_device",
            [0.01, 5e-3, 2e-3],
            [100, 200, 500],
            "tokens per second",
            "rises from 100 tokens/s to 500",
        ),
        (
            "dollars_per_token",
            [4e-6, 3e-6, 1e-6],
            [4, 3, 1],
            "dollars per million tokens",
            "falls from 4 dollars to 1 dollars",
        ),
        ("period", [1.0, 2.0, 3.0], [1, 2, 3], "period (s)", "falls from 1 s to 1 s"),
    ],
)
def test_figures_draw_what_the_search_is_for(
    objective: str,
    values: list[float],
    shown: list[float],
    label: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        tuning_figures, "picture", lambda figure, *texts, **_: drawn.append((figure.axes[0], texts))
    )
    study = priced(objective, values)
    history_figure(study), pareto_figure(study)
    (history, texts), (pareto, others) = drawn
    assert (
        list(history.lines[0].get_ydata()) == pytest.approx(shown) and label in history.get_ylabel()
    )
    assert (
        list(pareto.lines[0].get_ydata()) == pytest.approx(shown) and label in pareto.get_ylabel()
    )
    assert said in texts[2] and ("period" in others[2]) == (objective == "period")
    parallel = parallel_figure(study)
    assert parallel is not None and goal_of(study).name in parallel.alt


def test_candidates_are_listed_by_the_objective(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(priced("dollars_per_token", [4e-6, 3e-6, 1e-6]).dumps())
    trials = next(s for s in tuning_sheets(load(tmp_path)) if s.name == "trials")
    assert list(trials.frame["trial"]) == [2, 1, 0, 9] and trials.table.rows[0][-1] == "1 dollars"


def test_no_candidate_without_contention_is_the_best_beside_an_answer(tmp_path: Path) -> None:
    samples.write_tuning(tmp_path)
    assert "The best one is red" in write_report(tmp_path).html.read_text(encoding="utf-8")
    table = {"title": "a job", "columns": ["", "s/step"], "rows": [["1", "2 s"]], "notes": []}
    (tmp_path / "answer.json").write_text(json.dumps(table))
    page = write_report(tmp_path).html.read_text(encoding="utf-8")
    assert "without contention" in page and "The best one is red" not in page
