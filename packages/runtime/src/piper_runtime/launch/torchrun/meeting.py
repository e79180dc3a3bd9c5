"""Meet the other ranks that somebody has started: torch's store, names of machines, and how far clocks are apart."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piper_ir.ground.errors import ExecutionError
from piper_runtime.transport.gloo import LOOPBACK

RENDEZVOUS_S = 60.0
CLOCK_SAMPLES = 9


def env_number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ExecutionError(
            f"the environment has {name}={os.environ[name]!r}; a number is needed, as torchrun sets it"
        ) from None


def meeting_place() -> str:
    """Return the address of the ranks' meeting, for messages."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, where the ranks meet (MASTER_ADDR, MASTER_PORT),"


def open_store(seconds: float = RENDEZVOUS_S) -> Any:
    host, port = os.environ["MASTER_ADDR"], env_number("MASTER_PORT")
    try:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
    except (RuntimeError, ValueError, OSError) as e:
        in_use = "EADDRINUSE" in str(e) or "already in use" in str(e)
        why = (
            "the port is in use: choose another with --master-port (MASTER_PORT)"
            if in_use
            else f"{str(e).splitlines()[0]}"
        )
        raise ExecutionError(
            f"the ranks cannot meet at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why}"
        ) from e


def own_address(world: int) -> str:
    """Return the address under which peers reach this process: loopback when all are on this machine."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(
            (os.environ["MASTER_ADDR"], env_number("MASTER_PORT"))
        )  # sends nothing: it only chooses the way out
        address: str = probe.getsockname()[0]
    return address


def host_names(store: Any, rank: int, world: int, address: str) -> list[str]:
    """Return the names of all ranks' machines; all ranks call this."""
    store.set(f"host/{rank}", f"{socket.gethostname()} ({address})".encode())
    return [name.decode() for name in store.multi_get([f"host/{other}" for other in range(world)])]


def clock_ahead(everyone: Any, rank: int, world: int) -> tuple[float, float]:
    """Return the seconds that this rank's clock is ahead of rank 0's, and the error: half of the quickest round trip.

    All ranks of the group `everyone` call this.
    """
    samples = [(0.0, 0.0)] if rank == 0 else []
    for other in range(1, world):
        for _ in range(CLOCK_SAMPLES if rank in (0, other) else 0):
            start = time.perf_counter()
            theirs = torch.tensor([start], dtype=torch.float64)
            if rank == 0:
                everyone.recv([theirs], other, 0).wait()
                everyone.send(
                    [torch.tensor([time.perf_counter()], dtype=torch.float64)], other, 0
                ).wait()
                continue
            everyone.send([theirs.clone()], 0, 0).wait()
            everyone.recv([theirs], 0, 0).wait()
            end = time.perf_counter()
            samples.append(((end - start) / 2, (start + end) / 2 - theirs.item()))
    error, ahead = min(samples)
    return ahead, error
