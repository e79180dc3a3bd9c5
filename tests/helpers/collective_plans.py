"""Plans written by hand in which every collective of values takes part in training one model
(`tests.helpers.collective_model`).

The model: h = tanh(x @ stem); y = the sum over n branches of tanh(h @ branch k); a mean loss. Rank 0 has the stem and
the loss, rank k branch k. Per microbatch the ranks exchange the blocks of h and exchange them back (all_to_all twice:
what they had), and the gradient of h, which is the sum of what each branch gives, is reduced to blocks and gathered
from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from piper_ir.fold.memory import with_peaks
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import (
    COMPUTE,
    Bucket,
    Category,
    Channel,
    Instr,
    Part,
    Plan,
    RolePlan,
    State,
    Value,
)
from piper_ir.program.ops import COMM, Collective, Compute, Load, Op, Recv, Seed, Send, Update
from piper_ir.program.program import BatchTensor, Chunk, Input, Output, Param, Signature, Step

MICROBATCHES, ROWS, WIDTH = 2, 4, 4
BUCKET = 32
"""Elements of a bucket: a multiple of 256 bytes."""


def _spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float64")


WHOLE, WEIGHT, SCALAR = _spec(ROWS, WIDTH), _spec(WIDTH, WIDTH), _spec()


def _chunks(n: int) -> tuple[Chunk, ...]:
    ports = {"in0": WHOLE, "in1": WEIGHT, "out0": WHOLE, "tan0": WHOLE, "gin0": WHOLE, "iw0": WHOLE}
    value = Output("value", WHOLE, needs_grad=True)
    steps: dict[Step, Signature] = {
        "F": Signature(("in0", "in1"), ("out0",)),
        "I": Signature((), ()),
        "W": Signature(("in0", "out0", "tan0"), (), (1,)),
    }
    batch, stem = Input("batch", "inputs", WHOLE), Input("param", "stem", WEIGHT, True)
    found = [Chunk("stem", {"stage": 0}, (batch, stem), (value,), ports, steps, "stem")]
    steps = {
        "F": Signature(("in0", "in1"), ("out0",)),
        "I": Signature(("in1", "out0", "tan0"), ("gin0", "iw0")),
        "W": Signature(("in0", "iw0"), (), (1,)),
    }
    for k in range(n):
        inputs = (
            Input("value", "stem:out0", WHOLE, True),
            Input("param", f"branches.{k}", WEIGHT, True),
        )
        found.append(Chunk(f"branch{k}", {"stage": k}, inputs, (value,), ports, steps, "branch"))
    targets = Input("batch", "targets", WHOLE)
    inputs = (*(Input("value", f"branch{k}:out0", WHOLE, True) for k in range(n)), targets)
    gins = tuple(f"gin{k}" for k in range(n))
    ports = (
        {f"in{k}": WHOLE for k in range(n + 1)}
        | dict.fromkeys((*gins, "saved0"), WHOLE)
        | {"out0": SCALAR, "tan0": SCALAR}
    )
    steps = {
        "F": Signature(tuple(f"in{k}" for k in range(n + 1)), ("out0", "saved0")),
        "I": Signature(("saved0", "tan0"), gins),
        "W": Signature((), ()),
    }
    loss = Output("loss", SCALAR, needs_grad=True)
    return (*found, Chunk("loss", {"stage": 0}, inputs, (loss,), ports, steps, f"loss{n}"))


@dataclass
class _Role:
    """The program of one role while it is written: where each value was written, and which ones communication
    touches."""

    rank: int
    program: list[Instr] = field(default_factory=list)
    count: dict[str, int] = field(default_factory=dict)
    made: dict[str, tuple[str, int]] = field(default_factory=dict)
    touched: dict[str, None] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)

    def add(self, stream: str, *parts: Part) -> None:
        """One instruction, which waits for what its parts read."""
        waits: dict[str, int] = {}
        inside = {v for p in parts for v in p.writes}
        for value in (v for p in parts for v in p.reads if v not in inside):
            source, n = self.made[value]
            if source != stream:
                waits[source] = max(waits.get(source, 0), n)
        self.program.append(Instr(stream, parts, tuple(waits.items())))
        self.count[stream] = self.count.get(stream, 0) + 1
        for part in parts:
            self.made.update(dict.fromkeys(part.writes, (stream, self.count[stream])))
            if isinstance(part.op, COMM):
                self.touched.update(dict.fromkeys((*part.reads, *part.writes)))
                self.received += part.writes

    def finish(self, bucket: str) -> None:
        """The update, which waits for all streams and frees what communication touched; all else dies at its last
        reader."""
        last: dict[str, tuple[int, int]] = {}
        for i, instr in enumerate(self.program):
            for p, part in enumerate(instr.parts):
                last.update(dict.fromkeys((*part.writes, *part.reads), (i, p)))
        for value, (i, p) in last.items():
            if value not in self.touched:
                parts = list(self.program[i].parts)
                parts[p] = Part(**{**_fields(parts[p]), "frees": (*parts[p].frees, value)})
                self.program[i] = Instr(self.program[i].stream, tuple(parts), self.program[i].waits)
        waits = tuple((stream, n) for stream, n in self.count.items() if stream != COMPUTE)
        update = Part(f"update#{self.rank}", Update((bucket,)))
        self.program.append(Instr(COMPUTE, (update,), waits, frees_before=tuple(self.touched)))


def _fields(part: Part) -> dict[str, object]:
    return {name: getattr(part, name) for name in ("node", "op", "mb", "reads", "writes", "frees")}


class _Writer:
    """All roles of the plan, written microbatch by microbatch in one global order."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.roles = [_Role(k) for k in range(n)]
        self.values: dict[str, Value] = {}
        self.channels: dict[str, Channel] = {}

    def value(self, id: str, category: Category, spec: TensorSpec = WHOLE) -> str:
        self.values[id] = Value(id, spec, category)
        return id

    def step(
        self,
        rank: int,
        chunk: str,
        step: Step,
        mb: int,
        reads: list[str],
        writes: list[str],
        *before: Part,
    ) -> None:
        part = Part(f"{chunk}.{step}@{mb}", Compute(chunk, step), mb, tuple(reads), tuple(writes))
        self.roles[rank].add(COMPUTE, *before, part)

    def source(self, op: Op, value: str, mb: int) -> Part:
        return Part(f"source.{value}", op, mb, (), (value,))

    def transfer(
        self, name: str, source: int, to: int, value: str, mb: int, category: Category
    ) -> str:
        """The value on another rank."""
        channel = Channel(name, "p2p", (f"r{source}", f"r{to}"), ("send", "recv"))
        self.channels[name] = channel
        copy = self.value(f"{value}#r{to}", category)
        self.roles[source].add("send", Part(f"send.{copy}", Send(name), mb, (value,)))
        self.roles[to].add("recv", Part(f"recv.{copy}", Recv(name), mb, (), (copy,)))
        return copy

    def collective(
        self, kind: str, channel: str, reads: list[str], name: str, mb: int, spec: TensorSpec
    ) -> list[str]:
        """What every rank gets."""
        everyone = tuple(r.role for r in _plain_roles(self.n))
        self.channels[channel] = Channel(channel, "group", everyone, ("group",) * self.n)
        got = []
        for rank, read in enumerate(reads):
            got.append(self.value(f"{name}@{mb}#r{rank}", self.values[read].category, spec))
            self.roles[rank].add(
                "group",
                Part(f"{kind}.{got[-1]}", Collective(kind, channel), mb, (read,), (got[-1],)),
            )
        return got

    def microbatch(self, mb: int) -> None:
        n, part = self.n, _spec(ROWS // self.n, WIDTH)
        x, h = self.value(f"x@{mb}", "batch"), self.value(f"h@{mb}", "activation")
        self.step(0, "stem", "F", mb, [x], [h], self.source(Load("inputs"), x, mb))
        held = [h, *(self.transfer(f"h.{k}", 0, k, h, mb, "activation") for k in range(1, n))]
        swapped = self.collective("all_to_all", "swap", held, "swapped", mb, WHOLE)
        held = self.collective("all_to_all", "swap", swapped, "held", mb, WHOLE)
        outs = [self.value(f"y{k}@{mb}", "activation") for k in range(n)]
        for k in range(n):
            self.step(k, f"branch{k}", "F", mb, [held[k]], [outs[k]])
        there = [
            outs[0],
            *(self.transfer(f"y.{k}", k, 0, outs[k], mb, "activation") for k in range(1, n)),
        ]
        gins = self._loss(mb, there)
        tans = [
            gins[0],
            *(self.transfer(f"g.{k}", 0, k, gins[k], mb, "gradient") for k in range(1, n)),
        ]
        own, inner = (
            [self.value(f"{v}{k}@{mb}", "gradient") for k in range(n)] for v in ("gh", "iw")
        )
        for k in range(n):
            self.step(k, f"branch{k}", "I", mb, [outs[k], tans[k]], [own[k], inner[k]])
        parts = self.collective("reduce_scatter", "sum", own, "part", mb, part)
        whole = self.collective("all_gather", "sum", parts, "whole", mb, WHOLE)
        for k in range(n):
            self.step(k, f"branch{k}", "W", mb, [held[k], inner[k]], [])
        self.step(0, "stem", "W", mb, [x, h, whole[0]], [])

    def _loss(self, mb: int, outs: list[str]) -> list[str]:
        target, diff = self.value(f"t@{mb}", "batch"), self.value(f"diff@{mb}", "activation")
        loss, seed = (self.value(f"{v}@{mb}", "scalar", SCALAR) for v in ("loss", "seed"))
        gins = [self.value(f"g{k}@{mb}", "gradient") for k in range(self.n)]
        self.step(
            0,
            "loss",
            "F",
            mb,
            [*outs, target],
            [loss, diff],
            self.source(Load("targets"), target, mb),
        )
        given = self.source(Seed(1 / MICROBATCHES, "float64"), seed, mb)
        self.step(0, "loss", "I", mb, [diff, seed], gins, given)
        return gins


def _plain_roles(n: int) -> list[RolePlan]:
    return [RolePlan(f"r{k}", {"pp": k}, (k,), (), ()) for k in range(n)]


def plan(n: int) -> Plan:
    """The plan of the job of n branches on n ranks; `ROWS` must divide by n."""
    writer = _Writer(n)
    for mb in range(MICROBATCHES):
        writer.microbatch(mb)
    names = [(("stem",) if k == 0 else ()) + (f"branches.{k}",) for k in range(n)]
    buckets = []
    for k, params in enumerate(names):
        offsets = tuple(BUCKET * i for i in range(len(params)))
        buckets.append(
            Bucket(f"b{k}", params, offsets, BUCKET * len(params), "float64", (f"r{k}",))
        )
    roles = []
    for role, bucket, bare in zip(writer.roles, buckets, _plain_roles(n), strict=True):
        role.finish(bucket.id)
        states = (
            State("param", bucket.id, bucket.numel * 8, True),
            State("grad", bucket.id, bucket.numel * 8, True),
        )
        streams = (COMPUTE, "send", "recv", "group")
        first = tuple(role.received)
        roles.append(
            RolePlan(
                bare.role, bare.placed, bare.ranks, tuple(role.program), streams, states, first
            )
        )
    params = tuple(Param(p, WEIGHT) for group in names for p in group)
    tensors = BatchTensor("inputs", WHOLE), BatchTensor("targets", WHOLE)
    made = Plan(
        "by hand", Mesh(pp=n), ROWS, MICROBATCHES, (), tuple(roles), tuple(writer.channels.values()), tuple(buckets),
        writer.values, _chunks(n), params, (), tensors,
    )  # fmt: skip
    return with_peaks(made)
