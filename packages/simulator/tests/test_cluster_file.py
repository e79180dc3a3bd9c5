"""Clusters from files: what they give, and what is refused, each with file, keys and what would be right."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from packages.simulator.tests.toys import changed, toy
from piper_ir.ground.errors import ClusterError
from piper_simulator import SlowLink, load_cluster
from piper_simulator.cluster.checks import KeyPath
from piper_simulator.cluster.cluster_file import SCHEMA, read_cluster
from piper_simulator.cluster.named import DEVICES
from piper_simulator.cluster.stacks import STACKS, Stack
from tests.helpers.cases import each_case

LAB = """
name = "lab"
device = "h100-80g-sxm"
notes = "as ordered"

[nodes]
count = 4
devices = 8

[links.inter]
kind = "roce"
nics_per_node = 4
rails = 4
oversubscription = 2

[[slow_ranks]]
rank = 5
factor = 1.2

[[slow_links]]
nodes = [0, 3]
factor = 2.5
"""
ROW = """
[[kernel]]
kind = "matmul"
dtype = "bfloat16"
seconds = 1e-4
source = "here"
shape = [64, 64, 32]
"""
WHOLE = """
[device]
name = "toy"
peak_flops = { float32 = 1e12 }
memory_bandwidth = 1e11
memory_bytes = 1_000_000_000
sms = 10
[nodes]
count = 2
[links]
intra = { kind = "pcie", bandwidth = 1e10, latency = 1e-6 }
inter = { bandwidth = 1e9, latency = 1e-5 }
"""
STACK = """
stack = "liger"
device = "h100-80g-sxm"
[attention.flash-3]
source = "arXiv 2407.08608: up to 740 TFLOP/s in FP16, 75 % of an H100"
hopper = [0.75, 0.6]
[stacks.liger]
attention = "flash-3"
lowering = "one kernel"
optimizer = "foreach"
fused = ["norm", "loss"]
saved = "what autograd saves"
overlap = ["gradient buckets"]
source = "here"
"""
MIXED = """
name = "mixed"
[links.inter]
bandwidth = 20e9
[[nodes]]
count = 2
devices = 4
device = "a100-80g-sxm"
[[nodes]]
count = 3
devices = 4
device = { base = "h100-80g-sxm", memory_bytes = 1000 }
[nodes.links.inter]
nics_per_node = 2
latency = 1e-5
[[slow_ranks]]
rank = 19
factor = 2
"""


def written(folder: Path, text: str, name: str = "c.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_on_a_built_in_device(tmp_path: Path) -> None:
    cluster = load_cluster(str(written(tmp_path, LAB)))
    h100 = load_cluster("h100x8*4")
    assert (cluster.name, cluster.device.name, cluster.devices, cluster.warnings) == (
        "lab",
        "h100-80g-sxm",
        32,
        ("lab: as ordered",),
    )
    by_the_file = {
        "inter_bandwidth": h100.links.inter_bandwidth / 2,  # 4 NICs for 8 devices
        "inter_kind": "roce",
        "rails": 4,
        "oversubscription": 2,
        "slow_ranks": {5: 1.2},
        "slow_links": (SlowLink(0, 3, 2.5),),
    }
    assert cluster == changed(h100, **by_the_file)


def test_nodes_of_two_devices(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, MIXED))
    a100, h100 = DEVICES["a100-80g-sxm"], DEVICES["h100-80g-sxm"]
    assert (cluster.name, cluster.node_count, cluster.devices, cluster.slow_ranks) == (
        "mixed",
        5,
        20,
        {19: 2},
    )
    assert [cluster.kind_of(rank) for rank in (0, 7, 8, 19)] == [0, 0, 1, 1]
    assert cluster.of(0) == a100.device and cluster.of(8) == replace(h100.device, memory_bytes=1000)
    assert cluster.links_of(0) == replace(a100.links, inter_bandwidth=20e9)
    assert cluster.links_of(8) == replace(h100.links, inter_bandwidth=10e9, inter_latency=1e-5)
    assert load_cluster(written(tmp_path, json.dumps(tomllib.loads(MIXED)), "c.json")) == cluster


def test_json_says_the_same(tmp_path: Path) -> None:
    same = written(tmp_path, json.dumps(tomllib.loads(LAB)), "c.json")
    assert load_cluster(same) == load_cluster(written(tmp_path, LAB))


def test_a_device_without_a_base(tmp_path: Path) -> None:
    assert load_cluster(written(tmp_path, WHOLE, "own.toml")) == toy(
        "toy",
        {"float32": 1e12},
        1e11,
        10**9,
        1e10,
        1e-6,
        1e9,
        1e-5,
        nodes=2,
        sms=10,
        intra_kind="pcie",
    )
    assert load_cluster(tmp_path / "own.toml").name == "own", "a file without a name has its own"


def test_a_base_with_other_constants(tmp_path: Path) -> None:
    text = '[device]\nbase = "a100-40g-sxm"\nname = "capped"\nmatmul_fraction = 0.5\n'
    base, capped = DEVICES["a100-40g-sxm"].cluster(), load_cluster(written(tmp_path, text))
    assert capped == changed(base, name="capped", matmul_fraction=0.5)
    relinked = load_cluster(written(tmp_path, text + "[links.intra]\nbandwidth = 1e11\n"))
    assert base.links.messages and relinked.links.messages == (), (
        "they were measured on other links"
    )


def test_a_stack_and_the_steps_of_a_memory(tmp_path: Path) -> None:
    steps = "memory_steps = [[0, 0.3], [1e6, 0.6]]\n"
    cluster = load_cluster(
        written(tmp_path, 'stack = "inductor"\n' + WHOLE.replace("sms = 10\n", steps))
    )
    assert cluster.device.stack == STACKS["inductor"] and cluster.device.memory_steps == (
        (1e6, 0.6),
        (0, 0.3),
    )


def test_a_stack_of_the_file(tmp_path: Path) -> None:
    """A stack has the fields of the built-in ones; its attention kernel is the file's or a built-in one."""
    liger = Stack(
        "liger",
        "flash-3",
        {"hopper": (0.75, 0.6)},
        "one kernel",
        "foreach",
        ("norm", "loss"),
        "what autograd saves",
        ("gradient buckets",),
        "here",
    )
    h100 = DEVICES["h100-80g-sxm"]
    cluster = load_cluster(written(tmp_path, STACK))
    assert cluster == changed(h100.cluster(), stack=liger)
    as_json = written(tmp_path, json.dumps(tomllib.loads(STACK)), "c.json")
    assert load_cluster(as_json) == cluster
    on_nodes = MIXED.lstrip() + STACK.split('sxm"\n')[1]
    kinds = load_cluster(written(tmp_path, 'stack = "liger"\n' + on_nodes)).kinds
    assert [kind.device.stack for kind in kinds] == [liger, liger], "a stack is of the whole file"
    known = load_cluster(
        written(tmp_path, STACK.replace('= "flash-3"', '= "flash-2"'))
    ).device.stack
    assert known is not None and known.attention_fraction == STACKS["eager"].attention_fraction
    other = load_cluster(written(tmp_path, STACK.replace('stack = "liger"', 'stack = "eager"')))
    assert other.device.stack == STACKS["eager"], "a stack that no key names changes nothing"
    assert load_cluster(written(tmp_path, STACK.replace('stack = "liger"', ""))) == h100.cluster()


