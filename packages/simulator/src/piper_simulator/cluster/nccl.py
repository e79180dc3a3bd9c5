"""Estimate collectives as NCCL does: by a latency and a bandwidth for each algorithm and protocol; the fastest counts.

A ring of n ranks passes nsteps = 2 (n - 1) messages on (all-reduce) or n - 1 (all-gather, reduce-scatter):

    latency = base + (nsteps - between) x hop + between x network hop, where 2 (nodes - 1) or nodes - 1 of the steps are
              between nodes
    seconds = latency + nsteps / n x bytes / (bus bandwidth x fraction of the protocol)

A tree (all-reduce only) goes up and down, once within each node and log2(nodes) times between them:

    latency = base + 2 ((n / nodes - 1) x hop + log2(nodes) x network hop)
    seconds = latency + 2 x bytes / (bus bandwidth x fraction)

NVLS lets the switch add (all-reduce of the 8 devices of a node; with 4 a measured NCCL chose the ring), NVLSTree with a
tree between nodes. Constants come from NCCL 2.30, src/graph/tuning.cc, and from NCCL 2.8's if that is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log2

from piper_ir.program.collectives import law_of
from piper_simulator.cluster.checks import NotNegative, Positive

LL, LL128, SIMPLE = range(3)
US = 1e-6
TREE_BASE = (6.8 * US, 14 * US, 8.4 * US)
RING_BASE = (6.6 * US, 14 * US, 8.4 * US)
TREE_HOP = {"nvlink": (0.6 * US, 1.25 * US, 4.0 * US), "pcie": (1.0 * US, 1.9 * US, 4.0 * US)}
RING_HOP = {"nvlink": (0.6 * US, 1.9 * US, 3.4 * US), "pcie": (1.0 * US, 2.5 * US, 5.7 * US)}
TREE_NET = (5.0 * US, 8.5 * US, 14 * US)
RING_NET = (2.7 * US, 4.0 * US, 14 * US)
"""The seconds by protocol (LL, LL128, Simple): of the start, of a step within a node, of a step between nodes."""
NVLS_HOP, NVLS_TREE_HOP, NVLS_TREE_NET = 25 * US, 25 * US, 20.9 * US
LL128_FRACTION, TREE_FRACTION = 0.92, 0.92
TREE_LL128 = (7 / 9, 0.915)
"""The further fraction that a tree's LL128 reaches on one node, and on more: NCCL 2.8, src/graph/tuning.cc."""
NVLS_RANKS = 8


@dataclass(frozen=True, slots=True)
class Nccl:
    """Hold the constants of NCCL's model that differ between devices.

    The last four are corrections that only measurements give; by default they leave NCCL's constants as they are.

    Attributes:
        ll_max: most bytes/s of the LL protocol on 1, 2, and more nodes.
        ll_fraction: LL over the bus bandwidth; every other word of LL is a flag.
        nvls_bandwidth: reached bus bandwidth in bytes/s; 0 without NVLS.
        start_s: additional seconds of a start in LL128 and Simple.
        hop_factor: factor on steps within nodes.
        net_hop_factor: factor on steps between nodes.
        pass_bandwidth: bytes/s at which a ring's turning step adds and copies its n-th part of the tensor in memory.
    """

    ll_max: tuple[Positive, Positive, Positive] = (inf, inf, inf)
    ll_fraction: Positive = 0.5
    nvls_bandwidth: NotNegative = 0.0
    start_s: NotNegative = 0.0
    hop_factor: Positive = 1.0
    net_hop_factor: Positive = 1.0
    pass_bandwidth: Positive = inf


@dataclass(frozen=True, slots=True)
class Ranks:
    """Describe n ranks on some nodes, joined by links of `kind` within a node.

    Attributes:
        bandwidth: bus bandwidth in bytes/s of the slowest link that a ring over all of them takes.
        network: that of the links between nodes alone.
    """

    n: int
    nodes: int
    kind: str
    bandwidth: float
    network: float


