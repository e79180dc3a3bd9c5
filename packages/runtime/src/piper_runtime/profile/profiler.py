"""Measure in a worker the durations of chunks' steps, other ops, messages and instructions on this machine.

All ranks measure the same thing at the same time: ranks of one machine share its memory bandwidth, and in a run they
compute at once. A rank computes the whole model on the job's own batches, part by part in the order of a plan for one
device, with the closures that a run binds and a clock around each; of chunks that devices share, one device's work,
without the messages inside. Messages go over communicators like a run's, between ranks that do nothing else.

On CUDA every rank needs a device of its own, and messages go over NCCL. The host issues a pass behind others that are
not measured, so that it is as far ahead of the device as between the microbatches of a step.
"""

from __future__ import annotations

import gc
import pickle
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from piper_ir.ground.errors import ExecutionError
from piper_ir.plan.plan import Part, Plan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.collectives import law_of
from piper_ir.program.ops import (
    COMM,
    Cast,
    Compute,
    Fold,
    Fresh,
    Load,
    SquaredNorm,
    Update,
    cost_op,
)
from piper_ir.program.program import Step
from piper_runtime.engine.core_shares import core_share
from piper_runtime.engine.streams import PHASE, RUNNING, STEP, Heartbeat
from piper_runtime.profile.device_clocks import clock_of
from piper_runtime.profile.host_costs import host_seconds, issue_seconds
from piper_runtime.profile.measure_messages import Messages, MessageSample
from piper_runtime.profile.resident import (
    most_on_device,
    most_resident,
    reset_most_on_device,
    reset_most_resident,
)
from piper_runtime.rank.batches.batches import flatten_batch, microbatch_rows
from piper_runtime.rank.binding.parts import Thunk, bind_alloc, bind_operand, bind_part
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.job.job import Batch
from piper_runtime.rank.sending.shipping import Parcel
from piper_runtime.rank.values import device as devices
from piper_runtime.rank.values.code import ShippedCode, missing_operators
from piper_runtime.rank.values.rng import Draws
from piper_runtime.rank.values.store import empty_value
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.nccl import NcclCommunicators
from piper_runtime.transport.transport import agreed_transport, nccl_of, shared, take_device

WARMUP = 1
"""The number of passes that do not count: caches are cold, and memory comes from the system for the first time."""
LEAD_S = 0.1
"""The seconds that a CUDA device computes at least before each measured pass.

Under load it may lower its clock to keep within its power. Behind one pass alone, steps in bfloat16 on an H200 were
predicted 3 % too short.
"""

CostKey = tuple[str, str, int]
"""The key of a `StepDuration` (code, step, rows) or of a `PartDuration` ("", name of op, amount)."""


@dataclass(frozen=True)
class ProfileRequest:
    """Describe the measurements of one rank.

    Attributes:
        plan: the strategy's plan, pickled; its updates are measured.
        plans: plans for one device, pickled, one per number of rows; everything in them is measured.
        again: the same with recomputation, which is measured.
        sharing: plans of ranks that share states, pickled; rank 0's ops on buckets are measured.
        code: the code of all of them, by rows.
        draws: the way of drawing random numbers, "rows" or "microbatches".
        sizes: bytes of messages.
        device: the kind of device of runs in the process that makes the request.
    """

    plan: bytes
    plans: bytes
    again: bytes
    sharing: bytes
    callables: bytes
    code: dict[int, dict[str, dict[str, ShippedCode]]]
    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    seed: int
    repeats: int
    sizes: tuple[int, ...]
    draws: Draws
    device: str = field(default_factory=lambda: devices.default)


@dataclass
class ProfileReport:
    """Hold the seconds that one rank has measured, one entry per repeat.

    Attributes:
        parts: also one entry per chunk of a code.
        issue: seconds of the issuing thread per instruction, beyond its parts.
        talk: these seconds per communication instruction, beyond its message.
        resident: per number of rows, ascending, the bytes of tensors at the peak and the most bytes that were resident
            (on CUDA: taken from the device by this process); empty if the system does not tell, or if NCCL has taken
            device memory before.
        node: the host's name.
        backend: the transport of messages.
        device: the name of the rank's CUDA device, "" for the CPU.
        devices: how many of them its node has.
    """

    parts: dict[CostKey, list[float]] = field(default_factory=dict)
    messages: list[MessageSample] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    talk: list[float] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)
    node: str = ""
    backend: str = "none"
    device: str = ""
    devices: int = 0


