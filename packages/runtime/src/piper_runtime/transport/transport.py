"""Choose a rank's communicators, and the engine for them, by the device of its tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from piper_ir.ground.errors import ExecutionError
from piper_ir.plan.plan import COMPUTE
from piper_runtime.engine.cuda_graphs import DeviceGraph
from piper_runtime.engine.cuda_streams import CudaApi, CudaStreams, StagedStreams
from piper_runtime.engine.engine import Communicate, Engine, host_clock
from piper_runtime.engine.streams import CpuStreams, Heartbeat, StreamBackend
from piper_runtime.rank.batches.batch_totals import counting_ranks
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.values.device import choose_device
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.nccl import NcclCommunicators
from piper_runtime.transport.staging import StagedCommunicators

Name = Callable[[Rank, Communicate], Communicate]
TransportName = Literal["gloo", "nccl", "staged"]
SHARED_DEVICE = "PIPER_SHARED_DEVICE"
"""The environment variable that names the transport of ranks that share a CUDA device, the same on every rank.

"gloo", the default, works on pinned copies. "nccl", for tests of it, joins all ranks by NCCL's sockets, also ranks with
a device of their own (`piper_runtime.transport.nccl`).
"""

_nccl: WeakKeyDictionary[GlooCommunicators, NcclCommunicators] = WeakKeyDictionary()
"""The NCCL communicators of this process, kept as long as the gloo communicators whose store they use."""

_calls: WeakKeyDictionary[GlooCommunicators, Counter[int]] = WeakKeyDictionary()
"""The counts of plans so far, by their number of ranks: the same on each of these ranks."""


def take_device(kind: str, local_rank: int) -> torch.device:
    """Return `choose_device`, and make it this process's own."""
    device = choose_device(kind, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def choose_transport(device: torch.device, local_world: int) -> TransportName:
    """Return the transport of tensors: gloo on the CPU; on CUDA, NCCL if every rank has a device of its own.

    Ranks that share a device get gloo on pinned copies, unless the environment says otherwise (`SHARED_DEVICE`; an
    unknown name raises ExecutionError). `local_world` is the most ranks on any node.
    """
    if device.type == "cpu":
        return "gloo"
    joins = apart() or not shared(local_world)
    return "nccl" if joins and dist.is_nccl_available() else "staged"


def agreed_transport(
    rank: int, world: int, device: torch.device, local_world: int, gloo: GlooCommunicators
) -> TransportName:
    """Return `choose_transport`; raise ExecutionError unless all ranks choose alike, which would block them.

    Each of the plan's `world` ranks calls this once per plan.
    """
    mine = choose_transport(device, local_world)
    calls = _calls.setdefault(gloo, Counter())
    calls[world] += 1
    theirs = gloo.store.compare_set(f"transport/{world}/{calls[world]}", "", mine).decode()
    if theirs != mine:
        raise ExecutionError(
            f"rank {rank} would communicate over {mine}, another rank over {theirs}: every node of a run needs a "
            f"CUDA device for each of its ranks, or none does, and {SHARED_DEVICE} must be the same everywhere"
        )
    return mine


def shared(local_world: int) -> bool:
    """Return whether ranks of a node share a CUDA device, given the most ranks on any node."""
    return local_world > torch.cuda.device_count()


def apart() -> bool:
    """Return whether the environment makes each rank a host of its own to NCCL; raise ExecutionError if unclear."""
    wanted = os.environ.get(SHARED_DEVICE, "gloo")
    if wanted not in ("gloo", "nccl"):
        raise ExecutionError(
            f'the environment has {SHARED_DEVICE}={wanted!r}; "gloo" and "nccl" are accepted'
        )
    return wanted == "nccl"


def nccl_of(gloo: GlooCommunicators, device: torch.device) -> NcclCommunicators:
    """Return the NCCL communicators of a process, made on first use from the store of `gloo`."""
    if gloo not in _nccl:
        _nccl[gloo] = NcclCommunicators(gloo, device, apart=apart())
    return _nccl[gloo]


def connected(
    rank: Rank,
    gloo: GlooCommunicators,
    heart: Heartbeat,
    *,
    local_world: int,
    trace: bool,
    name: Name | None = None,
) -> tuple[StreamBackend, Engine]:
    """Return the streams and the engine of a rank, with its communicators connected.

    `gloo` has the communicators of its process. `name` is called before anything is bound, to put something around each
    instruction (`piper_runtime.engine.ranges`).
    """
    around = (lambda bind: name(rank, bind)) if name is not None else (lambda bind: bind)
    if counting := counting_ranks(rank.plan):
        rank.feed.totals.meeting = gloo.meeting(rank.plan.mesh.world, counting)
    streams = [s for s in rank.role.streams if s != COMPUTE]
    chosen = agreed_transport(rank.rank, rank.plan.mesh.world, rank.device, local_world, gloo)
    if rank.plan.cuda_graph and chosen != "nccl":
        raise ExecutionError(
            f"rank {rank.rank}: cuda_graph=True needs a CUDA device for each rank, joined by NCCL; this rank is on "
            f"{rank.device} and communicates over {chosen}: leave cuda_graph out"
        )
    match chosen:
        case "gloo":
            gloo.connect(rank.plan)
            cpu = CpuStreams(streams, heart)
            return cpu, Engine(rank, cpu, around(gloo.bind), heart, host_clock if trace else None)
        case "staged":
            staged = StagedCommunicators(gloo)
            staged.connect(rank.plan)
            hosted = StagedStreams(rank.entries, streams, heart, CudaApi(rank.device))
            return hosted, Engine(
                rank, hosted, around(staged.bind), heart, hosted.clock if trace else None
            )
        case "nccl":
            nccl = nccl_of(gloo, rank.device)
            nccl.connect(rank.plan)
            device = CudaStreams(rank.entries, streams, heart, CudaApi(rank.device))
            graph = DeviceGraph(rank.device) if rank.plan.cuda_graph else None
            return device, Engine(
                rank, device, around(nccl.bind), heart, device.clock if trace else None, graph
            )
