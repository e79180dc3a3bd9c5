"""Results of many ranks: what ranks share is written once, and is read as if it were written for each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import piper
from piper.api.ground import results
from piper_compiler import synthetic
from piper_report import load, write_report
from piper_report.facts.results import Results
from piper_report.tables.tables import rank_sheet
from piper_simulator import Simulation, load_cluster, simulate

DP = 40
SLOW = 7
STRATEGY = piper.Strategy(
    piper.Mesh(pp=2, dp=DP),
    (*piper.recipes.gpipe(pp=2, microbatches=4), *piper.recipes.data_parallel()),
)


@pytest.fixture(scope="module")
def predicted() -> tuple[piper.Plan, Simulation]:
    """Two stages of 40 replicas, of which one is slow: its two ranks are not like the others of their roles."""
    program = synthetic(stages=2, F=0.1, I=0.1, W=0.1, activation=1000, params=10**9)
    plan = piper.compile(program, STRATEGY).plan
    return plan, simulate(plan, replace(load_cluster("h100x8*10"), slow_ranks={SLOW: 1.5}))


def saved(predicted: tuple[piper.Plan, Simulation], folder: Path) -> Results:
    folder.mkdir()
    results.save_plan(folder, predicted[0], STRATEGY)
    results.save_prediction(folder, predicted[1], predicted[0])
    return load(folder)


@pytest.fixture(scope="module")
def by_role(
    predicted: tuple[piper.Plan, Simulation], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return saved(predicted, tmp_path_factory.mktemp("by_role") / "folder")


@pytest.fixture(scope="module")
def by_rank(
    predicted: tuple[piper.Plan, Simulation], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """The same as folders had it before, each rank by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "MOST_RANKS", 10**9)
        return saved(predicted, tmp_path_factory.mktemp("by_rank") / "folder")


def test_what_ranks_share_is_written_once(by_role: Results, by_rank: Results) -> None:
    short, long = by_role.predicted_trace, by_rank.predicted_trace
    assert short is not None and long is not None
    firsts = {s.rank for s in short.spans}
    assert 2 < len(firsts) < 10 and len({s.rank for s in long.spans}) == 2 * DP
    assert sorted(rank for ranks in short.alike for rank in ranks) == [*range(2 * DP)]
    same = short.shown_as()
    whole = {(s.rank, s.instr): s for s in long.spans}
    own = {(s.rank, s.instr): s for s in short.spans}
    for (rank, instr), span in whole.items():
        assert replace(own[same.get(rank, rank), instr], rank=rank) == span
    assert (
        SLOW in firsts and by_role.folder.joinpath("trace-predicted.json").stat().st_size < 200_000
    )


def test_every_rank_has_its_prediction(
    by_role: Results, by_rank: Results, predicted: tuple[piper.Plan, Simulation]
) -> None:
    assert by_role.predicted is not None and by_rank.predicted is not None
    short, long = by_role.predicted.by_rank(), by_rank.predicted.by_rank()
    assert short.keys() == long.keys() == {*range(2 * DP)}
    for rank in short:
        assert (short[rank].bubble_s, short[rank].peak_bytes) == (
            long[rank].bubble_s,
            long[rank].peak_bytes,
        )
        assert short[rank].bubble_s == predicted[1].bubble_s[rank]


def test_the_sheet_of_ranks_says_how_many_are_alike(by_role: Results, by_rank: Results) -> None:
    """Exposed communication is found among the spans of a meeting, of which each sort of rank is there once."""
    short, long = rank_sheet(by_role), rank_sheet(by_rank)
    assert short is not None and long is not None
    assert list(short.frame["rank"]) == [
        f"0, 1, 2 and {DP - 4} more",
        str(SLOW),
        f"{DP}-{2 * DP - 1}",
    ]
    for mine, other in zip(
        short.frame.to_dict("records"), long.frame.to_dict("records"), strict=True
    ):
        assert {k: v for k, v in mine.items() if v == v} == pytest.approx(
            {k: v for k, v in other.items() if v == v}
        )


def test_a_report_is_made_of_both(by_role: Results, by_rank: Results) -> None:
    for found in (by_role, by_rank):
        assert "80" in write_report(found.folder).html.read_text()


def test_chromes_viewer_is_told_how_many_a_rank_stands_for(by_role: Results) -> None:
    events = json.loads((by_role.folder / "trace-predicted.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert f"ranks 0, 1, 2 and {DP - 4} more (pp=0)" in names
    assert any(name.startswith(f"rank {SLOW} (pp=") for name in names)


def test_few_ranks_are_written_one_by_one(tmp_path: Path) -> None:
    plan = piper.compile(synthetic(stages=2, F=1, I=1, W=1), piper.Strategy(piper.Mesh(), [])).plan
    results.save_prediction(tmp_path, simulate(plan), plan)
    numbers = json.loads((tmp_path / "predicted.json").read_text())
    assert len(numbers["ranks"]) == 1 and "roles" not in numbers
    assert "alike" not in json.loads((tmp_path / "spans-predicted.json").read_text())
