"""Make a small good plan, written by hand, and change one thing in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from piper_ir.fold.memory import with_peaks
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Bucket, Category, Channel, Instr, Part, Plan, RolePlan, State, Value
from piper_ir.program.ops import (
    Add,
    Collective,
    Compute,
    Load,
    Op,
    Recv,
    Seed,
    Send,
    SquaredNorm,
    Step,
    Update,
    Zeros,
)
from piper_ir.program.program import (
    BatchTensor,
    Buffer,
    Chunk,
    Cost,
    Input,
    Kernel,
    Liveness,
    Output,
    Param,
    Signature,
)

ROWS = 2
HIDDEN = TensorSpec((ROWS, 8), "float32")
SCALAR = TensorSpec((), "float32")
IDS = TensorSpec((ROWS,), "int64")
TABLE = TensorSpec((16, 8), "float32")
BIAS = TensorSpec((16,), "float32")
FROZEN = TensorSpec((8,), "float32")


def chunks() -> tuple[Chunk, Chunk]:
    """Return an embedding, and a head on its table that reads one output of it twice: that tangent is a sum."""
    kernel = Kernel("matmul", (ROWS, 8, 16), "float32", 512, 1024)
    embed = Chunk(
        "embed",
        {"stage": 0},
        (
            Input("batch", "inputs", IDS),
            Input("param", "table", TABLE, True),
            Input("buffer", "scale", FROZEN),
        ),
        (Output("value", HIDDEN, needs_grad=True), Output("value", HIDDEN, needs_grad=True)),
        {"out0": HIDDEN, "out1": HIDDEN, "tan0": HIDDEN, "tan1": HIDDEN, "saved0": HIDDEN},
        {
            "F": Signature(("in0", "in1", "in2"), ("out0", "out1", "saved0"), cost=Cost((kernel,))),
            "I": Signature((), ()),
            "W": Signature(
                ("saved0", "tan0", "tan1"), (), (1,), liveness=Liveness((1,), ((128,), (64,)))
            ),
        },
    )
    value = (Input("value", "embed:out0", HIDDEN, True), Input("value", "embed:out1", HIDDEN, True))
    head = Chunk(
        "head",
        {"stage": 1},
        (
            *value,
            *value[:1],
            Input("batch", "targets", IDS),
            Input("param", "table", TABLE, True),
            Input("param", "bias", BIAS, True),
        ),
        (Output("loss", SCALAR, needs_grad=True),),
        {
            "out0": SCALAR,
            "tan0": SCALAR,
            "saved0": HIDDEN,
            "iw0": HIDDEN,
            "gin0": HIDDEN,
            "gin1": HIDDEN,
            "gin2": HIDDEN,
        },
        {
            "F": Signature(
                ("in0", "in1", "in2", "in3", "in4", "in5"), ("out0", "saved0"), cost=Cost((kernel,))
            ),
            "I": Signature(("saved0", "tan0", "in4"), ("gin0", "gin1", "gin2", "iw0")),
            "W": Signature(("saved0", "iw0"), (), (4, 5)),
        },
    )
    return embed, head


class Builder:
    """Collect the values and instructions of one role."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values = values
        self.program: list[Instr] = []

    def make(self, category: Category, spec: TensorSpec, *ids: str) -> tuple[str, ...]:
        self.values.update({id: Value(id, spec, category) for id in ids})
        return ids

    def add(self, stream: str, *parts: Part, **fields: Any) -> None:
        self.program.append(Instr(stream, parts, **fields))


def step(
    chunk: str,
    kind: Step,
    mb: int,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    frees: tuple[str, ...],
) -> Part:
    return Part(f"{chunk}.{kind}@{mb}", Compute(chunk, kind), mb, reads, writes, frees)


def whole(
    node: str,
    op: Op,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    frees: tuple[str, ...] = (),
) -> Part:
    return Part(node, op, -1, reads, writes, frees)


