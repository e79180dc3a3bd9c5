"""Run one rank of an emulated run: real streams, waits and rendezvous, with sleeps in place of compute.

`piper_runtime.launch.processes.emulation` has its purpose.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from piper_ir.plan.plan import Channel, Instr, Plan
from piper_ir.program.ops import COMM, Compute, Recv, Send
from piper_runtime.engine.engine import Engine
from piper_runtime.engine.streams import PHASE, RUNNING, CpuStreams, Heartbeat
from piper_runtime.engine.trace import TimedSpan
from piper_runtime.launch.ground.report import RankReport
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, BoundInstr, Rank, comm_kind
from piper_runtime.transport.gloo import GlooCommunicators

SHORTEST_S, LONGEST_S = 0.02, 0.1
"""The bounds between which the shortest compute instruction that matters sleeps.

Waking up is small beside it, and nobody waits for hours.
"""
HOST_S = SHORTEST_S / 4
"""The longest delay that counts as the machine's, and that later sleeps make up for."""
LEAD_S = 0.05
"""The seconds from the moment when all ranks are ready to their common start, so that all hear of it in time."""


@dataclass(frozen=True)
class EmulationRequest:
    """Describe one emulated run of one rank.

    Attributes:
        plan: pickled.
        seconds: to sleep, per instruction.
        latency: seconds to sleep of a point-to-point transfer.
        issued: per instruction, how long after its host began with the step it may start; empty for at once.
        host_s: seconds in which the host issues a step; it then begins with the next.
        meeting: names the common start; it is different for every run.
    """

    plan: bytes
    seconds: tuple[float, ...]
    latency: float
    issued: tuple[float, ...]
    host_s: float
    steps: int
    meeting: str


@dataclass
class EmulationReport(RankReport):
    """Hold the times of an emulated run.

    `held_up` are, per instruction, the seconds from when its causes were really done to when it really began.
    """

    held_up: list[float] = field(default_factory=list)


def emulate_rank(
    rank: int, request: EmulationRequest, communicators: GlooCommunicators, heart: Heartbeat
) -> EmulationReport:
    """Run the worker's side: bind the plan, wait for the common start, run the steps."""
    plan: Plan = pickle.loads(request.plan)
    communicators.connect(plan)
    backend = CpuStreams(plan.role_of(rank).streams, heart)
    timed = TimedRank(plan, rank, request, communicators)
    # The engine needs of a rank its entries, begin and end; there is nothing else without tensors.
    engine = Engine(cast(Rank, timed), backend, timed.communication, heart)
    report = EmulationReport(held_up=timed.held_up)
    report.started = timed.now = _common_start(
        communicators.store, request.meeting, plan.mesh.world
    )
    sleep_until(report.started)
    heart[PHASE] = RUNNING
    for step in range(request.steps):
        engine.step(step)
        report.finished.append(timed.now)
    backend.close()
    report.spans = timed.spans
    return report


def _common_start(store: Any, name: str, world: int) -> float:
    """Return a moment in the near future, the same on all ranks; the last one that gets here sets it."""
    if store.add(f"{name} ranks", 1) == world:
        store.set(f"{name} start", repr(time.perf_counter() + LEAD_S))
    return float(store.get(f"{name} start"))


def sleep_until(moment: float) -> None:
    """Sleep to a moment of time.perf_counter; return at once when it is past."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


@dataclass(frozen=True, slots=True)
class _TimedComm(BoundComm):
    """Hold a communication with its index in the program."""

    index: int = -1


@dataclass(frozen=True, slots=True)
class Moment:
    """Hold when something ended: by the plan's time, and really, which is later."""

    planned: float
    real: float


Meet = Callable[[Moment], list[Moment]]
"""A call that tells others when this rank was there, and returns when each of them was."""


def latest(moments: Iterable[Moment]) -> Moment:
    """Return the moment when all of them have ended."""
    ends = list(moments)
    return Moment(max(m.planned for m in ends), max(m.real for m in ends))


