"""Clusters for tests: made from a few numbers, or a given one with single constants changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from piper_simulator import Cluster, Device, Links, Network, NodeKind

_DEVICE, _LINKS, _NETWORK = (
    {f.name for f in fields(record)} for record in (Device, Links, Network)
)


def toy(
    name: str,
    peak_flops: Mapping[str, float],
    memory_bandwidth: float,
    memory_bytes: int,
    intra_bandwidth: float,
    intra_latency: float,
    inter_bandwidth: float,
    inter_latency: float,
    **more: Any,
) -> Cluster:
    """Return a cluster of one kind of device. `more` as in `changed`."""
    device = Device(name, peak_flops, memory_bandwidth, memory_bytes)
    links = Links(intra_bandwidth, intra_latency, inter_bandwidth, inter_latency)
    return changed(NodeKind(device, links).cluster(), **more)


def changed(cluster: Cluster, **values: Any) -> Cluster:
    """Return a cluster with other values, each wherever its field is: on all devices, all links, the network or the
    cluster. The value of `nodes` is a number of nodes."""
    for name, value in values.items():
        one = {name: value}
        if name == "nodes":
            cluster = replace(cluster, nodes=((value, cluster.device),))
        elif name in _DEVICE:
            cluster = cluster.each_device(lambda device, one=one: replace(device, **one))
        elif name in _LINKS and name not in _NETWORK:
            cluster = cluster.each_links(lambda links, one=one: replace(links, **one))
        elif name in _NETWORK:
            cluster = replace(cluster, network=replace(cluster.network, **one))
        else:
            cluster = replace(cluster, **one)
    return cluster


def beside(cluster: Cluster, first: int, count: int, other: Cluster) -> Cluster:
    """Return a cluster whose `count` nodes from `first` on have the devices and links of another one."""
    whole = changed(cluster, slow_ranks={}, slow_links=())
    parts = [(first, whole), (count, other), (cluster.node_count - first - count, whole)]
    per_node = cluster.per_node
    joined = Cluster.joined([changed(part, nodes=n, per_node=per_node) for n, part in parts if n])
    network = replace(
        joined.network,
        rails=cluster.network.rails,
        oversubscription=cluster.network.oversubscription,
    )
    return changed(
        replace(joined, network=network, label=cluster.label),
        slow_links=cluster.network.slow_links,
        slow_ranks=cluster.slow_ranks,
    )
