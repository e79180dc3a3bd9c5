"""What each directive does to a graph, before and after, on one screen."""

from __future__ import annotations

from packages.compiler.tests.compile_cases import layered
from piper_compiler import (
    Directive,
    Strategy,
    compile_program,
    order,
    partition,
    place,
    replicate,
    split,
    stream,
)
from piper_compiler.build import build_graph
from piper_compiler.compile import apply_directives
from piper_ir.graph.graph_text import format_graph
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from tests.helpers.cases import each_case

Golden = tuple[int, tuple[Directive, ...], Directive, str, str]
"""Layers, directives before, the directive, the graph before and after."""

GOLDENS: dict[str, Golden] = {
    "partition": (
        3,
        (),
        partition(stages=2),
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F  layer=0  inputs -> stage0:out0
stage1.F  layer=1  stage0:out0 -> stage1:out0
stage2.F  layer=2  stage1:out0 -> stage2:out0
stage2.B  layer=2  stage2:tan0 -> stage2:gin0
stage1.B  layer=1  stage2:gin0 -> stage1:gin0
stage0.B  layer=0  stage1:gin0
""",
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F  layer=0 stage=0  inputs -> stage0:out0
stage1.F  layer=1 stage=0  stage0:out0 -> stage1:out0
stage2.F  layer=2 stage=1  stage1:out0 -> stage2:out0
stage2.B  layer=2 stage=1  stage2:tan0 -> stage2:gin0
stage1.B  layer=1 stage=0  stage2:gin0 -> stage1:gin0
stage0.B  layer=0 stage=0  stage1:gin0
""",
    ),
    "split": (
        1,
        (),
        split(where(), microbatches=2),
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F  layer=0  inputs -> stage0:out0
stage0.B  layer=0  stage0:tan0
""",
        """\
graph on Mesh(pp=2, dp=2), 2 microbatches
stage0.F@0  layer=0  inputs@0 -> stage0:out0@0
stage0.F@1  layer=0  inputs@1 -> stage0:out0@1
stage0.B@0  layer=0  stage0:tan0@0
stage0.B@1  layer=0  stage0:tan0@1
""",
    ),
    "place": (
        2,
        (partition(stages=2), place(where(stage=0), on=dict(pp=0))),
        place(where(stage=1), on=dict(pp=1)),
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F  pp0  layer=0 stage=0  inputs -> stage0:out0
stage1.F       layer=1 stage=1  stage0:out0 -> stage1:out0
stage1.B       layer=1 stage=1  stage1:tan0 -> stage1:gin0
stage0.B  pp0  layer=0 stage=0  stage1:gin0
""",
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F              pp0               layer=0 stage=0  inputs -> stage0:out0
send.stage0:out0#pp1  pp0/pp0>pp1.act   layer=0 stage=0  stage0:out0
recv.stage0:out0#pp1  pp1/pp0>pp1.act   layer=0 stage=0  -> stage0:out0#pp1
stage1.F              pp1               layer=1 stage=1  stage0:out0#pp1 -> stage1:out0
stage1.B              pp1               layer=1 stage=1  stage1:tan0 -> stage1:gin0
send.stage1:gin0#pp0  pp1/pp1>pp0.grad  layer=1 stage=1  stage1:gin0
recv.stage1:gin0#pp0  pp0/pp1>pp0.grad  layer=1 stage=1  -> stage1:gin0#pp0
stage0.B              pp0               layer=0 stage=0  stage1:gin0#pp0
channel pp0>pp1.act: pp0/pp0>pp1.act -> pp1/pp0>pp1.act
channel pp1>pp0.grad: pp1/pp1>pp0.grad -> pp0/pp1>pp0.grad
""",
    ),
    "order": (
        1,
        (split(where(), microbatches=2),),
        order(
            where(phase="F", mb=0),
            where(phase="F", mb=1),
            where(phase="B", mb=0),
            where(phase="B", mb=1),
        ),
        """\
graph on Mesh(pp=2, dp=2), 2 microbatches
stage0.F@0  layer=0  inputs@0 -> stage0:out0@0
stage0.F@1  layer=0  inputs@1 -> stage0:out0@1
stage0.B@0  layer=0  stage0:tan0@0
stage0.B@1  layer=0  stage0:tan0@1
""",
        """\
graph on Mesh(pp=2, dp=2), 2 microbatches
stage0.F@0  layer=0  inputs@0 -> stage0:out0@0
stage0.F@1  layer=0  inputs@1 -> stage0:out0@1  after stage0.F@0
stage0.B@0  layer=0  stage0:tan0@0              after stage0.F@1
stage0.B@1  layer=0  stage0:tan0@1              after stage0.B@0
""",
    ),
    "stream": (
        2,
        (
            partition(stages=2),
            place(where(stage=0), on=dict(pp=0)),
            place(where(stage=1), on=dict(pp=1)),
        ),
        stream(where(op=("send", "recv")), "p2p"),
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F              pp0               layer=0 stage=0  inputs -> stage0:out0
send.stage0:out0#pp1  pp0/pp0>pp1.act   layer=0 stage=0  stage0:out0
recv.stage0:out0#pp1  pp1/pp0>pp1.act   layer=0 stage=0  -> stage0:out0#pp1
stage1.F              pp1               layer=1 stage=1  stage0:out0#pp1 -> stage1:out0
stage1.B              pp1               layer=1 stage=1  stage1:tan0 -> stage1:gin0
send.stage1:gin0#pp0  pp1/pp1>pp0.grad  layer=1 stage=1  stage1:gin0
recv.stage1:gin0#pp0  pp0/pp1>pp0.grad  layer=1 stage=1  -> stage1:gin0#pp0
stage0.B              pp0               layer=0 stage=0  stage1:gin0#pp0
channel pp0>pp1.act: pp0/pp0>pp1.act -> pp1/pp0>pp1.act
channel pp1>pp0.grad: pp1/pp1>pp0.grad -> pp0/pp1>pp0.grad
""",
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F              pp0      layer=0 stage=0  inputs -> stage0:out0
send.stage0:out0#pp1  pp0/p2p  layer=0 stage=0  stage0:out0
recv.stage0:out0#pp1  pp1/p2p  layer=0 stage=0  -> stage0:out0#pp1
stage1.F              pp1      layer=1 stage=1  stage0:out0#pp1 -> stage1:out0
stage1.B              pp1      layer=1 stage=1  stage1:tan0 -> stage1:gin0
send.stage1:gin0#pp0  pp1/p2p  layer=1 stage=1  stage1:gin0
recv.stage1:gin0#pp0  pp0/p2p  layer=1 stage=1  -> stage1:gin0#pp0
stage0.B              pp0      layer=0 stage=0  stage1:gin0#pp0
channel pp0>pp1.act: pp0/p2p -> pp1/p2p
channel pp1>pp0.grad: pp1/p2p -> pp0/p2p
""",
    ),
    "replicate": (
        2,
        (),
        replicate(where(layer=1), bucket_mb=0.5, reduce="sync"),
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F  layer=0  inputs -> stage0:out0
stage1.F  layer=1  stage0:out0 -> stage1:out0
stage1.B  layer=1  stage1:tan0 -> stage1:gin0
stage0.B  layer=0  stage1:gin0
""",
        """\
graph on Mesh(pp=2, dp=2), no microbatches
stage0.F  layer=0  inputs -> stage0:out0
stage1.F  layer=1  stage0:out0 -> stage1:out0
stage1.B  layer=1  stage1:tan0 -> stage1:gin0
stage0.B  layer=0  stage1:gin0
replicated stage1: over dp, buckets of 524288 bytes on sync
""",
    ),
}


