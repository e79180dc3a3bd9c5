"""Measuring inside of a worker: what steps of chunks, other ops, messages and instructions take on this machine.

All ranks measure the same thing at the same time: ranks of one machine share its memory bandwidth, and in a run they compute at
once. A rank computes the whole model on the job's own batches, part by part in the order of a plan for one device, with the
closures that a run binds and a clock around each. Messages go over communicators like those of a run, between ranks that do
nothing else.
"""

from __future__ import annotations

import pickle
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from piper_ir.ops import COMM, Compute, Load, SquaredNorm, Update
from piper_ir.plan import Part, Plan
from piper_ir.traffic import Traffic
from piper_runtime.code import ShippedCode, missing_operators
from piper_runtime.engine import Engine
from piper_runtime.gloo import GlooCommunicators
from piper_runtime.job import Batch, NamedParameters, flatten_batch, microbatch_rows
from piper_runtime.parts import Run, bind_alloc, bind_operand, bind_part
from piper_runtime.profiler_messages import Messages, MessageSample
from piper_runtime.profiler_plans import instructions_plan, messages_plan
from piper_runtime.rank import Rank, Trainee
from piper_runtime.resident import most_resident, reset_most_resident
from piper_runtime.shipping import Parcel
from piper_runtime.streams import PHASE, RUNNING, STEP, CpuStreams, Heart

WARMUP = 1
"""Passes that are not counted: caches are cold, and memory comes from the system for the first time."""
INSTRUCTIONS = 512
"""Of a plan that does nothing else."""

Key = tuple[str, str, int]
"""(code, "F" | "I" | "W", rows), or ("", name of another op, its amount): `piper_ir.costs.StepDuration`, `PartDuration`."""


@dataclass(frozen=True)
class ProfileRequest:
    """What one rank is to measure. Pickled: `plan`, that of the strategy, of which the updates are measured, and `plans` for one
    device, one per number of rows, of which everything is. `code` of all of them, by rows. `sizes`: bytes of messages."""

    plan: bytes
    plans: bytes
    callables: bytes
    code: dict[int, dict[str, dict[str, ShippedCode]]]
    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    seed: int
    repeats: int
    sizes: tuple[int, ...]


@dataclass
class ProfileReport:
    """Seconds, one entry per repeat. `parts`: also one per chunk of a code. `issue`: per instruction, beyond its parts; `talk`:
    processor seconds per instruction that sends or receives a scalar. `resident`: per number of rows, ascending, the bytes of
    tensors at the peak and the most bytes that were resident; empty where the system does not say. `node`: the host's name."""

    parts: dict[Key, list[float]] = field(default_factory=dict)
    messages: list[MessageSample] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    talk: list[float] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)
    node: str = ""


def profile(rank: int, request: ProfileRequest, communicators: GlooCommunicators, heart: Heart) -> ProfileReport:
    """Measure all that a request asks for."""
    profiler = _Profiler(rank, request, communicators, heart)
    with torch.no_grad():
        profiler.compute()
        profiler.messages()
        profiler.instructions()
    return profiler.report


