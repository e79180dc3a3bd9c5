"""Devices made up for tests, with the interface that the CUDA engine asks of torch.cuda.

`Machine`: streams of one device per rank, which hold back what they are given and later run it in a legal order that is
drawn at random, the worst ones among them. As on CUDA, a wait for an event that was not recorded yet is no wait.
`HostDevice`: runs everything at once, and fails when an event is waited for that was not recorded in this step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from piper_runtime.engine.inline import collected
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm


class NotYet(BaseException):
    """A communication's peer is not there. Not an Exception: it is none, and the engine must let it through."""


class Stuck(Exception):
    """No stream can go on."""


@dataclass
class Ticket:
    """One recording of an event."""

    done: bool = False


class Stream:
    """A queue of closures; one that returns False or raises NotYet could not run yet and stays."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()

    def try_next(self) -> bool:
        """Run the next item if it can run."""
        try:
            ran = self.queue[0]() is not False
        except NotYet:
            return False
        if ran:
            self.queue.popleft()
        return ran


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._ticket: Ticket | None = None

    def record(self, stream: Stream) -> None:
        ticket = self._ticket = Ticket()
        stream.queue.append(lambda: setattr(ticket, "done", True))

    def wait(self, stream: Stream) -> None:
        if (ticket := self._ticket) is not None:
            stream.queue.append(lambda: ticket.done)

    def query(self) -> bool:
        """The host has issued all that it has when it asks: so the devices may run."""
        assert self._ticket is not None
        if not self._ticket.done:
            self._machine.everybody_waits()
        return self._ticket.done


class Machine:
    """Devices of `world` ranks, each of which is issued to by a thread of its own."""

    def __init__(self, world: int, seed: int) -> None:
        self._random = Random(seed)
        self._fair = seed % 3 == 0
        self._ranks: dict[Stream, float] = {}
        self._streams: list[Stream] = []
        self._barrier = threading.Barrier(world, action=self._run)
        self._boxes: dict[tuple[str, tuple[int, ...]], Box] = {}
        self._error: BaseException | None = None

    def everybody_waits(self) -> None:
        """Called by every rank's thread once per step."""
        self._barrier.wait(60)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while busy := [s for s in self._streams if s.queue]:
                self._random.shuffle(busy)
                if not self._fair:  # the same streams run ahead of all others as far as they can
                    busy.sort(key=self._ranks.__getitem__)
                if not any(s.try_next() for s in busy):
                    raise Stuck("the devices wait for each other")
        except BaseException as e:  # raised in the ranks' threads
            self._error = e

    def device(self) -> Device:
        return Device(self)

    def new_stream(self) -> Stream:
        stream = Stream()
        self._ranks[stream] = self._random.random()
        self._streams.append(stream)
        return stream

    def communicate(self, rank: int) -> Callable[[BoundComm], Thunk]:
        """The communicators of a rank."""
        return lambda comm: self._boxes.setdefault((comm.channel, comm.peers), Box()).bind(
            rank, comm
        )


class Device:
    """A StreamApi."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._home = machine, machine.new_stream()

    def current(self) -> Stream:
        return self._home

    def stream(self) -> Stream:
        return self._machine.new_stream()

    def event(self, *, timed: bool = False) -> Event:
        return Event(self._machine)

    def bound(self, stream: Stream, work: Thunk) -> Thunk:
        return lambda: stream.queue.append(work)


@dataclass
class Box:
    """What is on its way on one channel instance."""

    sent: deque[torch.Tensor] = field(default_factory=deque)
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def bind(self, rank: int, comm: BoundComm) -> Thunk:
        match comm.kind:
            case "send":
                return lambda: self.sent.append(comm.operand().clone())
            case "recv":
                return lambda: self._receive(comm)
            case _:
                return lambda: self._collect(rank, comm)

    def _receive(self, comm: BoundComm) -> None:
        if not self.sent:
            raise NotYet
        comm.operand().copy_(self.sent.popleft())

    def _collect(self, rank: int, comm: BoundComm) -> None:
        law = comm.law
        assert law is not None
        if rank not in self.given:
            if self.results:  # the round before is not over
                raise NotYet
            tensor = comm.operand()
            target = tensor if comm.result is None else comm.result()
            self.given[rank] = (
                target,
                tensor.clone(),
            )  # a collective may read as soon as it has started
            if law.spoils:
                tensor.fill_(float("nan"))
        if not self.results:
            if len(self.given) < len(comm.peers):
                raise NotYet
            members = sorted(self.given)
            self.results = dict(
                zip(members, collected(law, [self.given[r][1] for r in members]), strict=True)
            )
        self.given.pop(rank)[0].copy_(self.results[rank])
        if not self.given:
            self.results = {}


class HostEvent:
    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._recorded = -1

    def record(self, stream: object) -> None:
        self._recorded = self._device.step

    def wait(self, stream: object = None) -> None:
        assert self._recorded == self._device.step or self._device.between_steps, (
            "a wait for an event before it is recorded"
        )

    synchronize = wait

    def query(self) -> bool:
        self.wait()
        return True


class HostDevice:
    """A StreamApi whose streams are all the host itself."""

    def __init__(self) -> None:
        self.step = 0
        self.between_steps = True

    def current(self) -> object:
        return self

    def stream(self) -> object:
        return object()

    def event(self, *, timed: bool = False) -> Any:
        return HostEvent(self)

    def bound(self, stream: object, work: Thunk) -> Thunk:
        return work
