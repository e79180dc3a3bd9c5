"""Call a batch function in processes of its own, which hand tensors over in shared memory.

Python code of a batch function then takes nothing from the rank's interpreter. A process ends with the rank that it
serves, however that ends: it holds the other end of a pipe.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

import piper_ir.ground.errors
from piper_ir.ground.errors import ExecutionError
from piper_runtime.rank.batches.batch_call import BatchCall
from piper_runtime.rank.batches.loader_thread import Microbatch
from piper_runtime.rank.sending.shipping import pack

_CHILD = "from piper_runtime.rank.batches.loader_process import main; main()"
_ALIGNED = 64
_SLOTS = 2
"""The steps that have room in the shared memory: the one that is computed, and the next."""


@dataclass(frozen=True)
class RaisedThere:
    """Describe an exception of a batch function in another process: its class's name, its text, and its traceback."""

    kind: str
    text: str
    details: str

    def exception(self) -> BaseException:
        """Return the exception for this process: of the same name, and of the same class if that matters here.

        The user's class may not exist here, and is not imported.
        """
        known = getattr(
            piper_ir.ground.errors,
            self.kind,
            {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}.get(self.kind),
        )
        error: BaseException = (
            known(self.text) if known is not None else type(self.kind, (Exception,), {})(self.text)
        )
        error.add_note(f"in a loader process:\n{self.details}")
        return error


class LoaderProcesses:
    """Call a batch function in `count` processes, which take turns at the microbatches."""

    def __init__(self, call: BatchCall, rank: int, count: int) -> None:
        self._order, self._rank = {mb: k for k, mb in enumerate(call.rows)}, rank
        self._children: list[tuple[subprocess.Popen[bytes], Connection[Any, Any]]] = []
        size = max((end for _, end in _places(call).values()), default=0)
        descriptor = _shared_file(max(_SLOTS * size, 1))
        try:
            self._views = _views(descriptor, call, size)
            blob = pickle.dumps(pack(call))
            for index in range(count):
                self._children.append(_spawn(descriptor))
                self._children[-1][1].send((blob, index, count, size))
            for index in range(count):
                self._receive(index)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def ask(self, step: int) -> None:
        for _, pipe in self._children:
            with suppress(BrokenPipeError):  # it has ended, as `take` is about to find out
                pipe.send(step)

    def take(self, step: int, mb: int) -> Microbatch:
        self._receive(turn(step, self._order[mb], len(self._order), len(self._children)))
        return self._views[step % _SLOTS][mb]

    def close(self) -> None:
        for process, pipe in self._children:
            process.kill()
            process.wait()
            pipe.close()
        self._children.clear()

    def _receive(self, index: int) -> None:
        """Wait for the next message of a process; raise the exception of the function there."""
        process, pipe = self._children[index]
        try:
            said = pipe.recv()
        except (EOFError, ConnectionResetError):
            code = process.wait()
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            raise ExecutionError(
                f"rank {self._rank}: a loader process, which calls Job.batch, {how}; its output is above"
            ) from None
        if isinstance(said, RaisedThere):
            raise said.exception()


def turn(step: int, k: int, each: int, count: int) -> int:
    """Return which of `count` processes makes microbatch k of a step, of `each` in a step."""
    return (step * each + k) % count


def _places(call: BatchCall) -> dict[tuple[int, str], tuple[int, int]]:
    """Return the place of each tensor of a step in its slot: (first byte, byte behind the last, aligned)."""
    places, at = {}, 0
    for mb, names in call.names.items():
        for name in names:
            look = call.looks[name]
            nbytes = torch.Size(look.shape).numel() * look.dtype.itemsize
            end = at + -(-nbytes // _ALIGNED) * _ALIGNED
            places[mb, name], at = (at, end), end
    return places


def _shared_file(size: int) -> int:
    """Return the descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("piper loader")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _views(descriptor: int, call: BatchCall, size: int) -> list[dict[int, Microbatch]]:
    """Return the tensors of each slot in the shared memory; they keep it mapped."""
    memory = mmap.mmap(descriptor, max(_SLOTS * size, 1))
    slots: list[dict[int, Microbatch]] = [{mb: {} for mb in call.names} for _ in range(_SLOTS)]
    for (mb, name), (start, _) in _places(call).items():
        look = call.looks[name]
        count = torch.Size(look.shape).numel()
        for slot in range(_SLOTS):
            whole = (
                torch.frombuffer(memory, dtype=look.dtype, count=count, offset=slot * size + start)
                if count
                else torch.empty(0)
            )
            slots[slot][mb][name] = whole.to(look.dtype).view(look.shape)
    return slots


def _spawn(descriptor: int) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    ours, theirs = Pipe()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(descriptor)],
            stdin=subprocess.DEVNULL, env=environment, pass_fds=(theirs.fileno(), descriptor),
            start_new_session=True,  # an interrupt at the terminal is not meant for the user's function
        )  # fmt: skip
    finally:
        theirs.close()
    return process, ours


def main() -> None:
    """Serve the rank whose pipe and shared memory are named in the command line, until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    asked: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_listen, args=(pipe, asked), name="piper loader's pipe", daemon=True).start()
    blob, index, count, size = asked.get()
    try:
        call = pickle.loads(blob).open()
    except BaseException as e:  # of the user's module, which is run here
        pipe.send(_raised(e))
        return
    views = _views(int(sys.argv[2]), call, size)
    pipe.send(None)
    while True:
        step = asked.get()
        for k, mb in enumerate(call.rows):
            if turn(step, k, len(call.rows), count) == index:
                pipe.send(_prepared(call, step, mb, views[step % _SLOTS][mb]))


def _listen(pipe: Connection[Any, Any], asked: SimpleQueue[Any]) -> None:
    while True:
        try:
            asked.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


def _prepared(call: BatchCall, step: int, mb: int, into: Microbatch) -> RaisedThere | None:
    """Put a microbatch into the shared memory; return the exception of its function, None without one."""
    try:
        with torch.no_grad():
            for name, tensor in call(step, mb).items():
                into[name].copy_(tensor)
    except BaseException as e:
        return _raised(e)
    return None


def _raised(error: BaseException) -> RaisedThere:
    return RaisedThere(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