class _Profiler:
    def __init__(self, rank: int, request: ProfileRequest, communicators: GlooCommunicators, heart: Heart) -> None:
        self._rank, self._request, self._communicators, self._heart = rank, request, communicators, heart
        self._plan: Plan = pickle.loads(request.plan)
        self.report = ProfileReport(node=platform.node())
        heart[PHASE], heart[STEP] = RUNNING, 0
        self._messages = Messages(rank, self._plan.mesh.world, communicators, self._alive)

    def _alive(self) -> None:
        """Who watches this rank sees that it makes progress."""
        self._heart[STEP] += 1

    def compute(self) -> None:
        """Everything that runs on the compute stream, and the memory that it takes."""
        trainee = self._trainee()
        plans: list[Plan] = pickle.loads(self._request.plans)
        for plan in plans:
            reset_most_resident()
            self._passes(plan, trainee)
            if (most := most_resident()) is not None:
                self.report.resident.append((plan.roles[0].peak_bytes, most))
        self._updates(trainee)

    def _trainee(self) -> Trainee:
        parcel: Parcel = pickle.loads(self._request.callables)
        batch, optimizer, scheduler = parcel.open()
        if any(missing_operators(code) for code in self._request.code.values()):
            parcel.import_definers()
        return Trainee(batch, optimizer, scheduler, self._request.seed)

    def _bound(self, plan: Plan, rank: int, trainee: Trainee) -> Rank:
        return Rank(plan, rank, self._request.code[plan.rows], trainee, self._request.params, self._request.buffers)

    def _turns(self) -> Iterator[tuple[int, bool]]:
        """(step, whether it counts), all ranks starting each together."""
        for step in range(WARMUP + self._request.repeats):
            self._messages.barrier()
            yield step, step >= WARMUP
            self._alive()

    def _passes(self, plan: Plan, trainee: Trainee) -> None:
        """Steps of a plan for one device, part by part."""
        bound = self._bound(plan, 0, trainee)
        clocked = list(_clocked(bound))
        for step, counts in self._turns():
            taken = [(("", "Batch", plan.rows), _seconds(partial(_make_batch, trainee.batch, step, plan)))]
            bound.begin(step)
            taken += [(key, _seconds(run)) for key, run in clocked]
            bound.end()
            if counts:
                self._keep(taken)

    def _updates(self, trainee: Trainee) -> None:
        """Updates and norms of the gradients that this rank holds under the strategy: other sizes than on one device."""
        bound = self._bound(self._plan, self._rank, trainee)
        traffic = Traffic(self._plan)
        parts = [p for instr in bound.role.program for p in instr.parts if isinstance(p.op, SquaredNorm | Update)]
        clocked = [(_key(p, bound, traffic), bind_part(replace(p, frees=()), bound)) for p in parts]
        for _, counts in self._turns():
            bound.store.values.update({v: torch.ones(()) for p in parts for v in p.reads})
            taken = [(key, _seconds(run)) for key, run in clocked]
            if counts:
                self._keep(taken)

    def _keep(self, taken: Iterable[tuple[Key | None, float]]) -> None:
        for key, seconds in taken:
            if key is not None:
                self.report.parts.setdefault(key, []).append(seconds)

    def messages(self) -> None:
        """Communication by size and group."""
        self.report.messages = self._messages.measure(self._request.sizes, self._request.repeats)

    def instructions(self) -> None:
        """Instructions that do next to nothing, without communication, then with it (between ranks 0 and 1)."""
        bound = _idle_rank(instructions_plan(INSTRUCTIONS), 0)
        works = [e.work for e in bound.entries if e.work is not None]
        made: list[float] = []
        for wall, busy in self._steps(bound):
            bare = _seconds(lambda: [work() for work in works])
            self.report.issue.append((wall - bare) / INSTRUCTIONS)
            made.append(busy if self._rank == 0 else 0.0)  # in the other plan only rank 0 makes a scalar for each message
        if self._rank < 2 <= self._plan.mesh.world:
            pair = messages_plan(INSTRUCTIONS)
            self._communicators.connect(pair)
            steps = self._steps(_idle_rank(pair, self._rank))
            self.report.talk = [(busy - median(made)) / INSTRUCTIONS for _, busy in steps]
        self._messages.barrier()

    def _steps(self, bound: Rank) -> Iterator[tuple[float, float]]:
        """Seconds by the clock and of the processor of each step of a rank, run as any other."""
        backend = CpuStreams(bound.role.streams, self._heart)
        engine = Engine(bound, backend, self._communicators.bind, self._heart)
        try:
            for step in range(WARMUP + self._request.repeats):
                begin, begin_busy = time.perf_counter(), time.process_time()
                engine.step(step)
                found = time.perf_counter() - begin, time.process_time() - begin_busy
                if step >= WARMUP:
                    yield found
        finally:
            backend.close()


def _idle_rank(plan: Plan, rank: int) -> Rank:
    return Rank(plan, rank, {}, Trainee(_no_batch, _sgd, None, 0), {}, {})


def _seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _clocked(bound: Rank) -> Iterator[tuple[Key | None, Run]]:
    """What a rank runs, in order, each with the key under which its time is kept; None: it is not kept."""
    traffic, loaded = Traffic(bound.plan), set[int]()
    for instr in bound.role.program:
        for v in instr.frees_before:
            yield None, partial(bound.store.values.pop, v)
        for part in instr.parts:
            if isinstance(part.op, COMM):  # with itself alone
                yield None, partial(bind_operand(part, bound))
                continue
            # The first load of a microbatch calls the job's batch function, which is measured by itself.
            calls = isinstance(part.op, Load) and part.mb not in loaded
            loaded.add(part.mb)
            yield None if calls else _key(part, bound, traffic), bind_part(part, bound)
        for v in instr.allocs_after:
            yield None, bind_alloc(v, bound)


def _key(part: Part, bound: Rank, traffic: Traffic) -> Key:
    if isinstance(part.op, Compute):
        return bound.plan.chunk(part.op.chunk).code, part.op.step, bound.plan.rows
    return "", type(part.op).__name__, traffic.touched(bound.role, part)


def _make_batch(batch: Batch, step: int, plan: Plan) -> None:
    flatten_batch(*batch(step, microbatch_rows(plan, 0, 0)))


def _no_batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("plans of the profiler load nothing")


def _sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.0)