def profile(
    rank: int,
    request: ProfileRequest,
    communicators: GlooCommunicators,
    heart: Heartbeat,
    local_rank: int,
    local_world: int | None,
    on_cores: Callable[[int], tuple[int, int]],
) -> ProfileReport:
    """Return all measurements of a request; raise ExecutionError when the ranks of a node share a CUDA device.

    `local_rank` is the rank's number on its node, which has at most `local_world` ranks; None: all ranks of the plan.
    `on_cores` is `WorkerContext.on_cores`.
    """
    device, plan = take_device(request.device, local_rank), pickle.loads(request.plan)
    local_world = plan.mesh.world if local_world is None else local_world
    transport = agreed_transport(rank, plan.mesh.world, device, local_world, communicators)
    if transport == "staged" and shared(local_world):
        raise ExecutionError(
            f"profile: {local_world} ranks of a node share {torch.cuda.device_count()} CUDA device, and what they "
            f"take from each other is not simulated; profile a strategy of at most as many ranks as there are "
            f"devices"
        )
    nccl = nccl_of(communicators, device) if transport == "nccl" else None
    with core_share(device, *on_cores(plan.mesh.world)) as own_core, torch.no_grad():
        # Ranks that share cores take turns in a run, too, and their durations hold for as many ranks only.
        profiler = _Profiler(rank, request, plan, communicators, heart, device, nccl, own_core)
        profiler.compute(memory=nccl is None or not nccl.in_use)
        if transport != "staged":
            profiler.messages("gloo" if nccl is None else nccl.name)
        profiler.instructions()
    return profiler.report


