"""The load of experts in reports: numbers by layer, rank and expert, over few steps and many, and what was assumed of
it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from packages.report.tests import samples
from piper_ir.ground.errors import FormatError
from piper_ir.ground.expert_tokens import LOAD_NOT_MEASURED
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Param, Plan
from piper_ir.program.layout import DimPart, StepCollective
from piper_report import load, write_report
from piper_report.facts.expert_history import ExpertHistory, expert_axes
from piper_report.figures import expert_figures
from piper_report.figures.expert_figures import MOST_POINTS, curve, layer_names, load_figure
from piper_report.pages.report import Report
from piper_report.tables.expert_tables import (
    MOST_ROWS,
    layer_sheet,
    load_note,
    rank_load_sheet,
    token_sheet,
)
from tests.helpers.cases import each_case

STEPS = ([4, 4, 0, 0], [1, 1, 2, 4], [2, 2, 2, 2])
"""The tokens of four experts in three steps: the fullest has 2, 2 and 1 times the mean, with two on a rank 2, 1.5 and
1."""


def of_two() -> Plan:
    """Return a plan of two ranks that have two of four experts each."""
    return replace(samples.plan_of(pp=1, dp=2), experts=("dp",))


def history(
    layers: Sequence[Sequence[Sequence[int]]], plan: Plan | None = None, **more: Any
) -> ExpertHistory:
    """Return the history of layers, of each its tokens by step."""
    made = ExpertHistory(plan)
    for step, of_layers in enumerate(zip(*layers, strict=True)):
        logged = {
            f"layers.{k}.mlp": {"tokens": [*tokens], "overflow": 1, **more}
            for k, tokens in enumerate(of_layers)
        }
        made.add(10 * step, logged, "here")
    return made


def folder_of(folder: Path, layers: Sequence[Sequence[Sequence[int]]], plan: Plan) -> Path:
    """Write a run with experts beside a prediction that assumed equal loads."""
    made = samples.simulate(plan, "h100x8", costs=samples.comm_costs(plan), tokens_per_row=64)
    samples.write_simulation(folder, made, plan)
    notes = [f"{LOAD_NOT_MEASURED}: as if all ranks had equally many tokens", "another note"]
    assumed = {
        "mean": 1.0,
        "worst": 1.0,
        "source": "assumed",
        "text": "evenly",
        "worst_step_s": None,
    }
    document = json.loads((folder / "predicted.json").read_text()) | {
        "load": assumed,
        "notes": notes,
    }
    (folder / "predicted.json").write_text(json.dumps(document))
    lines = []
    for step, of_layers in enumerate(zip(*layers, strict=True)):
        experts = {
            f"layers.{k}.mlp": {"tokens": [*tokens], "overflow": 0}
            for k, tokens in enumerate(of_layers)
        }
        lines.append(
            json.dumps({"step": step, "loss": 1.0, "step_s": 0.1, "experts": experts}) + "\n"
        )
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_layers_have_mean_worst_and_step() -> None:
    found = layer_sheet(history([STEPS, STEPS[::-1]], of_two(), dropped=2))
    assert found.table.plain() == (
        """Load of experts in 3 steps
