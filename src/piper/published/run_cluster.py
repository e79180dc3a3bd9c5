"""Make the cluster of a published run, with the software stack whose words the run has."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from piper.published.table import PublishedRow
from piper_ir.ground.errors import ClusterError, JobError
from piper_simulator import (
    ALIASES,
    DEVICES,
    GENERATIONS,
    STACKS,
    Cluster,
    Stack,
    load_cluster,
    read_software,
    stacks_of,
    with_stack,
)

NVLINK_DOMAIN = {"gb200-186g": 72}
"""The devices that NVLink joins, where they are more than a node."""
TRAY = {"gb200-186g": 4}
"""The devices of a node in such a domain, which have the NICs."""
NICS = re.compile(r"(\d+) NICs of (\d+) Gb/s")
"""The words of a note for the NICs of a node."""
USABLE = 0.94
"""The part of a NIC's rate that messages reach, as in the files of devices: 23.5 of 25 GB/s of a ConnectX-6 (SimAI)."""
ON = " on "
"""The word between a stack and a device that it is borrowed for, in the name of such a stack."""
UNNAMED = 0.17
"""The share by which a step may be longer than predicted where no word of a row names its software.

With the constants of its device's other stacks four in five runs of each source of the shared table are within it
(`benchmarks/left_out.py`, 30 November 2026).
"""
OF_DEVICES = ("matmul", "memory", "attention_forward", "attention_backward", "intra", "inter")
"""The constants that software of one device has more in common than one software on two devices."""


def cluster_of(published: PublishedRow, stack: Stack | str | None = None) -> Cluster:
    """Return the cluster of a row, with its software stack if there is one."""
    device = _device(published.hw)
    if not device:
        raise JobError(
            f"{published.case}: no device {published.hw!r} is described; known are {', '.join(DEVICES)}: correct the "
            f"column hw"
        )
    most = NVLINK_DOMAIN.get(device, published.gpus_per_node or 8)
    per_node = max((n for n in range(1, most + 1) if published.gpus % n == 0), default=1)
    if device not in NVLINK_DOMAIN:
        per_node = min(most, published.gpus)
    if published.gpus % per_node:
        raise JobError(
            f"{published.case}: {published.gpus} devices do not fill nodes of {per_node}: correct the column "
            f"gpus or gpus_per_node"
        )
    cluster = load_cluster(f"{device}:{per_node}*{published.gpus // per_node}")
    if nics := NICS.search(published.note):
        node_rate = int(nics[1]) * int(nics[2]) * 1e9 / 8
        each = USABLE * node_rate / min(per_node, published.gpus_per_node or TRAY.get(device, 8))
        cluster = cluster.each_links(lambda links: replace(links, inter_bandwidth=each))
    if stack is None:
        stack = stack_of(published, device)
        if is_guessed(published, device) and stack in STACKS:
            stack = replace(STACKS[stack], seen=max(UNNAMED, STACKS[stack].seen))
    if stack:
        cluster = with_stack(cluster, stack if isinstance(stack, Stack) else stack_named(stack))
    if published.says("CUDA graphs"):
        return cluster.each_device(lambda one: replace(one, launch_s=0.0))
    if published.says("CUDA_LAUNCH_BLOCKING"):
        return cluster.each_device(
            lambda one: replace(one, kernel_s=one.kernel_s + one.launch_s, launch_s=0.0)
        )
    return cluster


def _device(hw: str) -> str:
    """Return the device of a name, or of the longest alias that it begins with; "" if there is none."""
    hw = hw.lower()
    if hw in DEVICES:
        return hw
    begins = [alias for alias in ALIASES if hw == alias or hw.startswith(f"{alias}-")]
    return ALIASES[max(begins, key=len)] if begins else ""


def software_of(published: PublishedRow) -> str:
    """Return name and words of a row's stack, by which the row is read; source and note if its device has no stack."""
    if published.software:
        return published.software
    device = _device(published.hw)
    stack = stack_of(published, device)
    return words_of(stack_named(stack)) if stack else published.text


