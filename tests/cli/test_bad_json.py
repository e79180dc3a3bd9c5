"""JSON that says two things, or nothing: a key that stands twice, NaN and Infinity in costs are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packages.ir.tests.plans_for_tests import good_plan
from piper.api.ground.costs_file import load_costs
from piper_compiler import Strategy
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_ir.study.study import StudyDocument
from piper_report import load
from piper_simulator import load_cluster
from tests.helpers.cases import each_case
from tests.helpers.command_line import command, fails


@each_case("kind", [Costs, Plan, StudyDocument])
def test_documents(kind: type) -> None:
    with pytest.raises(FormatError, match=r"file\.json: .*the key 'version' stands twice"):
        loads(kind, '{"format": "x", "version": 1, "version": 2}', "file.json")


def test_a_strategy_at_any_depth() -> None:
    text = '{"format": "Strategy", "version": 1, "mesh": {"pp": 2, "pp": 4}, "directives": []}'
    with pytest.raises(FormatError, match=r"best\.json: .*the key 'pp' stands twice in one object"):
        Strategy.loads(text, "best.json")


@each_case("name", ["predicted.json", "measured.json", "metrics.jsonl", "strategy.json"])
def test_files_of_a_result_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"step_s": 1, "step_s": 2}')
    with pytest.raises(FormatError, match=rf"{name}.*the key 'step_s' stands twice"):
        load(tmp_path)


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_text('{"name": "a", "name": "b"}')
    with pytest.raises(ValueError, match="the key 'name' stands twice"):
        load_cluster(path)


def test_an_argument_of_a_recipe() -> None:
    fails(
        command("show", "--recipe", "zero_bubble", "-p", 'memory_limit={"a": 1, "a": 2}'),
        "the key 'a' stands twice",
    )


@each_case("value", ["NaN", "Infinity", "-Infinity"])
def test_costs_are_numbers(value: str, tmp_path: Path) -> None:
    """A prediction with such costs would end in a figure that cannot be drawn."""
    path = tmp_path / "costs.json"
    path.write_text(
        f'{{"format": "Costs", "version": 1, "host": {{"issue_s": {value}, "comm_s": 0}}}}'
    )
    with pytest.raises(FormatError, match=r"costs\.json: NaN or Infinity"):
        load_costs(path)


@each_case(
    ("damage", "said"),
    [
        ("value", "there is no value ghost in the plan"),
        ("chunk", "there is no chunk ghost in the plan"),
        ("channel", "there is no channel ghost in the plan"),
        ("wait", "it waits for 7 instructions of compute"),
        ("peak", "the plan states a peak of bytes"),
    ],
)
def test_a_damaged_plan(damage: str, said: str, tmp_path: Path) -> None:
    document = json.loads(dumps(good_plan()))
    role = document["roles"][0]
    load, forward = role["program"][0]["parts"]
    if damage == "value":
        forward["reads"] = ["ghost"]
    elif damage == "chunk":
        forward["op"]["chunk"] = "ghost"
    elif damage == "channel":
        load["op"] = {"is": "Recv", "channel": "ghost"}
    elif damage == "wait":
        role["program"][0]["waits"] = [["compute", 7]]
    else:
        role["peak_bytes"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    fails(command("report", tmp_path), "plan.json: the plan is not valid", said)
