"""Clusters by name, and what is refused."""

from dataclasses import replace

import pytest

from piper_ir.errors import ClusterError
from piper_simulator import cpu_local, load_cluster
from piper_simulator.clusters import DEVICES


@pytest.mark.parametrize(
    ("name", "full", "devices"),
    [
        ("h100-80g-sxm:8*4", "h100-80g-sxm:8*4", 32),
        ("h100x8", "h100-80g-sxm:8", 8),
        ("H100x8*4", "h100-80g-sxm:8*4", 32),
        ("a100x8", "a100-80g-sxm:8", 8),
        ("a100-80g-sxm:1", "a100-80g-sxm:1", 1),
    ],
)
def test_names(name: str, full: str, devices: int) -> None:
    cluster = load_cluster(name)
    assert (cluster.name, cluster.devices) == (full, devices)
    assert load_cluster(cluster.name) == cluster


@pytest.mark.parametrize("name", ["", "h100", "h100x0", "x8", "v100x8", "h100x8*", "h100-80g-sxm", "cpu-local:4", "h100x8*0"])
def test_an_unknown_name_lists_what_is_known(name: str) -> None:
    with pytest.raises(ClusterError, match="unknown cluster") as found:
        load_cluster(name)
    for known in (*DEVICES, "a100x8", "h100x8*4", "cpu-local", "<device>:<per node>[*<nodes>]"):
        assert known in str(found.value)


def test_ranks_fill_nodes_in_order() -> None:
    assert [load_cluster("h100x8*2").node_of(r) for r in (0, 7, 8, 15)] == [0, 0, 1, 1]


def test_cpu_local_says_what_was_measured() -> None:
    assert load_cluster("cpu-local").name == "cpu-local"
    assert "assumed, not measured: matmul_flops, memory_bandwidth, link_bandwidth" in load_cluster("cpu-local").notes
    some = cpu_local(matmul_flops=1e9, launch_s=1e-6)
    assert some.peak("float32") == 1e9 and some.launch_s == 1e-6
    assert "matmul_flops" not in some.notes and "link_latency" in some.notes
    whole = cpu_local(
        matmul_flops=1e9, memory_bandwidth=2e9, link_bandwidth=3e9, link_latency=0.0, launch_s=0.0, host_issue_s=0.0
    )
    assert whole.notes == "" and whole.warnings == ()


def test_peaks_by_dtype() -> None:
    a100 = load_cluster("a100x8")
    assert a100.peak("bfloat16") == 312e12
    assert a100.peak("int8") == min(a100.peak_flops.values()), "not known: the slowest"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops": {}}, "peak_flops is empty"),
        ({"memory_bandwidth": 0.0}, "memory_bandwidth is 0.0; a positive number"),
        ({"peak_flops": {"float32": float("nan")}}, r"peak_flops\[float32\] is nan"),
        ({"launch_s": -1.0}, "launch_s is -1.0; it cannot be negative"),
        ({"nodes": 0}, "nodes is 0"),
    ],
)
def test_impossible_constants_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        replace(load_cluster("h100x8"), **change)  # type: ignore[arg-type]  # fields by name
