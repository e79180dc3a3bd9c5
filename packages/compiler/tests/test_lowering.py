"""From a graph to a plan: what is refused, and that what completion and lowering add is what the step needs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from packages.compiler.tests.compile_cases import RandomProgram, layered
from packages.compiler.tests.plan_walk import walk
from piper_compiler import (
    Directive,
    Strategy,
    Training,
    compile_program,
    order,
    partition,
    place,
    recipes,
    replicate,
    split,
    synthetic,
)
from piper_compiler.compile import apply_directives
from piper_ir.ground.errors import CompileError, DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Add, Collective, Compute, SquaredNorm, Update, Zeros
from piper_ir.program.program import (
    BatchTensor,
    Buffer,
    Chunk,
    Cost,
    Input,
    Output,
    Param,
    Program,
    Signature,
)
from piper_ir.verify import verify
from tests.helpers.cases import each_case

ROW = TensorSpec((Affine(0, 8),), "float32")
SCALAR = TensorSpec((), "float32")


def planned(
    program: Program, *directives: Directive, training: Training | None = None, **mesh: int
) -> Plan:
    plan = compile_program(program, Strategy(Mesh(**mesh), directives), training=training).plan
    verify(plan)
    assert walk(plan) == {r.role: r.peak_bytes for r in plan.roles}
    return plan


def ops_of(plan: Plan, role: int, kind: type) -> list[str]:
    return [p.node for i in plan.roles[role].program for p in i.parts if isinstance(p.op, kind)]


# --- strategies that are no training step

STAGES = (partition(stages=2), split(where(), microbatches=2))


@each_case(
    ("directives", "mesh", "says"),
    [
        (
            (*STAGES, place(where(stage=0), on=dict(pp=0))),
            dict(pp=2),
            "stage2.F@0 (of 8 such nodes) is not placed, but others",
        ),
        (
            (
                *STAGES,
                place(where(stage=0), on=dict(pp=0)),
                place(where(stage=1, mb=0), on=dict(pp=1)),
            ),
            dict(pp=2),
            "stage2.F@1 (of 4 such nodes) is not placed",
        ),
        (
            STAGES,
            dict(pp=2),
            "the mesh has pp=2 but no directive uses pp; shard or replicate over it, place on it, or take it out",
        ),
        (
            recipes.gpipe(pp=2, microbatches=2),
            dict(pp=2, dp=2),
            "the mesh has dp=2 but no directive uses dp",
        ),
        (
            recipes.gpipe(pp=2, microbatches=2),
            dict(pp=3),
            "nothing is placed on rank 2 (pp=2) of Mesh(pp=3)",
        ),
        (
            (*recipes.gpipe(pp=2, microbatches=2), *recipes.data_parallel()),
            dict(pp=3, dp=2),
            "nothing is placed on rank 4 (dp=0, pp=2) of Mesh(pp=3, dp=2); place a stage there or make the mesh "
            "smaller",
        ),
        (
            (replicate(where(layer=(0, 1))),),
            dict(dp=2),
            "stage2 is not replicated at all. The result would differ from one device",
        ),
    ],
)
def test_incomplete_strategies(
    directives: tuple[Directive, ...], mesh: dict[str, int], says: str
) -> None:
    with pytest.raises(CompileError) as caught:
        compile_program(layered(4), Strategy(Mesh(**mesh), directives))
    assert says in str(caught.value)


def test_a_region_placed_twice_and_more_coordinates_than_the_mesh_has() -> None:
    twice = (*STAGES, place(where(stage=0), on=dict(pp=0)), place(where(layer=1), on=dict(pp=1)))
    with pytest.raises(
        DirectiveError,
        match=r"place\(where\(layer=1\), on=dict\(pp=1\)\) at .*placed on pp0 already",
    ):
        compile_program(layered(4), Strategy(Mesh(pp=2), twice))
    with pytest.raises(
        DirectiveError, match=r"pp=2 is outside of Mesh\(pp=2\), where pp has 2 coordinates"
    ):
        compile_program(layered(4), Strategy(Mesh(pp=2), recipes.gpipe(pp=3, microbatches=2)))


@each_case(
    ("batch", "says"),
    [
        (
            7,
            "7 rows does not divide into 4 microbatches x 3 data-parallel replicas; use a multiple of 12, e.g. 12",
        ),
        (100, "use a multiple of 12, e.g. 96"),
        (103, "e.g. 108"),
        (0, "e.g. 12"),
        (-24, "e.g. 12"),
    ],
)
def test_a_batch_that_does_not_divide_names_a_good_one(batch: int, says: str) -> None:
    directives = (*recipes.gpipe(pp=2, microbatches=4), *recipes.data_parallel())
    strategy = Strategy(Mesh(pp=2, dp=3), directives)
    with pytest.raises(CompileError) as caught:
        compile_program(layered(4), strategy, global_batch=batch)
    assert says in str(caught.value)
    assert compile_program(layered(4), strategy, global_batch=24).plan.rows == 2
    assert compile_program(layered(4), strategy).plan.rows == 1


# --- programs at the edges


def chain(
    *, loss_reads_forward: bool = True, weight: bool = False, tied: str = "", params: bool = True
) -> Program:
    """Three chunks on stages 0, 1, 2. The loss's backward reads nothing of its forward unless `loss_reads_forward`;
    `tied`: the last chunk uses the first one's parameter, "trained" or "detached"; the middle one has no parameter."""
    first = Chunk(
        "first",
        {"stage": 0},
        (
            Input("batch", "inputs", ROW),
            *((Input("param", "table", TensorSpec((50,), "float32"), True),) * params),
        ),
        (Output("value", ROW, needs_grad=True),),
        {"out0": ROW, "saved0": ROW, "tan0": ROW},
        {
            "F": Signature(("in0", "in1")[: 1 + params], ("out0", "saved0"), cost=Cost(seconds=1)),
            "I": Signature((), ()),
            "W": Signature(("saved0", "tan0"), (), (1,) * params, Cost(seconds=1)),
        },
    )
    middle = Chunk(
        "middle",
        {"stage": 1},
        (Input("value", "first:out0", ROW, True),),
        (Output("value", ROW, needs_grad=True),),
        {"out0": ROW, "tan0": ROW, "gin0": ROW},
        {
            "F": Signature(("in0",), ("out0",), cost=Cost(seconds=1)),
            "I": Signature(("in0", "tan0"), ("gin0",), cost=Cost(seconds=1)),
        },
    )
    shared = (
        (Input("param", "table", TensorSpec((50,), "float32"), tied == "trained"),) if tied else ()
    )
    last = Chunk(
        "last",
        {"stage": 2},
        (Input("value", "middle:out0", ROW, True), *shared),
        (Output("loss", SCALAR, needs_grad=True), *((Output("weight", SCALAR),) if weight else ())),
        {"out0": SCALAR, "out1": SCALAR, "tan0": SCALAR, "gin0": ROW},
        {
            "F": Signature(
                ("in0", *(("in1",) if tied else ())),
                ("out0", "out1")[: 1 + weight],
                cost=Cost(seconds=1),
            ),
            "I": Signature(
                ("in0", "tan0") if loss_reads_forward else ("tan0",),
                ("gin0",),
                cost=Cost(seconds=1),
            ),
            "W": Signature(("tan0",), (), (1,), Cost(seconds=1))
            if tied == "trained"
            else Signature((), ()),
        },
    )
    manifest = (Param("table", TensorSpec((50,), "float32")),) if params else ()
    batch = (BatchTensor("inputs", ROW),)
    return Program(
        (first, middle, last), manifest, batch=batch, loss_kind="sum" if weight else "mean"
    )


