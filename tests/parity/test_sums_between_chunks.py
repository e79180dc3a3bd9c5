"""Protect sums between chunks that are cut where devices share work: where they are, their axes, that they are hidden.

Under any schedule they are in test_compositions.py (shard with cut=True)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import piper
from piper import Mesh, recipes
from piper.models import GPTConfig
from piper.views.explained.explain import explain
from piper_compiler import Strategy
from piper_ir.graph.graph import Graph
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import where
from piper_ir.plan.plan import Part, Plan, RolePlan
from piper_ir.program.layout import SHARED
from piper_ir.program.ops import Collective
from piper_ir.verify import check
from tests.helpers import shared_jobs
from tests.helpers.memory_judge import lies
from tests.helpers.plan_edits import every_part, with_program


def cut(name: str, mesh: Mesh, *directives: Any) -> Any:
    return shared_jobs.in_twos(name, mesh, [piper.shard(where(), cut=True), *directives])


def assert_right(name: str, made: Any, **more: Any) -> None:
    found = shared_jobs.run(made, **more)
    shared_jobs.assert_equal(name, made, found)
    assert not lies(made.plan, found.memory)


@pytest.mark.long
@pytest.mark.parametrize("name", ["branches", "experts", "dropless"])
def test_two_devices_are_one(name: str) -> None:
    assert_right(name, cut(name, Mesh(tp=2)))


@pytest.mark.long
def test_axes_that_are_split() -> None:
    """Two heads of keys on eight devices: what they sum up is a sum along both parts of the axis."""
    made = cut("few_kv_heads", Mesh(tp=8))
    assert_right("few_kv_heads", made)
    assert ("tp.0", "tp.1") in {over for c in made.plan.chunks for _, over in c.terms}


def test_a_layer_has_the_sums_of_megatron_between_its_chunks() -> None:
    """Shoeybi et al. (arXiv 1909.08053): two in forward and two in backward, and none of them inside of a step."""
    made = cut("gpt", Mesh(tp=2), piper.split(where(), microbatches=2))
    chunks = [c for c in made.plan.chunks if c.coords.get("layer") == 1]
    assert [c.id for c in chunks] == [
        "layer1",
        "layer1_shared0",
        "layer1.1",
        "layer1_shared0.1",
        "layer1.2",
    ]
    assert not any(sig.collectives for c in chunks for sig in c.steps.values())
    assert [c.terms for c in chunks if SHARED in c.coords] == [
        (("out0", ("tp",)), ("gin0", ("tp",)))
    ] * 2
    parts = [
        p
        for _, _, i in made.plan.instructions()
        for p in i.parts
        if isinstance(p.op, Collective) and p.reads
    ]
    of_layer = [p for p in parts if p.reads[0].startswith("layer1_")]
    assert sorted((p.mb, p.op.kind) for p in of_layer) == [
        (mb, "all_reduce") for mb in (0, 1) for _ in range(4)
    ]


def test_documents_keep_it() -> None:
    made = cut("gpt", Mesh(tp=2))
    assert loads(Plan, dumps(made.plan)) == made.plan
    assert loads(Graph, dumps(made.graph)).exchanges == made.graph.exchanges
    assert "group all over tp: sums of what devices that share chunks have made" in explain(made)


@pytest.mark.long
def test_another_microbatch_hides_sums() -> None:
    """In a direction of DualPipeV each device has two microbatches in hand; inside of steps nothing hides a sum."""
    work = piper.models.job(
        GPTConfig(layers=4, width=4096, heads=32, vocab=1024, length=2048), global_batch=8
    )
    seconds = {}
    for apart in (False, True):
        asked = [*recipes.tensor_parallel(cut=apart), *recipes.dualpipe_v(pp=2, microbatches=8)]
        plan = piper.compile(work, Strategy(Mesh(tp=4, pp=2), asked)).plan
        seconds[apart] = piper.simulate(plan, piper.load_cluster("h100x8")).step_s
    assert seconds[True] < 0.98 * seconds[False]


def unsummed(plan: Plan, role: RolePlan, sums: Part) -> Plan:
    """The plan in which who reads a sum reads the term, and the other way round where it is freed."""
    (given,), (got,) = sums.reads, sums.writes
    other = {given: got, got: given}
    program = [
        replace(
            instr,
            frees_before=tuple(other.get(v, v) for v in instr.frees_before),
            parts=tuple(
                p
                if p is sums
                else replace(
                    p,
                    reads=tuple(given if v == got else v for v in p.reads),
                    frees=tuple(other.get(v, v) for v in p.frees),
                )
                for p in instr.parts
            ),
        )
        for instr in role.program
    ]
    return with_program(plan, role, program)


def is_sum(part: Any) -> bool:
    return (
        isinstance(part.op, Collective) and bool(part.reads) and part.reads[0].startswith("layer")
    )


def test_a_term_that_is_not_summed_up_is_seen() -> None:
    """Negative controls: a term read as it is, one of another kind of exchange, and terms that nobody writes."""
    plan = cut("gpt", Mesh(tp=2)).plan
    role = plan.roles[0]
    part = next(p for i in role.program for p in i.parts if is_sum(p))
    unread = unsummed(plan, role, part)
    assert any(
        v.rule == "R27-dataflow" and "missing layer0_shared0:out0@0 summed over tp" in str(v)
        for v in check(unread)
    )
    gathered = every_part(
        plan, lambda r, p: is_sum(p), lambda p: replace(p, op=replace(p.op, kind="all_to_all"))
    )
    assert gathered is not None and any(v.rule == "R27-dataflow" for v in check(gathered))
    chunks = tuple(replace(c, terms=(("out9", ("dp",)),)) if c.terms else c for c in plan.chunks)
    said = [str(v) for v in check(replace(plan, chunks=chunks)) if v.rule == "R36-inside"]
    assert any("holds terms of out9, which none of its steps writes" in text for text in said)
    assert any(
        "holds terms of out9 along dp; devices share chunks along tp" in text for text in said
    )


def test_a_group_makes_its_sums_again() -> None:
    """R of a chunk reads the sum of terms that R of the one before made. Control: one such term, which R27 sees."""
    made = cut("gpt", Mesh(tp=2), piper.recompute(where(), group=2))
    assert_right("gpt", made)
    role = made.plan.roles[0]
    again = [p for i in role.program for p in i.parts if is_sum(p) and p.reads[0].endswith("!r@0")]
    of_both = {f"layer0_shared0{tail}:out0!r@0" for tail in ("", ".1")}
    assert of_both < {p.reads[0] for p in again}
    (first,) = (p for p in again if p.reads[0] == "layer0_shared0:out0!r@0")
    found = [str(v) for v in check(unsummed(made.plan, role, first)) if v.rule == "R27-dataflow"]
    assert any("layer0.1.R@0" in text and "summed over tp" in text for text in found), found


def test_dropout_is_refused() -> None:
    with pytest.raises(
        DirectiveError,
        match="layer0 draws random numbers, in the order of the whole chunk; leave cut=True out",
    ):
        cut("gpt_dropout", Mesh(tp=2))
