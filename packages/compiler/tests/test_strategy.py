"""Strategies: JSON both ways, and errors that name what is wrong in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packages.compiler.tests.compile_cases import layered, random_case
from piper_compiler import (
    Strategy,
    compile_program,
    load_strategy,
    order,
    partition,
    place,
    recipes,
    replicate,
    save_strategy,
    shard,
    split,
    stream,
    synthetic,
)
from piper_compiler.compile import with_fixed_stages
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import (
    CompileError,
    DirectiveError,
    FormatError,
    OutputError,
    SelectorError,
)
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, NONE, where
from tests.helpers.cases import each_case

EVERY = Strategy(
    Mesh(pp=2, dp=2),
    [
        partition(stages=2, at=(3,)),
        [
            split(where(), microbatches=4),
            (place(where(stage=0, expert=NONE), on=dict(pp=0), send="out", recv="in"),),
        ],
        place(where(stage=(1,), layer=ANY), on={"pp": 1}),
        order(where(mb=range(2)), (where(mb=(2, 3), phase="F"),), missing="skip"),
        replicate(where(), over=("dp",), bucket_mb=0.5, reduce="sync"),
        stream(where(op="send"), "wire"),
        stream(where(op="recv"), "in", sms=8),
    ],
)


def test_json_both_ways() -> None:
    text = EVERY.dumps()
    assert Strategy.loads(text) == EVERY
    assert Strategy.loads(text).dumps() == text
    assert json.loads(text)["version"] == 1


@each_case("seed", range(0, 60, 6))
def test_a_loaded_strategy_gives_the_same_plan(seed: int) -> None:
    case = random_case(seed)
    loaded = Strategy.loads(case.strategy.dumps())
    plans = [
        compile_program(case.program, s, global_batch=case.global_batch).plan.key
        for s in (case.strategy, loaded)
    ]
    assert plans[0] == plans[1]


def test_the_order_of_axes_is_kept() -> None:
    strategy = Strategy(Mesh(pp=2, dp=2, order=("pp",)), recipes.gpipe(pp=2, microbatches=2))
    again = Strategy.loads(strategy.dumps())
    assert again == strategy and again.mesh.axes == ("pp", "dp")


def test_files(tmp_path: Path) -> None:
    save_strategy(EVERY, tmp_path / "best.json")
    assert load_strategy(tmp_path / "best.json") == EVERY
    with pytest.raises(FormatError, match=r"cannot read the strategy .*none\.json: .*no such file"):
        load_strategy(tmp_path / "none.json")
    with pytest.raises(OutputError, match="cannot write the strategy"):
        save_strategy(EVERY, tmp_path / "no" / "best.json")


def test_an_error_in_a_loaded_strategy_points_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    save_strategy(
        Strategy(Mesh(), (split(where(), microbatches=2), split(where(), microbatches=3))), path
    )
    with pytest.raises(DirectiveError, match=r"best\.json\.directives\[1\]: the batch is split"):
        compile_program(layered(2), load_strategy(path))


def test_the_rows_of_a_step_are_kept(tmp_path: Path) -> None:
    path, told = tmp_path / "best.json", Strategy(Mesh(), [split(where(), 2)], global_batch=8)
    save_strategy(told, path)
    loaded = load_strategy(path)
    with pytest.raises(CompileError, match="a step has 16 rows"):
        compile_program(layered(2), loaded, global_batch=16)
    settled = with_fixed_stages(loaded, compile_program(layered(2), loaded, global_batch=8).graph)
    assert settled.global_batch == told.with_directives([]).global_batch == 8


def changed(**fields: object) -> str:
    return json.dumps(json.loads(EVERY.dumps()) | fields)


@each_case(
    ("text", "says"),
    [
        (EVERY.dumps()[:-30], "f.json: not JSON: "),
        (EVERY.dumps()[:-30], "is the file truncated?"),
        ("", "is the file truncated?"),
        ("[]", "is expected"),
        (changed(format="Plan"), "is expected"),
        (changed(version=2), 'f.json: "version" is 2; this Piper reads version 1'),
        (changed(version=None), '"version" is None'),
        (changed(note=""), "f.json: unknown key 'note'; known are mesh, directives"),
        (changed(global_batch="8"), '"global_batch" must be the rows of a step'),
        (changed(mesh=[2]), '"mesh" must be an object'),
        (
            changed(mesh={"data": 2}),
            "f.json.mesh: unknown axis 'data'; the axes are cp, dp, ep, etp, pp, rep, tp",
        ),
        (changed(mesh={"sizes": 2}), "unknown axis 'sizes'"),
        (changed(mesh={"pp": 0}), "f.json.mesh.pp: a positive integer is expected, found 0"),
        (changed(mesh={"pp": True}), "f.json.mesh.pp: a positive integer"),
        (changed(directives={}), '"directives" an array'),
        (
            changed(directives=[{"is": "Fuse"}]),
            "f.json.directives[0]: unknown directive 'Fuse'; known are ",
        ),
        (changed(directives=[{"is": "Fuse"}]), "Import the file that defines yours"),
        (
            changed(directives=[{"is": ["Split"]}]),
            "f.json.directives[0]: unknown directive ['Split']",
        ),
        (changed(directives=["Split"]), "f.json.directives[0]: unknown directive 'Split'"),
        (
            changed(directives=[{"is": "Split", "selection": {"terms": []}}]),
            "f.json.directives[0]: Split lacks microbatches",
        ),
        (
            changed(directives=[{"is": "Partition", "stages": 2, "by": 1}]),
            "unknown key 'by' in Partition; known are stages, at",
        ),
        (
            changed(directives=[{"is": "Partition", "stages": "2"}]),
            "f.json.directives[0].stages: an integer is expected",
        ),
        (
            changed(directives=[{"is": "Partition", "stages": 2, "at": "wide"}]),
            "f.json.directives[0].at",
        ),
        (
            changed(directives=[{"is": "Order", "selections": [{"terms": [["mb", 1.5]]}]}]),
            "directives[0].selections[0].terms[0]",
        ),
        (changed(directives=[{"is": "Partition", "stages": 2, "site": "x"}]), "unknown key 'site'"),
    ],
)
def test_a_bad_file_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        Strategy.loads(text, "f.json")
    assert says in str(caught.value)


def test_what_is_no_directive_is_refused() -> None:
    with pytest.raises(
        DirectiveError, match="'gpipe' is no directive; it needs to be a frozen dataclass"
    ):
        Strategy(Mesh(), ["gpipe"])
    with pytest.raises(DirectiveError, match="is no directive"):
        Strategy(Mesh(), [split])
    with pytest.raises(DirectiveError, match="the first argument is int; a Mesh is expected"):
        Strategy(2, ())  # type: ignore[arg-type]  # the mistake under test


def test_an_unregistered_directive_cannot_be_saved() -> None:
    @dataclass(frozen=True)
    class Mine:
        def check(self, graph: Graph) -> None: ...

        def apply(self, graph: Graph) -> Graph:
            return graph

    strategy = Strategy(Mesh(), [Mine()])
    with pytest.raises(DirectiveError, match=r"mine\(\): Mine is not registered"):
        strategy.dumps()


def test_values_in_selectors() -> None:
    for bad in ((), range(0), 1.5, None, True, [1.5], {1}):
        with pytest.raises(SelectorError, match=r"where\(mb="):
            where(mb=bad)


def test_strategies_are_values() -> None:
    one, two = (Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=2)) for _ in range(2))
    assert one == two and hash(one) == hash(two)


def test_the_values_that_made_a_strategy_travel_with_it() -> None:
    params = {"m": 4, "name": "gpipe", "x": 0.5, "flag": True}
    made = Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=4)).with_params(params)
    again = Strategy.loads(made.dumps())
    assert again.params == params
    assert (
        again == made == Strategy(made.mesh, made.directives)
    )  # where a strategy comes from does not change it
    with pytest.raises(DirectiveError, match=r"params\['x'\]"):
        made.with_params({"x": (1, 2)})
    with pytest.raises(FormatError, match="params"):
        Strategy.loads(made.dumps().replace('"params": {', '"params": {"y": [1], '))


def test_one_directive_and_one_axis_need_no_tuple() -> None:
    alone = split(where(), microbatches=2)
    assert Strategy(Mesh(), alone) == Strategy(Mesh(), [alone])
    listed = replicate(where(), over=["dp"])  # type: ignore[arg-type]  # a list is taken, too
    assert replicate(where(), over="dp") == listed == replicate(where(), over=("dp",))
    shared = replicate(where(), shard={"optim": "dp"})  # type: ignore[dict-item]  # one name alone
    assert shared == replicate(where(), shard={"optim": ("dp",)})
    assert shard(where(), over=("tp",)) == shard(where(), over="tp")  # type: ignore[arg-type]  # one name alone
    with pytest.raises(DirectiveError, match="Strategy: 3 is no directive"):
        Strategy(Mesh(), 3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(DirectiveError, match="the selection is 5; where"):
        Strategy(Mesh(), [split(5, 2)])  # type: ignore[arg-type]  # on purpose


MESH = Mesh(pp=2, dp=3, cp=2)


def sized(*items: Any, global_batch: int | None = 24) -> Strategy:
    """A strategy with one replication over dp, and states over cp, along which rows are the same."""
    shared = (shard(where(), over="cp", index="tokens"), replicate(where(), ("dp", "cp"), zero=1))
    return Strategy(MESH, (items, shared), global_batch=global_batch)


def test_recipes_take_sizes_from_the_strategy() -> None:
    given = sized(recipes.interleaved(pp=2, microbatches=4, chunks=2), global_batch=None)
    assert given.replicas == 3
    assert sized(recipes.interleaved(rows=2, chunks=2)) == given
    assert sized(*recipes.interleaved(microbatches=4, chunks=2), global_batch=None) == given
    assert sized(recipes.interleaved(rows=4, chunks=2)) != given
    plain = Strategy(Mesh(pp=2), recipes.pipeline(pp=2, microbatches=3))
    assert Strategy(Mesh(pp=2), recipes.pipeline(rows=1), global_batch=3) == plain
    assert type(recipes.expert_parallel()) is tuple


def test_a_strategy_for_other_rows_than_those_of_a_step_is_refused() -> None:
    """Also as a search has it, which writes down the answers of a trial."""
    program = synthetic(stages=2, F=1, I=1, W=1)
    made = Strategy(Mesh(pp=2), recipes.gpipe(microbatches=2), global_batch=8).with_params({"x": 1})
    assert compile_program(program, made, global_batch=8).plan.rows == 4
    assert compile_program(program, made).plan.rows == 4, "it has its own"
    with pytest.raises(
        CompileError, match=r"global_batch=8\): a step has 16 rows; .* leave it out"
    ):
        compile_program(program, made, global_batch=16)
    with pytest.raises(DirectiveError, match=r"global_batch='8'\): an integer"):
        Strategy(Mesh(), global_batch="8")  # type: ignore[arg-type]  # on purpose


def test_sizes_of_recipes_that_do_not_go_together() -> None:
    with pytest.raises(DirectiveError, match=r"gpipe\(rows=1, microbatches=2\): give one of both"):
        recipes.gpipe(rows=1, microbatches=2)
    with pytest.raises(DirectiveError, match=r"rows=1.*give them as Strategy"):
        sized(recipes.gpipe(rows=1), global_batch=None)
    with pytest.raises(DirectiveError, match=r"24 rows .* 3 replicas .* 3 rows; use rows=2"):
        sized(recipes.gpipe(rows=3))
    with pytest.raises(DirectiveError, match="a multiple of 3 rows"):
        sized(recipes.gpipe(rows=1), global_batch=25)
    with pytest.raises(DirectiveError, match=r"rows=True.*an integer"):
        sized(recipes.gpipe(rows=True))
    with pytest.raises(
        DirectiveError, match=r"gpipe: .*chunks.*; it takes pp, microbatches, at, rows"
    ):
        recipes.gpipe(rows=1, chunks=2)
