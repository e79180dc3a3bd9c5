"""Clusters from files: what they give, and what is refused, each with file, keys and what would be right."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from packages.simulator.tests.cluster_files import LAB, MIXED, STACK, WHOLE, WRONG
from packages.simulator.tests.toys import changed, toy
from piper_ir.ground.errors import ClusterError
from piper_simulator import SlowLink, load_cluster
from piper_simulator.cluster.checks import KeyPath
from piper_simulator.cluster.cluster_file import SCHEMA, read_cluster
from piper_simulator.cluster.named import DEVICES
from piper_simulator.cluster.stacks import STACKS, Stack
from tests.helpers.cases import each_case


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


@each_case(
    ("right", "wrong", "said"),
    [
        ("float32 = 1e12", "float32 = 989", "device.peak_flops = 989 is hardly in FLOP/s"),
        ("memory_bytes = 1_000_000_000", "memory_bytes = 80", "device.memory_bytes = 80 is hardly in bytes"),
        ("bandwidth = 1e10", "bandwidth = 370", "links.intra_bandwidth = 370 is hardly in bytes/s"),
    ],
)  # fmt: skip
def test_numbers_in_other_units_are_warned_of(
    tmp_path: Path, right: str, wrong: str, said: str
) -> None:
    assert load_cluster(written(tmp_path, WHOLE)).warnings == ()
    [warning] = load_cluster(written(tmp_path, WHOLE.replace(right, wrong, 1))).warnings
    assert said in warning


def test_a_mark_of_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    assert load_cluster(written(tmp_path, f"\ufeff{LAB}")) == load_cluster(
        written(tmp_path, LAB, "same.toml")
    )


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
