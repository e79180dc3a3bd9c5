"""Add up the memory of hosts: the peaks of the ranks of each node."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ir.tools import size_text
from piper_simulator.cluster.cluster import Cluster


def host_bytes_by_node(by_rank: Sequence[int], cluster: Cluster | None) -> list[int]:
    """Return the bytes that the ranks of each node have on their host, each at its own peak.

    Without a cluster each rank has a host of its own.
    """
    each = 1 if cluster is None else cluster.per_node
    return [sum(by_rank[k : k + each]) for k in range(0, len(by_rank), each)]


def host_notes(by_rank: Sequence[int], cluster: Cluster | None) -> list[str]:
    """Return a warning of the fullest node whose memory is too small for the tensors that wait there."""
    if cluster is None:
        return []
    over = []
    for node, needs in enumerate(host_bytes_by_node(by_rank, cluster)):
        limit = cluster.links_of(node * cluster.per_node).host_memory_bytes
        if limit and needs > limit:
            over.append((needs - limit, node, needs, limit))
    if not over:
        return []
    _, node, needs, limit = max(over)
    return [
        f"the host of node {node} needs {size_text(needs)} for tensors of its devices, and has {size_text(limit)}"
    ]
