"""Clusters on which small models wait for devices and messages, as large ones do on fast devices."""

from dataclasses import replace

from piper_simulator import Cluster, load_cluster


def slow_devices(name: str, slower: float = 1000) -> Cluster:
    """Return a cluster whose devices are slower, and whose hosts take no time."""
    return load_cluster(name).each_device(
        lambda device: replace(
            device,
            launch_s=0.0,
            host_issue_s=0.0,
            memory_bandwidth=device.memory_bandwidth / slower,
            peak_flops={dtype: rate / slower for dtype, rate in device.peak_flops.items()},
        )
    )
