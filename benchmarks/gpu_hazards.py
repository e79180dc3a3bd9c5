"""Provoke hazards between two streams of a CUDA device with a deliberate delay, and check what is read.

Each function runs one step in the CUDA engine and says whether the result is right. `waits`: with the wait that a plan
has there; without it the delay must make the result wrong, or the check shows nothing. `staged`: the engine for ranks
that share a device, where a thread issues each communication.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from benchmarks.measure import Goal, Row
from piper_ir.plan.plan import COMPUTE
from piper_runtime.engine import CudaApi, CudaStreams, Engine, StagedStreams
from piper_runtime.rank import BoundComm, BoundInstr, upload

CYCLES = 200_000_000
"""What a delayed stream sleeps: about 0.1 s, and longer than the host needs to issue these programs."""
SIZE = 1 << 20


def warm(device: torch.device) -> None:
    """Load the kernels that are used: loading one may wait for all streams."""
    torch.cuda.set_device(device)
    torch.cuda._sleep(1)
    found = torch.full((4,), 1.0, device=device)
    found.add_(upload(torch.ones(4, dtype=torch.float64), (4,), torch.float32, device).sum()).fill_(
        2.0
    )
    assert bool((found == 2.0).all())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def step(
    entries: list[BoundInstr],
    works: list[Callable[[], None]],
    *,
    staged: bool = False,
    trace: bool = False,
) -> Engine:
    """Run one step of a rank without tensors of its own; `works` are those of communications, in order."""
    heart = array("q", [0] * 16)
    rank = SimpleNamespace(
        entries=entries, rank=0, step=0, begin=lambda step: None, end=lambda: None
    )
    streams = (StagedStreams if staged else CudaStreams)(
        entries, dict.fromkeys(e.stream for e in entries), heart, CudaApi(torch.device("cuda", 0))
    )
    left = iter(works)
    engine = Engine(rank, streams, lambda comm: next(left), heart, streams.clock if trace else None)  # type: ignore[arg-type]  # see above
    engine.step(0, traced=trace)
    streams.close()
    return engine


def compute(index: int, work: Callable[[], None], *waits: tuple[str, int]) -> BoundInstr:
    """Return an instruction of the compute stream."""
    return BoundInstr(index, COMPUTE, waits, f"c{index}", work=work)


def communication(index: int, *waits: tuple[str, int]) -> BoundInstr:
    """Return an instruction of another stream."""
    return BoundInstr(
        index,
        "a",
        waits,
        f"a{index}",
        comm=BoundComm("recv", "1>0", (1, 0), lambda: torch.empty(0)),
    )


def void(_: object) -> None:
    """Drop a result."""


def compute_after_communication(device: torch.device, waits: bool, staged: bool) -> bool:
    """Let compute read what a slow receive writes."""
    buffer, read = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    torch.cuda.synchronize()

    def receive() -> None:
        torch.cuda._sleep(CYCLES)
        buffer.fill_(1.0)

    step(
        [communication(0), compute(1, lambda: void(read.copy_(buffer)), *[("a", 1)] * waits)],
        [receive],
        staged=staged,
    )
    torch.cuda.synchronize()
    return bool((read == 1.0).all())


def communication_after_compute(device: torch.device, waits: bool, staged: bool) -> bool:
    """Let a send read what slow compute writes."""
    value, sent = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    torch.cuda.synchronize()

    def produce() -> None:
        torch.cuda._sleep(CYCLES)
        value.fill_(1.0)

    entries = [compute(0, produce), communication(1, *[(COMPUTE, 1)] * waits)]
    step(entries, [lambda: void(sent.copy_(value))], staged=staged)
    torch.cuda.synchronize()
    return bool((sent == 1.0).all())


def buffer_on_two_streams(device: torch.device, waits: bool, staged: bool) -> bool:
    """Let compute free a buffer that a slow send reads; the allocator gives the block to the next value.

    There is no `record_stream`: the free stands behind a wait for the send (R16), and without it the send reads what
    the next value holds.
    """
    held: dict[str, torch.Tensor] = {}
    sent = torch.zeros(SIZE, device=device)
    addresses: list[int] = []
    torch.cuda.synchronize()

    def produce() -> None:
        held["v"] = torch.full((SIZE,), 1.0, device=device)
        addresses.append(held["v"].data_ptr())

    def send() -> None:
        tensor = held["v"]
        torch.cuda._sleep(CYCLES)
        sent.copy_(tensor)

    def reuse() -> None:
        del held["v"]
        held["w"] = torch.full((SIZE,), 2.0, device=device)
        addresses.append(held["w"].data_ptr())

    entries = [
        compute(0, produce),
        communication(1, (COMPUTE, 1)),
        compute(2, reuse, *[("a", 1)] * waits),
    ]
    step(entries, [send], staged=staged)
    torch.cuda.synchronize()
    if addresses[0] != addresses[1]:
        raise RuntimeError("the allocator gave another block, so that this shows nothing")
    return bool((sent == 1.0).all())


HAZARDS: dict[str, tuple[Callable[[torch.device, bool, bool], bool], tuple[bool, ...]]] = {
    "compute reads what a slow communication writes": (compute_after_communication, (False, True)),
    "a communication reads what slow compute writes": (communication_after_compute, (False, True)),
    "a buffer that two streams use is freed and taken again": (buffer_on_two_streams, (False,)),
}
"""The check of each name, and the engines that it runs in (staged or not). The last is about a device's own streams."""


def rows() -> Iterator[Row]:
    """Return each hazard with its wait, which must be right, and without, which must be wrong."""
    device = torch.device("cuda", 0)
    warm(device)
    for name, (check, engines) in HAZARDS.items():
        for staged in engines:
            with_wait, without = check(device, True, staged), check(device, False, staged)
            found = f"with the wait {'right' if with_wait else 'WRONG'}, without it {'RIGHT' if without else 'wrong'}"
            title = name + (", communication staged on the host" if staged else "")
            yield Row(
                "streams",
                title,
                with_wait + (not without),
                "of 2",
                goal=Goal("above", 1),
                note=found + ", as must be" * (with_wait and not without),
            )