def _first(b: Builder) -> None:
    """Return role pp0, which runs F0 F1 W0 W1, the norm's zero and the update."""
    for mb in range(2):
        b.make("batch", IDS, f"x@{mb}")
        b.make("activation", HIDDEN, f"a@{mb}", f"b@{mb}", f"s@{mb}")
        b.make("gradient", HIDDEN, f"ga@{mb}#pp0", f"gb@{mb}#pp0")
        load = Part(f"load@{mb}", Load("inputs"), mb, (), (f"x@{mb}",))
        forward = step(
            "embed", "F", mb, (f"x@{mb}",), (f"a@{mb}", f"b@{mb}", f"s@{mb}"), (f"x@{mb}",)
        )
        allocs = tuple(f"{g}@{k}#pp0" for k in range(2) for g in ("ga", "gb")) if mb == 1 else ()
        b.add("compute", load, forward, allocs_after=allocs)
        for v in ("a", "b"):
            b.add(
                "send",
                Part(f"send.{v}@{mb}", Send("act"), mb, (f"{v}@{mb}",)),
                waits=(("compute", mb + 1),),
            )
    for mb in range(2):
        for v in ("ga", "gb"):
            b.add(
                "recv",
                Part(f"recv.{v}@{mb}", Recv("grad"), mb, (), (f"{v}@{mb}#pp0",)),
                waits=(("compute", 2),),
            )
        dying = (f"s@{mb}", f"ga@{mb}#pp0", f"gb@{mb}#pp0")
        waits = (("recv", 2 * mb + 2), ("send", 2 * mb + 2))
        b.add(
            "compute",
            step("embed", "W", mb, dying, (), dying),
            waits=waits,
            frees_before=(f"a@{mb}", f"b@{mb}"),
        )
    b.make("scalar", SCALAR, "zero", "norm#pp0")
    b.add(
        "reduce",
        whole("reduce.tied", Collective("all_reduce", "tied", "tied")),
        waits=(("compute", 4),),
    )
    b.add("compute", whole("zero", Zeros("float32"), (), ("zero",)), allocs_after=("norm#pp0",))
    b.add(
        "reduce",
        whole("reduce.norm", Collective("all_reduce", "norm"), ("zero",), ("norm#pp0",)),
        waits=(("compute", 5),),
    )
    update = whole("update", Update(("tied",), clip=1.0), ("norm#pp0",), (), ("norm#pp0",))
    b.add("compute", update, waits=(("reduce", 2),), frees_before=("zero",))


def _second(b: Builder) -> None:
    """Return role pp1, which runs F0 F1 (I0 W0) (I1 W1), two reductions, the norm and the update."""
    for mb in range(2):
        b.make("batch", IDS, f"t@{mb}")
        b.make("activation", HIDDEN, f"a@{mb}#pp1", f"b@{mb}#pp1", f"h@{mb}", f"iw@{mb}")
        b.make("gradient", HIDDEN, *(f"{g}@{mb}" for g in ("g0", "g1", "g2", "ga")))
        b.make("scalar", SCALAR, f"loss@{mb}", f"seed@{mb}")
        for v in ("a", "b"):
            waits = (("compute", 1),) if mb else ()
            b.add(
                "recv", Part(f"recv.{v}@{mb}", Recv("act"), mb, (), (f"{v}@{mb}#pp1",)), waits=waits
            )
        load = Part(f"load.t@{mb}", Load("targets"), mb, (), (f"t@{mb}",))
        reads = (f"a@{mb}#pp1", f"b@{mb}#pp1", f"a@{mb}#pp1", f"t@{mb}")
        dying = (f"a@{mb}#pp1", f"b@{mb}#pp1", f"t@{mb}", f"loss@{mb}")
        allocs = ("a@1#pp1", "b@1#pp1") if mb == 0 else ()
        forward = step("head", "F", mb, reads, (f"loss@{mb}", f"h@{mb}"), dying)
        b.add("compute", load, forward, waits=(("recv", 2 * mb + 2),), allocs_after=allocs)
    for mb in range(2):
        b.add(
            "compute",
            Part(f"seed@{mb}", Seed(0.25, "float32"), mb, (), (f"seed@{mb}",)),
            step(
                "head",
                "I",
                mb,
                (f"h@{mb}", f"seed@{mb}"),
                (f"g0@{mb}", f"g1@{mb}", f"g2@{mb}", f"iw@{mb}"),
                (f"seed@{mb}",),
            ),
            step("head", "W", mb, (f"h@{mb}", f"iw@{mb}"), (), (f"h@{mb}", f"iw@{mb}")),
            Part(
                f"sum@{mb}",
                Add(),
                mb,
                (f"g2@{mb}", f"g0@{mb}"),
                (f"ga@{mb}",),
                (f"g0@{mb}", f"g2@{mb}"),
            ),
        )
        for v in ("ga", "g1"):
            b.add(
                "send",
                Part(f"send.{v}@{mb}", Send("grad"), mb, (f"{v}@{mb}",)),
                waits=(("compute", mb + 3),),
            )
    b.make("scalar", SCALAR, "squares", "norm#pp1")
    for n, bucket in enumerate(("tied", "own")):
        waits = (("compute", 4),) if n == 0 else ()
        b.add(
            "reduce",
            whole(f"reduce.{bucket}", Collective("all_reduce", bucket, bucket)),
            waits=waits,
        )
    norm = whole("squares", SquaredNorm(("tied", "own"), "float32"), (), ("squares",))
    b.add("compute", norm, waits=(("reduce", 2),), allocs_after=("norm#pp1",))
    b.add(
        "reduce",
        whole("reduce.norm", Collective("all_reduce", "norm"), ("squares",), ("norm#pp1",)),
        waits=(("compute", 5),),
    )
    update = whole("update", Update(("tied", "own"), clip=1.0), ("norm#pp1",), (), ("norm#pp1",))
    dead = ("squares", *(f"{g}@{mb}" for mb in range(2) for g in ("ga", "g1")))
    b.add("compute", update, waits=(("reduce", 3), ("send", 4)), frees_before=dead)