class _Profiler:
    def __init__(
        self, rank: int, request: ProfileRequest, plan: Plan, communicators: GlooCommunicators, heart: Heartbeat,
        device: torch.device, nccl: NcclCommunicators | None, own_core: bool,
    ) -> None:  # fmt: skip
        self._rank, self._request, self._heart = rank, request, heart
        self._device, self._clock = device, clock_of(device, own_core)
        self._plan = plan
        self.report = ProfileReport(node=platform.node())
        if device.type == "cuda":
            self.report.device, self.report.devices = (
                torch.cuda.get_device_name(device),
                torch.cuda.device_count(),
            )
        heart[PHASE], heart[STEP] = RUNNING, 0
        # A message takes turns with the threads that carry it, which a run does, too.
        self._messages = Messages(
            rank, self._plan.mesh.world, communicators, clock_of(device), device, self._alive, nccl
        )

    def _alive(self) -> None:
        """Show the launcher's watch that this rank makes progress."""
        self._heart[STEP] += 1

    def compute(self, memory: bool) -> None:
        """Measure everything that runs on the compute stream, and, if asked for, the memory that it takes."""
        job = self._rank_job()
        plans: list[Plan] = pickle.loads(self._request.plans)
        on_device = self._device.type == "cuda"
        for plan in plans:
            gc.collect()  # a rank and its closures hold each other
            reset_most_on_device(self._device) if on_device else reset_most_resident()
            self._passes(plan, job)
            if (
                memory
                and (most := most_on_device(self._device) if on_device else most_resident())
                is not None
            ):
                self.report.resident.append((plan.roles[0].peak_bytes, most))
        for plan in pickle.loads(self._request.again):
            self._passes(plan, job, only="R")
        self._on_buckets(self._plan, self._rank, job)
        for plan in pickle.loads(self._request.sharing):
            self._on_buckets(plan, 0, job)

    def _rank_job(self) -> RankJob:
        parcel: Parcel = pickle.loads(self._request.callables)
        batch, optimizer, scheduler = parcel.open()
        if any(missing_operators(code) for code in self._request.code.values()):
            parcel.import_definers()
        return RankJob(
            batch, optimizer, scheduler, self._request.seed, draws=self._request.draws, progress=self._alive
        )  # fmt: skip

    def _bound(self, plan: Plan, rank: int, job: RankJob) -> Rank:
        code, params, buffers = (
            self._request.code[plan.rows],
            self._request.params,
            self._request.buffers,
        )
        bound = Rank(plan, rank, code, job, params, buffers, None, self._device)
        bound.exchange = partial(_copied, plan)
        bound.post = partial(_started, plan)
        return bound

    def _turns(self) -> Iterator[tuple[int, bool]]:
        """Yield (step, whether it counts), with all ranks starting each together."""
        for step in range(WARMUP + self._request.repeats):
            self._messages.barrier()
            yield step, step >= WARMUP
            self._alive()

    def _passes(self, plan: Plan, job: RankJob, only: Step | None = None) -> None:
        """Measure steps of a plan for one device, part by part, and keep all of it or one step of each chunk."""
        bound = self._bound(plan, 0, job)
        batch: CostKey = ("", "Batch", plan.rows)
        # A host that is ahead calls the batch function while the device computes; only the rest of its time is in the load
        # that calls.
        ahead = self._clock.ahead
        keys, runs = zip(
            *_clocked(bound, batch if ahead else None, None if ahead else self._messages),
            strict=True,
        )
        for step, counts in self._turns():
            taken: list[tuple[CostKey | None, float]] = []
            if self._clock.ahead:
                self._lead(runs, partial(bound.begin, step))
            else:
                taken.append((batch, self._clock.all(partial(_make_batch, job.batch, step, plan))))
            bound.begin(step)
            taken += zip(keys, self._clock.each(runs), strict=True)
            bound.end()
            if counts:
                self._keep(
                    (key, seconds)
                    for key, seconds in taken
                    if only is None or (key is not None and key[1] == only)
                )

    def _lead(self, runs: Sequence[Thunk], begin: Thunk | None = None) -> None:
        """Let the host get ahead of a device, if it can, and the device get as warm as in a run."""
        until = time.perf_counter() + LEAD_S
        while self._clock.ahead and time.perf_counter() < until:
            for run in (begin, *runs) if begin is not None else runs:
                run()

    def _on_buckets(self, plan: Plan, rank: int, job: RankJob) -> None:
        """Measure a rank's ops on its buckets: updates, norms, buffers of gradients, their casts and folds."""
        bound = self._bound(plan, rank, job)
        traffic = PlanBytes(plan)
        ops = SquaredNorm | Update | Fresh | Cast | Fold
        parts = [p for instr in bound.role.program for p in instr.parts if isinstance(p.op, ops)]
        keys, runs = (
            [_key(p, bound, traffic) for p in parts],
            [bind_part(replace(p, frees=()), bound) for p in parts],
        )
        for _, counts in self._turns():
            bound.store.values.update({v: self._ones(plan, v) for p in parts for v in p.reads})
            self._lead(runs)
            taken = zip(keys, self._clock.each(runs), strict=True)
            if counts:
                self._keep(taken)
            bound.store.values.clear()

    def _ones(self, plan: Plan, value: str) -> torch.Tensor:
        shape, dtype = empty_value(plan, value)
        return torch.ones(shape, dtype=dtype, device=self._device)

    def _keep(self, taken: Iterable[tuple[CostKey | None, float]]) -> None:
        for key, seconds in taken:
            if key is not None:
                self.report.parts.setdefault(key, []).append(seconds)

    def messages(self, over: str) -> None:
        """Measure communication by size and group, over the transport `over`."""
        gc.collect()  # the last rank's memory makes room for messages
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.report.messages = self._messages.measure(self._request.sizes, self._request.repeats)
        self.report.backend = over if self.report.messages or over == "gloo" else "none"

    def instructions(self) -> None:
        """Measure the issuing thread's time for instructions, on all ranks at once."""
        if self._device.type == "cuda":
            self.report.issue = list(
                issue_seconds(self._device, self._heart, self._clock, self._turns())
            )[WARMUP:]
            return
        seconds = list(host_seconds(self._heart, self._turns()))[WARMUP:]
        self.report.issue, self.report.talk = (
            [issue for issue, _ in seconds],
            [talk for _, talk in seconds],
        )