def stack_of(published: PublishedRow, device: str) -> str:
    """Return the name of a row's stack: of its column, or by its words; "" if its device has none that serves.

    Words that name no stack of the device may name another generation's, which is then borrowed.
    """
    return (
        published.stack
        or next(iter(stacks_of(device, published.note, published.source)), "")
        or borrowed_for(published, device, named=True)
        or stack_for(published, device)
        or borrowed_for(published, device)
    )


def words_of(stack: Stack) -> str:
    """Return name and words of a stack."""
    return "; ".join((stack.name, *stack.words))


def stack_for(published: PublishedRow, device: str) -> str:
    """Return the name of the stack whose words a row has; else one of its generation that is like it; else "".

    A row that shares layers or stages is taken as Megatron, any other as eager torch.
    """
    like = "Megatron" if published.tp * published.pp * published.cp > 1 else "eager"
    fitting = stacks_of(device, published.note, published.source, like)
    return fitting[0] if fitting else ""


def is_guessed(published: PublishedRow, device: str) -> bool:
    """Return whether nothing in a row names a stack, of its device or of another generation."""
    return not (
        published.stack
        or stacks_of(device, published.note, published.source)
        or borrowed_for(published, device, named=True)
    )


def borrowed_for(published: PublishedRow, device: str, *, named: bool = False) -> str:
    """Return the name of a stack that a device lacks, made of another generation's (`borrowed`); "" if there is none.

    Its facts come from the stack that `stack_for` finds on the nearest generation, or words of the row with `named`.
    """

    def distance(other: str) -> int:
        generation = DEVICES[other].device.generation
        return abs(GENERATIONS.index(generation) - own) if generation in GENERATIONS else 9

    if not stacks_of(device):
        return ""
    own = GENERATIONS.index(DEVICES[device].device.generation)
    others = sorted(DEVICES, key=distance)
    if named:
        found = (stacks_of(other, published.note, published.source)[:1] for other in others)
        return next((f"{name}{ON}{device}" for names in found for name in names), "")
    likely = (stack_for(published, other) for other in others)
    return next((f"{name}{ON}{device}" for name in likely if name), "")


def borrowed(stack: Stack, device: str) -> Stack:
    """Return the facts of a stack with the constants that a device's stacks have, and an interval of unknown width."""
    found = with_constants_of_others(stack, device, OF_DEVICES)
    messages = next((m for name in stacks_of(device) if (m := STACKS[name].messages)), "")
    name = f"{stack.name}{ON}{device}"
    return replace(found, name=name, devices=(device,), messages=messages, words=(), seen=0.0)


def with_constants_of_others(stack: Stack, device: str, names: Collection[str]) -> Stack:
    """Return a stack with some constants as the mean of the other stacks of a device that fitted them, or as priors."""
    others = [STACKS[name] for name in stacks_of(device) if name != stack.name]
    constants = dict(stack.constants)
    for name in set(names).intersection(constants):
        own = constants[name]
        found = [s.constants[name] for s in others if name in s.constants]
        # a stack that is based on this one has this constant itself, and two of one base have one constant
        values = {c.source: c.value for c in found if c.fitted and c != own}
        constants[name] = replace(own, value=fmean(values.values()) if values else own.prior)
    return replace(stack, constants=constants)


def stack_named(name: str) -> Stack:
    """Return a stack by name, or from a file that ends in .toml; raise ClusterError if there is none."""
    if name.endswith(".toml"):
        return read_software(Path(name), STACKS)
    facts, on, device = name.partition(ON)
    if on and facts in STACKS and device in DEVICES:
        return borrowed(STACKS[facts], device)
    if name not in STACKS:
        raise ClusterError(
            f"no stack {name!r}; known are {', '.join(STACKS)}, and files that end in .toml"
        )
    return STACKS[name]
