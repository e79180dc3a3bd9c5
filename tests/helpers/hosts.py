"""Several machines in one: network namespaces with names of their own on a switch.

A machine can be killed, cut off from the others, healed and made slow. Nothing leaves the namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESSES = {name: f"10.213.7.{n}" for n, name in enumerate("abcd", 1)}
NAMES_OF = Path("/etc/netns")
"""The folder from which `ip netns exec` takes a namespace's own /etc/hosts."""
SLOWED = {
    "netem": ["delay", "50ms", "rate", "1mbit"],
    "tbf": ["rate", "1mbit", "burst", "3kb", "latency", "2s"],
}
"""The ways to slow a machine's messages down, in the order in which they are tried: a kernel may have neither."""


SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
"""The path of programs on all machines: torchrun and piper are beside this interpreter, whoever has started it."""


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass
class Hosts:
    """Some of the machines of ADDRESSES, by name."""

    tag: str
    names: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, host: str, command: list[str], variables: Mapping[str, str], **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program on a machine; its process is the program itself, and signals reach it."""
        inside = ["ip", "netns", "exec", f"{self.tag}{host}", "unshare", "--uts", "sh", "-c"]
        named = [*inside, f'hostname {host} && exec "$@"', "sh", *command]
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        environment = os.environ | {"PATH": SEARCH_PATH} | dict(variables)
        process = subprocess.Popen(named, env=environment, **(pipes | more))
        self.started.append(process)
        return process

    def cut(self, host: str) -> None:
        """Take a machine from the switch: nothing arrives any more, and nobody is told."""
        _ip("-n", f"{self.tag}s", "link", "set", f"to-{host}", "nomaster")

    def heal(self, host: str) -> None:
        """Connect a machine with the switch again."""
        _ip("-n", f"{self.tag}s", "link", "set", f"to-{host}", "master", "switch", "up")

    def slow(self, host: str) -> str:
        """Slow down the messages that a machine sends; return the queue that does it, empty if the kernel has none."""
        for kind, settings in SLOWED.items():
            words = ["tc", "-n", f"{self.tag}{host}", "qdisc", "add", "dev", "net0", "root"]
            if not subprocess.run([*words, kind, *settings], capture_output=True).returncode:
                return kind
        return ""

    def running(self, host: str) -> list[int]:
        """Return the processes of a machine."""
        return [int(pid) for pid in _ip("netns", "pids", f"{self.tag}{host}").split()]

    def kill(self, host: str) -> None:
        """Kill all processes of a machine at once, as a loss of power does."""
        for pid in self.running(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self, seconds: float) -> dict[str, list[int]]:
        """Return the processes that are still there after a time, by machine; a machine without any is left out."""
        end = time.monotonic() + seconds
        while True:
            left = {host: pids for host in self.names if (pids := self.running(host))}
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.2)


def why_not() -> str:
    """Why this machine cannot make them; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)} (iproute2, util-linux)"
    try:
        with some_hosts():
            return ""
    except subprocess.CalledProcessError as e:
        return f"network namespaces cannot be made here: {e.stderr.strip()}"


@contextmanager
def some_hosts(names: str = "ab") -> Iterator[Hosts]:
    """Make machines and their network, which are gone at the end."""
    hosts = Hosts(f"pp{os.getpid()}", names)
    switch, spaces = f"{hosts.tag}s", {name: f"{hosts.tag}{name}" for name in names}
    known = "".join(f"{ADDRESSES[name]} {name}\n" for name in names)
    try:
        for space in (switch, *spaces.values()):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for name, space in spaces.items():
            (NAMES_OF / space).mkdir(parents=True)
            (NAMES_OF / space / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            pair = ["type", "veth", "peer", "name", "net0", "netns", space]
            _ip("-n", switch, "link", "add", f"to-{name}", *pair)
            hosts.heal(name)
            _ip("-n", space, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "net0")
            _ip("-n", space, "link", "set", "net0", "up")
        yield hosts
    finally:
        for process in hosts.started:
            process.kill()
        for space in (switch, *spaces.values()):
            with suppress(subprocess.CalledProcessError):
                hosts.kill(space.removeprefix(hosts.tag))
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(NAMES_OF / space, ignore_errors=True)
