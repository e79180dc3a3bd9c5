"""The search: what it finds, what it counts, and what it says when the strategy function is at fault."""

from __future__ import annotations

import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import optuna
import pytest

from packages.autotune.tests.tuner_spaces import exhaustive, problem, strategy
from piper_autotune import Confirmation, NothingFoundError, SearchError, SearchProgress, Study, tune
from piper_autotune.scoring.evaluators import Here
from piper_autotune.searching import storage
from piper_autotune.searching.search import LEADERS
from piper_autotune.space.problem import Programs, TuningProblem
from piper_autotune.space.rules import RULES
from piper_compiler import Strategy, recipes
from piper_ir.ground.errors import DirectiveError, TuneError
from piper_ir.ground.mesh import Mesh
from tests.helpers.cases import each_case

LIMIT = 2400
"""Bytes. Some points fit, the fastest does not."""


def search(function: Any = strategy, of: TuningProblem | None = None, **more: Any) -> Study:
    return tune(of or problem(LIMIT), function, **{"trials": 12, "workers": 0, **more})


@pytest.fixture(scope="module")
def found() -> Study:
    return search()


def test_the_best_that_fits_is_found(found: Study) -> None:
    scores = [s for _, s in exhaustive(problem(LIMIT))]
    fitting = [s.period_s for s in scores if not s.reason]
    assert 0 < len(fitting) < len(scores) and min(s.period_s for s in scores) < min(fitting), (
        "otherwise there is no limit"
    )
    assert found.best_row is not None and found.best_row.period_s == pytest.approx(min(fitting))
    assert found.best is not None and found.best.params == found.best_row.params
    assert all(row["device_bytes"] <= LIMIT for row in found.table())


def test_rows_are_in_order_distinct_and_their_leaders_scored_by_the_engine(found: Study) -> None:
    table = found.table()
    assert [r["period_s"] for r in table] == sorted(r["period_s"] for r in table)
    assert [r["source"] for r in table[:LEADERS]] == ["engine"] * LEADERS
    points = [tuple(sorted(r["params"].items())) for r in (*table, *found.rejected())]
    assert len(points) == len(set(points))
    assert all(r["reason"] and r["kind"] for r in found.rejected())


def test_only_what_is_scored_counts(found: Study) -> None:
    scored = [r for r in found.rows if r.kind not in RULES]
    assert len(scored) <= 12 < len(scored) + sum(r.kind in RULES for r in found.rows) + 1
    assert len(found.rules) == len(RULES)


def test_the_same_seed_gives_the_same_study_and_another_does_not(found: Study) -> None:
    assert search() == found
    assert [r.params for r in search(seed=1).rows] != [r.params for r in found.rows]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: optuna.samplers.RandomSampler(seed=0),
        lambda: optuna.samplers.GridSampler(
            {"pp": [4], "schedule": ["1f1b"], "microbatches": [1, 2, 3]}, seed=0
        ),
        lambda: optuna.samplers.BruteForceSampler(seed=0),
    ],
    ids=["random", "grid", "brute force"],
)
def test_any_sampler_of_optuna_works_and_may_end_the_search(sampler: Any) -> None:
    assert search(sampler=sampler()).best is not None


def test_an_exhausted_space_ends_the_search() -> None:
    def two(trial: Any) -> Strategy:
        return Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=trial.suggest_int("m", 1, 2)))

    assert len(search(two, problem()).rows) == 2


def test_progress_counts_up_to_the_trials_and_knows_the_best(found: Study) -> None:
    seen: list[SearchProgress] = []
    search(progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen) and seen[-1].done <= seen[
        -1
    ].trials == 12
    assert (
        seen[-1].best is not None
        and found.best_row is not None
        and seen[-1].best.number == found.best_row.number
    )


def test_ctrl_c_returns_what_was_found() -> None:
    def interrupt(now: SearchProgress) -> None:
        if now.done == 5:
            raise KeyboardInterrupt

    study = search(progress=interrupt)
    assert (
        study.interrupted
        and study.best is not None
        and len([r for r in study.rows if r.kind not in RULES]) == 5
    )


def test_a_function_that_raises_for_some_is_one_row_each_with_its_line() -> None:
    def fussy(trial: Any) -> Strategy:
        made = strategy(trial)
        if trial.params["microbatches"] == 3:
            raise ZeroDivisionError("three")
        return made

    rows = [r for r in search(fussy, problem(), trials=20).rejected() if r["kind"] == "strategy"]
    assert rows and all(r["params"]["microbatches"] == 3 for r in rows)
    assert (
        "ZeroDivisionError: three" in rows[0]["reason"] and Path(__file__).name in rows[0]["reason"]
    )