def test_model_constants_and_table_of_messages(tmp_path: Path) -> None:
    written(tmp_path, "# source\nop,ranks,nodes,bytes,seconds\nall_reduce,8,1,1024,2e-5\n", "m.csv")
    text = 'device = "h100-80g-sxm"\n[nodes]\ndevices = 8\n[communication]\nmodel = "nccl"\nmessages = "m.csv"\n'
    cluster = load_cluster(
        written(tmp_path, text + "nccl = { ll_max = [1e11, 1e10, 1e9], start_s = 1e-5 }\n")
    )
    assert cluster.links.communication == "nccl"
    assert cluster.links.nccl == replace(
        DEVICES["h100-80g-sxm"].links.nccl, ll_max=(1e11, 1e10, 1e9), start_s=1e-5
    )
    found = cluster.links.table.of_comm("all_reduce", 1024, 8, 1)
    assert found is not None and (found.seconds, found.source) == (2e-5, "table")


WRONG = {
    "unknown key": (
        LAB + "factr = 2\n",
        r"slow_links\[0\].factr: no such key; known here: nodes, factor",
    ),
    "unknown key of a table": (
        LAB.replace("rails", "rail"),
        "links.inter.rail: no such key; known here: kind, bandwidth",
    ),
    "zero bandwidth": (
        WHOLE.replace("1e9, latency", "0, latency"),
        "links.inter.bandwidth: 0 stands here; a number above 0",
    ),
    "negative number": (
        WHOLE.replace("1e-6", "-1e-6"),
        "links.intra.latency: -1e-06 stands here; a number from 0 on",
    ),
    "not finite": (WHOLE.replace("1e11", "inf"), "device.memory_bandwidth: inf stands here"),
    "text for a number": (
        WHOLE.replace("1e11", '"fast"'),
        "device.memory_bandwidth: 'fast' stands here; a number above 0",
    ),
    "truth for a number": (
        LAB.replace("count = 4", "count = true"),
        "nodes.count: True stands here; a whole number from 1 on",
    ),
    "broken number": (
        LAB.replace("count = 4", "count = 4.5"),
        "nodes.count: 4.5 stands here; a whole number",
    ),
    "number for a table": ("nodes = 3\n", "nodes: 3 stands here; a table of keys and values"),
    "table for a list": (
        "slow_ranks = { rank = 1 }\n",
        "slow_ranks: .* stands here; a list is needed",
    ),
    "number for text": ("device = 3\n", "device: 3 stands here; a table"),
    "missing device": (
        "[nodes]\ncount = 2\n",
        'device is missing: device = "NAME" with one of a100-80g-sxm',
    ),
    "unknown device": ('device = "h900"\n', "device: no device 'h900'; known: a100-80g-sxm"),
    "unknown base": ('[device]\nbase = "h900"\n', "device.base: no device 'h900'"),
    "nameless device": ("[device]\nsms = 3\n", "device: name is missing"),
    "incomplete device": (
        WHOLE.replace("memory_bandwidth = 1e11", "").replace(", latency = 1e-5", ""),
        "device.memory_bandwidth, links.inter.latency missing",
    ),
    "unknown kind": (
        LAB.replace("roce", "string"),
        "links.inter.kind: 'string' stands here; one of 'infiniband', 'roce'",
    ),
    "rails without NICs": (
        LAB.replace("rails = 4", "rails = 5"),
        "links.inter.rails: 5 rails with 4 NICs per node",
    ),
    "slow rank that is not there": (
        LAB.replace("rank = 5", "rank = 32"),
        "rank 32 is not there; the ranks are 0 to 31",
    ),
    "fast slow rank": (
        LAB.replace("1.2", "0.5"),
        r"slow_ranks\[0\].factor: 0.5 stands here; a number from 1 on",
    ),
    "slow rank twice": (
        LAB + "[[slow_ranks]]\nrank = 5\nfactor = 2\n",
        r"slow_ranks\[1\]: rank 5 is there twice",
    ),
    "slow rank without a factor": (
        LAB.replace("factor = 1.2", ""),
        r"slow_ranks\[0\]: factor is missing",
    ),
    "link between nodes that are not there": (
        LAB.replace("[0, 3]", "[0, 4]"),
        "node 4 is not there; the nodes are 0 to 3",
    ),
    "link of three nodes": (
        LAB.replace("[0, 3]", "[0, 3, 1]"),
        r"slow_links\[0\].nodes: 3 of them; 2 are needed",
    ),
    "kernel without seconds": (
        LAB + ROW.replace("seconds = 1e-4", ""),
        r"kernel\[0\]: seconds missing",
    ),
    "kernel of no size": (
        LAB + ROW.replace("shape = [64, 64, 32]", ""),
        r"kernel\[0\]: no size given; exactly one of shape, bytes",
    ),
    "kernel of two sizes": (
        LAB + ROW + "bytes = 7\n",
        r"kernel\[0\]: shape and bytes given; exactly one of shape, bytes, flops",
    ),
    "kernel of two dimensions": (
        LAB + ROW.replace("64, 64", "64"),
        r"kernel\[0\].shape: \[64, 32\] stands here, of kind 'matmul'; \[M, N",
    ),
    "shape of a norm": (
        LAB + ROW.replace("matmul", "norm"),
        r"of kind 'norm'; give bytes or flops; only matmul, attention, loss have",
    ),
    "no such kind of kernel": (
        LAB + ROW.replace("matmul", "gemm"),
        r"kernel\[0\].kind: 'gemm' stands here; one of 'matmul', ",
    ),
    "dtype of a kernel": (
        LAB + ROW.replace("bfloat16", "bf16"),
        r"kernel\[0\].dtype: 'bf16' stands here; one of 'float64', ",
    ),
    "kernel in no time": (
        LAB + ROW.replace("1e-4", "0"),
        r"kernel\[0\].seconds: 0 stands here; a number above 0 is needed",
    ),
    "kernel of a negative shape": (
        LAB + ROW.replace("32]", "-1]"),
        r"kernel\[0\].shape\[2\]: -1 stands here; a whole number from 1",
    ),
    "key of a kernel": (
        LAB + ROW + "time = 1\n",
        r"kernel\[0\].time: no such key; known here: kind, op, dtype",
    ),
    "kernel twice": (
        LAB + ROW + ROW,
        r"kernel\[1\]: measured in kernel\[0\] already; one of them is needed",
    ),
    "link twice": (
        LAB + "[[slow_links]]\nnodes = [3, 0]\nfactor = 2\n",
        "the link of nodes 3 and 0 is there twice",
    ),
    "unknown model": (
        'device = "h100-80g-sxm"\n[communication]\nmodel = "fast"\n',
        "communication.model: 'fast' stands here",
    ),
    "missing table": (
        'device = "h100-80g-sxm"\n[communication]\nmessages = "no.csv"\n',
        "communication.messages: cannot read",
    ),
    "unknown stack": (
        'stack = "numpy"\n' + LAB,
        "stack: 'numpy' stands here; one of 'eager', 'inductor', 'megatron'",
    ),
    "a stack that lacks fields": (
        LAB + '[stacks.mine]\nattention = "flash-2"\n',
        "stacks.mine: lowering, optimizer, fused, saved, overlap, source missing",
    ),
    "an unknown field of a stack": (
        STACK.replace("fused", "joined"),
        "stacks.liger.joined: no such key; known here: attention, lowering, optimizer, fused",
    ),
    "an unknown stack beside an own one": (
        STACK.replace('stack = "liger"', 'stack = "tiger"'),
        "stack: 'tiger' stands here; one of 'eager', 'inductor', 'megatron', 'liger' is needed",
    ),
    "an unknown attention kernel": (
        STACK.replace('attention = "flash-3"', 'attention = "own"'),
        "stacks.liger.attention: no kernel 'own'; known: flash-2, flash-3",
    ),
    "an unknown kind that is fused": (
        STACK.replace('"norm"', '"gemm"'),
        r"stacks.liger.fused\[0\]: 'gemm' stands here; one of 'matmul', 'attention'",
    ),
    "an unknown lowering": (
        STACK.replace("one kernel", "jax"),
        "lowering: 'jax' stands here; one of 'torch', 'one kernel' is needed",
    ),
    "attention in one direction": (
        STACK.replace("[0.75, 0.6]", "[0.75]"),
        "attention.flash-3.hopper: 1 of them; 2 are needed",
    ),
    "attention above the peak": (
        STACK.replace("0.75", "75"),
        r"attention.flash-3.hopper\[0\]: 75 stands here; a fraction, above 0 and at most 1",
    ),
    "a stack with a built-in name": (
        STACK.replace("liger", "eager"),
        "stacks.eager: the name is built in; give yours another one than eager, inductor, megatron",
    ),
    "an attention kernel with a built-in name": (
        STACK.replace("flash-3", "flash-2"),
        "attention.flash-2: the name is built in; give yours another one than flash-2",
    ),
    "more than the peak": (
        WHOLE.replace("sms = 10", "matmul_fraction = 1.5"),
        "device.matmul_fraction: 1.5 stands here; a fraction,",
    ),
    "more than the memory's bandwidth": (
        WHOLE.replace("sms = 10", "memory_fraction = 90"),
        "memory_fraction: 90 stands here; a fra",
    ),
    "no fraction at all": (
        WHOLE.replace("sms = 10", "memory_fraction = 0"),
        "memory_fraction: 0 stands here; a number above 0",
    ),
    "an allocator that saves": (
        WHOLE.replace("sms = 10", "allocator_factor = 0.5"),
        "device.allocator_factor: 0.5 stands here; a number from 1 on",
    ),
    "memory that reaches nothing": (
        WHOLE.replace("sms = 10", "memory_steps = [[10, 0]]"),
        r"memory_steps\[0\]\[1\]: 0 stands here; a number above 0",
    ),
    "unknown generation": (
        WHOLE.replace("sms = 10", 'generation = "fermi"'),
        "device.generation: 'fermi' stands here; one of",
    ),
    "no nodes": ('device = "h100-80g-sxm"\nnodes = []\n', "nodes: none stand here"),
    "nodes of nothing": (
        "[[nodes]]\ncount = 2\n",
        r"nodes\[0\]: device is missing, here or for the whole file",
    ),
    "nodes of an unknown device": (
        MIXED.replace("a100-80g-sxm", "a1"),
        r"nodes\[0\].device: no device 'a1'; known: a100-80g",
    ),
    "nodes with unknown keys": (
        MIXED.replace("latency", "delay"),
        r"nodes\[1\].links.inter.delay: no such key; known here: kind",
    ),
    "nodes with rails": (
        MIXED.replace("latency", "rails"),
        r"nodes\[1\].links.inter.rails: no such key",
    ),
    "nodes of several sizes": (
        MIXED.replace("devices = 4", "devices = 8", 1),
        "4 devices per node of h100-80g-sxm and 8 of a100",
    ),
    "one table for two devices": (
        MIXED + '[communication]\nmessages = "m.csv"\n',
        "messages: a table holds for one kind of device",
    ),
    "one table of kernels for two devices": (
        MIXED + ROW,
        "kernel: a table holds for one kind of device",
    ),
    "devices beside a CPU": (MIXED.replace("h100-80g-sxm", "cpu-local"), "no device 'cpu-local'"),
    "not TOML": ("device = \n", "not TOML"),
    "empty name": (
        'name = " "\ndevice = "h100-80g-sxm"\n',
        "name: ' ' stands here; text is needed",
    ),
}