class TimedRank:
    """Let an engine run a rank whose instructions sleep, in place of tensors.

    `now` is when the step begins or, after it, when it was over, by the plan's time. `spans` has the last step's spans,
    by the plan's time too. `held_up` is as in EmulationReport. The plan's host is never blocked: `_host` is when it
    began with the step, long before `now` if it is quicker than its device.

    Per stream, `_end` is when its last instruction had left it, and `_done` when each of its instructions was done for
    waiters (`latency` later for a transfer). Only the stream's own thread writes them, before others learn that it has
    gone on.
    """

    def __init__(
        self, plan: Plan, rank: int, request: EmulationRequest, communicators: GlooCommunicators
    ) -> None:
        self.rank, self.step = rank, 0
        self._communicators = communicators
        self._inside: dict[str, Meet] = {}
        self.now = self._host = 0.0
        self.spans: list[TimedSpan] = []
        self.held_up: list[float] = []
        self._plan, self._request = plan, request
        self._program = plan.role_of(rank).program
        self._streams = list(dict.fromkeys(instr.stream for instr in self._program))
        self._end: dict[str, Moment] = {}
        self._done: dict[str, list[Moment]] = {}
        self.entries = tuple(self._entry(i) for i in range(len(self._program)))

    def begin(self, step: int) -> None:
        """Start a step."""
        self.step = step
        self._host = self._host + self._request.host_s if step else self.now
        self.spans.clear()
        self._end = dict.fromkeys(self._streams, Moment(self.now, time.perf_counter()))
        self._done = {s: [] for s in self._streams}

    def end(self) -> None:
        """End a step, after transfers that are still under way."""
        self.now = max([self.now, *(done[-1].planned for done in self._done.values())])
        sleep_until(self.now)

    def _entry(self, index: int) -> BoundInstr:
        instr = self._program[index]
        op = instr.parts[0].op
        if not isinstance(op, COMM):
            meets = [
                self._meet_inside(channel) for channel in _inside(self._plan, self.rank, instr)
            ]
            return BoundInstr(
                index,
                instr.stream,
                instr.waits,
                instr.name,
                work=lambda: self._compute(index, meets),
            )
        peers = self._plan.peers(self._plan.channel(op.channel), self.rank)
        comm = _TimedComm(comm_kind(op), op.channel, peers, _no_tensor, index=index)
        return BoundInstr(index, instr.stream, instr.waits, instr.name, comm=comm)

    def _meet_inside(self, channel: Channel) -> Meet:
        """Return the rendezvous of devices that share chunks on a channel, one for all instructions."""
        if channel.id not in self._inside:
            peers = self._plan.peers(channel, self.rank)
            self._inside[channel.id] = _meeting(
                BoundComm("all_reduce", channel.id, peers, _no_tensor),
                self.rank,
                self._communicators,
            )
        return self._inside[channel.id]

    def _compute(self, index: int, meets: Sequence[Meet]) -> None:
        """Take the time of an instruction of the compute stream.

        Devices that exchange something inside of its steps run it together: as the last of them is there.
        """
        ready = self._ready(index)
        for meet in meets:
            sleep_until(ready.planned)
            ready = latest(meet(Moment(ready.planned, time.perf_counter())))
        self._run(index, ready)

    def _ready(self, index: int) -> Moment:
        """Return when an instruction may begin as far as this rank knows: issued, its waits done, its stream free."""
        instr = self._program[index]
        issued = self._host + self._request.issued[index] if self._request.issued else self.now
        return latest(
            [
                Moment(issued, issued),
                self._end[instr.stream],
                *(self._done[s][n - 1] for s, n in instr.waits if n),
            ]
        )

    def _run(self, index: int, ready: Moment) -> None:
        """Occupy the stream for an instruction's time.

        `ready` is when its causes were done: in the future while a transfer that it waits for is still under way.
        """
        instr = self._program[index]
        held_up = max(0.0, time.perf_counter() - max(ready.planned, ready.real))
        self.held_up.append(held_up)
        begin = ready.planned + (held_up if held_up > HOST_S else 0.0)
        end = begin + self._request.seconds[index]
        sleep_until(end)
        self.spans.append((index, begin, end))
        self._end[instr.stream] = Moment(end, time.perf_counter())
        transfer = isinstance(instr.parts[0].op, Send | Recv)
        arrival = Moment(
            end + (self._request.latency if transfer else 0.0), self._end[instr.stream].real
        )
        done = self._done[instr.stream]
        done.append(latest([arrival, *done[-1:]]))

    def communication(self, comm: BoundComm) -> Thunk:
        """Return the closure that meets the other members of a communication and takes its time with them."""
        assert isinstance(comm, _TimedComm)
        index = comm.index
        meet = _meeting(comm, self.rank, self._communicators)

        def run() -> None:
            ready = self._ready(index)
            sleep_until(ready.planned)
            self._run(index, latest(meet(Moment(ready.planned, time.perf_counter()))))

        return run


def _no_tensor() -> torch.Tensor:
    raise TypeError("an emulated communication has no tensor of the plan's")


def _inside(plan: Plan, rank: int, instr: Instr) -> list[Channel]:
    """Return the channels of collectives inside of an instruction's steps, between devices that share chunks."""
    steps = [
        plan.chunk(p.op.variant).steps[p.op.step] for p in instr.parts if isinstance(p.op, Compute)
    ]
    axes = dict.fromkeys(plan.mesh.along(c.axis) for step in steps for c in step.collectives)
    role = plan.role_of(rank).role
    return [
        c for c in plan.channels if c.purpose == "tensor" and role in c.roles and c.over in axes
    ]


def _meeting(comm: BoundComm, rank: int, communicators: GlooCommunicators) -> Meet:
    """Return a call that tells the other members when this rank was there, and returns when each of them was.

    The message is as small as possible and goes through the same communicator as the plan's would. The members of a
    collective each fill a row of their own, and an all-reduce sums; the receiver of a transfer answers.
    """
    members = sorted(comm.peers)
    here = members.index(rank)
    rows = torch.zeros(len(members), 2, dtype=torch.float64)
    if comm.law is not None:
        transfers = [communicators.bind(_message(replace(comm, kind="all_reduce"), rows))]
    else:
        answer = "recv" if comm.kind == "send" else "send"
        row = {"send": rows[here], "recv": rows[1 - here]}
        legs = [comm, replace(comm, kind=answer, peers=comm.peers[::-1])]
        transfers = [communicators.bind(_message(leg, row[leg.kind])) for leg in legs]

    def meet(own: Moment) -> list[Moment]:
        rows.zero_()
        rows[here, 0], rows[here, 1] = own.planned, own.real
        for transfer in transfers:
            transfer()
        return [Moment(*row) for row in rows.tolist()]

    return meet


def _message(comm: BoundComm, tensor: torch.Tensor) -> BoundComm:
    return replace(comm, operand=lambda: tensor)
