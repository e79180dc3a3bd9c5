"""The orders of the recipes: invariants for any numbers, agreement with published tables, refusals, and what registers
them."""

from __future__ import annotations

import inspect
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.compile_cases import frozen_first
from packages.compiler.tests.order_validator import Did, execute, peaks, validate, validate_plan
from packages.compiler.tests.recipe_orders import orders_of_directives
from piper_compiler import (
    Directive,
    Strategy,
    compile_program,
    load_strategy,
    recipes,
    save_strategy,
    synthetic,
)
from piper_compiler.recipes import RECIPES, recipe
from piper_compiler.recipes.dualpipe import dualpipe_v_orders
from piper_compiler.recipes.zero_bubble_1f1b import late_weight_orders
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from piper_ir.verify import verify
from tests.helpers.cases import each_case

ONE, TWO, MANY = 1, 2, 0
CHUNKS = {
    "gpipe": ONE,
    "one_f_one_b": ONE,
    "interleaved": MANY,
    "looped_bfs": MANY,
    "zb_h1": ONE,
    "zb_h2": ONE,
    "interleaved_zb": MANY,
    "zbv": TWO,
    "dualpipe_v": TWO,
    "dualpipe": ONE,
}
"""Chunks per device of each recipe."""
DUALPIPE_V = ["4f7a78987a0cacfd", "b49aa243337f64e2", "0d2aeebcfaea8a2d", "b37396c5a02fc28e"]
ZB1P = ["79916995e1b68e79", "82dbd47b340e5ea6"]
EXAMPLES = settings().max_examples // 4


def drawn(
    name: str, data: st.DataObject, most: int = 12
) -> tuple[tuple[Directive, ...], int, int, int]:
    """A recipe with any legal numbers; its p, stages and m."""
    p, m = data.draw(st.integers(1, most)), data.draw(st.integers(1, 2 * most))
    p += p % 2 if name == "dualpipe" else 0
    v = CHUNKS[name] or data.draw(st.integers(1, 3))
    more: dict[str, Any] = {} if CHUNKS[name] else {"chunks": v}
    if name == "interleaved":
        more["group"] = data.draw(st.none() | st.integers(p, 2 * p))
    return getattr(recipes, name)(pp=p, microbatches=m, **more), p, v * p, m


def compiled(directives: tuple[Directive, ...], p: int, stages: int) -> Plan:
    return compile_program(
        synthetic(stages=stages, F=1, I=1, W=1, params=4), Strategy(Mesh(pp=p), directives)
    ).plan


@pytest.mark.parametrize("name", CHUNKS)
@settings(max_examples=EXAMPLES)
@given(st.data())
def test_every_legal_order_is_valid(name: str, data: st.DataObject) -> None:
    directives, p, stages, m = drawn(name, data)
    if stages * m > 1:  # one action of each phase on one device needs no order
        orders = orders_of_directives(directives)
        assert len(orders) == p
        validate(orders, stages, m)


