"""Clusters by name, and what is refused."""

from pathlib import Path

import pytest

from packages.simulator.tests.toys import changed
from piper_ir.ground.errors import ClusterError
from piper_simulator import SlowLink, cpu_local, load_cluster
from piper_simulator.cluster.named import DEVICES, product_cluster
from tests.helpers.cases import each_case


@each_case(
    ("name", "full", "devices"),
    [
        ("h100-80g-sxm:8*4", "h100-80g-sxm:8*4", 32),
        ("h100x8", "h100-80g-sxm:8", 8),
        ("H100x8*4", "h100-80g-sxm:8*4", 32),
        ("a100x8", "a100-80g-sxm:8", 8),
        ("a100-80g-sxm:1", "a100-80g-sxm:1", 1),
        ("a100-40gx8", "a100-40g-sxm:8", 8),
        ("h200x8", "h200-141g-sxm:8", 8),
        ("b200x8*2", "b200-sxm:8*2", 16),
        ("h200x8*2@eager", "h200-141g-sxm:8*2@eager", 16),
    ],
)
def test_names(name: str, full: str, devices: int) -> None:
    cluster = load_cluster(name)
    assert (cluster.name, cluster.devices) == (full, devices)
    assert load_cluster(cluster.name) == cluster
    assert (cluster.device.stack is not None) == ("@" in name)


@each_case(
    ("name", "says"),
    [
        ("", "a device is missing"),
        ("h200", "did you mean h200x8 (h200-141g-sxm)?"),
        ("h100-80g-sxm", "did you mean h100-80g-sxm:8?"),
        ("h100x0", "h100x0 has 0 devices; at least 1"),
        ("h100x8*0", "has 0 nodes; at least 1"),
        ("8xh100", "write h100x8"),
        ("h100x8 * 2", "without spaces, 'h100x8*2'"),
        ("x8", "there is no device 'x8'"),
        ("v100x8", "did you mean h100x8 (h100-80g-sxm)?"),
        ("tpux8", "there are a100, a100-40g, h100"),
        ("h100x8*", "the number of nodes is missing behind 'h100x8*'"),
        ("h100x²", "with whole numbers"),
        ("h100x8+", "a device is missing"),
        ("cpu-local:4", "cpu-local stands alone"),
        ("cpu-local@eager", "cpu-local stands alone"),
        ("h100x8@", "a stack is missing behind '@'"),
        ("h100x8@foo", "for h100-80g-sxm there are eager, inductor, megatron, hopper-"),
        ("h100x8@hoper-nemo", "did you mean hopper-nemo?"),
        ("a100x8@eager+h100x8", "one stack is named, at the end"),
    ],
)
def test_the_wrong_part_of_a_name_is_said(name: str, says: str) -> None:
    with pytest.raises(ClusterError, match="unknown cluster") as found:
        load_cluster(name)
    text = str(found.value)
    assert says in text and "Names are such as h100x8" in text and len(text) < 540, text


def test_a_stacks_own_file_follows_built_in_devices(tmp_path: Path) -> None:
    own = tmp_path / "Mine.toml"
    own.write_text('base = "hopper-torch"\nsource = "ours"\nseen = 0.03\n', encoding="utf-8")
    stack = load_cluster(f"H100x8*2@{own}").device.stack
    built_in = load_cluster("h100x8*2@hopper-torch").device.stack
    assert stack is not None and built_in is not None
    assert (stack.name, stack.seen, stack.constants) == ("Mine", 0.03, built_in.constants)
    with pytest.raises(ClusterError, match=r"cannot read the stack .*none\.toml"):
        load_cluster(f"h100x8@{tmp_path / 'none.toml'}")
    with pytest.raises(ClusterError, match=r"follows built-in devices, as in h100x8@mine\.toml"):
        load_cluster(f"v100x8@{own}")


def test_a_device_by_the_name_that_its_driver_has() -> None:
    h200 = product_cluster("NVIDIA H200", 2)
    assert h200 == load_cluster("h200x2") and h200.name == "h200-141g-sxm:2"
    other = product_cluster("Some GPU, 24 GB", 1)
    assert other.name == "some-gpu-24-gb:1" and other.device.peak("bfloat16") == load_cluster(
        "a100x1"
    ).device.peak("bfloat16")
    assert other.warnings == (
        "some-gpu-24-gb:1: nothing is known of a Some GPU, 24 GB; computed as a100-80g-sxm",
    )


