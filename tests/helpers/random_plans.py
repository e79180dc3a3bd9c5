"""Random legal plans without a compiler: what the timing sweep, the event engine and the verifier must agree on.

Instructions are appended to their roles along one global sequence, which is hence an order in which the plan can run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import COMPUTE, Channel, Instr, Part, Plan, RolePlan, Value
from piper_ir.program.ops import Collective, Compute, Op, Recv, Send
from piper_ir.program.program import Chunk, Cost, Signature


@dataclass
class PlanBuilder:
    """Hand-made plans in few words: one role per pipeline device, a chunk per duration, values of no bytes unless
    given."""

    roles: int
    hop: float = 0.0
    dp: int = 1
    programs: list[list[Instr]] = field(init=False)
    chunks: dict[float, Chunk] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = [[] for _ in range(self.roles)]

    def count(self, role: int, stream: str) -> int:
        """How many instructions a stream has so far."""
        return sum(i.stream == stream for i in self.programs[role])

    def compute(
        self, role: int, seconds: float, waits: tuple[tuple[str, int], ...] = (), name: str = ""
    ) -> None:
        chunk = self.chunks.setdefault(seconds, _chunk(f"c{len(self.chunks)}", seconds))
        self._append(role, COMPUTE, Compute(chunk.id, "F"), waits, name)

    def transfer(
        self,
        source: int,
        target: int,
        waits: tuple[tuple[str, int], ...] = (),
        to: tuple[tuple[str, int], ...] = (),
        nbytes: int = 0,
    ) -> None:
        """A Send on `source` with its waits and the Recv on `target` with the waits `to`, on streams of their own."""
        name = f"{source}>{target}"
        streams = self.stream(name, source), self.stream(name, target)
        self.channels.setdefault(
            name, Channel(name, "p2p", (_role(source), _role(target)), streams)
        )
        k = sum(
            isinstance(i.parts[0].op, Send) and i.parts[0].op.channel == name
            for i in self.programs[source]
        )
        ids = f"v{name}@{k}", f"v{name}@{k}#"
        self.values.update({v: Value(v, TensorSpec((nbytes,), "uint8"), "activation") for v in ids})
        self._append(source, streams[0], Send(name), waits, f"{name}.send@{k}", reads=(ids[0],))
        self._append(target, streams[1], Recv(name), to, f"{name}.recv@{k}", writes=(ids[1],))

    def all_reduce(
        self, members: tuple[int, ...], waits: dict[int, tuple[tuple[str, int], ...]]
    ) -> None:
        name = "=".join(map(str, members))
        self.channels.setdefault(
            name,
            Channel(
                name,
                "group",
                tuple(map(_role, members)),
                tuple(self.stream(name, m) for m in members),
                ("dp",),
                "reduce",
            ),
        )
        for m in members:
            self._append(
                m,
                self.stream(name, m),
                Collective("all_reduce", name),
                waits.get(m, ()),
                f"{name}.reduce",
            )

    def stream(self, channel: str, role: int) -> str:
        """The stream that a channel uses on a role; overridden where several channels share one."""
        return channel

    def plan(self) -> Plan:
        mesh = Mesh(pp=self.roles, dp=self.dp)
        roles = tuple(
            RolePlan(
                _role(r),
                {"pp": r},
                mesh.ranks({"pp": r}),
                tuple(p),
                tuple(dict.fromkeys(i.stream for i in p)),
            )
            for r, p in enumerate(self.programs)
        )
        chunks, channels = tuple(self.chunks.values()), tuple(self.channels.values())
        replicated = ("dp",) if self.dp > 1 else ()
        return Plan(
            "hand", mesh, 1, 1, replicated, roles, channels, (), self.values, chunks, hop=self.hop
        )

    def _append(
        self,
        role: int,
        stream: str,
        op: Op,
        waits: tuple[tuple[str, int], ...],
        name: str = "",
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        name = name or f"{stream}@{len(self.programs[role])}"
        self.programs[role].append(
            Instr(stream, (Part(name, op, reads=reads, writes=writes),), waits)
        )


class SharedStreams(PlanBuilder):
    """Channels of one role share one to three communication streams."""

    def stream(self, channel: str, role: int) -> str:
        return f"comm{hash_of(channel) % (1 + role % 3)}"


def hash_of(text: str) -> int:
    """The same on every run, unlike hash()."""
    return sum(ord(c) * (i + 1) for i, c in enumerate(text))


def random_launches(durations: list[float], rng: Random) -> list[float]:
    """Seconds of launches per instruction: none, less than its duration, as much, or more."""
    return [rng.choice((0.0, 0.3 * d, d, d + 0.17)) for d in durations]


def random_plan(seed: int, *, most_roles: int = 6, most: int = 60) -> tuple[Plan, list[float]]:
    """A plan and a duration per instruction (roles in order), many of them zero or equal, so that there are ties."""
    rng = Random(seed)
    p = rng.randint(1, most_roles)
    build = rng.choice((PlanBuilder, SharedStreams))(p, hop=rng.choice((0.0, 0.0, 1.0, 0.3)))
    build.compute(0, 1.0)
    for _ in range(rng.randint(1, most)):
        kind = rng.random()
        if kind < 0.5 or p == 1:
            role = rng.randrange(p)
            build.compute(role, rng.choice((0.0, 1.0, 2.0, 0.7)), _waits(rng, build, role, COMPUTE))
        elif kind < 0.9:
            a, b = rng.sample(range(p), 2)
            name = f"{a}>{b}"
            sent = _waits(rng, build, a, build.stream(name, a))
            build.transfer(a, b, sent, _waits(rng, build, b, build.stream(name, b)))
        else:
            members = tuple(sorted(rng.sample(range(p), rng.randint(1, p))))
            name = "=".join(map(str, members))
            build.all_reduce(
                members, {m: _waits(rng, build, m, build.stream(name, m)) for m in members}
            )
    plan = build.plan()
    return plan, _durations(plan, rng)


def given_durations(plan: Plan) -> list[float]:
    """Per instruction: what the chunks say, 0 for communication."""
    return _durations(plan, None)


def _waits(rng: Random, build: PlanBuilder, role: int, own: str) -> tuple[tuple[str, int], ...]:
    """Some earlier instructions of other streams of the role."""
    streams = dict.fromkeys(i.stream for i in build.programs[role] if i.stream != own)
    return tuple((s, rng.randint(1, build.count(role, s))) for s in streams if rng.random() < 0.5)


def _durations(plan: Plan, rng: Random | None) -> list[float]:
    """Per instruction; all ends of a channel's k-th use take the same time."""
    of_use: dict[tuple[str, int], float] = {}
    out = []
    for role in plan.roles:
        uses: dict[str, int] = {}
        for instr in role.program:
            op = instr.parts[0].op
            if isinstance(op, Compute):
                seconds = plan.chunk(op.chunk).steps["F"].cost.seconds
                assert seconds is not None
                out.append(seconds)
                continue
            assert isinstance(op, Send | Recv | Collective)
            k = uses[op.channel] = uses.get(op.channel, 0) + 1
            out.append(
                of_use.setdefault((op.channel, k), rng.choice((0.0, 0.5, 1.0, 0.1)) if rng else 0.0)
            )
    return out


def _chunk(id: str, seconds: float) -> Chunk:
    return Chunk(id, {}, (), (), {}, {"F": Signature((), (), cost=Cost(seconds=seconds))})


def _role(r: int) -> str:
    return f"pp{r}"
