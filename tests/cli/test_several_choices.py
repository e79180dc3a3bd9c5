"""Protect that `piper simulate FILE.py -p a=1,2 -p b=3,4` prints a row for each choice, refused or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from piper import cli
from piper.cli.actions.several import choices
from piper_ir.ground.errors import JobError

FILE = """
import piper
job = piper.models.job(piper.models.LlamaConfig(
    layers=2, width=64, heads=8, kv_heads=2, hidden=96, vocab=128, length=64), global_batch=16)
def strategy(trial):
    pp = trial.suggest_int("pp", 1, 3)
    zero = trial.suggest_categorical("zero", (0, 1, 3))
    if pp == 3:
        trial.skip("two layers")
    pipeline = piper.recipes.one_f_one_b(pp=pp, microbatches=4)
    return piper.Strategy(piper.Mesh(pp=pp, dp=2), (*pipeline, *piper.recipes.data_parallel(zero=zero)))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tried.py"
    path.write_text(FILE)
    return path


def simulate(*arguments: object) -> Any:
    given = ["simulate", *map(str, arguments), "--cluster", "h100x8"]
    return CliRunner().invoke(cli.app, given)


def test_every_choice_has_a_row_and_what_is_refused_its_reason(path: Path) -> None:
    done = simulate(path, "-p", "pp=1,3", "-p", "zero=0,3")
    assert done.exit_code == 0, done.stderr
    title, head, _, *rows = done.stdout.splitlines()
    assert "4 choices" in title and head.split()[:2] == ["pp", "zero"]
    assert [row.split()[:3] for row in rows[2:4]] == [["3", "0", "refused"], ["3", "3", "refused"]]
    assert "the fastest that fits: pp=1, zero=0" in done.stdout
    assert done.stdout.count("the strategy skips pp=3") == 2


def test_its_rows_are_those_of_single_simulations(path: Path) -> None:
    rows = json.loads(simulate(path, "-p", "pp=1,2", "-p", "zero=1", "--json").stdout)
    assert [row["params"] for row in rows] == [{"pp": "1", "zero": "1"}, {"pp": "2", "zero": "1"}]
    one = json.loads(simulate(path, "-p", "pp=2", "-p", "zero=1", "--json").stdout)
    assert rows[1]["prediction"]["period_s"] == one["period_s"] and rows[1]["reason"] is None


def test_what_is_for_one_strategy_is_refused(path: Path) -> None:
    done = simulate(path, "-p", "pp=1,2", "-p", "zero=0", "--why")
    assert done.exit_code == 2 and "-p NAME=A,B makes a table" in done.stderr
    done = simulate(path, "-p", "pp=3", "-p", "zero=0,1")
    assert done.exit_code == 2 and "the strategy skips pp=3" in done.stderr
    for text, says in (("a,,b", "empty between two commas"), (",".join("ab" * 1001), "choices")):
        with pytest.raises(JobError, match=says):
            choices({"m": text})


def test_a_name_twice_and_a_name_that_nothing_asks_for_are_named(path: Path) -> None:
    done = simulate(path, "-p", "pp=1", "-p", "zero=1", "-p", "zero=3")
    assert done.exit_code == 2 and "-p zero=1 and -p zero=3: give zero once" in done.stderr
    assert "-p zero=1,3" in done.stderr
    done = simulate(path, "-p", "zer=1", "-p", "pp=1")
    assert done.exit_code == 2 and "-p zer=...: the strategy has no parameter" in done.stderr
    assert "did you mean zero? it has pp, zero" in done.stderr
    done = simulate(path, "-p", "zero=1")
    assert done.exit_code == 2 and "asks for 'pp'" in done.stderr, (
        "zero, which comes later, is known"
    )


def test_parameters_are_all_combined() -> None:
    assert choices({"a": "1,2", "b": "x"}) == [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}]
    assert choices({}) == [{}]