def test_a_function_that_always_raises_is_an_error_with_the_study() -> None:
    def broken(trial: Any) -> Strategy:
        raise KeyError(trial.suggest_int("m", 1, 100))

    with pytest.raises(
        NothingFoundError, match=r"'strategy'; the first: strategy\(trial\) raised KeyError"
    ) as caught:
        search(broken, trials=4)
    assert len(caught.value.study.rows) == 4 and caught.value.study.best is None


def test_a_recipe_that_refuses_is_a_row_too() -> None:
    def some(trial: Any) -> Strategy:
        return Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=trial.suggest_int("m", 0, 3)))

    (row,) = search(some, problem()).rejected()
    assert row["kind"] == "strategy" and "microbatches=0" in row["reason"]


@each_case("value", [None, 3, "strategy"])
def test_a_function_that_returns_no_strategy_is_named(value: Any) -> None:
    with pytest.raises(
        TuneError, match=f"returned a {type(value).__name__}; a piper.Strategy is needed"
    ):
        search(lambda trial: value, trials=2)


def twice_in_one(trial: Any) -> Strategy:
    return Strategy(
        Mesh(),
        recipes.gpipe(pp=trial.suggest_int("m", 1, 1), microbatches=trial.suggest_int("m", 1, 4)),
    )


def twice_in_two(trial: Any) -> Strategy:
    if trial.suggest_categorical("kind", ["a", "b"]) == "a":
        m = trial.suggest_categorical("m", [1, 2])
    else:
        m = trial.suggest_int("m", 1, 8)
    return Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=m))


def other_choices(trial: Any) -> Strategy:
    pp = trial.suggest_categorical("pp", [1, 2])
    return Strategy(
        Mesh(pp=pp),
        recipes.gpipe(pp=pp, microbatches=trial.suggest_categorical("m", [1, 2, pp * 8])),
    )


@each_case("function", [twice_in_one, twice_in_two, other_choices])
def test_a_name_that_stands_for_two_things_is_named(function: Any) -> None:
    with pytest.raises(TuneError, match="uses the name 'm' for two things in"):
        search(function, problem())


def test_the_range_of_a_number_may_depend_on_another() -> None:
    def some(trial: Any) -> Strategy:
        pp = trial.suggest_categorical("pp", [1, 2])
        return Strategy(
            Mesh(pp=pp), recipes.gpipe(pp=pp, microbatches=trial.suggest_int("m", pp, 4 * pp))
        )

    assert search(some, problem()).best is not None


def test_choices_that_cannot_be_saved_are_refused_by_name() -> None:
    def cuts(trial: Any) -> Strategy:
        at = trial.suggest_categorical("at", [(1,), (2,)])
        return Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=1, at=at))

    with pytest.raises(
        TuneError, match=r"suggest_categorical\('at'\) has the choice \(1,\), a tuple"
    ):
        search(cuts)


