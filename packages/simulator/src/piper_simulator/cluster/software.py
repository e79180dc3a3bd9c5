"""Put a software stack on the devices of a cluster: its kernels, the rates of its constants, and its messages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from piper_ir.program.costs import CommDuration
from piper_simulator.cluster.checks import KeyPath
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.constants import device_with, links_with
from piper_simulator.cluster.messages_file import read_messages
from piper_simulator.cluster.stacks import Stack

_DATA = Path(__file__).parent / "data"


def with_stack(cluster: Cluster, stack: Stack) -> Cluster:
    """Return a cluster whose devices run a stack, with the rates and messages of the stack's constants."""
    messages = messages_of(stack)
    return cluster.each_device(
        lambda device: replace(device_with(device, stack.constants), stack=stack)
    ).each_links(
        lambda links: links_with(
            replace(links, messages=messages) if messages else links, stack.constants
        )
    )


@cache
def _messages(name: str) -> tuple[CommDuration, ...]:
    return read_messages(_DATA / name, KeyPath(name))


def messages_of(stack: Stack) -> tuple[CommDuration, ...]:
    """Return the measured messages of the links of a stack's devices; none if it has no table."""
    return _messages(stack.messages) if stack.messages else ()
