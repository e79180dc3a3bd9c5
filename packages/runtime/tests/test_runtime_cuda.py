"""The CUDA engine without CUDA: its streams on made-up devices, and what it does on the host."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.fake_device import HostDevice, Machine
from packages.runtime.tests.handmade import CODE, adamw, batch
from piper_ir.ground.errors import ExecutionError, NonFiniteLossError, PlanError
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.ops import Update
from piper_ir.verify import verify
from piper_runtime import Job, Run
from piper_runtime.engine.cuda_streams import CudaStreams, StagedStreams
from piper_runtime.engine.engine import Engine
from piper_runtime.engine.streams import FIRST_STREAM, ISSUED, PHASE, RUNNING, WAITING
from piper_runtime.launch.ground.recovery import Recovery
from piper_runtime.launch.ground.report import RankReport
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.running.attempts import Attempts
from piper_runtime.launch.running.beginning import Beginning
from piper_runtime.launch.running.inline_run import rank_job
from piper_runtime.launch.running.survivors import Survivors
from piper_runtime.rank.binding.rank import BoundComm, BoundInstr, Rank
from piper_runtime.rank.binding.update_scale import device_scale, gradient_scale
from piper_runtime.rank.job.job import materialize
from piper_runtime.rank.values.device import CPU, LateNumbers, using
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.staging import StagedCommunicators
from tests.helpers import collective_model, collective_plans

STEPS = 2
SEEDS = 24
"""Random orders after which a missing wait must have shown."""


def together(world: int, body: Callable[[int], None]) -> None:
    """Run a body per rank, each in a thread; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            body(rank)
        except BaseException as e:  # raised below, in the test's own thread
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(r,)) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def bound(plan: Plan, job: Job, rank: int, report: RankReport | None = None) -> Rank:
    """A rank on the CPU that reads its numbers as one on CUDA does."""
    state = materialize(job)
    probe = report.probe if report is not None else None
    return Rank(
        plan,
        rank,
        CODE | collective_model.code(plan.mesh.world),
        rank_job(job),
        state.params,
        state.buffers,
        probe,
        numbers=LateNumbers(CPU),
    )


def results(
    plan: Plan, job: Job, engine: Callable[[Rank, Any], tuple[Engine, Any]], steps: int = STEPS
) -> Run:
    """A run of every rank in a thread of its own."""
    reports = {r: RankReport() for r in range(plan.mesh.world)}
    ranks = {r: bound(plan, job, r, report) for r, report in reports.items()}

    def body(r: int) -> None:
        made, backend = engine(ranks[r], array("q", [0] * 16))
        try:
            for step in range(steps):
                made.step(step)
                reports[r].end_step(ranks[r])
        finally:
            backend.close()
        reports[r].close(ranks[r], [], None)

    together(plan.mesh.world, body)
    options = RunOptions(steps=steps)
    attempts = Attempts(job, materialize(job), Beginning(options), None, Survivors(None, 0))
    return attempts._result(plan, reports, Recovery(options, plan.mesh.world))


def on_machine(plan: Plan, job: Job, seed: int) -> Run:
    """A run on made-up devices with the streams of the CUDA engine."""
    machine = Machine(plan.mesh.world, seed)
    devices = [machine.device() for _ in range(plan.mesh.world)]

    def engine(rank: Rank, heart: Any) -> tuple[Engine, Any]:
        streams = CudaStreams(rank.entries, rank.role.streams, heart, devices[rank.rank])
        return Engine(rank, streams, machine.communicate(rank.rank), heart), streams

    return results(plan, job, engine)