def pipeline(m: int = 2, **names: str) -> tuple[Directive, ...]:
    return (
        split(where(), microbatches=m),
        *(place(where(stage=s), on=dict(pp=s), **names) for s in range(3)),
    )


def test_a_backward_that_reads_nothing_of_its_forward_follows_it() -> None:
    plan = planned(chain(loss_reads_forward=False), *pipeline(), pp=3)
    assert [n for n in ops_of(plan, 2, Compute) if n.endswith("@0")] == ["last.F@0", "last.I@0"]


def test_roles_without_parameters_update_nothing() -> None:
    plan = planned(chain(), *pipeline(), *recipes.data_parallel(), pp=3, dp=2)
    updates = [
        p.op for r in plan.roles for i in r.program for p in i.parts if isinstance(p.op, Update)
    ]
    assert [u.buckets for u in updates] == [("bucket0",), (), ()]
    assert [len(r.states) for r in plan.roles] == [2, 0, 0]


def test_a_model_that_trains_nothing_before_the_loss() -> None:
    """Only the loss has a backward; the others only a forward."""
    program = RandomProgram(Random(1), 3).build()
    frozen = [
        replace(
            c,
            steps={
                "F": replace(
                    c.steps["F"], writes=tuple(w for w in c.steps["F"].writes if w[0] == "o")
                )
            },
        )
        for c in program.chunks
    ]
    frozen = [
        replace(
            c,
            inputs=tuple(replace(i, needs_grad=False) for i in c.inputs),
            outputs=tuple(replace(o, needs_grad=False) for o in c.outputs),
        )
        for c in frozen
    ]
    untrained = tuple(replace(p, trained=False) for p in program.params)
    plan = planned(replace(program, chunks=tuple(frozen), params=untrained), *pipeline(m=4), pp=3)
    assert not plan.buckets and {
        p.op.step
        for r in plan.roles
        for i in r.program
        for p in i.parts
        if isinstance(p.op, Compute)
    } == {"F"}


