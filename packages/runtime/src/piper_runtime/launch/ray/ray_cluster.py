"""Join a Ray cluster, or start one on this machine and end it without a trace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from piper_ir.ground.errors import ExecutionError

PROBE_S = 3.0
"""The seconds within which an address must answer."""
VITAL = {
    "gcs_server": "Ray's head process (GCS)",
    "raylet": "Ray's process on this machine (raylet)",
}
"""The processes of a Ray started here that every run needs."""
UNANSWERED = 3
"""The number of looks in a row without an answer after which the head of a joined cluster counts as dead."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The client's preface with an empty SETTINGS frame (RFC 9113, 3.4), which a server such as Ray's answers with one."""
_JANITOR = """
import os, shutil, signal, sys, time
folder = sys.argv[1]
def end(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            ours = b"ray" in file.read()
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")] if ours else []
        if any(name.startswith(folder + "/") for name in held):
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass  # another user's, or it has ended
sys.stdin.read()
for _ in range(20):
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        end(pid)
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.5)
"""
"""The program of a process that waits for our end, however we end.

If Ray was not ended before, it ends the Ray processes with open logs in the folder, which outlive the driver by a
minute, and removes the folder, while others may still write into it for a moment.
"""


class RayLink:
    """Hold this process's connection to Ray.

    `close` undoes `connect`: it leaves a cluster that was joined, ends a Ray that was started, and does not touch a
    connection that was there before.
    """

    def __init__(self, ray: Any, undo: Callable[[], None] | None):
        self.ray = ray
        self._address = ray.get_runtime_context().gcs_address
        self._silent = 0
        self._undo = weakref.finalize(self, undo) if undo is not None else None

    def fault(self) -> str:
        """Return which of Ray's own processes has died; an empty text when none has.

        Ray itself waits a minute, and then ends us.
        """
        node = (
            self.ray._private.worker._global_node
        )  # set if this process has started Ray; it knows its children
        dead = (
            [kind for kind, _ in node.dead_processes() if kind in VITAL] if node is not None else []
        )
        if dead:
            return f"{' and '.join(VITAL[kind] for kind in dead)} died"
        problem = _problem(self.ray, self._address)
        self._silent = self._silent + 1 if problem else 0
        return (
            f"{VITAL['gcs_server']} at {self._address} does not answer: {problem}"
            if self._silent >= UNANSWERED
            else ""
        )

    def close(self) -> None:
        """Undo `connect` as the class says; a second call does nothing."""
        if self._undo is not None:
            self._undo()


@dataclass(frozen=True)
class RayWording:
    """Hold a caller's words for error messages.

    These are the feature that needs Ray, its address argument, how to use a running cluster, and the alternative
    without Ray.
    """

    what: str = 'launcher "ray"'
    argument: str = "cluster"
    present: str = 'cluster="auto"'
    instead: str = 'launcher="processes"'


LAUNCHER = RayWording()


def import_ray(wording: RayWording = LAUNCHER) -> Any:
    """Return the ray module; raise ExecutionError when it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when a cluster starts
    try:
        import ray
    except ImportError as e:
        raise ExecutionError(
            f"{wording.what} needs Ray, which cannot be imported here ({e}); pip install "
            f'"ray>=2.60", or use '
            f"{wording.instead}"
        ) from None
    return ray


def connect(cluster: str, cpus: int, wording: RayWording = LAUNCHER) -> RayLink:
    """Connect to Ray; raise ExecutionError when nothing usable answers, within seconds.

    `cluster` is an address host:port to join; "local" to start Ray on this machine with `cpus` CPUs; or "auto" for a
    connection that this process has, else the cluster that RAY_ADDRESS or an earlier `ray start` on this machine names,
    else "local".
    """
    ray = import_ray(wording)
    if ray.is_initialized():
        return _present(ray, cluster, wording)
    wanted = _wanted(ray, cluster)
    return _start(ray, cpus, wording) if wanted == "local" else _join(ray, wanted, wording)


def check_ray() -> None:
    """Raise ExecutionError when a launcher's `connect` would fail for want of Ray or of an answer; start nothing."""
    ray = import_ray()
    if not ray.is_initialized() and (wanted := _wanted(ray, "auto")) != "local":
        _check_address(ray, wanted, LAUNCHER)