CASES: dict[str, dict[str, Any]] = {
    "1f1b": dict(pp=2, microbatches=4),
    "gpipe": dict(pp=3, layers=4, schedule="gpipe", microbatches=3, clip_norm=0.01, fuse=False),
    "host": dict(pp=2, layers=4, schedule="gpipe", microbatches=3, moves=True, hosted=True),
    "masked": dict(dp=2, tied=True, masked=True, clip_norm=0.01, optimizer=adamw),
    "shared states": dict(
        pp=2, dp=2, microbatches=2, optimizer=adamw, sharing=dict(zero=3, bucket_mb=1e-4)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_order_of_the_devices_gives_the_numbers_of_one_device(case: dict[str, Any]) -> None:
    plan, job = chain(**case)
    for seed in range(4 if "sharing" in case else 12):  # it has four ranks
        assert distance(on_machine(plan, job, seed), plan, job) < TOLERANCE, f"seed {seed}"


@pytest.mark.parametrize("n", [2, 4])
def test_any_order_of_the_devices_gives_the_numbers_of_one_device_with_collectives(n: int) -> None:
    plan, job = collective_plans.plan(n), collective_model.job(n)
    for seed in range(12):
        assert distance(on_machine(plan, job, seed), plan, job) < TOLERANCE, f"seed {seed}"


def without_wait(plan: Plan, role: int, index: int, wait: int) -> Plan:
    """The plan without one wait of one instruction."""
    found = plan.roles[role]
    instr = found.program[index]
    less = replace(instr, waits=instr.waits[:wait] + instr.waits[wait + 1 :])
    program = (*found.program[:index], less, *found.program[index + 1 :])
    return replace(
        plan, roles=(*plan.roles[:role], replace(found, program=program), *plan.roles[role + 1 :])
    )


def is_wrong(plan: Plan, job: Job, right: Run, seed: int) -> bool:
    try:
        found = on_machine(plan, job, seed)
    except Exception:  # a value that is not there yet or any more, as one order has it
        return True
    a, b = found.state_dict(), right.state_dict()
    return not all(torch.allclose(a[n], b[n], rtol=0, atol=1e-12) for n in b)


def refusal(plan: Plan) -> str:
    """What `verify` says of a plan."""
    try:
        verify(plan)
    except PlanError as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("case", "least"),
    [
        (dict(layers=2, pp=2, microbatches=2, tied=True), 14),
        (dict(layers=4, pp=1, microbatches=1, moves=True), 10),
    ],
    ids=["stages", "host"],
)
def test_every_wait_that_verify_misses_is_missed_by_some_order(
    case: dict[str, Any], least: int
) -> None:
    """And none that it does not miss. It knows no causes that go through other ranks, so it also asks for a wait for a
    send before its tensor is freed (R16) where the answer of the peer says already that it has come."""
    plan, job = chain(**case)
    right, missed = run(plan, job, steps=STEPS), 0
    for r, role in enumerate(plan.roles):
        for index, instr in enumerate(role.program):
            for k in range(len(instr.waits)):
                less = without_wait(plan, r, index, k)
                said = refusal(less)
                wrong = any(is_wrong(less, job, right, seed) for seed in range(SEEDS))
                assert said if wrong else "R16" in said or not said, (
                    f"{role.role}[{index}] {instr.name}, {instr.waits[k]}: {said}"
                )
                missed += wrong
    assert missed >= least


@pytest.mark.parametrize("seed", range(6))
def test_the_streams_of_a_step_start_behind_the_step_before(seed: int) -> None:
    """Here the host does not wait at a step's end: `begin` alone must order steps."""
    machine, done = Machine(1, seed), list[str]()
    entries = [entry(0, "a", ()), entry(1, COMPUTE, ())]
    streams = CudaStreams(entries, ["a"], array("q", [0] * 16), machine.device())
    for step in range(3):
        streams.begin()
        for e in entries:
            streams.bind(
                e.index, e.stream, e.waits, lambda e=e, step=step: done.append(f"{e.stream}{step}")
            )()
    streams.synchronize()
    assert [sorted(done[i : i + 2]) for i in (0, 2, 4)] == [
        ["a0", "compute0"],
        ["a1", "compute1"],
        ["a2", "compute2"],
    ]


def entry(index: int, stream: str, waits: tuple[tuple[str, int], ...]) -> BoundInstr:
    return BoundInstr(index, stream, waits, f"n{index}", work=lambda: None)


class Slow(HostDevice):
    """A device that does what it is given when it is told to: events up to `reached` are done."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[SlowEvent] = []
        self.reached = -1

    def event(self, *, timed: bool = False) -> Any:
        self.made.append(SlowEvent(self))
        return self.made[-1]


class SlowEvent:
    """`at`: which instruction recorded it, in order of issue."""

    def __init__(self, device: Slow) -> None:
        self._device, self.at = device, -1

    def record(self, stream: object) -> None:
        self._device.step += 1
        self.at = self._device.step

    def wait(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.at <= self._device.reached


def test_the_heart_says_in_what_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device, beat = Slow(), array("q", [0] * 16)
    entries = [
        entry(0, COMPUTE, ()),
        entry(1, "a", ((COMPUTE, 1),)),
        entry(2, COMPUTE, (("a", 1),)),
        entry(3, "b", ((COMPUTE, 2),)),
    ]
    streams = CudaStreams(entries, ["a", "b"], beat, device)
    streams.begin()
    for e in entries:
        streams.bind(e.index, e.stream, e.waits, lambda: None)()
    start, seen = device.step - len(entries), list[tuple[int, ...]]()

    def look(_: float) -> None:
        seen.append((beat[ISSUED], beat[PHASE], beat[FIRST_STREAM], beat[FIRST_STREAM + 1]))
        device.reached = start + len(seen)

    monkeypatch.setattr("piper_runtime.engine.cuda_streams.time.sleep", look)
    device.reached = start
    streams.synchronize()
    assert seen == [
        (0, RUNNING, 0, 0),
        (2, WAITING, 2, 0),  # in the communication at index 1
        (2, RUNNING, 0, 0),
        (2, WAITING, 0, 4),
    ]
    assert beat[PHASE] == RUNNING and not beat[FIRST_STREAM + 1]


def test_events_are_made_once_and_only_where_somebody_looks() -> None:
    device = Slow()
    entries = [entry(i, COMPUTE, ()) for i in range(20)]
    entries += [
        entry(20, "a", ((COMPUTE, 3),)),
        entry(21, "a", ()),
        entry(22, COMPUTE, (("a", 1),)),
        entry(23, COMPUTE, ()),
    ]
    streams = CudaStreams(entries, ["a"], array("q", [0] * 16), device)
    made = len(device.made)
    # Two of begin; compute: a wait for it, every 16th, before it waits itself, the last; every communication.
    assert made == 2 + len([2, 15, 19, 23]) + len([20, 21])
    for _ in range(2):
        streams.bind(20, "a", ((COMPUTE, 3),), lambda: None)
    assert len(device.made) == made


def staged(plan: Plan, job: Job, steps: int = STEPS) -> Run:
    """A run with the CUDA engine for ranks that share a device, over gloo, on a device that is the host."""
    store = dist.HashStore()

    def engine(rank: Rank, heart: Any) -> tuple[Engine, Any]:
        device = HostDevice()

        class Streams(StagedStreams):
            def begin(self) -> None:
                device.between_steps = True
                super().begin()
                device.step, device.between_steps = device.step + 1, False

        communicators = StagedCommunicators(GlooCommunicators(store, rank.rank))
        communicators.connect(plan)
        streams = Streams(rank.entries, rank.role.streams, heart, device)
        return Engine(rank, streams, communicators.bind, heart), streams

    return results(plan, job, engine, steps)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_staged_communication_gives_the_numbers_of_one_device(case: dict[str, Any]) -> None:
    """Threads wait for events only when they are recorded, and the host for threads."""
    plan, job = chain(**case)
    assert distance(staged(plan, job), plan, job) < TOLERANCE


def test_a_staged_stream_that_fails_wakes_the_others_and_is_named() -> None:
    plan, job = chain()
    rank = bound(plan, job, 1)
    streams = StagedStreams(
        rank.entries, rank.role.streams, array("q", [0] * 16), device := HostDevice()
    )

    def broken(comm: BoundComm) -> Callable[[], None]:
        def fail() -> None:
            raise ValueError("broken wire")

        return fail

    engine = Engine(rank, streams, broken, array("q", [0] * 16))
    with pytest.raises(
        ExecutionError,
        match=r"rank 1, step 0, instruction 0 \(recv.* failed: ValueError: broken wire",
    ):
        engine.step(0)
    assert device.between_steps
    streams.close()


def failing_batch(step: int, rows: range) -> Any:
    x, t = batch(step, rows)
    return (x * float("inf") if step == 1 and rows.start == 4 else x), t


def test_a_loss_that_is_not_finite_is_named_at_the_end_of_its_step() -> None:
    plan, job = chain(pp=1, batch=failing_batch)
    with pytest.raises(
        NonFiniteLossError, match=r"the loss is nan in step 1 on rank 0, microbatch 2"
    ):
        staged(plan, job)


def test_a_scale_that_is_no_number_is_named_at_the_end_of_its_step() -> None:
    def masked(step: int, rows: range) -> Any:
        x, t = batch(step, rows)
        return x, -t.abs() if step else t

    plan, job = chain(pp=1, dp=2, masked=True, batch=masked)
    with pytest.raises(
        NonFiniteLossError, match=r"^step 1, rank \d: the loss weights of the global batch sum to 0"
    ):
        staged(plan, job)


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_scale_on_the_device_is_the_one_of_the_host(clip: float | None, weighted: bool) -> None:
    op = Update(("b",), clip=clip, weighted=weighted)
    numbers = [3.0] * weighted + [7.25] * (clip is not None)
    found = device_scale(op, [torch.tensor(n, dtype=torch.float64) for n in numbers])
    assert float(found) == pytest.approx(gradient_scale(op, numbers, ""), rel=1e-15)


def test_a_device_that_is_not_there_ends_a_run_with_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    plan, job = chain(pp=1)
    for launcher in ("inline", "processes"):
        with using("cuda"), pytest.raises(ExecutionError, match="no CUDA device"):
            run(plan, job, launcher=launcher)


def test_a_host_that_waits_for_a_communication_shows_what_the_device_is_in() -> None:
    device, beat, gate = Slow(), array("q", [0] * 16), threading.Event()
    entries = [
        entry(0, COMPUTE, ()),
        entry(1, "a", ()),
        entry(2, COMPUTE, ((COMPUTE, 1), ("a", 1))),
    ]
    streams = StagedStreams(entries, ["a"], beat, device)
    seen: list[tuple[int, int]] = []

    def look(_: float) -> bool:
        seen.append((beat[ISSUED], beat[PHASE]))
        if len(seen) == 2:
            device.reached = 100
        if len(seen) == 4:
            gate.set()
        return wait(0.005)

    wait, streams._moved.wait = streams._moved.wait, look  # type: ignore[method-assign]  # to see what others see
    streams.begin()
    works: list[Callable[[], object]] = [lambda: None, lambda: gate.wait(10), lambda: None]
    for e, work in zip(entries, works, strict=True):
        streams.bind(e.index, e.stream, e.waits, work)()  # type: ignore[arg-type]  # what it returns is dropped
    streams.synchronize()
    streams.close()
    assert seen[:4] == [(0, RUNNING), (0, RUNNING), (2, WAITING), (2, WAITING)]


def test_a_staged_communication_starts_when_what_it_waits_for_is_done() -> None:
    """On the device, which its thread waits for, and on the host, where another thread carries it out."""
    gate, passed, done = threading.Event(), list[str](), list[str]()

    class GatedEvent(SlowEvent):
        def synchronize(self) -> None:
            passed.append("device" if gate.wait(10) else "late")

    device = Slow()
    device.event = lambda *, timed=False: GatedEvent(device)  # type: ignore[method-assign]  # of this test alone
    entries = [entry(0, COMPUTE, ()), entry(1, "a", ((COMPUTE, 1),)), entry(2, "b", (("a", 1),))]
    streams = StagedStreams(entries, ["a", "b"], array("q", [0] * 16), device)
    streams.begin()
    for e in entries:
        streams.bind(e.index, e.stream, e.waits, lambda e=e: done.append(e.stream))()
    assert done == [COMPUTE]
    gate.set()
    device.reached = 100
    streams.synchronize()
    streams.close()
    assert done == [COMPUTE, "a", "b"] and passed == ["device", "device"]


def test_late_numbers_are_handed_over_once_in_order_and_as_they_were() -> None:
    numbers, seen, tensor = (
        LateNumbers(CPU),
        list[tuple[str, float]](),
        torch.tensor(1.0, dtype=torch.bfloat16),
    )
    first = numbers.reader(tensor.dtype, lambda n: seen.append(("first", n)))
    second = numbers.reader(tensor.dtype, lambda n: seen.append(("second", n)))
    for _ in range(2):
        second(tensor)
        first(tensor.add_(1.0))
        assert not seen
        numbers.finish()
        numbers.finish()
        assert seen == [("second", float(tensor) - 1), ("first", float(tensor))]
        seen.clear()
