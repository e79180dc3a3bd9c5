"""The CUDA engine on CUDA: what only a device can show. Everything here is skipped where there is none."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_hazards
from benchmarks.gpu import joined_pool
from benchmarks.gpu_hazards import CYCLES, SIZE, communication, compute, step, void
from packages.runtime.tests.chains import chain, distance, run
from packages.runtime.tests.handmade import adamw, batch
from packages.runtime.tests.instants import pids_alive
from packages.runtime.tests.test_runtime_cuda import CASES
from piper_ir.ground.errors import ExecutionError, NonFiniteLossError
from piper_ir.plan.plan import COMPUTE
from piper_runtime.engine.memory import AllocatorCounter
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.rank.batches.feed import upload
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.rank.values.device import NO_CUDA, LateNumbers, using
from piper_runtime.rank.values.rng import generator
from piper_runtime.transport import transport
from piper_runtime.transport.gloo import GlooCommunicators

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
JOINED = ["gloo", "nccl"] if dist.is_nccl_available() else ["gloo"]
"""What joins ranks that share a device."""

TOLERANCE = 1e-10
"""float64; a device adds in another order than the CPU."""


@pytest.fixture
def device() -> torch.device:
    """The first device, with the kernels loaded that the tests use."""
    device = torch.device("cuda", 0)
    gpu_hazards.warm(device)
    return device


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("name", gpu_hazards.HAZARDS)
def test_a_wait_makes_the_difference(device: torch.device, name: str, waits: bool) -> None:
    """With it the result is right; without it wrong, because of a deliberate delay."""
    check, engines = gpu_hazards.HAZARDS[name]
    assert [check(device, waits, staged) for staged in engines] == [waits] * len(engines)


def test_spans_are_of_the_device(device: torch.device) -> None:
    entries = [
        communication(0),
        compute(1, lambda: torch.cuda._sleep(CYCLES)),
        compute(2, lambda: None, ("a", 1)),
    ]
    found = {
        i: (start, end)
        for i, start, end in step(
            entries, [lambda: torch.cuda._sleep(2 * CYCLES)], trace=True
        ).spans
    }
    assert found.keys() == {0, 1, 2}
    assert found[0][0] < found[1][1] and found[1][0] < found[0][1], "they ran beside each other"
    assert found[2][0] >= found[0][1] - 1e-4


@pytest.mark.parametrize("staged", [False, True])
def test_issuing_does_not_wait_for_the_device(device: torch.device, staged: bool) -> None:
    """Nor does anything that parts do to hand numbers over or to load a batch."""
    torch.cuda.synchronize()
    idle: list[bool] = []
    numbers = LateNumbers(device)
    seen: list[float] = []
    read = numbers.reader(torch.float32, seen.append)
    rows, sum_ = torch.ones(4, dtype=torch.float64), torch.zeros((), device=device)

    def last() -> None:
        idle.append(torch.cuda.current_stream().query())

    works = [
        lambda: torch.cuda._sleep(CYCLES),
        lambda: void(sum_.add_(upload(rows, (4,), torch.float32, device).sum())),
        lambda: read(sum_),
        lambda: void(generator(device).manual_seed(2**63 - 1)),
        last,
    ]
    step([compute(i, work) for i, work in enumerate(works)], [], staged=staged)
    assert idle == [False] and not seen
    numbers.finish()
    assert seen == [4.0]


@pytest.fixture(scope="module", params=JOINED)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with joined_pool(4, request.param) as workers:
        yield workers


@pytest.fixture
def by_nccl(pool: Pool, request: pytest.FixtureRequest) -> bool:
    """Whether NCCL joins two ranks of the pool."""
    return "nccl" in request.node.callspec.id or torch.cuda.device_count() >= 2


@pytest.fixture
def on_cuda() -> Iterator[None]:
    with using("cuda"):
        yield


MORE = CASES | {
    "four ranks": dict(pp=2, dp=2, masked=True, clip_norm=0.01, optimizer=adamw),
    "four stages": dict(pp=4, layers=7),
}


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_ranks_compute_what_one_device_computes(pool: Pool, case: dict[str, Any]) -> None:
    """Through staged gloo and through NCCL."""
    plan, job = chain(**case)
    found = run(plan, job, launcher="processes", pool=pool, trace=True)
    assert distance(found, plan, job) < TOLERANCE
    assert len(found.trace.spans) == sum(len(r.program) * len(r.ranks) for r in plan.roles)
    assert all(s.end >= s.start for s in found.trace.spans)
    assert distance(run(plan, job), plan, job) < TOLERANCE  # inline


GRAPHED = {"one rank": dict(pp=1, masked=True, clip_norm=0.01, optimizer=adamw)} | {
    name: CASES[name] for name in ("1f1b", "masked", "shared states")
}


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("case", GRAPHED.values(), ids=GRAPHED)
def test_a_step_that_is_a_graph_computes_what_one_device_computes(
    pool: Pool, by_nccl: bool, case: dict[str, Any]
) -> None:
    """Four launches, between a second step that is issued and counted and a last one that is issued and traced."""
    if not by_nccl:
        pytest.skip("a graph needs ranks that NCCL joins")
    plan, job = chain(**case)
    graphed = replace(plan, cuda_graph=True)
    found = run(graphed, job, launcher="processes", pool=pool, steps=7, trace=True, memory=True)
    assert distance(found, plan, job) < TOLERANCE


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("name", ["1f1b", "masked", "shared states"])
def test_the_allocator_was_asked_for_what_the_plan_says(pool: Pool, name: str) -> None:
    """A gather or scatter that keeps its tensors would show: what it leaves is more than planned."""
    plan, job = chain(**CASES[name])
    found = run(plan, job, launcher="processes", pool=pool, memory=True)
    for rank, record in found.memory.items():
        role = plan.role_of(rank)
        assert record.states == sum(s.nbytes for s in role.states)
        live, points = (
            sum(plan.values[v].nbytes for v in role.allocs_first),
            {p.instr: p for p in record.points},
        )
        for index, instr in enumerate(role.program):
            if instr.stream == COMPUTE:
                values = lambda ids: sum(plan.values[v].nbytes for v in ids)  # noqa: E731 - one line, used in the next three
                live += values(instr.allocs_after) - values(instr.frees_before)
                live += sum(values(p.writes) - values(p.frees) for p in instr.parts)
                assert points[index].after - record.states == live, f"rank {rank}, {instr.name}"
        # Temporaries of the code by hand are in no plan; tests/runs/test_cuda.py compares the peaks of generated code.
        assert (
            record.peak
            == max(p.within for p in record.points)
            >= max(p.after for p in record.points)
        )


def test_the_allocator_counter_counts_what_is_asked_for(device: torch.device) -> None:
    kept = torch.empty(100, device=device)
    counter = AllocatorCounter(device)
    counter.track([kept, kept[:50]])
    with counter.during(0):
        value = torch.empty(7, dtype=torch.float64, device=device)
        del value
        held = torch.empty(3, dtype=torch.float64, device=device)
    with counter.during(1), counter.paused():
        torch.empty(1000, device=device)
    del held
    with counter.during(2):
        pass
    assert [(p.within, p.after) for p in counter.points] == [(456, 424), (424, 424), (400, 400)]
    assert (
        counter.record().peak == 456
        and counter.record().peak_at == 0
        and counter.record().states == 400
    )


@pytest.mark.usefixtures("on_cuda")
def test_a_loss_that_is_not_finite_names_its_step_and_rank(pool: Pool) -> None:
    plan, job = chain(batch=poisoned)
    with pytest.raises(NonFiniteLossError, match="step 1 on rank 1, microbatch 1"):
        run(plan, job, launcher="processes", pool=pool)


def poisoned(step: int, rows: range) -> Any:
    x, t = batch(step, rows)
    return (x * float("inf") if step == 1 and rows.start == 2 else x), t


@pytest.mark.usefixtures("on_cuda")
def test_a_device_that_hangs_is_noticed_and_its_instruction_named(pool: Pool) -> None:
    plan, job = chain(batch=hanging)
    with pytest.raises(
        ExecutionError,
        match=r"no rank made progress for 4 s.*rank 0 ran instruction \d+ .* in step 1",
    ):
        run(plan, job, launcher="processes", pool=pool, timeout_s=4.0)


def hanging(step: int, rows: range) -> Any:
    """Puts a sleep of minutes in front of the compute of rank 0; on one device, of every rank that loads these rows."""
    if step == 1 and rows.start == 2 and torch.cuda.current_device() == 0:
        torch.cuda._sleep(10**12)
    return batch(step, rows)


def test_nccl_of_one_rank_reduces_on_our_stream(device: torch.device) -> None:
    from piper_runtime.transport.nccl import NcclCommunicators

    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    communicators = NcclCommunicators(GlooCommunicators(dist.HashStore(), 0), device)
    group = communicators._groups["x"] = communicators.group("x", [0])
    communicators._keys["c"] = "x"
    tensor, stream = torch.zeros(SIZE, device=device), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    # A communication of one rank is none, so the group is asked as `bind` would ask it for more.
    work = communicators.bind(BoundComm("all_reduce", "c", (0, 1), lambda: tensor))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        tensor.fill_(3.0)
        work()
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the host waited"
    done.synchronize()
    assert bool((tensor == 3.0).all()) and group.size() == 1
    communicators.close()


@pytest.mark.usefixtures("on_cuda")
def test_two_ranks_are_joined_as_the_environment_says(pool: Pool, by_nccl: bool) -> None:
    """So the tests above are of what they say."""
    plan, job = chain(batch=joined_by_nccl if by_nccl else joined_without)
    assert distance(run(plan, job, launcher="processes", pool=pool, steps=5), plan, job) < TOLERANCE


def joined_by_nccl(step: int, rows: range) -> Any:
    """Check that ranks with a device each are not joined by sockets, unless the environment says so."""
    assert not in_worker() or transport.apart() == ("NCCL_HOSTID" in os.environ)
    assert not in_worker() or [len(c._groups) > 0 for c in transport._nccl.values()] == [True]
    return batch(step, rows)


def joined_without(step: int, rows: range) -> Any:
    assert not in_worker() or not transport._nccl
    return batch(step, rows)


@pytest.mark.usefixtures("on_cuda")
def test_a_rank_that_raises_is_named_while_its_peer_waits_for_it(pool: Pool) -> None:
    plan, job = chain(batch=raising)
    with pytest.raises(
        ExecutionError, match=r"rank 1, step 1, instruction \d+ .*ValueError: no such rows"
    ):
        run(plan, job, launcher="processes", pool=pool)


def raising(step: int, rows: range) -> Any:
    if step == 1 and rows.start == 2 and worker_rank() == 1:
        raise ValueError("no such rows")
    return batch(step, rows)


@pytest.mark.usefixtures("on_cuda")
def test_a_rank_that_is_killed_is_named_while_its_peer_waits_for_it(pool: Pool) -> None:
    """None of its processes is left, and the next run has new ones."""
    plan, job = chain(batch=killed)
    pool.start()
    before = pool.pids
    with pytest.raises(ExecutionError, match=r"rank 1 was killed by SIGKILL: rank 1 .* in step 1"):
        run(plan, job, launcher="processes", pool=pool)
    assert len(before) == 4 and not pids_alive(before)
    plan, job = chain()
    assert distance(run(plan, job, launcher="processes", pool=pool), plan, job) < TOLERANCE


def killed(step: int, rows: range) -> Any:
    if step == 1 and rows.start == 2 and worker_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(step, rows)


def in_worker() -> bool:
    """Not so in the process that compares, which asks for batches too."""
    return sys.argv[1:] != [] and sys.argv[1].startswith('{"rank"')


def worker_rank() -> int:
    """Return the rank of the worker process that calls."""
    return int(json.loads(sys.argv[1])["rank"])
