"""Put a software stack on the devices of a cluster: its kernels, the rates of its constants, and its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from piper_ir.program.costs import CommDuration
from piper_simulator.cluster.checks import KeyPath
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.constants import StackConstant
from piper_simulator.cluster.device import Device
from piper_simulator.cluster.messages_file import read_messages
from piper_simulator.cluster.network import Links
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


def device_with(device: Device, constants: Mapping[str, StackConstant]) -> Device:
    """Return a device with the rates of a stack's constants, in place of the ones of its own file."""
    changes: dict[str, Any] = {}
    if "matmul" in constants:
        value = constants["matmul"].value * device.clock
        changes["matmul_fraction"] = value
        changes["matmul_fractions"] = {
            dtype: fraction * value / device.matmul_fraction
            for dtype, fraction in device.matmul_fractions.items()
        }
    if "launch_s" in constants:
        changes["launch_s"] = constants["launch_s"].value
    if "memory" in constants:
        value = constants["memory"].value
        best = max([device.memory_fraction, *(f for _, f in device.memory_steps)])
        changes["memory_fraction"] = value
        changes["memory_steps"] = tuple((b, f * value / best) for b, f in device.memory_steps)
    return replace(device, **changes) if changes else device


def links_with(links: Links, constants: Mapping[str, StackConstant]) -> Links:
    """Return links with messages as fast as a stack's constants say; measured messages change by the same factors."""
    factors = [constants[n].value if n in constants else 1.0 for n in ("intra", "inter")]
    if factors == [1.0, 1.0]:
        return links
    messages = tuple(
        replace(m, duration=replace(m.duration, seconds=m.duration.seconds / factors[m.nodes > 1]))
        for m in links.messages
    )
    return replace(
        links,
        intra_bandwidth=links.intra_bandwidth * factors[0],
        inter_bandwidth=links.inter_bandwidth * factors[1],
        messages=messages,
    )