@each_case(
    ("more", "message"),
    [
        ({"trials": 0}, "trials=0"),
        ({"confirm": -1}, "confirm=-1"),
        ({"confirm": 1}, "only a piper.Job can be run"),
        ({"workers": -1}, "workers=-1"),
        ({"workers": "host:1"}, "workers='host:1'"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_arguments_are_checked(more: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        search(**more)


def test_a_strategy_that_is_no_function_is_refused() -> None:
    with pytest.raises(TuneError, match="a function of a trial is needed"):
        search(Strategy(Mesh()))


def test_optuna_is_silent(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    before = optuna.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(trials=5)
    assert capsys.readouterr() == ("", "") and optuna.logging.get_verbosity() == before
    assert not logging.getLogger("optuna").disabled


def test_a_bad_candidate_does_not_end_the_search() -> None:
    def some(trial: Any) -> Strategy:
        return Strategy(
            Mesh(pp=2),
            recipes.gpipe(pp=trial.suggest_categorical("stages", [2, 20]), microbatches=2),
        )

    study = search(some, problem())
    (row,) = study.rejected()
    assert study.best is not None and row["kind"] == "illegal" and "8 layers" in row["reason"]


def test_confirmed_candidates_are_measured_and_the_fastest_measured_is_best() -> None:
    asked: list[Strategy] = []

    def measure(made: Strategy) -> Confirmation:
        asked.append(made)
        return Confirmation(100.0 - len(asked), 7)

    study = search(confirm=3, measure=measure)
    measured = [r for r in study.rows if r.measured_period_s is not None]
    assert len(set(asked)) == len(measured) == 3 and study.best == asked[-1]
    assert study.best_row is not None and study.best_row.measured_peak_bytes == 7
    assert study.best_row.period_s is not None and study.best_row.error == pytest.approx(
        study.best_row.period_s / 97 - 1
    )


def test_a_confirmation_that_fails_is_a_row_with_its_reason() -> None:
    def measure(made: Strategy) -> Confirmation:
        if not failed:
            failed.append(made)
            raise DirectiveError("rank 1 died")
        return Confirmation(50.0)

    failed: list[Strategy] = []
    study = search(confirm=2, measure=measure)
    (row,) = [r for r in study.rejected() if r["kind"] == "confirmation"]
    assert "rank 1 died" in row["reason"] and row["period_s"] is not None
    assert study.best_row is not None and study.best_row.measured_period_s == 50.0

    def never(made: Strategy) -> Confirmation:
        raise DirectiveError("no such machine")

    with pytest.raises(
        NothingFoundError, match=r"none of the 2 best could be run; .*no such machine"
    ):
        search(confirm=2, measure=never)


def test_a_storage_lets_a_search_go_on(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    first = search(of=problem(), trials=4, storage=url)
    scored: list[Strategy] = []

    class Counting(Here):
        def submit(self, made: Strategy, engine: bool = False) -> int:
            scored.extend([] if engine else [made])
            return super().submit(made, engine)

    of = problem()
    second = search(of=of, trials=7, storage=url, evaluator=Counting(of, Programs(of, None)))
    assert len(scored) == 3 and not set(scored) & set(first.strategies.values())
    assert {r.number for r in first.rows} < {r.number for r in second.rows}
    assert search(of=of, trials=7, storage=url).best == second.best

    def other(trial: Any) -> Strategy:
        return replace(strategy(trial)) if trial else strategy(trial)

    assert (
        len([r for r in search(other, trials=3, storage=url).rows if r.kind not in RULES]) == 3
    ), "another space, another study"


@each_case(
    ("url", "message"),
    [
        (
            "sqlite:////no/such/folder/study.db",
            "cannot be used: unable to open database file|cannot be used: .*unable to open",
        ),
        ("nonsense", "the storage nonsense cannot be used"),
        ("redis://localhost", "the storage redis://localhost cannot be used"),
    ],
)
def test_a_storage_that_is_none_is_one_message(url: str, message: str) -> None:
    with pytest.raises(TuneError, match=message):
        search(storage=url)


def test_a_locked_storage_is_one_message(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "study.db"
    search(trials=1, storage=f"sqlite:///{path}")
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(TuneError, match="is locked by another process"):
            search(trials=5, storage=f"sqlite:///{path}?timeout=0.1")
    finally:
        holder.close()


@pytest.mark.parametrize("asked", [False, True], ids=["between candidates", "in suggest"])
def test_a_storage_that_gets_locked_in_mid_search_loses_nothing(
    tmp_path: Path, asked: bool
) -> None:
    import sqlite3

    path = tmp_path / "study.db"
    holder = sqlite3.connect(path, isolation_level=None)
    seen: list[SearchProgress] = []

    def lock() -> None:
        if len(seen) >= 5 and not holder.in_transaction:
            holder.execute("BEGIN EXCLUSIVE")

    def locking(trial: Any) -> Strategy:
        if asked:
            lock()
        return strategy(trial)

    def progress(now: SearchProgress) -> None:
        seen.append(now)
        if not asked:
            lock()

    try:
        with pytest.raises(SearchError, match="is locked by another process") as caught:
            search(locking, storage=f"sqlite:///{path}?timeout=0.1", progress=progress)
    finally:
        holder.close()
    study = caught.value.study
    assert study.interrupted and len(study.rows) == 5 and study.best is not None
    assert not [r for r in study.rows if r.kind == "strategy"], "it is no fault of the strategy"


@pytest.mark.parametrize(
    "said",
    ["table studies already exists", "UNIQUE constraint failed: version_info.version_info_id"],
)
def test_a_database_that_another_search_makes_at_the_same_moment_is_opened(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower of two searches finds the tables half made; a moment later all of them are there."""
    made, calls = optuna.create_study, [said]

    def raced(**given: Any) -> Any:
        if calls:
            raise RuntimeError(calls.pop())
        return made(**given)

    monkeypatch.setattr(storage.optuna, "create_study", raced)
    monkeypatch.setattr(storage, "WAITS_S", (0.0,))
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert (
        storage.open_study(url, "name", optuna.samplers.RandomSampler(seed=0)).study_name == "name"
    )
    calls += [said, said]
    with pytest.raises(
        TuneError, match="is being set up by another search at this moment; start this one again"
    ):
        storage.open_study(url, "name", optuna.samplers.RandomSampler(seed=0))


def test_searches_that_make_a_database_at_once_all_open_it(tmp_path: Path) -> None:
    url, start = f"sqlite:///{tmp_path / 'study.db'}", Barrier(4)

    def opened(_: int) -> str:
        start.wait()
        return storage.open_study(url, "name", optuna.samplers.RandomSampler(seed=0)).study_name

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(opened, range(4))] == ["name"] * 4
