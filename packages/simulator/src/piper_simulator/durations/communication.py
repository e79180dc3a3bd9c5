"""Compute the duration of a message: (op, bytes, members, nodes) on a cluster.

The duration comes from the cluster's table of measurements if it has this op, number of ranks and number of nodes, with
lines on log-log paper between its sizes, and above them the formula scaled to meet the largest. Else it comes from a
formula. `communication = "ring"` is one ring at full bandwidth. "nccl" is NCCL's choice among ring, tree and NVLS in
three protocols (`piper_simulator.cluster.nccl`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from piper_ir.program.collectives import HOST_COPIES, law_of
from piper_ir.program.costs import Duration
from piper_simulator.cluster import nccl
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.network import Links, Network, SlowLink

HALVES = ("all_gather", "reduce_scatter")
"""The collectives that are half of an all-reduce: a ring scatters sums, and then gathers them."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Describe where the members of a message are.

    Attributes:
        ranks: how many they are.
        nodes: on how many nodes.
        least: the fewest on one of these nodes.
        most: the most on one of these nodes.
        inter_factor: factor of the slowest link between any two of their nodes (`slow_links`).
        intra_factor: factor of the slowest link within one of their nodes.
        changes_rail: whether two members on two nodes are on different rails.
        kinds: the kinds of their devices, by index in `Cluster.kinds`.
    """

    ranks: int
    nodes: int
    least: int
    most: int
    inter_factor: float = 1.0
    intra_factor: float = 1.0
    changes_rail: bool = False
    kinds: tuple[int, ...] = (0,)

    @property
    def slowed(self) -> bool:
        return self.inter_factor > 1 or self.intra_factor > 1


def crossed(cluster: Cluster, members: Sequence[int]) -> list[SlowLink]:
    """Return the slow links between any two of these ranks."""
    slow = cluster.network.slow_links
    count = Counter(r // cluster.per_node for r in members) if slow else {}
    return [x for x in slow if x.a in count and x.b in count and (x.a != x.b or count[x.a] > 1)]


def rank_group(cluster: Cluster, members: Sequence[int]) -> RankGroup:
    """Describe where these ranks are: how many, on which nodes, over which slow links."""
    per_node = cluster.per_node
    count = Counter([rank // per_node for rank in members])
    slow = crossed(cluster, members)
    inter, intra = ([x.factor for x in slow if (x.a == x.b) is within] for within in (False, True))
    rails = (
        {cluster.rail_of(r) for r in members}
        if len(count) > 1 and cluster.network.rails > 1
        else ()
    )
    return RankGroup(
        len(members), len(count), min(count.values()), max(count.values()), max(inter, default=1.0), max(intra, default=1.0),
        len(rails) > 1, tuple(sorted({cluster.kind_of(r) for r in members})) if len(cluster.nodes) > 1 else (0,),
    )  # fmt: skip


def duration(cluster: Cluster, op: str, nbytes: int, of: RankGroup) -> Duration:
    """Return the duration of a message of `nbytes` on each rank (all_gather, reduce_scatter: of the whole tensor).

    The table is for links at full speed and for one kind of device, so messages over slowed links, or between two
    kinds, are computed. Above the largest size of the table the formula is scaled to meet it there, and still called
    one.
    """
    links, formula = cluster.kinds[of.kinds[0]].links, by_formula(cluster, op, nbytes, of)
    if links.messages and formula and len(of.kinds) == 1 and not of.slowed and of.least == of.most:
        if op in HALVES and not links.table.bytes_of(op, of.ranks, of.nodes):
            whole = duration(cluster, "all_reduce", nbytes, of)
            return Duration(whole.seconds / 2, "formula")  # it was not measured itself
        sizes = links.table.bytes_of(op, of.ranks, of.nodes)
        known = links.table.of_comm(op, min([nbytes, *sizes[-1:]]), of.ranks, of.nodes)
        if known is not None and sizes and nbytes > sizes[-1]:
            return Duration(
                formula * known.seconds / by_formula(cluster, op, sizes[-1], of), "formula"
            )
        if known is not None:
            return Duration(known.seconds, known.source)
        return Duration(formula * _over_formula(cluster, links, op, nbytes, of), "formula")
    return Duration(formula, "formula")


def _over_formula(cluster: Cluster, links: Links, op: str, nbytes: int, of: RankGroup) -> float:
    """Return measured over computed seconds of the most nodes in the table with as many ranks of a node; else 1.

    More nodes than were measured are hardly slower: the bus bandwidth of a ring depends little on their number.
    """
    known = [
        m
        for m in {(m.group, m.nodes) for m in links.messages if m.op == op}
        if m[1] > 1 and m[1] < of.nodes and m[0] == m[1] * of.most
    ]
    if of.nodes == 1 or not known:
        return 1.0
    ranks, nodes = max(known)
    measured = replace(of, ranks=ranks, nodes=nodes)
    return duration(cluster, op, nbytes, measured).seconds / by_formula(
        cluster, op, nbytes, measured
    )


def by_formula(cluster: Cluster, op: str, nbytes: float, of: RankGroup) -> float:
    """Return the seconds of a message by the cluster's model.

    Between two kinds of devices it takes as long as among the slower kind: the slowest link of a ring, or the slower
    end of a transfer, decides.
    """
    return max(
        [_of_kind(cluster.network, cluster.kinds[k].links, op, nbytes, of) for k in of.kinds]
    )


def _of_kind(network: Network, links: Links, op: str, nbytes: float, of: RankGroup) -> float:
    if op in HOST_COPIES:
        return links.host_latency + nbytes / links.host_bandwidth
    if of.ranks == 1:
        return 0.0
    route = "next" if op == "p2p" else law_of(op).route
    match route:
        case "pairs":
            return _all_to_all(network, links, nbytes, of)
        case "next":
            return _point_to_point(network, links, nbytes, of)
        case "ring" if links.communication == "nccl":
            bandwidth = bus_bandwidth(network, links, of)
            ranks = nccl.Ranks(
                of.ranks, of.nodes, links.intra_kind, bandwidth, _network(network, links, of)
            )
            return nccl.seconds(links.nccl, op, nbytes, ranks)
        case "ring":
            return _ring(network, links, law_of(op).rounds, nbytes, of)
        case "host":
            raise AssertionError("copies to the host are timed above")
        case _:
            assert_never(route)


def bus_bandwidth(network: Network, links: Links, of: RankGroup) -> float:
    """Return the bytes/s of a ring's slowest link.

    A ring crosses to another node once per node, and all its ranks of one node share the crossing, each with its part
    of the node's NICs: bus bandwidth = min(NVLink, NICs x rate), as in SimAI (https://github.com/aliyun/SimAI).
    """
    intra = links.intra_bandwidth / of.intra_factor
    if of.nodes == 1:
        return intra
    between = _network(network, links, of)
    return (
        between if of.most == 1 else min(between, intra)
    )  # with one rank per node no link within a node is used


def _network(network: Network, links: Links, of: RankGroup) -> float:
    """Return the bytes/s between two nodes of a group; a ring stays on its rails, as NCCL changes them over NVLink."""
    per_device = (
        links.inter_bandwidth
        / of.inter_factor
        / (network.oversubscription if network.rails == 1 else 1.0)
    )
    return of.least * per_device


def _ring(network: Network, links: Links, rounds: int, nbytes: float, of: RankGroup) -> float:
    """Return a ring's seconds: rounds * (n - 1) hops, and rounds * (n - 1) / n of the bytes over its slowest link."""
    hops, between = rounds * (of.ranks - 1), rounds * (of.nodes - 1)
    latency = (hops - between) * links.intra_latency + between * links.inter_latency
    share = rounds * (of.ranks - 1) / of.ranks
    return latency + share * nbytes / bus_bandwidth(network, links, of)