@pytest.mark.parametrize("name", CHUNKS)
@settings(max_examples=EXAMPLES // 4)
@given(st.data())
def test_every_legal_plan_is_valid(name: str, data: st.DataObject) -> None:
    directives, p, stages, m = drawn(name, data, most=5)
    plan = compiled(directives, p, stages)
    validate_plan(plan, stages, m)
    verify(plan)


@each_case("name", CHUNKS)
def test_frozen_first_stages(name: str) -> None:
    stages = 4 * (CHUNKS[name] or 2)
    plan = compile_program(
        frozen_first(stages, 2), Strategy(Mesh(pp=4), getattr(recipes, name)(pp=4, microbatches=8))
    ).plan
    verify(plan)


@each_case("name", CHUNKS)
def test_every_recipe_composes_with_data_parallelism(name: str) -> None:
    stages = 2 * (CHUNKS[name] or 2)
    both = (*getattr(recipes, name)(pp=2, microbatches=5), *recipes.data_parallel())
    plan = compile_program(
        synthetic(stages=stages, F=1, I=1, W=1, params=4), Strategy(Mesh(pp=2, dp=2), both)
    ).plan
    verify(plan)
    assert plan.replicas == 2 and all(b.channel for b in plan.buckets)


@each_case("name", CHUNKS)
def test_every_recipe_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    chosen = Strategy(Mesh(pp=4), getattr(recipes, name)(pp=4, microbatches=9))
    save_strategy(chosen, tmp_path / "s.json")
    loaded = load_strategy(tmp_path / "s.json")
    assert loaded == chosen
    program = synthetic(stages=4 * (CHUNKS[name] or 2), F=3, I=4, W=2, overlap=8)
    assert compile_program(program, loaded).plan == compile_program(program, chosen).plan


def test_the_foot_of_a_v_hands_over_without_communication() -> None:
    plan = compiled(recipes.zbv(pp=3, microbatches=4), 3, 6)
    down, up = ["pp0>pp1", "pp1>pp2"], ["pp2>pp1", "pp1>pp0"]
    assert {c.id for c in plan.channels} == {
        f"{hop}.{kind}" for hop in (*down, *up) for kind in ("act", "grad")
    }
    sends = [i for _, _, i in plan.instructions() if i.parts[0].node.startswith("send.")]
    assert len(sends) == 4 * 2 * (2 + 2)


def test_a_group_that_is_not_full_costs_no_memory() -> None:
    for m in range(1, 13):
        units = peaks(orders_of_directives(recipes.interleaved(pp=4, microbatches=m)))
        assert all(n <= most for n, most in zip(units, [11, 9, 7, 5], strict=True))


def test_peaks_of_few_microbatches() -> None:
    for p in range(2, 7):
        for m in range(1, 2 * p):
            for directives, most in (
                (recipes.zb_h1(pp=p, microbatches=m), min(m, p)),
                (recipes.zb_h2(pp=p, microbatches=m), min(m, 2 * p - 1)),
                (recipes.interleaved_zb(pp=p, microbatches=m, chunks=3), 3 * min(m, p)),
            ):
                assert peaks(orders_of_directives(directives)) == [most] * p


def test_dualpipe_has_each_stage_on_two_devices() -> None:
    plan = compiled(recipes.dualpipe(pp=4, microbatches=8), 4, 4)
    holders = {param: set(b.roles) for b in plan.buckets for param in b.params}
    outer, inner = {"pp0", "pp3"}, {"pp1", "pp2"}
    assert holders == {
        "stage0.weight": outer,
        "stage1.weight": inner,
        "stage2.weight": inner,
        "stage3.weight": outer,
    }
    assert all(b.channel for b in plan.buckets), "and their gradients are summed"


def rows(orders: Any) -> list[str]:
    return [
        ",".join(str(s[0]) if len(s) == 1 else f"({s[0]};{s[1]})OVERLAP_F_B" for s in slots)
        for slots in orders
    ]


def digests(orders: Any) -> list[str]:
    return [sha256(row.encode()).hexdigest()[:16] for row in rows(orders)]


def test_dualpipe_v_is_the_published_table() -> None:
    """Digests of the rows of dualpipev_4rank_10mb.csv, of PyTorch's tests (test/distributed/pipelining/artifacts)."""
    assert digests(dualpipe_v_orders(4, 10)) == DUALPIPE_V
    assert digests(dualpipe_v_orders(4, 9)) != DUALPIPE_V


def test_interleaved_zb_is_the_published_table() -> None:
    """Digests of the rows of zb1p_2rank_2stagep_compute.csv, of PyTorch's tests, without idle slots and with I for what
    is called B there."""
    assert digests(late_weight_orders(2, 8, chunks=2)) == ZB1P


# Negative controls: each breaks one rule of a good order.


def good() -> list[list[tuple[Did, ...]]]:
    return orders_of_directives(recipes.zb_h1(pp=3, microbatches=4))


def moved(orders: list[list[tuple[Did, ...]]], device: int, what: str, before: str) -> None:
    row = orders[device]
    texts = [f"{s[0].stage}{s[0].phase}{s[0].mb}" for s in row]
    row.insert(texts.index(before), row.pop(texts.index(what)))


def test_a_good_order_passes() -> None:
    validate(good(), 3, 4)


@each_case(
    ("device", "what", "before", "message"),
    [
        (0, "0W1", "0I1", "0W1 on device 0 follows F"),
        (2, "2I0", "2F0", "2I0 on device 2 follows nothing"),
        (
            2,
            "2F3",
            "2I0",
            "deadlock",
        ),  # which holds back the gradient that device 0 wants before its 0F3
        (
            0,
            "0I2",
            "0F3",
            "deadlock",
        ),  # device 2 wants 2F3, of 0F3, before it gives the third gradient
    ],
)
def test_a_broken_sequence_is_caught(device: int, what: str, before: str, message: str) -> None:
    orders = good()
    if before == "0F3":
        moved(orders, 2, "2F3", "2I2")
    moved(orders, device, what, before)
    with pytest.raises(AssertionError, match=message):
        validate(orders, 3, 4)


def test_a_missing_doubled_or_foreign_action_is_caught() -> None:
    for change, message in (
        (lambda row: row.pop(), r"stage 1, microbatch 3 has \['F', 'I'\]"),
        (
            lambda row: row.append((Did(1, "W", 3),)),
            r"stage 1, microbatch 3 has \['F', 'I', 'W', 'W'\]",
        ),
        (
            lambda row: row.append((Did(1, "B", 3),)),
            r"stage 1, microbatch 3 has \['F', 'I', 'W', 'B'\]",
        ),
        (lambda row: row.append((Did(1, "F", 4),)), "there is no stage 1 with microbatch 4"),
    ):
        orders = good()
        change(orders[1])
        with pytest.raises(AssertionError, match=message):
            validate(orders, 3, 4)


def test_a_backward_on_another_device_is_caught() -> None:
    orders = good()
    orders[0].append(orders[1].pop())
    with pytest.raises(AssertionError, match="1W3 is on device 0, its F on 1"):
        validate(orders, 3, 4)


def test_crossed_channels_are_caught() -> None:
    """A plan whose sends on one channel are exchanged."""
    from dataclasses import replace

    plan = compiled(recipes.one_f_one_b(pp=2, microbatches=4), 2, 2)
    program = list(plan.roles[0].program)
    sends = [k for k, i in enumerate(program) if i.parts[0].node.startswith("send.")]
    first, second = sends[:2]
    program[first], program[second] = (
        replace(program[first], parts=program[second].parts),
        replace(program[second], parts=program[first].parts),
    )
    broken = replace(plan, roles=(replace(plan.roles[0], program=tuple(program)), *plan.roles[1:]))
    validate_plan(plan, 2, 4)
    with pytest.raises(AssertionError, match="pp0>pp1"):
        validate_plan(broken, 2, 4)


def test_execution_of_a_chain_by_hand() -> None:
    """Two devices, one microbatch: 3 + hop 1 + 3, then 6 + hop 1 + 6."""
    orders = [[(Did(0, "F", 0),), (Did(0, "B", 0),)], [(Did(1, "F", 0),), (Did(1, "B", 0),)]]
    run = execute(orders, stages=2, times={"F": 3, "I": 4, "W": 2}, hop=1)
    assert (run.makespan, run.busy, run.start) == (20, [9, 9], [0, 4])


# Refusals and the registry.


@each_case("name", CHUNKS)
def test_bad_numbers(name: str) -> None:
    for pp, m in ((0, 1), (1, 0), (-2, 3), (2.0, 4), ("2", 4), (True, 4)):
        with pytest.raises(DirectiveError, match="must be integers of at least 1"):
            getattr(recipes, name)(pp=pp, microbatches=m)


@each_case(
    ("call", "message"),
    [
        (
            lambda: recipes.interleaved(pp=4, microbatches=8, group=3),
            "group smaller than pp .* use group=4 or more",
        ),
        (
            lambda: recipes.interleaved(pp=4, microbatches=8, chunks=0),
            "chunks=0, group=4.: all must be integers of at least 1",
        ),
        (
            lambda: recipes.looped_bfs(pp=4, microbatches=8, chunks=1.5),
            "chunks=1.5.: all must be integers",
        ),  # type: ignore[arg-type]  # it is the point
        (
            lambda: recipes.dualpipe(pp=5, microbatches=8),
            "dualpipe.pp=5.: .* an even number of devices; use pp=6",
        ),
    ],
)
def test_illegal_numbers_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        call()


def test_every_recipe_says_what_it_is() -> None:
    assert set(CHUNKS) <= set(RECIPES)
    for name in CHUNKS:
        known = RECIPES[name]
        assert known.make is inspect.unwrap(getattr(recipes, name))
        assert known.source and known.formula and known.peak and known.use and known.rule
        parameters = inspect.signature(known.make).parameters.values()
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters)
        assert {"pp", "microbatches", "at"} <= {p.name for p in parameters}
        assert "Source" in (known.make.__doc__ or "")


def test_two_recipes_of_one_name_are_refused() -> None:
    def zbv() -> None: ...

    with pytest.raises(DirectiveError, match="two recipes are called zbv"):
        recipe(source="s", formula="f", peak="p", use="u")(zbv)
