"""partition: even, given boundaries, by cost (against brute force), and tags that are there already."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.compile_cases import layered
from piper_compiler import Strategy, compile_program, partition, recipes, split, synthetic
from piper_compiler.build import build_graph
from piper_compiler.compile import apply_directives
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.ground.sizes import Affine
from piper_ir.program.costs import Costs, Duration
from piper_ir.program.program import Cost, Kernel, Program
from tests.helpers.cases import each_case


def stage_list(program: Program, item: partition) -> list[int]:
    graph = apply_directives(build_graph(program, Mesh()), (item,))
    return [int(graph.nodes[f"{c.id}.F"].coords["stage"]) for c in program.chunks]


@each_case(
    ("layers", "stages", "expected"),
    [
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (7, 3, [0, 0, 0, 1, 1, 2, 2]),
        (3, 3, [0, 1, 2]),
        (3, 1, [0, 0, 0]),
    ],
)
def test_even(layers: int, stages: int, expected: list[int]) -> None:
    assert stage_list(layered(layers), partition(stages=stages)) == expected


def test_given_boundaries_are_first_layers() -> None:
    assert stage_list(layered(6), partition(stages=3, at=(1, 5))) == [0, 1, 1, 1, 1, 2]


def test_both_phases_of_a_chunk_get_the_stage() -> None:
    graph = apply_directives(
        build_graph(layered(4), Mesh()), (split(where(), microbatches=2), partition(stages=2))
    )
    by_chunk = {(n.coords["chunk"], n.coords["stage"]) for n in graph.nodes.values()}
    assert by_chunk == {("stage0", 0), ("stage1", 0), ("stage2", 1), ("stage3", 1)}


def test_what_has_no_layer_joins_its_neighbour() -> None:
    """An embedding before the layers, something between two of them, a head behind."""
    program = layered(6)
    layers = [None, 0, None, 1, 2, None]
    chunks = (
        replace(c, coords={} if k is None else {"layer": k})
        for c, k in zip(program.chunks, layers, strict=True)
    )
    assert stage_list(replace(program, chunks=tuple(chunks)), partition(stages=3)) == [
        0,
        0,
        0,
        1,
        2,
        2,
    ]


def test_tags_that_agree_are_kept() -> None:
    program = synthetic(stages=3, F=1, I=1, W=1)
    graph = build_graph(program, Mesh())
    partition(stages=3).check(graph)
    assert partition(stages=3).apply(graph) is graph
    plan = compile_program(program, Strategy(Mesh(pp=3), recipes.gpipe(pp=3, microbatches=2))).plan
    assert [c.coords["stage"] for c in plan.chunks] == [0, 1, 2]


def uneven(seconds: list[float]) -> Program:
    program = synthetic(
        stages=len(seconds),
        F=[s / 4 for s in seconds],
        I=[s / 4 for s in seconds],
        W=[s / 2 for s in seconds],
    )
    return replace(
        program,
        chunks=tuple(replace(c, coords={"layer": c.coords["stage"]}) for c in program.chunks),
    )


def slowest(seconds: list[float], stage_of: list[int]) -> float:
    total: dict[int, float] = {}
    for s, stage in zip(seconds, stage_of, strict=True):
        total[stage] = total.get(stage, 0) + s
    return max(total.values())


@settings(max_examples=80)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_cost_is_optimal_and_cuts_as_early_as_it_can(
    seconds: list[int], data: st.DataObject
) -> None:
    n, stages = len(seconds), data.draw(st.integers(1, len(seconds)))
    found = stage_list(uneven([float(s) for s in seconds]), partition(stages=stages, at="cost"))
    every = [
        [sum(k >= cut for cut in cuts) for k in range(n)]
        for cuts in combinations(range(1, n), stages - 1)
    ]
    best = min(slowest(seconds, s) for s in every)  # type: ignore[arg-type]  # ints are floats here
    assert found == sorted(found) and set(found) == set(range(stages))
    assert slowest(seconds, found) == best  # type: ignore[arg-type]  # ints are floats here


def test_cost_uses_flops_of_what_is_captured() -> None:
    def heavy(flops: int) -> Cost:
        return Cost((Kernel("matmul", (Affine(0, 8), 8, 8), "float32", Affine(0, flops), 0),))

    program = layered(4)
    chunks = []
    for c, flops in zip(program.chunks, (10**15, 10**15, 10**15, 3 * 10**15), strict=True):
        chunks.append(
            replace(c, steps={k: replace(s, cost=heavy(flops)) for k, s in c.steps.items()})
        )
    assert stage_list(replace(program, chunks=tuple(chunks)), partition(stages=2, at="cost")) == [
        0,
        0,
        0,
        1,
    ]


def test_cost_prefers_measured_seconds() -> None:
    program = layered(4)
    chunks = tuple(
        replace(c, steps={k: replace(s, cost=Cost()) for k, s in c.steps.items()})
        for c in program.chunks
    )
    costs = Costs({"stage0": {s: Duration(5.0) for s in ("F", "I", "W")}})
    program = replace(program, chunks=chunks)
    plan = compile_program(
        program, Strategy(Mesh(), (partition(stages=2, at="cost"),)), costs=costs
    ).plan
    assert [c.coords["stage"] for c in plan.chunks] == [0, 1, 1, 1]


def test_a_layer_index_need_not_start_at_zero_or_be_dense() -> None:
    rng = Random(0)
    numbers = sorted(rng.sample(range(5, 60), 6))
    program = layered(6)
    chunks = (replace(c, coords={"layer": k}) for c, k in zip(program.chunks, numbers, strict=True))
    program = replace(program, chunks=tuple(chunks))
    assert stage_list(program, partition(stages=2, at=(numbers[2],))) == [0, 0, 1, 1, 1, 1]
    assert stage_list(program, partition(stages=3)) == [0, 0, 1, 1, 2, 2]
