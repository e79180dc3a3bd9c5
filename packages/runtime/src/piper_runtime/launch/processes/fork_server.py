"""Fork the workers of a launcher from one process that has imported their common modules.

To import torch takes a process seconds. This one does it once, and a worker that is forked from it starts at once and
shares its pages. It runs no thread and touches no device before it forks. `piper_runtime.launch.processes.forking`
starts it.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from piper_runtime.launch.processes.forking import LENGTH, STATUS, Fork, receive_exactly
from piper_runtime.launch.processes.worker_process import main
from piper_runtime.launch.worker.worker import warm_up

_DESCRIPTORS = 5
"""The number of descriptors of a request: pipe, lifeline and status of the worker, output and error of the launcher."""


class ForkServer:
    """Answer a launcher's requests for workers, and say how each worker ended.

    Args:
        channel: the socket to the launcher; when it closes, the server ends with its last worker.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._status: dict[int, int] = {}
        """The descriptor that a worker's exit code is written to, by process id."""
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(
            signal.SIGCHLD, lambda *_: None
        )  # so that the signal reaches the wake-up socket
        self._wake = wake

    def serve(self) -> None:
        """Fork and reap until the launcher has ended, and the workers too."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            asked = True
            while asked or self._status:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._reap()
                    elif not self._fork(selector):
                        selector.unregister(self._channel)
                        asked = False

    def _fork(self, selector: selectors.BaseSelector) -> bool:
        """Fork one worker; return whether the launcher is still there."""
        try:
            head, descriptors, *_ = socket.recv_fds(self._channel, LENGTH.size, _DESCRIPTORS)
            request = receive_exactly(self._channel, LENGTH.unpack(head)[0]) if head else b""
        except (ConnectionResetError, EOFError):  # the launcher ended in the middle of a request
            return False
        if not head:
            return False
        fork: Fork = pickle.loads(request)  # from our own launcher
        pipe, lifeline, status, *streams = descriptors
        pid = os.fork()
        if pid == 0:
            selector.close()
            for (
                descriptor
            ) in self._status.values():  # those of the others; its own one stays open until it ends
                os.close(descriptor)
            for end in (self._channel, self._woken, self._wake):
                end.close()
            _work(fork, pipe, lifeline, streams)
        self._status[pid] = status
        for descriptor in (pipe, lifeline, *streams):
            os.close(descriptor)
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the launcher ended, as the next look at the channel shows
            self._channel.sendall(LENGTH.pack(pid))
        return True

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for pid in list(self._status):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                descriptor = self._status.pop(pid)
                with suppress(BrokenPipeError):  # the launcher has forgotten this worker
                    os.write(descriptor, STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(descriptor)


def _work(fork: Fork, pipe: int, lifeline: int, streams: list[int]) -> NoReturn:
    """Be the worker, with the launcher's present surroundings, which may have changed since the server started."""
    try:
        os.setsid()  # an interrupt at the terminal reaches the launcher only, which then ends its workers
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
            os.close(stream)
        fork.surroundings.take()
        sys.argv[1:] = [
            json.dumps(vars(fork.setup))
        ]  # says whose worker it is where somebody looks
        random.seed()
        if "numpy" in sys.modules:
            sys.modules[
                "numpy"
            ].random.seed()  # Python's numbers begin anew in a fork, numpy's would be the same in all ranks
        main(replace(fork.setup, pipe=pipe, lifeline=lifeline))
    # goes to standard error; the exit code tells the launcher, and nothing may return into the server
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def start(channel: int) -> None:
    """Serve on an inherited socket, and end the process."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    warm_up()
    gc.freeze()  # imported objects stay for ever, and their pages stay shared
    ForkServer(socket.socket(fileno=channel)).serve()
    os._exit(0)
