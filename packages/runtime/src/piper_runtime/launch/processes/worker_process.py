"""Serve the requests of one rank in a process, which `piper_runtime.launch.processes.fork_server` forks.

It serves requests from its pipe until the pipe closes. When the launcher is gone, however it ended, a second pipe
closes too and the process ends at once.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import shutil
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from piper_runtime.checkpoint.host_snapshots import drop_snapshots
from piper_runtime.engine.streams import HEART_SLOTS, Heartbeat
from piper_runtime.launch.ground.protocol import Setup
from piper_runtime.launch.worker.worker import WorkerContext, answer, warm_up
from piper_runtime.rank import keep_freed_memory
from piper_runtime.transport.gloo import GlooCommunicators


def serve(setup: Setup) -> None:
    """Answer requests until the launcher closes the pipe."""
    torch.set_num_threads(setup.threads)
    keep_freed_memory()
    threading.Thread(
        target=_end_with,
        args=(setup.lifeline, Path(setup.store).parent),
        name="piper lifeline",
        daemon=True,
    ).start()
    pipe: Connection[Any, Any] = Connection(setup.pipe)
    communicators = GlooCommunicators(dist.FileStore(setup.store, setup.world), setup.rank)
    # Plain pickle: a Connection would hand tensors over as shared memory, which needs a handshake.
    speaking = threading.Lock()  # a thread that writes a checkpoint speaks, too

    def tell(message: Any) -> None:
        said = pickle.dumps(message, protocol=5)
        with speaking:
            try:
                pipe.send_bytes(said)
            except BrokenPipeError:
                _leave(Path(setup.store).parent, 1)

    context = WorkerContext(setup.rank, communicators, _heart(setup), tell)
    warm_up()
    gc.freeze()  # imported objects stay for ever
    gc.enable()
    context.tell("ready")
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        context.tell(answer(context, request))


def _heart(setup: Setup) -> Heartbeat:
    with open(setup.heart, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    slots = memoryview(shared).cast("q")[setup.rank * HEART_SLOTS : (setup.rank + 1) * HEART_SLOTS]
    return slots  # type: ignore[return-value]  # typeshed calls a memoryview a Sequence; assignment is all that is needed


def _end_with(lifeline: int, folder: Path) -> None:
    """Wait for the launcher's end."""
    os.read(lifeline, 1)
    _leave(folder, 1)


_leaving = threading.Lock()


def _leave(folder: Path, code: int) -> NoReturn:
    """Remove the shared files, which nobody else does now that the launcher has ended, and end the process.

    Several threads may notice it; the first one does all.
    """
    _leaving.acquire()
    shutil.rmtree(folder, ignore_errors=True)
    drop_snapshots()
    # Idle threads of communicators have no orderly end.
    os._exit(code)


def main(setup: Setup) -> NoReturn:
    """Serve a rank, and end the process."""
    serve(setup)
    sys.stdout.flush()
    _leave(Path(setup.heart).parent, 0)