@each_case("tied", ["trained", "detached"])
@each_case("dp", [1, 2])
def test_a_shared_parameter_is_one_bucket_on_both_roles(tied: str, dp: int) -> None:
    """Also where one use is detached: that role adds nothing to the gradient, but must update its copy."""
    plan = planned(chain(tied=tied), *pipeline(), *recipes.data_parallel() * (dp > 1), pp=3, dp=dp)
    assert [(b.params, b.roles) for b in plan.buckets] == [(("table",), ("pp0", "pp2"))]
    for role in (0, 2):
        assert ops_of(plan, role, Collective) == [f"reduce.bucket0#pp{role}"]
        assert [s.id for s in plan.roles[role].states] == ["param:bucket0", "grad:bucket0"]
    assert not ops_of(plan, 1, Collective)


def test_a_shared_parameter_on_one_device_needs_no_reduction() -> None:
    plan = planned(chain(tied="trained"), split(where(), microbatches=2))
    assert not plan.channels and plan.buckets[0].channel == ""


def test_chunks_that_share_a_parameter_are_replicated_alike() -> None:
    directives = (replicate(where(stage=(0, 1))), replicate(where(stage=2), bucket_mb=1))
    with pytest.raises(
        CompileError,
        match="parameter 'table' is shared by chunks that are replicated in different ways",
    ):
        planned(chain(tied="trained"), *directives, dp=2)


@each_case("dp", [1, 2])
@each_case("clip", [None, 1.0])
@each_case("m", [1, 3])
def test_the_weight_of_a_pair_loss_reaches_every_role(dp: int, clip: float | None, m: int) -> None:
    replicas = recipes.data_parallel() if dp > 1 else ()
    plan = planned(
        chain(weight=True), *pipeline(m), *replicas, training=Training(clip=clip), pp=3, dp=dp
    )
    for r, role in enumerate(plan.roles):
        update = role.program[-1].parts[-1]
        assert isinstance(update.op, Update) and update.op.weighted and update.op.clip == clip
        assert update.reads == (f"weight.total#pp{r}", *((f"norm.total#pp{r}",) if clip else ()))
    assert ops_of(plan, 0, Zeros)[:1] == ["zeros.weight#pp0"]
    assert ("sum.weight#pp2" in ops_of(plan, 2, Add)) == (m > 1)
    assert plan.channel("weight").over == (("dp",) if dp > 1 else ())


def test_the_norm_counts_a_bucket_once() -> None:
    plan = planned(chain(tied="trained"), *pipeline(), training=Training(clip=1.0), pp=3)
    assert [ops_of(plan, r, SquaredNorm) for r in range(3)] == [["norm#pp0"], [], []]
    assert [ops_of(plan, r, Zeros) for r in range(3)] == [
        [],
        ["zeros.norm#pp1"],
        ["zeros.norm#pp2"],
    ]
    assert plan.channel("norm").over == (), "replicas hold equal gradients after their reductions"


def test_one_role_needs_no_exchange_of_scalars() -> None:
    plan = planned(chain(weight=True), split(where(), microbatches=2), training=Training(clip=1.0))
    assert not plan.channels


def test_a_buffer_is_updated_on_one_device_in_order_of_microbatches() -> None:
    spec = TensorSpec((3,), "float32")
    program = chain()
    first = program.chunks[0]
    forward = replace(
        first.steps["F"], reads=("in0", "in1", "in2"), writes=("out0", "out1", "saved0")
    )
    first = replace(
        first,
        inputs=(*first.inputs, Input("buffer", "count", spec)),
        outputs=(*first.outputs, Output("buffer", spec, "count", varies=False)),
        ports={**first.ports, "out1": spec},
        steps={**first.steps, "F": forward},
    )
    program = replace(
        program, chunks=(first, *program.chunks[1:]), buffers=(Buffer("count", spec),)
    )
    plan = planned(program, *pipeline(4), pp=3)
    assert [n for n in ops_of(plan, 0, Compute) if ".F@" in n] == [f"first.F@{i}" for i in range(4)]
    assert ops_of(plan, 0, Compute)[:4] != [f"first.F@{i}" for i in range(4)], (
        "the order of buffers lifts no limit on what is in flight"
    )
    backwards = order(where(stage=0, phase="F", mb=1), where(stage=0, phase="F", mb=0))
    with pytest.raises(CompileError, match="microbatches update a buffer in order"):
        planned(program, *pipeline(), backwards, pp=3)
    apart = (split(where(), microbatches=2), *(place(where(mb=i), on=dict(pp=i)) for i in range(2)))
    with pytest.raises(
        CompileError, match=r"buffer 'count' is updated .*pp0.*pp1.*; place first on one device"
    ):
        planned(program, *apart, pp=2)
    varying = replace(first, outputs=(first.outputs[0], replace(first.outputs[1], varies=True)))
    program = replace(program, chunks=(varying, *program.chunks[1:]))
    with pytest.raises(
        CompileError,
        match="buffer 'count' is updated from the batch in first, so its replicas would differ",
    ):
        planned(program, *recipes.data_parallel(), dp=2)