def _wanted(ray: Any, cluster: str) -> str:
    wanted = (os.environ.get("RAY_ADDRESS") or "auto") if cluster == "auto" else cluster
    return "local" if wanted == "auto" and not _started_here(ray) else wanted


def _present(ray: Any, cluster: str, wording: RayWording) -> RayLink:
    address = ray.get_runtime_context().gcs_address
    if cluster not in ("auto", address):
        raise ExecutionError(
            f"this process is already connected to Ray at {address}; {wording.argument}={cluster!r} cannot be used "
            f"beside it: use {wording.present}, or call ray.shutdown() before"
        )
    return RayLink(ray, None)


def _started_here(ray: Any) -> bool:
    """Return whether `ray start` made a cluster on this machine that still answers; Ray takes it for "auto"."""
    from ray._private import services  # its record of `ray start` has no public reader

    address = services.find_bootstrap_address(None)
    return bool(address) and _problem(ray, address) is None


def _join(ray: Any, address: str, wording: RayWording) -> RayLink:
    _check_address(ray, address, wording)
    what = f"join Ray at {address} (if it asks for a token: RAY_AUTH_MODE=token and its token are needed here)"
    _init(ray, what, wording, address=address)
    return RayLink(ray, ray.shutdown)


def _check_address(ray: Any, address: str, wording: RayWording) -> None:
    if address.startswith("ray://"):
        raise ExecutionError(
            f"{address}: Ray Client addresses are not supported; run this on a machine of the cluster with "
            f"{wording.argument}=HOST:PORT, or hand it in with `ray job submit`"
        )
    problem = None if address == "auto" else _problem(ray, address)
    if problem is not None:
        raise ExecutionError(
            f"no Ray cluster at {address}: {problem}; `ray start --head` makes one and prints its address, "
            f'{wording.argument}="local" starts a Ray for this run only, {wording.instead} needs '
            f"none"
        )


def _problem(ray: Any, address: str) -> str | None:
    """Return why an address cannot be Ray's, before `ray.init`, which takes minutes to give up."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        return "an address looks like HOST:PORT"
    # Ray takes localhost for the machine's own address, on which alone it may listen.
    hosts = [host, ray.util.get_node_ip_address()] if host in ("localhost", "127.0.0.1") else [host]
    problems = [silence(h, int(port)) for h in hosts]
    return None if None in problems else problems[0]


def silence(host: str, port: int) -> str | None:
    """Return why nothing like Ray answers at a port; None if something does."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as probe:
            probe.sendall(_HTTP2_HELLO)
            answer = probe.recv(9)
    except (OSError, OverflowError) as e:
        return f"{type(e).__name__}: {e}"
    return None if len(answer) == 9 and answer[3] == 4 else "something else answers there"


def _start(ray: Any, cpus: int, wording: RayWording) -> RayLink:
    # A short path: Ray puts sockets below it, whose names may have about 100 characters.
    folder = tempfile.mkdtemp(prefix="piper-", dir="/tmp")
    janitor = subprocess.Popen(
        [sys.executable, "-S", "-c", _JANITOR, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        ray.shutdown(wait_for_processes=True)
        janitor.kill()
        janitor.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        settings: dict[str, Any] = dict(
            address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=folder
        )
        _init(ray, "start Ray on this machine", wording, **settings)
    except BaseException:
        ray.shutdown()
        # What was interrupted while it started, Ray does not know of: the janitor ends it, beside us.
        assert janitor.stdin is not None
        janitor.stdin.close()
        raise
    return RayLink(ray, end)


def _init(ray: Any, what: str, wording: RayWording, **arguments: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **arguments)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as e:
        raise ExecutionError(f"cannot {what}: {e}; {wording.instead} needs no Ray") from e
    finally:
        # Ray answers SIGTERM with a stack of its own and SIGABRT. Only the main thread may say who answers instead.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    # What Ray prints of a worker's death in spite of log_to_driver=False, our own error says in one message.
    ray._private.worker._worker_logs_enabled = False