def text(layers: int, *directives: Directive) -> str:
    return format_graph(
        apply_directives(build_graph(layered(layers), Mesh(pp=2, dp=2)), directives), log=False
    )


@each_case("name", GOLDENS)
def test_before_and_after(name: str) -> None:
    layers, before, item, first, second = GOLDENS[name]
    assert text(layers, *before) == first
    assert text(layers, *before, item) == second
    assert len(second.splitlines()) <= 24, "a golden fits a screen"


COMPLETE = """\
graph on Mesh(dp=2), 1 microbatch
stage0.F@0          all         layer=0         inputs@0 -> stage0:out0@0
stage1.F@0          all         layer=1         stage0:out0@0 -> stage1:out0@0
stage1.B@0          all         layer=1         stage1:tan0@0 -> stage1:gin0@0
stage0.B@0          all         layer=0         stage1:gin0@0
reduce.bucket0#all  all/reduce  bucket=bucket0
reduce.bucket1#all  all/reduce  bucket=bucket1
update#all          all
channel reduce.all/dp.reduce: among all/reduce over dp
replicated stage0: over dp, buckets of 10 bytes
replicated stage1: over dp, buckets of 10 bytes
bucket0: stage1.weight, 256 bytes on all, reduced by reduce.all/dp.reduce
bucket1: stage0.weight, 256 bytes on all, reduced by reduce.all/dp.reduce
"""


def test_what_completion_adds() -> None:
    strategy = Strategy(Mesh(dp=2), (replicate(where(), bucket_mb=1e-5),))
    assert format_graph(compile_program(layered(2), strategy).graph, log=False) == COMPLETE


def test_the_log_comes_first_with_call_sites() -> None:
    graph = apply_directives(
        build_graph(layered(2), Mesh(pp=2)), (partition(stages=2), split(where(), microbatches=2))
    )
    head = format_graph(graph).splitlines()[:3]
    assert head[0] == "graph on Mesh(pp=2), 2 microbatches"
    assert head[1].startswith("  1. partition(stages=2) (test_goldens.py:")
    assert head[2].startswith("  2. split(where(), microbatches=2) (test_goldens.py:")