# --- gradients


def test_one_consumer_needs_no_sum_and_several_are_added_last_first() -> None:
    program = synthetic(stages=4, F=1, I=1, W=1)
    assert not ops_of(planned(program), 0, Add)
    chunks = list(program.chunks)
    for k in (2, 3):  # chunks 2 and 3 read what chunk 0 gives as well
        more = (Input("value", "stage0:out0", chunks[k].inputs[0].spec, True),)
        forward = replace(chunks[k].steps["F"], reads=("in0", "in1"))
        backward = replace(chunks[k].steps["I"], writes=("gin0", "gin1", "iw0"))
        ports = {**chunks[k].ports, "in1": more[0].spec, "gin1": more[0].spec}
        chunks[k] = replace(
            chunks[k],
            inputs=chunks[k].inputs + more,
            ports=ports,
            steps={**chunks[k].steps, "F": forward, "I": backward},
        )
    plan = planned(
        replace(program, chunks=tuple(chunks)), *recipes.gpipe(pp=4, microbatches=1), pp=4
    )
    add = next(p for i in plan.roles[0].program for p in i.parts if isinstance(p.op, Add))
    assert add.node == "stage0.sum0@0"
    assert add.reads == ("stage3:gin1@0#pp0", "stage2:gin1@0#pp0", "stage1:gin0@0#pp0")


# --- buckets


def buckets(bucket_mb: float, layers: int = 6, **training: object) -> list[tuple[str, ...]]:
    given = Training(**training)  # type: ignore[arg-type]  # its own fields
    plan = planned(
        layered(layers), *recipes.data_parallel(bucket_mb=bucket_mb), training=given, dp=2
    )
    return [b.params for b in plan.buckets]


def test_buckets_fill_in_the_order_in_which_gradients_become_ready() -> None:
    names = [f"stage{k}.weight" for k in range(6)]
    assert buckets(25) == [tuple(reversed(names))]
    aligned = 256  # bytes of one parameter of 100 bytes in a bucket
    assert buckets(2 * aligned / 2**20) == [
        (names[5], names[4]),
        (names[3], names[2]),
        (names[1], names[0]),
    ]
    assert buckets(1 / 2**20) == [(n,) for n in reversed(names)], (
        "a parameter larger than a bucket has its own"
    )


def test_buckets_respect_optimizer_groups() -> None:
    groups = {f"stage{k}.weight": k % 2 for k in range(6)}
    assert buckets(25, group_of=groups) == [
        ("stage5.weight", "stage3.weight", "stage1.weight"),
        ("stage4.weight", "stage2.weight", "stage0.weight"),
    ]


def test_without_reduction_a_group_is_one_bucket_whatever_its_size() -> None:
    plan = planned(layered(6), replicate(where(), bucket_mb=1e-6))
    assert [len(b.params) for b in plan.buckets] == [6]


def test_offsets_are_aligned_and_states_follow() -> None:
    plan = planned(layered(3), training=Training(state_bytes=lambda b: 8 * b.numel))
    assert (plan.buckets[0].offsets, plan.buckets[0].numel) == ((0, 256, 512), 768)
    assert {s.id: s.nbytes for s in plan.roles[0].states} == {
        "param:bucket0": 768,
        "grad:bucket0": 768,
        "optim:bucket0": 6144,
    }


# --- program order


def test_the_log_of_the_graph_lists_the_directives() -> None:
    graph = compile_program(
        layered(4), Strategy(Mesh(pp=2), recipes.pipeline(pp=2, microbatches=2))
    ).graph
    assert [a.text for a in graph.log] == [
        "partition(stages=2)",
        "split(where(), microbatches=2)",
        "place(where(stage=0), on=dict(pp=0))",
        "place(where(stage=1), on=dict(pp=1))",
    ]
    assert all(a.site.startswith("test_lowering.py:") for a in graph.log)
    assert apply_directives(graph, ()).log == graph.log
