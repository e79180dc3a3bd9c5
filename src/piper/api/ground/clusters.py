"""Find the cluster that a caller means: by a name, a cluster, or nothing."""

from __future__ import annotations

from pathlib import Path

from piper_simulator import CPU, Cluster, load_cluster


def cluster_named(name: str) -> Cluster:
    """Return a cluster by its name ("cpu-local" is this machine, measured now); raise ClusterError if unknown."""
    return local_cluster() if name == CPU else load_cluster(name)


def chosen_cluster(cluster: str | Path | Cluster | None) -> Cluster | None:
    """Return the given or named cluster; None stays None. Raises ClusterError for an unknown name."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    return cluster_named(cluster) if isinstance(cluster, str) else load_cluster(cluster)


def local_cluster() -> Cluster:
    """Return this machine's CPU as a cluster, measured now."""
    from piper.api.ground.this_machine import measured_cpu  # which imports torch

    return measured_cpu()
