"""Describe the links of devices: within nodes and between them, rails, and measured durations of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from piper_ir.program.collectives import LAWS
from piper_ir.program.costs import CommDuration, Costs
from piper_simulator.cluster.checks import (
    Bandwidth,
    Count,
    Factor,
    Index,
    NotNegative,
    check_fields,
    one_of,
)
from piper_simulator.cluster.nccl import Nccl

OPS: tuple[str, ...] = ("p2p", *LAWS)
"""The names of messages in tables and formulas: transfers, and the kinds of collectives."""

INTRA = ("nvswitch", "nvlink", "pcie", "host")
INTER = ("infiniband", "roce", "ethernet", "host")
"""The kinds of links within nodes, and between nodes; `host` is the memory of one machine."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Name a link that takes `factor` times as long: between nodes `a` and `b`, or within one node `a` == `b`."""

    a: Index
    b: Index
    factor: Factor


@dataclass(frozen=True)
class Links:
    """Describe the links of one type of device, and how long messages over them take.

    Attributes:
        intra_bandwidth: reached bytes/s per device and direction within a node.
        intra_latency: seconds per hop within a node.
        inter_bandwidth: reached bytes/s per device and direction between nodes.
        inter_latency: seconds per hop between nodes.
        intra_kind: kind of the links within a node.
        inter_kind: kind of the links between nodes.
        communication: the model of messages that no table has, see `piper_simulator.durations.communication`.
        nccl: constants of the model of that name.
        messages: the table of measured messages.
        host_bandwidth: reached bytes/s per device and direction between it and the memory of its host.
        host_latency: seconds before the first byte of such a copy moves.
        host_memory_bandwidth: bytes/s that the memory of a node reads and writes for the copies of all its devices.
        host_memory_bytes: the memory of a node for tensors of its devices; 0 if unknown.
    """

    intra_bandwidth: Bandwidth
    intra_latency: NotNegative
    inter_bandwidth: Bandwidth
    inter_latency: NotNegative
    intra_kind: Annotated[str, one_of(*INTRA)] = "nvswitch"
    inter_kind: Annotated[str, one_of(*INTER)] = "infiniband"
    communication: Literal["ring", "nccl"] = "ring"
    nccl: Nccl = field(default_factory=Nccl)
    messages: tuple[CommDuration, ...] = ()
    host_bandwidth: Bandwidth = 25e9
    host_latency: NotNegative = 10e-6
    host_memory_bandwidth: Bandwidth = 200e9
    host_memory_bytes: Index = 0

    def __post_init__(self) -> None:
        check_fields(self, "links")

    @cached_property
    def table(self) -> Costs:
        """Return `messages` as a table for look-ups."""
        return Costs(comm=self.messages)


@dataclass(frozen=True)
class Network:
    """Describe the links between the nodes of a cluster.

    Attributes:
        links: the links of all nodes, or one entry for each run of nodes in `Cluster.nodes`.
        rails: with several, device k of a node is on rail k modulo their number, and a switch joins each rail.
        oversubscription: traffic that changes rails, or with one rail all traffic between nodes, reaches 1 / this of
            the bandwidth.
        slow_links: links that take longer than the others.
    """

    links: tuple[Links, ...]
    rails: Count = 1
    oversubscription: Factor = 1.0
    slow_links: tuple[SlowLink, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "network")
        for link in self.slow_links:
            check_fields(link, "network: slow_links")