def good_plan() -> Plan:
    """Return GPipe on pp=2 x dp=2 with two microbatches, a table of both stages, a parameter of the second,
    clipping."""
    values: dict[str, Value] = {}
    first, second = Builder(values), Builder(values)
    _first(first)
    _second(second)
    tied = (
        State("param", "tied", 512, True),
        State("grad", "tied", 512, True),
        State("optim", "tied", 1024, True),
    )
    own = (
        State("param", "own", 256, True),
        State("grad", "own", 256, True),
        State("optim", "own", 512, True),
    )
    scale = State("buffer", "scale", 32)
    streams = ("compute", "send", "recv", "reduce")
    plan = Plan(
        program_key="0123456789abcdef",
        mesh=Mesh(pp=2, dp=2),
        rows=ROWS,
        microbatches=2,
        replicated=("dp",),
        roles=(
            RolePlan("pp0", {"pp": 0}, (0, 1), tuple(first.program), streams, (*tied, scale)),
            RolePlan(
                "pp1",
                {"pp": 1},
                (2, 3),
                tuple(second.program),
                streams,
                (*tied, *own),
                ("a@0#pp1", "b@0#pp1"),
            ),
        ),
        channels=(
            Channel("act", "p2p", ("pp0", "pp1"), ("send", "recv")),
            Channel("grad", "p2p", ("pp1", "pp0"), ("send", "recv"), purpose="gradient"),
            Channel("tied", "group", ("pp0", "pp1"), ("reduce", "reduce"), ("dp",), "reduce"),
            Channel("own", "group", ("pp1",), ("reduce",), ("dp",), "reduce"),
            Channel("norm", "group", ("pp0", "pp1"), ("reduce", "reduce"), (), "norm"),
        ),
        buckets=(
            Bucket("tied", ("table",), (0,), 128, "float32", ("pp0", "pp1"), ("dp",), 0, "tied"),
            Bucket("own", ("bias",), (0,), 64, "float32", ("pp1",), ("dp",), 0, "own"),
        ),
        values=values,
        chunks=chunks(),
        params=(Param("table", TABLE, ("head.weight",)), Param("bias", BIAS)),
        buffers=(Buffer("scale", FROZEN),),
        batch=(BatchTensor("inputs", IDS), BatchTensor("targets", IDS)),
    )
    return with_peaks(plan)


def lone_plan() -> Plan:
    """Return the good plan with one replica, where nothing reduces the second stage's bucket: one rank holds it."""
    plan = replace(good_plan(), mesh=Mesh(pp=2), replicated=())
    for rank, role in enumerate(plan.roles):
        plan = change_role(plan, role.role, ranks=(rank,))
    for mb in range(2):
        plan = change_part(plan, "pp1", f"seed@{mb}", op=Seed(0.5, "float32"))
    plan = change_program(plan, "pp1", lambda program: program.pop(find(plan, "pp1", "reduce.own")))
    plan = change_instr(plan, "pp1", "squares", waits=(("reduce", 1),))
    plan = change_instr(plan, "pp1", "update", waits=(("reduce", 2), ("send", 4)))
    plan = change_channel(change_bucket(plan, "tied", over=()), "tied", over=())
    plan = replace(plan, channels=tuple(c for c in plan.channels if c.id != "own"))
    return with_peaks(change_bucket(plan, "own", over=(), channel=""))


def change_role(plan: Plan, role: str, **fields: Any) -> Plan:
    return replace(
        plan, roles=tuple(replace(r, **fields) if r.role == role else r for r in plan.roles)
    )


def change_program(plan: Plan, role: str, edit: Callable[[list[Instr]], Any]) -> Plan:
    """Edit a copy of a role's program in place."""
    program = list(plan.role(role).program)
    edit(program)
    return change_role(plan, role, program=tuple(program))


def find(plan: Plan, role: str, node: str) -> int:
    """Return the index of the instruction that has a part of this node."""
    return next(
        i
        for i, instr in enumerate(plan.role(role).program)
        if any(p.node == node for p in instr.parts)
    )


def change_instr(plan: Plan, role: str, node: str, **fields: Any) -> Plan:
    index = find(plan, role, node)
    return change_program(plan, role, lambda p: p.__setitem__(index, replace(p[index], **fields)))


def change_part(plan: Plan, role: str, node: str, **fields: Any) -> Plan:
    instr = plan.role(role).program[find(plan, role, node)]
    parts = tuple(replace(p, **fields) if p.node == node else p for p in instr.parts)
    return change_instr(plan, role, node, parts=parts)


def change_bucket(plan: Plan, bucket: str, **fields: Any) -> Plan:
    return replace(
        plan, buckets=tuple(replace(b, **fields) if b.id == bucket else b for b in plan.buckets)
    )


def change_channel(plan: Plan, channel: str, **fields: Any) -> Plan:
    return replace(
        plan, channels=tuple(replace(c, **fields) if c.id == channel else c for c in plan.channels)
    )