def _copied(plan: Plan, kind: str, axis: str, given: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape of a collective's result inside of a step, without a message.

    Messages are measured apart: here a device would wait for others, and measure them instead of its kernels.
    """
    if (
        kind == "all_gather"
        and any(chunk.experts == axis for chunk in plan.chunks)
        and given.dim() == 1
        and not given.is_floating_point()
    ):
        given = _evenly(given, plan.mesh.degree(plan.mesh.along(axis)))
    law = law_of(kind)
    if law.writes == "part":
        given = given[0]
    elif law.reads == "part":
        given = given.expand(plan.mesh.degree(plan.mesh.along(axis)), *given.shape)
    return given.clone(memory_format=torch.contiguous_format)


def _started(
    plan: Plan, kind: str, axis: str, degree: int, given: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a function that returns the result of `_copied`, for a collective that a step starts."""
    result = _copied(plan, kind, axis, given)
    return lambda: result


def _evenly(counts: torch.Tensor, devices: int) -> torch.Tensor:
    """Return counts of experts' rows that are as many in all, and equal for all devices and experts, or one more.

    Predictions scale a profile's measurements by the load (`piper_simulator.durations.expert_work`), so it is 1 here.
    With other counts a device would also read places that nobody filled.
    """
    experts, total = counts.shape[0], counts.sum()
    own, numbers = experts // devices, torch.arange(experts, device=counts.device)
    turn = (
        numbers % own * devices + numbers // own
    )  # the first experts of all devices, then the second ones
    return total.div(experts, rounding_mode="floor") + (turn < total.remainder(experts))


def _clocked(
    bound: Rank, batch: CostKey | None, messages: Messages | None
) -> Iterator[tuple[CostKey | None, Thunk]]:
    """Yield a rank's closures in order, each with the key under which its time is kept, or None.

    `batch` is the key of a load that calls the job's batch function. With `messages` ranks exchange something wherever
    a run communicates: a mixture whose ranks did not meet was measured 10 % faster than it ran (docs/decisions/0032).
    """
    traffic, loaded = PlanBytes(bound.plan), set[int]()
    for instr in bound.role.program:
        for v in instr.frees_before:
            yield None, partial(bound.store.values.pop, v)
        for part in instr.parts:
            if isinstance(part.op, COMM):
                yield None, _with_itself(part, bound)
                if messages is not None:
                    yield None, messages.between(traffic.message_bytes(part.op, part))
                continue
            # The first load of a microbatch calls it.
            calls = isinstance(part.op, Load) and part.mb not in loaded
            loaded.add(part.mb)
            yield batch if calls else _key(part, bound, traffic), bind_part(part, bound)
        for v in instr.allocs_after:
            yield None, bind_alloc(v, bound)


def _with_itself(part: Part, bound: Rank) -> Thunk:
    """Return a closure for a communication without other ranks: it copies the operand to a result of the same shape."""
    operand, values = bind_operand(part, bound), bound.store.values

    def run() -> None:
        tensor = operand()
        if part.reads and part.writes and values[part.writes[0]].shape == tensor.shape:
            values[part.writes[0]].copy_(tensor)

    return run


def _key(part: Part, bound: Rank, traffic: PlanBytes) -> CostKey:
    if isinstance(part.op, Compute):
        return (
            bound.plan.chunk(part.op.variant).cost_code(part.op.step),
            part.op.step,
            bound.plan.rows,
        )
    return "", cost_op(part.op), traffic.memory_bytes(bound.role, part)


def _make_batch(batch: Batch, step: int, plan: Plan) -> None:
    flatten_batch(batch(step, microbatch_rows(plan, 0, 0)))
