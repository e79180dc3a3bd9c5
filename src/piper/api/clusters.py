"""Clusters by what a caller gives: a name, a cluster, or nothing."""

from __future__ import annotations

from piper_simulator import CPU, Cluster, load_cluster


def cluster_named(name: str) -> Cluster:
    """Return a cluster by its name. "cpu-local" is this machine, which is measured now.

    ClusterError for an unknown name.
    """
    return local_cluster() if name == CPU else load_cluster(name)


def chosen_cluster(cluster: str | Cluster | None) -> Cluster | None:
    """Return the cluster that is given or named; None stays None. ClusterError for an unknown name."""
    return cluster_named(cluster) if isinstance(cluster, str) else cluster


def local_cluster() -> Cluster:
    """Return this machine's CPU as a cluster, measured now."""
    from piper.api.this_machine import measured_cpu  # which imports torch

    return measured_cpu()