def _point_to_point(network: Network, links: Links, nbytes: float, of: RankGroup) -> float:
    """Return the seconds of one step over one link; with NCCL of a ring of one step, the faster of LL and Simple."""
    bandwidth = (
        _one_link(network, links, of) if of.nodes > 1 else links.intra_bandwidth / of.intra_factor
    )
    if links.communication == "ring":
        return _start(links, of, nccl.SIMPLE) + nbytes / bandwidth
    flagged = min(bandwidth * links.nccl.ll_fraction, links.nccl.ll_max[min(of.nodes, 3) - 1])
    return min(
        _start(links, of, nccl.LL) + nbytes / flagged,
        _start(links, of, nccl.SIMPLE) + nbytes / bandwidth,
    )


def _all_to_all(network: Network, links: Links, nbytes: float, of: RankGroup) -> float:
    """Return the seconds in which every rank sends 1 / n of its bytes to each other one.

    It sends to ranks of its node and of others at once, over separate links.
    """
    near = (of.least if of.nodes > 1 else of.ranks) - 1
    within = near / of.ranks * nbytes / (links.intra_bandwidth / of.intra_factor)
    between = (
        (of.ranks - 1 - near) / of.ranks * nbytes / _one_link(network, links, of)
        if of.nodes > 1
        else 0.0
    )
    return _start(links, of, nccl.SIMPLE) + max(within, between)


def _one_link(network: Network, links: Links, of: RankGroup) -> float:
    """Return the bytes/s of one device's part of its node's NICs."""
    through_spine = network.rails == 1 or of.changes_rail
    return (
        links.inter_bandwidth
        / of.inter_factor
        / (network.oversubscription if through_spine else 1.0)
    )


def _start(links: Links, of: RankGroup, protocol: int) -> float:
    """Return the seconds before the first byte of one step arrives."""
    if links.communication == "ring":
        return links.inter_latency if of.nodes > 1 else links.intra_latency
    return nccl.step_latency(links.nccl, links.intra_kind, of.nodes > 1, protocol)