layer         expert: mean  worst  in step  rank: mean  worst  in step  no place  dropped
-----------------------------------------------------------------------------------------
all layers            1.67   2.00        0        1.50   2.00        0    12.5 %   25.0 %
layers.0.mlp          1.67   2.00        0        1.50   2.00        0    12.5 %   25.0 %
layers.1.mlp          1.67   2.00       10        1.50   2.00       20    12.5 %   25.0 %
Tokens of the fullest expert and rank over the mean of all; 1 is even; no place: choices that found their expert full; """
        "dropped: rows that found no place on a device."
    )
    assert [*found.frame["overflow"]] == [6 / 48, 3 / 24, 3 / 24]
    dropless = ExpertHistory()
    dropless.add(0, {"a": {"tokens": [1, 3], "overflow": 0}}, "here")
    assert "no place" not in layer_sheet(dropless).table.columns and [
        *layer_sheet(dropless).frame["overflow"]
    ] == [0]


def test_the_last_steps_have_a_column_once_there_are_more() -> None:
    found = layer_sheet(history([[*STEPS] + [[1, 1, 1, 1]] * 10]))
    row = dict(zip(found.table.columns, found.table.rows[0], strict=True))
    assert row["last 10"] == "1.00" and row["expert: mean"] == "1.15" and "rank: mean" not in row
    assert "last 10" not in layer_sheet(history([[*STEPS] + [[1, 1, 1, 1]] * 7])).table.columns


def test_ranks_have_the_tokens_of_their_experts() -> None:
    plan = of_two()
    found = rank_load_sheet(history([STEPS], plan), plan)
    assert found is not None and found.table.rows == (
        ("0", "0", "0-1", "1.17", "2.00", "0", "layers.0.mlp"),
        ("1", "1", "2-3", "0.83", "1.50", "10", "layers.0.mlp"),
    )
    twice = rank_load_sheet(history([[*STEPS, *STEPS]], plan), plan)
    assert twice is not None and [*twice.frame["worst_step"]] == [0, 10], (
        "of steps that are as bad the first"
    )
    assert rank_load_sheet(history([STEPS]), plan) is None, (
        "where each rank has all experts there is no such table"
    )
    swapped = history([[[t[0], t[2], t[1], t[3]] for t in STEPS]], plan)
    other = rank_load_sheet(swapped, plan)
    assert other is not None and other.table.rows[0][3] != "1.17", (
        "a control: other experts on a rank, other loads"
    )


def test_experts_have_their_tokens() -> None:
    frame = token_sheet(history([STEPS], of_two())).frame
    assert [*frame["tokens"]] == pytest.approx([7 / 3, 7 / 3, 4 / 3, 2]) and [*frame["part"]] == [
        0,
        0,
        1,
        1,
    ]
    assert [*frame["mean"]] == pytest.approx([7 / 6, 7 / 6, 4 / 6, 1])
    long = token_sheet(history([[*STEPS] + [[1, 1, 0, 2]] * 10])).frame
    assert [*long["last"]] == [1, 1, 0, 2] and long["mean"][2] > 0, "the last ten steps"


def test_axes_are_those_of_a_layers_own_parameters() -> None:
    spec = TensorSpec((2, 4), "float32")
    params = (
        Param("layers.0.mlp.up", spec, layout=(DimPart("dp", 0),)),
        Param("layers.1.mlp.up", spec),
    )
    plan = replace(of_two(), params=params)
    assert [expert_axes(plan, f"layers.{k}.mlp") for k in range(3)] == [("dp",), (), ("dp",)]
    made = history([STEPS, STEPS], plan)
    assert [layer.ranks for layer in made.layers.values()] == [2, 1]
    assert [*made.rank_of_step.values] == [2.0, 1.5, 1.0], (
        "of the layers alone whose experts are shared"
    )


def test_of_many_layers_the_page_has_the_worst_and_the_fullest() -> None:
    steps = [[[10, 10, 10, 10 + k]] * 3 for k in range(60)]
    steps[7] = [[10, 10, 10, 10], [0, 40, 0, 0], [10, 10, 10, 10]]
    found = layer_sheet(history(steps))
    shown = [row[0] for row in found.table.rows]
    assert (
        shown == ["all layers", "layers.7.mlp", *(f"layers.{k}.mlp" for k in range(51, 60))]
        and len(shown) == MOST_ROWS + 1
    )
    assert len(found.frame) == 61 and "10 of 60 layers" in found.table.notes[-1]
    assert found.table.rows[0][2:4] == ("4.00", "10")


def test_a_layer_without_tokens_in_a_step_has_no_load_there() -> None:
    made = ExpertHistory(of_two())
    made.add(0, {"a": {"tokens": [1, 3], "overflow": 0}}, "here")
    made.add(
        1, {"a": {"tokens": [0, 0], "overflow": 0}, "b": {"tokens": [5, 5], "overflow": 0}}, "here"
    )
    made.add(2, {"b": {"tokens": [4, 6], "overflow": 0}}, "here")
    a, b = made.layers.values()
    assert (
        a.expert.values[0] == 1.5
        and isnan(a.expert.values[1])
        and isnan(a.rank.values[2])
        and len(a.rank.values) == 3
    )
    assert (
        isnan(b.expert.values[0])
        and b.expert.mean == pytest.approx(1.1)
        and made.rank_of_step.mean == pytest.approx(3.7 / 3)
    )
    drawn = load_figure(made)
    assert drawn is not None and drawn.alt.count("from 1.50 to 1.20") == 2


def test_experts_that_never_got_a_token_have_no_figure(tmp_path: Path) -> None:
    """A model may log counts that it never takes, or never compute a layer."""
    never = write_report(folder_of(tmp_path, [[[0, 0, 0, 0]] * 3], of_two()))
    assert never.experts is not None and not any(
        "expert" in figure.name for figure in never.figures
    )
    drawn = load_figure(history([[[0, 0, 0, 0]] * 3, STEPS], of_two()))
    assert drawn is not None and "of 1 layers" in drawn.alt


@each_case(
    ("logged", "said"),
    [
        ({"a": {"tokens": [1.5, 2], "overflow": 0}}, "here.a: the tokens of each expert"),
        ({"a": {"tokens": [1, -2], "overflow": 0}}, "here.a: the tokens of each expert"),
        ({"a": {"tokens": [], "overflow": 0}}, "here.a: the tokens of each expert"),
        ({"a": {"tokens": [1, 2]}}, "here.a: the tokens of each expert"),
        ({"a": {"tokens": [1, 2, 3], "overflow": 0}}, "here.a: it has 3 experts, and had 2 before"),
        ({"b": {"tokens": [1, 2, 3], "overflow": 0}}, "its 3 experts cannot be those of 2 ranks"),
        ({"a": 3}, "here.a: a JSON object is expected"),
        ([], "here: a JSON object is expected"),
    ],
)
def test_what_no_run_logs_is_named(logged: Any, said: str) -> None:
    made = ExpertHistory(of_two())
    made.add(0, {"a": {"tokens": [1, 2], "overflow": 0}}, "here")
    with pytest.raises(FormatError, match=said):
        made.add(1, logged, "here")


def test_many_steps_are_fewer_points_that_keep_mean_least_and_highest() -> None:
    steps = range(100_000)
    values = array("d", (1 + (s == 50_001) * 8 for s in steps))
    found = curve(steps, [values])
    assert len(found.steps) <= MOST_POINTS and found.steps[1] - found.steps[0] == 334
    assert (
        max(found.high) == 9
        and max(found.mean) == pytest.approx(1 + 8 / 334)
        and {*found.low} == {1.0}
    )
    assert curve(range(5), [[1, 2, 3, 4, 5]]).mean == [1, 2, 3, 4, 5], (
        "a control: few steps are drawn as they are"
    )
    of_two = curve(range(2), [[1.0, nan], [3.0, nan]])
    assert (
        of_two.low[0] == 1 and of_two.high[0] == 3 and of_two.mean[0] == 2 and isnan(of_two.mean[1])
    )


def lines(monkeypatch: pytest.MonkeyPatch, layers: int) -> list[int]:
    """Return how many curves with a name each panel has, and draw them."""
    found: list[Figure] = []
    plain = expert_figures.picture

    def kept(figure: Figure, *words: Any, **more: Any) -> Any:
        found.append(figure)
        return plain(figure, *words, **more)

    monkeypatch.setattr(expert_figures, "picture", kept)
    load_figure(history([STEPS] * layers, of_two()))
    return [
        sum(not str(line.get_label()).startswith("_") for line in ax.lines) for ax in found[0].axes
    ]


def test_few_layers_have_a_line_each_and_many_one_in_a_band(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lines(monkeypatch, 2) == [2, 2] and lines(monkeypatch, 60) == [1, 1]
    monkeypatch.setattr(expert_figures, "LINES", expert_figures.LINES[:1])
    assert lines(monkeypatch, 2) == [1, 1], "a control"


def test_names_are_short_where_one_number_differs() -> None:
    assert layer_names(["model.layers.0.mlp", "model.layers.12.mlp"]) == ["layer 0", "layer 12"]
    assert layer_names(["a.0.b.1", "a.1.b.2"]) == ["a.0.b.1", "a.1.b.2"] and layer_names(
        ["alone"]
    ) == ["alone"]


def reported(folder: Path) -> tuple[Report, str]:
    made = write_report(folder)
    return made, made.html.read_text()


def test_a_report_says_what_was_assumed_beside_what_was_measured(tmp_path: Path) -> None:
    made, text = reported(folder_of(tmp_path, [STEPS, STEPS], of_two()))
    said = (
        "Load of experts on the fullest rank: predicted for 1 (assumed), measured 1.5 over 3 steps, at most 2 in "
        "step 0; experts with a capacity compute all their places, so that no time depends on it"
    )
    assert load_note(load(tmp_path)) == (said,) and said in text and made.experts is not None
    assert made.experts.notes[-1] == said, "on a terminal, too"
    assert LOAD_NOT_MEASURED not in text and "warning: another note" in text
    assert {"expert_load", "expert_tokens"} <= {p.stem for p in made.figures}
    assert {"experts", "expert_ranks", "expert_tokens"} <= {p.stem for p in made.tables}
    (tmp_path / "metrics.jsonl").unlink()
    made, text = reported(tmp_path)
    assert f"warning: {LOAD_NOT_MEASURED}" in text and made.experts is None, (
        "a control: nothing was measured"
    )


def test_a_load_that_decides_times_is_for_the_next_prediction(tmp_path: Path) -> None:
    found = load(folder_of(tmp_path, [STEPS], of_two()))
    assert found.plan is not None
    chunk = found.plan.chunks[0]
    traded = StepCollective("all_to_all", "dp", 10)  # plans of earlier versions say no more of it
    steps = {**chunk.steps, "F": replace(chunk.steps["F"], collectives=(traded,))}
    for experts, said in (
        ("dp", f"; predict with that by piper simulate FILE.py --load {tmp_path}"),
        ("ep", "no time depends on it"),
    ):
        dropless = replace(
            found.plan,
            chunks=(replace(chunk, steps=steps, experts=experts), *found.plan.chunks[1:]),
        )
        (note,) = load_note(replace(found, plan=dropless))
        assert note.endswith(said), "what is exchanged along other axes is no row of an expert"


def test_where_each_device_has_all_experts_no_load_matters(tmp_path: Path) -> None:
    assert load_note(load(folder_of(tmp_path, [STEPS], samples.plan_of(pp=1, dp=2)))) == (
        "Each device has all experts of its layers, so that no predicted time depends on their load.",
    )


@pytest.mark.parametrize(("layers", "experts", "steps"), [(1, 1, 1), (2, 4, 5), (60, 256, 3)])
def test_any_size_is_drawn(layers: int, experts: int, steps: int) -> None:
    made = history([[[k % 7 for k in range(experts)]] * steps] * layers)
    drawn: Sequence[Callable[[ExpertHistory], Any]] = (
        expert_figures.load_figure,
        expert_figures.token_figure,
    )
    if experts > 1:
        assert all(of(made).png for of in drawn)
    else:
        assert expert_figures.token_figure(made) is None, "no token at all"