def seconds(of: Nccl, op: str, nbytes: float, ranks: Ranks) -> float:
    """Return the seconds of a collective on `nbytes` of the whole tensor."""
    return min(s for _, s in estimates(of, op, nbytes, ranks)) if ranks.n > 1 else 0.0


def estimates(of: Nccl, op: str, nbytes: float, ranks: Ranks) -> Iterator[tuple[str, float]]:
    """Yield name and seconds of each algorithm with each protocol."""
    for protocol, name in ((LL, "LL"), (LL128, "LL128"), (SIMPLE, "Simple")):
        yield f"ring {name}", ring(of, op, nbytes, ranks, protocol)
        if op == "all_reduce":
            yield f"tree {name}", tree(of, nbytes, ranks, protocol)
    if op == "all_reduce" and of.nvls_bandwidth and ranks.n == NVLS_RANKS * ranks.nodes:
        yield "NVLS" if ranks.nodes == 1 else "NVLSTree", nvls(of, nbytes, ranks)


def ring(of: Nccl, op: str, nbytes: float, ranks: Ranks, protocol: int) -> float:
    """Return the seconds around a ring."""
    rounds = law_of(op).rounds
    steps, between = rounds * (ranks.n - 1), rounds * (ranks.nodes - 1)
    hop, net = (
        RING_HOP[_hops(ranks.kind)][protocol] * of.hop_factor,
        RING_NET[protocol] * of.net_hop_factor,
    )
    latency = RING_BASE[protocol] + _more(of, protocol) + (steps - between) * hop + between * net
    moved = steps / ranks.n * nbytes / _bandwidth(of, ranks, protocol, LL128_FRACTION)
    return latency + moved + (nbytes / ranks.n / of.pass_bandwidth if rounds == 2 else 0.0)


def tree(of: Nccl, nbytes: float, ranks: Ranks, protocol: int) -> float:
    """Return the seconds of an all-reduce up and down a double binary tree."""
    hop, net = (
        TREE_HOP[_hops(ranks.kind)][protocol] * of.hop_factor,
        TREE_NET[protocol] * of.net_hop_factor,
    )
    latency = (
        TREE_BASE[protocol]
        + _more(of, protocol)
        + 2 * ((ranks.n / ranks.nodes - 1) * hop + log2(ranks.nodes) * net)
    )
    bandwidth = _bandwidth(of, ranks, protocol, TREE_LL128[ranks.nodes > 1])
    return latency + 2 * nbytes / (bandwidth if protocol == LL else bandwidth * TREE_FRACTION)


def nvls(of: Nccl, nbytes: float, ranks: Ranks) -> float:
    """Return the seconds of an all-reduce that the switches add, with a tree between nodes."""
    share = 2 * (ranks.n - 1) / ranks.n * nbytes
    if ranks.nodes == 1:
        return NVLS_HOP + share / of.nvls_bandwidth
    latency = NVLS_TREE_HOP + 2 * log2(ranks.nodes) * NVLS_TREE_NET * of.net_hop_factor
    return latency + share / min(of.nvls_bandwidth, ranks.network)


def step_latency(of: Nccl, kind: str, between: bool, protocol: int) -> float:
    """Return the seconds of the start and of one step, within a node or between two."""
    hop = (
        RING_NET[protocol] * of.net_hop_factor
        if between
        else RING_HOP[_hops(kind)][protocol] * of.hop_factor
    )
    return RING_BASE[protocol] + _more(of, protocol) + hop


def _hops(kind: str) -> str:
    return "pcie" if kind == "pcie" else "nvlink"


def _more(of: Nccl, protocol: int) -> float:
    return 0.0 if protocol == LL else of.start_s


def _bandwidth(of: Nccl, ranks: Ranks, protocol: int, ll128: float) -> float:
    if protocol == LL:
        return min(ranks.bandwidth * of.ll_fraction, of.ll_max[min(ranks.nodes, 3) - 1])
    return ranks.bandwidth * (ll128 if protocol == LL128 else 1.0)
