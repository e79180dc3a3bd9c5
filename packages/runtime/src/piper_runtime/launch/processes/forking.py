"""Start workers by a fork server of this process, and follow them as one follows child processes."""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from piper_ir.ground.errors import ExecutionError
from piper_runtime.launch.ground.forked_settings import Surroundings
from piper_runtime.launch.ground.protocol import Setup
from piper_runtime.launch.ground.watch import STARTUP_S

LENGTH = struct.Struct("!Q")
"""The form of the length of a request, and of the process id in the answer."""
HOW_UNKNOWN = 1 << 16
"""The number in place of an exit code of a process that has ended in an unknown way."""
STATUS = struct.Struct("!i")
"""The form of an exit code; a negative one is the signal that ended the process."""

_SERVER = "import gc; gc.disable(); from piper_runtime.launch.processes.fork_server import start; start({channel})"
"""The program of the server's Python.

While torch's modules are imported, the garbage collector would look at their million objects again and again; the
worker turns it on.
"""
_AT_IMPORT = (
    "CUDA",
    "GOMP",
    "KMP",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC",
    "MKL",
    "OMP",
    "OPENBLAS",
    "PYTHON",
    "PYTORCH",
    "TORCH",
    "TZ",
)
"""The beginnings of environment variables that Python and torch's libraries read when they are loaded."""
_LATER = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
"""The variables among them that a worker can take over: the second is set by torch itself in the middle of a run."""


@dataclass(frozen=True)
class Fork:
    """Ask for one worker.

    Attributes:
        setup: the settings of the worker; its descriptors travel beside the request.
        surroundings: the settings that the worker gets.
    """

    setup: Setup
    surroundings: Surroundings


class ForkedProcess:
    """Follow a worker as `subprocess.Popen` follows a child.

    Attributes:
        pid: the worker's process id.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or HOW_UNKNOWN; None while the worker runs."""
        if self._code is None and select.select([self._status], [], [], 0)[0]:
            said = os.read(self._status, STATUS.size)
            # Without a code the server has ended before the worker, which held the last other end of this pipe.
            self._code = STATUS.unpack(said)[0] if said else HOW_UNKNOWN
            os.close(self._status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as soon as there is one.

        Raises:
            subprocess.TimeoutExpired: when there is none after `timeout` seconds.
        """
        until = None if timeout is None else monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if until is None else until - monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            select.select([self._status], [], [], left)
        return code

    def kill(self) -> None:
        """End the worker at once, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Server:
    """Hold the process that forks; it ends with this one, or when its last worker has."""

    def __init__(self, environment: dict[str, str], read_early: dict[str, str]) -> None:
        self.read_early, self.owner = read_early, os.getpid()
        self._workers: list[ForkedProcess] = []
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(STARTUP_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER.format(channel=theirs.fileno())],
                stdin=subprocess.DEVNULL, env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

    def fork(self, fork: Fork, pipe: int, lifeline: int) -> ForkedProcess:
        request = pickle.dumps(fork)
        status, theirs = os.pipe()
        streams = [_stream(number) for number in (1, 2)]
        try:
            socket.send_fds(
                self._channel, [LENGTH.pack(len(request))], [pipe, lifeline, theirs, *streams]
            )
            self._channel.sendall(request)
            (pid,) = LENGTH.unpack(receive_exactly(self._channel, LENGTH.size))
        except BaseException:
            os.close(status)
            raise
        finally:
            for descriptor in (theirs, *streams):
                os.close(descriptor)
        self._workers = [w for w in self._workers if w.poll() is None]
        self._workers.append(worker := ForkedProcess(pid, status))
        return worker

    def end(self) -> None:
        """End the server; one with workers follows them to their end, and no one waits for it."""
        if os.getpid() != self.owner:
            self._channel.close()
            return
        with suppress(OSError):
            self._channel.shutdown(
                socket.SHUT_RDWR
            )  # also if a fork of this process has kept the socket
        self._channel.close()
        if all(worker.poll() is not None for worker in self._workers):
            self._process.kill()
            self._process.wait()
        else:
            _following.append(self._process)

    @property
    def ended(self) -> bool:
        return os.getpid() == self.owner and self._process.poll() is not None

    def exit_code(self) -> int | None:
        """Return how a server ended that does not answer; None for one that had to be killed."""
        self._channel.close()
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None


_lock = threading.Lock()
_server: _Server | None = None
_following: list[subprocess.Popen[bytes]] = []
"""The servers that get no more requests and wait for their workers' ends."""


def fork_worker(setup: Setup, environment: dict[str, str]) -> ForkedProcess:
    """Start a worker in the environment given; the first one of this process waits for the imports of the server.

    Raises:
        ExecutionError: the server cannot be started.
    """
    global _server
    path = [p or os.getcwd() for p in sys.path]
    read_early = {
        n: v for n, v in environment.items() if n.startswith(_AT_IMPORT) and n not in _LATER
    }
    surroundings = Surroundings.of_now(environment | {"PYTHONPATH": os.pathsep.join(path)}, path)
    with _lock:
        _following[:] = [process for process in _following if process.poll() is None]
        if _server is not None and (
            _server.ended or (_server.owner, _server.read_early) != (os.getpid(), read_early)
        ):
            _end()
        if _server is None:
            _server = _Server(surroundings.environment, read_early)
        try:
            return _server.fork(Fork(setup, surroundings), setup.pipe, setup.lifeline)
        except (OSError, EOFError) as error:
            code, _server = _server.exit_code(), None
            what = (
                f"did not answer within {STARTUP_S:.0f} s"
                if code is None
                else f"has ended with exit code {code}"
            )
            raise ExecutionError(
                f"the process that forks workers {what}; its output is above"
            ) from error
        except (
            BaseException
        ):  # an interrupt: the server's next message is the answer to this request
            _end()
            raise


@atexit.register
def _end() -> None:
    global _server
    if _server is not None:
        _server.end()
        _server = None


def _stream(number: int) -> int:
    """Return a copy of one of this process's standard streams, or of the null device if it is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def receive_exactly(channel: socket.socket, count: int) -> bytes:
    """Return as many bytes as are asked for.

    Raises:
        EOFError: the other side has closed before.
    """
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
