"""Make plans that are only measured: instructions without work, messages of four bytes, and every channel."""

from __future__ import annotations

from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import COMPUTE, Channel, Instr, Part, Plan, RolePlan, Value
from piper_ir.program.ops import Recv, Send, Zeros
from piper_ir.program.program import Param

DTYPE = "float32"
PIPE = "pipe"
SCALAR = TensorSpec((), DTYPE)


def instructions_plan(count: int) -> Plan:
    """Return a plan of one rank that makes `count` scalars, each in an instruction of its own, and drops them."""
    names = [f"z{i}" for i in range(count)]
    program = tuple(_zeros(n, frees=(n,)) for n in names)
    return _plan(Mesh(pp=1), (_role(0, program, (COMPUTE,)),), (), names)


def messages_plan(count: int) -> Plan:
    """Return a plan with a rank 0 that makes `count` scalars and sends each to rank 1 in an instruction of its own."""
    sent, got = [f"z{i}" for i in range(count)], [f"r{i}" for i in range(count)]
    source: list[Instr] = []
    for i, name in enumerate(sent):
        source.append(_zeros(name))
        source.append(
            Instr(PIPE, (Part(f"send.{name}", Send(PIPE), reads=(name,)),), ((COMPUTE, i + 1),))
        )
    sink = [Instr(PIPE, (Part(f"recv.{name}", Recv(PIPE), writes=(name,)),)) for name in got]
    roles = (
        _role(0, (*source, _last(sent)), (COMPUTE, PIPE)),
        _role(1, (*sink, _last(got)), (COMPUTE, PIPE), allocs_first=tuple(got)),
    )
    channel = Channel(PIPE, "p2p", ("r0", "r1"), (PIPE, PIPE))
    return _plan(Mesh(pp=2), roles, (channel,), [*sent, *got, "last"])


def channels_plan(world: int, groups: tuple[tuple[int, ...], ...]) -> Plan:
    """Return a plan without instructions, for its channels.

    There is one between any two ranks of a pair (2k, 2k + 1), "0>1", and one over each group, "0,1".
    """
    roles = tuple(_role(r, (), (COMPUTE,)) for r in range(world))
    pairs = [(a, a ^ 1) for a in range(world) if a ^ 1 < world]
    p2p = [Channel(f"{a}>{b}", "p2p", (f"r{a}", f"r{b}"), ("pairs", "pairs")) for a, b in pairs]
    group = [
        Channel(group_channel(g), "group", tuple(f"r{r}" for r in g), ("groups",) * len(g))
        for g in groups
    ]
    return _plan(Mesh(pp=world), roles, (*p2p, *group), [])


def group_channel(members: tuple[int, ...]) -> str:
    """Return the channel of `channels_plan` over these ranks."""
    return ",".join(map(str, members))


def _zeros(name: str, frees: tuple[str, ...] = ()) -> Instr:
    return Instr(COMPUTE, (Part(name, Zeros(DTYPE), writes=(name,), frees=frees),))


def _last(held: list[str]) -> Instr:
    """Return the instruction that waits for all messages and drops their values."""
    part = Part("last", Zeros(DTYPE), writes=("last",), frees=("last",))
    return Instr(COMPUTE, (part,), ((PIPE, len(held)),), frees_before=tuple(held))


def _role(
    rank: int,
    program: tuple[Instr, ...],
    streams: tuple[str, ...],
    allocs_first: tuple[str, ...] = (),
) -> RolePlan:
    return RolePlan(f"r{rank}", {"pp": rank}, (rank,), program, streams, allocs_first=allocs_first)


def _plan(
    mesh: Mesh, roles: tuple[RolePlan, ...], channels: tuple[Channel, ...], values: list[str]
) -> Plan:
    scalars = {v: Value(v, SCALAR, "scalar") for v in values}
    param = Param("w", TensorSpec((1,), DTYPE), trained=False)  # torch's optimizers want one
    return Plan("profile", mesh, 1, 1, (), roles, channels, (), scalars, (), (param,))