@each_case(("text", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(
        tmp_path, text if "slow_ranks = {" not in text else 'device = "h100-80g-sxm"\n' + text
    )
    with pytest.raises(ClusterError, match=message) as found:
        load_cluster(path)
    assert str(found.value).startswith(f"{path}: ")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read the cluster file .*none\.toml"):
        load_cluster(tmp_path / "none.toml")
    with pytest.raises(ClusterError, match="not JSON: the key 'device' stands twice in one object"):
        load_cluster(written(tmp_path, '{"device": "a", "device": "b"}', "c.json"))


@each_case(
    ("lines", "message"),
    [
        ("", "the first line is missing; op,ranks,nodes,bytes,seconds is needed"),
        ("op,bytes\n", "the first line is op,bytes"),
        (
            "op,ranks,nodes,bytes,seconds\nall_reduce,8,1,x,1e-5\n",
            "line 2: bytes: 'x' stands here; a whole number",
        ),
        (
            "op,ranks,nodes,bytes,seconds\nall_reduce,8,1,8,0\n",
            "line 2: seconds: 0 stands here; a number above 0",
        ),
        (
            "op,ranks,nodes,bytes,seconds\nall,8,1,8,1\n",
            "line 2: op: 'all' stands here; one of p2p, all_reduce",
        ),
        ("op,ranks,nodes,bytes,seconds\nall_reduce,8,1,8\n", "line 2: 4 values; 5 are needed"),
        (
            "op,ranks,nodes,bytes,seconds\np2p,2,1,8,1\np2p,2,1,8,2\n",
            "line 3: measured on a line before",
        ),
    ],
)
def test_what_is_wrong_in_a_table_of_messages(tmp_path: Path, lines: str, message: str) -> None:
    written(tmp_path, lines, "m.csv")
    with pytest.raises(ClusterError, match=message):
        load_cluster(
            written(tmp_path, 'device = "h100-80g-sxm"\n[communication]\nmessages = "m.csv"\n')
        )


def test_every_built_in_device_is_a_file_with_sources() -> None:
    data = Path(read_cluster.__code__.co_filename).parent / "data"
    files = sorted(set(data.glob("*.toml")) - {data / "stacks.toml"})
    assert {f.stem for f in files} == {*DEVICES, "cpu-local"}
    for path in files:
        found = SCHEMA(tomllib.loads(path.read_text()), KeyPath(path.name))
        assert {"links", "host"} < found["sources"].keys(), path
        assert found["name"] == path.stem


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    written(tmp_path, "op,ranks,nodes,bytes,seconds\n", "all_reduce.csv")
    cluster = load_cluster(written(tmp_path, text.split("```toml\n")[1].split("```")[0]))
    assert (cluster.name, cluster.devices, cluster.slow_ranks, cluster.device.stack) == (
        "lab",
        32,
        {5: 1.2},
        STACKS["eager"],
    )
    priced = load_cluster(
        written(
            tmp_path,
            text.split("```toml\n")[2].split("```")[0] + "[nodes]\ncount = 1\ndevices = 8\n",
        )
    )
    assert priced.device.price_per_hour == 2.5
    own = load_cluster(written(tmp_path, text.split("```toml\n")[4].split("```")[0]))
    assert own.device.stack is not None and own.device.stack.name == "liger"
    two = load_cluster(written(tmp_path, text.split("```toml\n")[3].split("```")[0]))
    links = [(k.device.name, k.links.inter_bandwidth) for k in two.kinds]
    assert links == [("a100-80g-sxm", 23.5e9), ("h100-80g-sxm", 25e9)]
    assert [two.links_of(rank) for rank in (0, 64)] == [k.links for k in two.kinds]
