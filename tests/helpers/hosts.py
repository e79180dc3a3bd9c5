"""Two machines in one: network namespaces with names of their own on a switch, from which one of them can be cut
off."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """The two machines "a" and "b" of ADDRESSES."""

    tag: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, host: str, command: list[str], variables: Mapping[str, str], **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program on a machine; its process is the program itself, and signals reach it."""
        inside = ["ip", "netns", "exec", f"{self.tag}{host}", "unshare", "--uts", "sh", "-c"]
        named = [*inside, f'hostname {host} && exec "$@"', "sh", *command]
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(named, env=os.environ | dict(variables), **(pipes | more))
        self.started.append(process)
        return process

    def cut(self, host: str) -> None:
        """Take a machine from the switch: nothing arrives any more, and nobody is told."""
        _ip("-n", f"{self.tag}s", "link", "set", f"to-{host}", "nomaster")


def why_not() -> str:
    """Why this machine cannot make them; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)} (iproute2, util-linux)"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as e:
        return f"network namespaces cannot be made here: {e.stderr.strip()}"


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two machines and their network, gone at the end."""
    hosts = Hosts(f"pp{os.getpid()}")
    spaces = [f"{hosts.tag}{name}" for name in ("s", *ADDRESSES)]
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", spaces[0], "link", "add", "switch", "type", "bridge")
        _ip("-n", spaces[0], "link", "set", "switch", "up")
        for name, address in ADDRESSES.items():
            space, port = f"{hosts.tag}{name}", f"to-{name}"
            _ip(
                "-n",
                spaces[0],
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "net0",
                "netns",
                space,
            )
            _ip("-n", spaces[0], "link", "set", port, "master", "switch", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "net0")
            _ip("-n", space, "link", "set", "net0", "up")
        yield hosts
    finally:
        for process in hosts.started:
            process.kill()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
