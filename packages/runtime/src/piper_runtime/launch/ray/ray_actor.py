"""Run the worker of one rank inside a Ray actor."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_runtime.checkpoint.host_snapshots import drop_snapshots
from piper_runtime.engine import core_sharers
from piper_runtime.engine.streams import HEART_SLOTS
from piper_runtime.launch.ground.environment import Environment, environment
from piper_runtime.launch.ground.watch import LOADING_HEART
from piper_runtime.launch.worker.worker import WorkerContext, answer, warm_up
from piper_runtime.rank import keep_freed_memory
from piper_runtime.transport.gloo import GlooCommunicators

RENDEZVOUS_S = 60.0
OWN_DEVICE = "PIPER_OWN_DEVICE"
"""The environment variable of an actor that asked Ray for a device of its own."""
LIFELINE_S = 0.5


class RankActor:
    """Serve one rank; `perform` runs in one thread while another answers `look`.

    Hearts of the ranks of a node lie in one piece of shared memory, so that each can report a dead one's instruction.
    """

    def __init__(self, rank: int, world: int, name: str):
        torch.set_num_threads(1)
        keep_freed_memory()
        threading.Thread(
            target=_end_with, args=(os.getppid(),), name="piper lifeline", daemon=True
        ).start()
        self._rank, self._world = rank, world
        self._file = Path(tempfile.gettempdir(), name)
        self._hearts = memoryview(_shared(self._file, 8 * HEART_SLOTS * world)).cast("q")
        self._heart = self._hearts[rank * HEART_SLOTS : (rank + 1) * HEART_SLOTS]
        self._said: deque[Any] = deque()
        self._store: Any = None
        self._context: WorkerContext | None = None

    def describe(self) -> tuple[int, Environment]:
        """Return process id and versions, with the shared memory mapped."""
        warm_up()
        return os.getpid(), environment()

    def forget_file(self) -> None:
        """Remove the name of the shared memory, once every rank of the node has mapped it."""
        self._file.unlink(missing_ok=True)

    def host_store(self, host: str) -> int:
        """Open the store for the rendezvous of communicators; return its port, which the system chooses."""
        self._store = _store(host, 0, self._world, master=True)
        port: int = self._store.port
        return port

    def connect(self, host: str, port: int, interface: str) -> None:
        """Join the store; peers reach this rank under the address `interface`."""
        store = self._store or _store(host, port, self._world, master=False)
        # Ray shows an actor that asked for a device this one only.
        local_rank, local_world = (0, 1) if OWN_DEVICE in os.environ else (None, None)
        sharers = core_sharers(store, self._rank, self._world)
        communicators = GlooCommunicators(store, self._rank, interface)
        self._context = WorkerContext(
            self._rank,
            communicators,
            self._heart,  # type: ignore[arg-type]  # as in worker_process
            self._said.append,
            local_rank,
            local_world,
            sharers,
        )

    def clock(self) -> float:
        """Return the time on the clock of this rank."""
        return time.perf_counter()

    def perform(self, request: bytes, *blobs: bytes) -> bytes:
        """Perform a request; return the messages since the last `look`, and last the answer."""
        assert self._context is not None, "connect comes first"
        self._heart[:] = memoryview(LOADING_HEART)
        reply = answer(self._context, unpack(request, blobs))
        return pickle.dumps([*self._take(), reply], protocol=5)

    def look(self) -> tuple[bytes, bytes]:
        """Return the hearts of this node's ranks, and this rank's messages since the last look."""
        return self._hearts.tobytes(), pickle.dumps(self._take(), protocol=5)

    def _take(self) -> list[Any]:
        messages = []
        while self._said:
            messages.append(self._said.popleft())
        return messages


def _end_with(parent: int) -> None:
    """End when the raylet that started this process has gone; Ray does so too, but a busy process may take minutes."""
    while os.getppid() == parent:
        time.sleep(LIFELINE_S)
    drop_snapshots()
    os._exit(1)


def _shared(file: Path, size: int) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _store(host: str, port: int, world: int, *, master: bool) -> Any:
    timeout = timedelta(seconds=RENDEZVOUS_S)
    return dist.TCPStore(
        host, port, world, is_master=master, timeout=timeout, wait_for_workers=False
    )


class Packer(pickle.Pickler):
    """Pickle a request without its larger bytes objects, which `left_out` lists in order."""

    LEAST = 1024

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.left_out: list[bytes] = []

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not bytes or len(obj) < self.LEAST:
            return None
        self.left_out.append(obj)
        return len(self.left_out) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, request: bytes, blobs: tuple[bytes, ...]):
        super().__init__(io.BytesIO(request))
        self._blobs = blobs

    def persistent_load(self, pid: int) -> bytes:
        return self._blobs[pid]


def pack(request: object) -> tuple[bytes, list[bytes]]:
    """Return a request as bytes, and the larger bytes objects that it shares with others."""
    file = io.BytesIO()
    packer = Packer(file)
    packer.dump(request)
    return file.getvalue(), packer.left_out


def unpack(request: bytes, blobs: tuple[bytes, ...]) -> Any:
    """Return the request from `pack`."""
    return _Unpacker(request, blobs).load()