def test_ranks_fill_nodes_in_order() -> None:
    assert [load_cluster("h100x8*2").node_of(r) for r in (0, 7, 8, 15)] == [0, 0, 1, 1]


def test_cpu_local_says_what_was_measured() -> None:
    assert load_cluster("cpu-local").name == "cpu-local"
    assert (
        "assumed, not measured: matmul_flops, memory_bandwidth, link_bandwidth"
        in load_cluster("cpu-local").device.notes
    )
    some = cpu_local(matmul_flops=1e9, launch_s=1e-6)
    assert some.device.peak("float32") == 1e9 and some.device.launch_s == 1e-6
    assert "matmul_flops" not in some.device.notes and "link_latency" in some.device.notes
    whole = cpu_local(
        matmul_flops=1e9,
        memory_bandwidth=2e9,
        link_bandwidth=3e9,
        link_latency=0.0,
        launch_s=0.0,
        host_issue_s=0.0,
    )
    assert whole.device.notes == "" and whole.warnings == ()


@each_case(
    ("name", "bf16", "matmul", "memory", "sms", "intra", "between"),
    [
        ("a100-80g-sxm", 312, 271.2, 2.0, 108, 231, 23.5),
        ("h100-80g-sxm", 989, 794.5, 3.35, 132, 370, 48.5),
        ("h200-141g-sxm", 989, 794.5, 4.8, 132, 366, 48.5),
        ("b200-sxm", 2250, 1757, 8.0, 148, 682, 48.5),
    ],
)
def test_constants_are_those_of_their_sources(
    name: str, bf16: float, matmul: float, memory: float, sms: int, intra: float, between: float
) -> None:
    """The sources are named in the devices' files."""
    c = DEVICES[name]
    assert (c.device.peak("bfloat16") / 1e12, c.device.memory_bandwidth / 1e12, c.device.sms) == (
        bf16,
        memory,
        sms,
    )
    assert c.device.matmul_fraction * bf16 == pytest.approx(matmul, rel=2e-3)
    assert (c.links.intra_bandwidth / 1e9, c.links.inter_bandwidth / 1e9) == (intra, between)


def test_the_clusters_of_before_keep_the_plain_ring() -> None:
    """Results that were published with them rest on it (docs/decisions/0014)."""
    models = {name: c.links.communication for name, c in DEVICES.items()}
    nccl = ("a100-40g-sxm", "b200-sxm", "gb200-186g")
    assert models == dict.fromkeys(DEVICES, "ring") | dict.fromkeys(nccl, "nccl")
    assert cpu_local().links.communication == "ring"


def test_peaks_by_dtype() -> None:
    a100 = load_cluster("a100x8").device
    assert a100.peak("bfloat16") == 312e12
    assert a100.peak("int8") == min(a100.peak_flops.values()), "not known: the slowest"


@each_case(
    ("change", "message"),
    [
        ({"peak_flops": {}}, "peak_flops: 0 entries stand here; at least 1 is needed"),
        ({"memory_bandwidth": 0.0}, "memory_bandwidth: 0.0 stands here; a number from 1 on"),
        ({"peak_flops": {"float32": float("nan")}}, r"peak_flops.float32: nan stands here"),
        ({"launch_s": -1.0}, "launch_s: -1.0 stands here; a number from 0 on"),
        ({"nodes": 0}, r"nodes\[0\]: 0 stands here; a whole number from 1 on"),
        ({"intra_bandwidth": "fast"}, "intra_bandwidth: 'fast' stands here; a number from 1 on"),
        ({"intra_latency": None}, "intra_latency: None stands here; a number from 0 on"),
        ({"communication": "fast"}, "communication: 'fast' stands here; one of 'ring', 'nccl'"),
        ({"slow_ranks": {1: float("nan")}}, "slow_ranks.1: nan stands here; a number from 1 on"),
        ({"slow_ranks": {8: 2.0}}, "slow_ranks: rank 8 is not there; the ranks are 0 to 7"),
        (
            {"slow_links": (SlowLink(0, 1, 2.0),)},
            "slow_links: node 1 is not there; the nodes are 0 to 0",
        ),
        ({"oversubscription": 0.5}, "oversubscription: 0.5 stands here; a number from 1 on"),
    ],
)
def test_impossible_constants_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        changed(load_cluster("h100x8"), **change)
