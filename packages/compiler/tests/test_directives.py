"""Every numbered legality condition of every directive: messages name the directive, the line that wrote it, the
condition."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.compiler.tests.compile_cases import layered
from piper_compiler import (
    Directive,
    Strategy,
    compile_program,
    describe,
    order,
    partition,
    place,
    replicate,
    split,
    stream,
    synthetic,
)
from piper_compiler.build import build_graph
from piper_compiler.compile import apply_directives
from piper_ir.graph.graph import Graph
from piper_ir.graph.graph_text import format_graph
from piper_ir.ground.errors import DirectiveError, SelectorError
from piper_ir.ground.limits import MOST_NODES
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.program.program import Program
from tests.helpers.cases import each_case

MESH = Mesh(pp=2, dp=2)
BOTH = (place(where(stage=0), on=dict(pp=0)), place(where(stage=1), on=dict(pp=1)))


def applied(*directives: Directive, program: Program | None = None, mesh: Mesh = MESH) -> Graph:
    return apply_directives(build_graph(program or layered(4), mesh), directives)


def refused(
    condition: int,
    last: Directive,
    *before: Directive,
    program: Program | None = None,
    says: str,
    mesh: Mesh = MESH,
) -> str:
    """Check that the last directive is refused by a condition, with its text, the caller's file and that condition's
    number."""
    with pytest.raises(DirectiveError) as caught:
        applied(*before, last, program=program, mesh=mesh)
    message = str(caught.value)
    kind = type(last).__name__.lower()
    caller = Path(sys._getframe(1).f_code.co_filename).name
    assert message.startswith(f"{describe(last)} at {caller}:"), message
    assert message.endswith(f"[{kind} condition {condition}]"), message
    assert says in message, message
    return message


def test_the_call_site_is_the_line_that_wrote_the_directive() -> None:
    line = sys._getframe().f_lineno + 1
    message = refused(1, partition(stages=0), says="at least one stage")
    assert f"test_directives.py:{line}: " in message


def test_wrong_arguments_are_told_with_the_line_that_wrote_them() -> None:
    line = sys._getframe().f_lineno + 2
    with pytest.raises(DirectiveError) as missing:
        split(microbatches=2)  # type: ignore[call-arg]  # refused
    where_written = f"at test_directives.py:{line}: "
    assert f"split(microbatches=2) {where_written}the selection is missing" in str(missing.value)
    with pytest.raises(DirectiveError, match="did you mean 'microbatches'"):
        split(where(), microbatch=2)  # type: ignore[call-arg]  # refused
    with pytest.raises(DirectiveError, match=r"split\(selection, microbatches\) at .*: missing"):
        split(where())  # type: ignore[call-arg]  # refused


def stages(*numbers: int | None) -> Program:
    """One layered program whose layers also carry these stages (None: none)."""
    program = layered(len(numbers))
    chunks = (
        replace(c, coords=c.coords if s is None else {**c.coords, "stage": s})
        for c, s in zip(program.chunks, numbers, strict=True)
    )
    return replace(program, chunks=tuple(chunks))


class TestPartition:
    def test_1_enough_layers(self) -> None:
        refused(1, partition(stages=0), says="at least one stage is needed")
        refused(1, partition(stages="2"), says="a number of stages is accepted")  # type: ignore[arg-type]  # refused
        refused(1, partition(stages=5), says="the model has 4 layers; use at most 4 stages")

    @each_case(
        ("at", "says"),
        [
            ((1,), "3 stages need 2 boundaries, found 1"),
            ((2, 1), "ascend"),
            ((0, 2), "among the layers 1..3"),
            ((1, 4), "among the layers 1..3"),
            ("widest", '"even", "cost" or a tuple'),
        ],
    )
    def test_2_boundaries(self, at: tuple[int, ...], says: str) -> None:
        refused(2, partition(stages=3, at=at), says=says)

    def test_3_layers_exist(self) -> None:
        program = layered(2)
        bare = replace(
            program, chunks=tuple(replace(c, coords={"expert": 0}) for c in program.chunks)
        )
        refused(3, partition(stages=2), program=bare, says="piper.region(stage=...)")

    def test_4_agrees_with_tags(self) -> None:
        refused(
            4,
            partition(stages=2),
            program=synthetic(stages=3, F=1, I=1, W=1),
            says="use partition(stages=3)",
        )
        refused(
            4, partition(stages=2), program=stages(0, 2, 2, 2), says="tagged with stages [0, 2]"
        )
        refused(4, partition(stages=2), program=stages(0, None, 1, 1), says="stage1.F has none")
        assert applied(partition(stages=2), program=stages(0, 0, 1, 1)).coordinates()["stage"] == [
            0,
            1,
        ]

    @each_case("second", [partition(stages=2, at=(1,)), partition(stages=4)])
    def test_4_agrees_with_an_earlier_partition(self, second: partition) -> None:
        first = partition(stages=2, units="layers")
        message = refused(4, second, first, says="has made 2 stages already; give its arguments")
        assert f"{describe(first)} at test_directives.py:" in message and "tagged" not in message

    def test_5_before_place(self) -> None:
        everything = place(where(), on=dict(pp=0))
        refused(5, partition(stages=2), everything, says="write partition before place")

    def test_8_empty_stages_are_captured(self) -> None:
        refused(
            8, partition(stages=3, at=(1, 1)), says="no chunk for the empty stage 1; compile a job"
        )


class TestSplit:
    def test_1_at_least_one(self) -> None:
        refused(
            1, split(where(), microbatches=0), says="microbatches is 0; an integer of at least 1"
        )

    def test_2_once(self) -> None:
        refused(
            2,
            split(where(), microbatches=2),
            split(where(), microbatches=1),
            says="split into 1 microbatches already",
        )

    def test_3_everything(self) -> None:
        refused(
            3, split(where(layer=0), microbatches=2), says="2 of 8 nodes are selected; use where()"
        )

    def test_4_before_place(self) -> None:
        refused(
            4,
            split(where(), microbatches=2),
            partition(stages=2),
            BOTH[0],
            says="write split before place",
        )

    def test_5_so_many_nodes(self) -> None:
        most = MOST_NODES // 8
        refused(
            5,
            split(where(), microbatches=most + 1),
            says=f"8 nodes in each microbatch; use at most {most} microbatches",
        )


class TestPlace:
    first = (partition(stages=2), split(where(), microbatches=2))

    def test_1_inside_the_mesh(self) -> None:
        says = "pp=2 is outside of Mesh(pp=2, dp=2), where pp has 2 coordinates"
        refused(1, place(where(stage=0), on=dict(pp=2)), *self.first, says=says)
        refused(1, place(where(stage=0), on=dict(pp=-1)), *self.first, says="pp=-1 is outside")
        refused(
            1,
            place(where(stage=0), on=dict(stage=0)),
            *self.first,
            says="unknown axis 'stage'; the axes are cp, dp, ep, etp, pp, rep, tp",
        )
        refused(
            1, place(where(stage=0), on={}), *self.first, says="names no axis; give at least one"
        )

    @pytest.mark.parametrize("on", [5, "pp", {"pp": "0"}, {"pp": True}])
    def test_1_coordinates_are_numbers(self, on: Any) -> None:
        refused(1, place(where(stage=0), on), *self.first, says="coordinates by axis are accepted")

    def test_1_a_degree_of_one_is_no_error(self) -> None:
        lowered = compile_program(
            layered(4),
            Strategy(Mesh(), (partition(stages=1), place(where(stage=0), on=dict(pp=0)))),
        )
        assert [r.role for r in lowered.plan.roles] == ["pp0"]

    def test_2_placed_once(self) -> None:
        says = "stage0.F@0, stage1.F@0, stage0.F@1, stage1.F@1 and 4 more is placed on pp0 already"
        refused(2, place(where(stage=0), on=dict(pp=1)), *self.first, BOTH[0], says=says)
        refused(
            2,
            place(where(stage=0, mb=1), on=dict(pp=1)),
            *self.first,
            BOTH[0],
            says="a node runs in one place",
        )

    def test_3_the_same_axes(self) -> None:
        says = "it fixes ['dp', 'pp'] but pp0 fixes ['pp']; give every placement the same axes"
        refused(3, place(where(stage=1), on=dict(pp=1, dp=0)), *self.first, BOTH[0], says=says)

    def test_4_not_replicated_over_a_placed_axis(self) -> None:
        says = "replicated over ('dp',); a placed axis cannot be replicated too"
        refused(4, place(where(stage=0), on=dict(dp=0)), *self.first, replicate(where()), says=says)

    def test_5_streams_agree(self) -> None:
        named = place(where(stage=0, mb=0), on=dict(pp=0), send="out")
        refused(
            5,
            place(where(stage=0, mb=1), on=dict(pp=0), send="up"),
            *self.first,
            named,
            says="pp0 sends on 'out'",
        )
        refused(
            5,
            place(where(stage=0), on=dict(pp=0), recv="compute"),
            *self.first,
            says="the stream 'compute' is for compute",
        )
        assert (
            applied(*self.first, named, place(where(stage=0, mb=1), on=dict(pp=0), send="out"))
            .transports["pp0"]
            .send
            == "out"
        )

    def test_6_a_backward_runs_where_its_forward_does(self) -> None:
        forward = place(where(stage=0, phase="F"), on=dict(pp=0))
        refused(
            6,
            place(where(stage=0, phase="B"), on=dict(pp=1)),
            *self.first,
            forward,
            says=".F@0 is placed on pp0",
        )
        backward = place(where(stage=0, phase="B"), on=dict(pp=0))
        refused(
            6,
            place(where(stage=0, phase="F"), on=dict(pp=1)),
            *self.first,
            backward,
            says=".B@0 is placed on pp0",
        )
        assert {n.role for n in applied(*self.first, forward, backward).select(where(stage=0))} == {
            "pp0"
        }


class TestReplicate:
    def test_1_axes(self) -> None:
        refused(1, replicate(where(), over=()), says="one or more of")
        refused(
            1,
            replicate(where(), over=("data",)),
            says="over=('data',); one or more of cp, dp, ep, etp, pp, rep, tp are accepted",
        )

    def test_1_a_degree_of_one_is_no_error(self) -> None:
        plan = compile_program(
            layered(2), Strategy(Mesh(), (replicate(where(), over=("dp", "ep")),))
        ).plan
        assert plan.replicas == 1 and not plan.channels

    def test_2_whole_chunks(self) -> None:
        refused(
            2,
            replicate(where(phase="F")),
            says="1 of 2 nodes of stage0 are selected; select by region",
        )
        refused(
            2, replicate(where(mb=0)), split(where(), microbatches=3), says="2 of 6 nodes of stage0"
        )

    def test_3_once(self) -> None:
        says = "stage1 is replicated by replicate(where(layer=1)) (test_directives.py:"
        refused(3, replicate(where()), replicate(where(layer=1)), says=says)

    def test_4_not_over_a_placed_axis(self) -> None:
        says = "stage0.F is placed on pp0; it cannot be replicated over the same axis"
        refused(4, replicate(where(), over=("pp",)), partition(stages=2), *BOTH, says=says)

    def test_5_sizes_and_levels(self) -> None:
        refused(5, replicate(where(), bucket_mb=0), says="bucket_mb must be positive")
        refused(5, replicate(where(), zero="3"), says="0, 1, 2 or 3 is accepted")  # type: ignore[arg-type]  # refused
        refused(7, replicate(where(), shard=5), says="shard=5; axes for params")  # type: ignore[arg-type]  # refused
        refused(1, replicate(where(), over=5), says="over=5; one or more of")  # type: ignore[arg-type]  # refused
        refused(5, replicate(where(), zero=4), says="0, 1, 2 or 3 is accepted")

    def test_6_stream(self) -> None:
        refused(6, replicate(where(), reduce="compute"), says="the stream 'compute' is for compute")
        refused(6, replicate(where(), gather=5), says="the name of a stream")  # type: ignore[arg-type]  # refused

    def test_8_rooms_and_a_prefetch_are_numbers_from_0(self) -> None:
        for name in ("resident_mb", "reduced_mb"):
            for size in (-1, float("inf"), "layer"):
                says = f'{name}={size!r}; a number of MiB from 0 or "step" is accepted'
                refused(8, replicate(where(), zero=3, **{name: size}), says=says)  # type: ignore[arg-type]  # refused
        for count in (-1, 1.5, True):
            says = f"prefetch={count!r}; an integer from 0 is accepted"
            refused(8, replicate(where(), zero=3, prefetch=count), says=says)  # type: ignore[arg-type]  # refused

    def test_10_sizes_of_whole_parameters(self) -> None:
        for size in (-1, float("inf"), "step"):
            refused(10, replicate(where(), whole_mb=size), says=f"whole_mb={size!r}; a number of")

    def test_11_overlap(self) -> None:
        refused(
            11, replicate(where(), overlap="no"), says="overlap='no'; True or False is accepted"
        )


class TestOrder:
    first = (partition(stages=2), split(where(), microbatches=2))

    def test_1_two_selections_that_match(self) -> None:
        refused(1, order(where(mb=0)), *self.first, says="at least two selections")
        with pytest.raises(
            SelectorError,
            match=r"order\(where\(mb=0\), where\(mb=7\)\) at test_directives.py:\d+: where\(mb=7\)",
        ):
            applied(*self.first, order(where(mb=0), where(mb=7)))

    def test_1_a_missing_backward_may_be_skipped_and_nothing_else(self) -> None:
        program = replace(
            layered(4),
            chunks=tuple(
                _forward_only(c) if c.coords["layer"] < 2 else c for c in _after_frozen(4)
            ),
        )
        sequence = (
            where(stage=0, mb=0, phase="F"),
            where(stage=0, mb=0, phase="B"),
            where(stage=0, mb=1, phase="F"),
        )
        with pytest.raises(SelectorError, match="matches no node"):
            applied(*self.first, order(*sequence), program=program)
        skipped = applied(*self.first, order(*sequence, missing="skip"), program=program)
        assert (("stage1.F", 0), ("stage0.F", 1)) in skipped.order_edges
        for typo in (
            where(stage=7, mb=0, phase="B"),
            where(stage=0, mb=9, phase="B"),
            where(stage=0, phase="X"),
        ):
            with pytest.raises(SelectorError, match="matches no node"):
                applied(*self.first, order(sequence[0], typo, missing="skip"), program=program)

    def test_2_disjoint(self) -> None:
        refused(
            2,
            order(where(mb=0), where(phase="F")),
            *self.first,
            says="stage0.F@0 is in where(mb=0) and in where(phase='F')",
        )

    def test_3_placed(self) -> None:
        refused(
            3,
            order(where(stage=1, mb=0), where(stage=1, mb=1)),
            *self.first,
            BOTH[0],
            says="write place before order",
        )

    def test_4_has_an_effect(self) -> None:
        refused(
            4,
            order(where(stage=0), where(stage=1)),
            *self.first,
            *BOTH,
            says="no two of the selections share a device",
        )

    def test_all_of_a_runs_before_all_of_b(self) -> None:
        graph = applied(*self.first, *BOTH, order(where(stage=1, mb=1), where(stage=1, mb=0)))
        edges = [(graph.name(a), graph.name(b)) for a, b in graph.order_edges if a[1] != b[1]]
        assert edges == [("stage2.B@1", "stage2.F@0")]


class TestStream:
    first = (partition(stages=2), split(where(), microbatches=2))

    def test_1_transfers_exist(self) -> None:
        with pytest.raises(
            SelectorError,
            match=r"stream\(where\(op='send'\), name='p2p'\) at test_directives.py:\d+",
        ):
            applied(*self.first, stream(where(op="send"), "p2p"))

    def test_2_compute_stays(self) -> None:
        refused(2, stream(where(op="send"), "compute"), *self.first, *BOTH, says="is for compute")
        refused(
            2, stream(where(stage=0), "side"), *self.first, *BOTH, says="stage0.F@0 is no transfer"
        )

    def test_3_whole_channels(self) -> None:
        says = "uses channel pp0>pp1.act too but is not selected"
        refused(3, stream(where(op="send", mb=0, phase="F"), "p2p"), *self.first, *BOTH, says=says)

    def test_plans_use_it(self) -> None:
        strategy = Strategy(
            Mesh(pp=2), (*self.first, *BOTH, stream(where(op=("send", "recv")), "p2p"))
        )
        plan = compile_program(layered(4), strategy).plan
        assert [r.streams for r in plan.roles] == [("compute", "p2p")] * 2

    @each_case("sms", [-1, 2.5, "8", True, 4097])
    def test_4_a_number_of_sms(self, sms: object) -> None:
        item = stream(where(op="send"), "p2p", sms=sms)  # type: ignore[arg-type]  # what the condition is about
        refused(
            4,
            item,
            *self.first,
            *BOTH,
            says=f"sms is {sms!r}; a whole number from 0 (copy engines) to 4096 is expected",
        )

    def test_5_one_number_per_stream(self) -> None:
        sends, receives = where(op="send"), where(op="recv")
        says = "stream p2p of pp0 has 8 SMs, by channel pp0>pp1.act; give both the same"
        refused(
            5,
            stream(receives, "p2p", sms=4),
            *self.first,
            *BOTH,
            stream(sends, "p2p", sms=8),
            says=says,
        )
        for more in (
            stream(receives, "p2p", sms=8),
            stream(receives, "p2p"),
            stream(receives, "in", sms=4),
        ):
            applied(*self.first, *BOTH, stream(sends, "p2p", sms=8), more)

    def test_sms_are_in_the_plan(self) -> None:
        sends, receives = where(op="send"), where(op="recv")
        named = (stream(sends, "out", sms=8), stream(receives, "in", sms=0), stream(sends, "out"))
        plan = compile_program(layered(4), Strategy(Mesh(pp=2), (*self.first, *BOTH, *named))).plan
        assert {c.id: c.sms for c in plan.channels} == {
            "pp0>pp1.act": (8, 0),
            "pp1>pp0.grad": (8, 0),
        }
        moved = (stream(sends, "out", sms=8), stream(sends, "up"))
        plan = compile_program(layered(4), Strategy(Mesh(pp=2), (*self.first, *BOTH, *moved))).plan
        assert {c.sms for c in plan.channels} == {()}, (
            "the number is the stream's that they have left"
        )
        assert "pp0/out on 8 SMs -> pp1/in on 0 SMs" in format_graph(
            applied(*self.first, *BOTH, *named)
        )


def _forward_only(chunk):  # type: ignore[no-untyped-def]  # a Chunk without its backward
    forward = replace(chunk.steps["F"], writes=("out0",))
    return replace(
        chunk, steps={"F": forward}, outputs=(replace(chunk.outputs[0], needs_grad=False),)
    )


def _after_frozen(layers: int):  # type: ignore[no-untyped-def]  # chunks of which the third sends no gradient back
    chunks = list(layered(layers).chunks)
    steps = {**chunks[2].steps, "I": replace(chunks[2].steps["I"], writes=("iw0",))}
    chunks[2] = replace(chunks[2], steps=steps)
    return chunks
