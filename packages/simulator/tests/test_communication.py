"""Messages: each formula by hand with NCCL's constants, the table, and where members of a group are."""

from dataclasses import replace

import pytest

from packages.simulator.tests.toys import changed
from piper_ir.program.costs import CommDuration, Duration
from piper_simulator import Cluster, SlowLink, load_cluster
from piper_simulator.cluster import nccl
from piper_simulator.cluster.nccl import LL, LL128, SIMPLE, Nccl, Ranks
from piper_simulator.durations.communication import RankGroup, by_formula, duration, rank_group
from tests.helpers.cases import each_case

US, GB, MIB, GIB = 1e-6, 1e9, 1 << 20, 1 << 30
EIGHT = Ranks(8, 1, "nvswitch", 231 * GB, 0.0)
TWO_NODES = Ranks(16, 2, "nvswitch", 188 * GB, 188 * GB)


def with_nccl(name: str) -> Cluster:
    return changed(load_cluster(name), communication="nccl")


def bus(cluster: Cluster, nbytes: int, n: int) -> float:
    """GB/s on the bus, as nccl-tests prints it."""
    seconds = by_formula(cluster, "all_reduce", nbytes, rank_group(cluster, range(n)))
    return 2 * (n - 1) / n * nbytes / seconds / GB


@each_case(
    ("protocol", "us"),
    [(LL, 6.6 + 14 * 0.6), (LL128, 14 + 14 * 1.9), (SIMPLE, 8.4 + 14 * 3.4)],
    ids=["LL", "LL128", "Simple"],
)
def test_a_ring_of_one_node_passes_on_14_times(protocol: int, us: float) -> None:
    assert nccl.ring(Nccl(), "all_reduce", 0, EIGHT, protocol) == pytest.approx(us * US)


def test_rings_of_one_direction_take_half_the_steps() -> None:
    whole = nccl.ring(Nccl(), "all_reduce", 1e9, EIGHT, SIMPLE) - 8.4 * US
    for op in ("all_gather", "reduce_scatter"):
        assert nccl.ring(Nccl(), op, 1e9, EIGHT, SIMPLE) == pytest.approx(8.4 * US + whole / 2)


def test_steps_between_nodes_take_the_network_s_time() -> None:
    """16 ranks on 2 nodes: 2 of 30 steps of a ring between nodes; a tree goes up and down 7 steps within and 1
    between."""
    assert nccl.ring(Nccl(), "all_reduce", 0, TWO_NODES, SIMPLE) == pytest.approx(
        (8.4 + 28 * 3.4 + 2 * 14) * US
    )
    assert nccl.tree(Nccl(), 0, TWO_NODES, SIMPLE) == pytest.approx((8.4 + 2 * (7 * 4.0 + 14)) * US)
    assert nccl.tree(Nccl(), 0, TWO_NODES, LL) == pytest.approx((6.8 + 2 * (7 * 0.6 + 5)) * US)


def test_protocols_reach_a_fraction_of_the_bus() -> None:
    def bandwidth(seconds: float) -> float:
        return 1.75 * 1e12 / seconds

    assert bandwidth(nccl.ring(Nccl(), "all_reduce", 1e12, EIGHT, SIMPLE)) == pytest.approx(
        231 * GB, rel=1e-4
    )
    assert bandwidth(nccl.ring(Nccl(), "all_reduce", 1e12, EIGHT, LL128)) == pytest.approx(
        0.92 * 231 * GB, rel=1e-4
    )
    assert bandwidth(nccl.ring(Nccl(), "all_reduce", 1e12, EIGHT, LL)) == pytest.approx(
        0.5 * 231 * GB, rel=1e-4
    )
    ampere = Nccl(ll_max=(87.7 * GB, 22.5 * GB, 19 * GB))
    assert bandwidth(nccl.ring(ampere, "all_reduce", 1e12, EIGHT, LL)) == pytest.approx(
        87.7 * GB, rel=1e-4
    )
    for nodes, most in ((2, 22.5), (4, 19), (16, 19)):
        ranks = Ranks(8 * nodes, nodes, "nvswitch", 188 * GB, 188 * GB)
        seconds = nccl.ring(ampere, "all_reduce", 1e15, ranks, LL)
        assert 2 * (ranks.n - 1) / ranks.n * 1e15 / seconds == pytest.approx(most * GB, rel=1e-3)
    assert 2 * 1e12 / nccl.tree(Nccl(), 1e12, EIGHT, SIMPLE) == pytest.approx(
        0.92 * 231 * GB, rel=1e-4
    )


def test_pcie_has_steps_of_its_own() -> None:
    assert nccl.ring(Nccl(), "all_reduce", 0, replace(EIGHT, kind="pcie"), SIMPLE) == pytest.approx(
        (8.4 + 14 * 5.7) * US
    )


def test_the_fastest_algorithm_is_taken() -> None:
    """LL for what is small, Simple for what is large; a tree between many nodes, whose steps do not grow with their
    number."""

    def chosen(nbytes: int, ranks: Ranks) -> str:
        return min((s, name) for name, s in nccl.estimates(Nccl(), "all_reduce", nbytes, ranks))[1]

    assert chosen(1024, EIGHT) == "ring LL"
    assert chosen(GIB, EIGHT) == "ring Simple"
    assert chosen(MIB, Ranks(128, 16, "nvswitch", 188 * GB, 188 * GB)).startswith("tree")
    for nbytes in (1024, GIB):
        assert nccl.seconds(Nccl(), "all_reduce", nbytes, EIGHT) == min(
            s for _, s in nccl.estimates(Nccl(), "all_reduce", nbytes, EIGHT)
        )
    assert nccl.seconds(Nccl(), "all_reduce", GIB, replace(EIGHT, n=1)) == 0.0


@each_case(
    ("name", "eight", "four"),
    [("h100x8", 480, 370), ("h200x8", 473.1, 366), ("b200x8", 838, 682), ("a100x8", 231, 231)],
)
def test_switches_that_add_where_all_eight_take_part(name: str, eight: float, four: float) -> None:
    cluster = with_nccl(name)
    assert bus(cluster, 64 * GIB, 8) == pytest.approx(eight, rel=2e-3)
    assert bus(cluster, 64 * GIB, 4) == pytest.approx(four, rel=2e-3), (
        "a measured NCCL chose the ring"
    )


def test_nvls_starts_in_25_us() -> None:
    of = Nccl(nvls_bandwidth=480 * GB)
    assert nccl.nvls(of, 0, EIGHT) == pytest.approx(25 * US)
    assert nccl.nvls(of, 0, replace(TWO_NODES, n=32, nodes=4)) == pytest.approx(
        (25 + 2 * 2 * 20.9) * US
    )
    slow_network = nccl.nvls(of, 1e12, TWO_NODES)
    assert 2 * 15 / 16 * 1e12 / slow_network == pytest.approx(188 * GB, rel=1e-4)


def test_a_ring_over_nodes_is_bound_by_their_nics() -> None:
    """min(NVLink, NICs x 48.5 GB/s), SimAI: 8 NICs are more than an H100's ring reaches within a node, 4 are not."""
    assert bus(changed(with_nccl("h100x8*2"), nccl=Nccl()), 64 * GIB, 16) == pytest.approx(
        370, rel=3e-3
    )
    assert bus(changed(with_nccl("h100x4*2"), nccl=Nccl()), 64 * GIB, 8) == pytest.approx(
        4 * 48.5, rel=3e-3
    )


def test_point_to_point_is_one_step() -> None:
    near, far = RankGroup(2, 1, 2, 2), RankGroup(2, 2, 1, 1)
    ring = load_cluster("a100x8*2")
    assert by_formula(ring, "p2p", 231e9, near) == pytest.approx(1.0 + 1.9 * US)
    assert by_formula(ring, "p2p", 23.5e9, far) == pytest.approx(1.0 + 4 * US)
    cluster = with_nccl("a100x8*2")
    assert by_formula(cluster, "p2p", 231e9, near) == pytest.approx(
        1.0 + (8.4 + 3.4) * US, rel=1e-9
    )
    assert by_formula(cluster, "p2p", 23.5e9, far) == pytest.approx(1.0 + (8.4 + 14) * US, rel=1e-9)
    assert by_formula(cluster, "p2p", 0, near) == pytest.approx((6.6 + 0.6) * US), "LL"


def test_all_to_all_uses_both_kinds_of_links_at_once() -> None:
    cluster = load_cluster("a100x8*2")
    within = by_formula(cluster, "all_to_all", 231e9, rank_group(cluster, range(8)))
    assert within == pytest.approx(7 / 8 + 1.9 * US)
    across = by_formula(cluster, "all_to_all", 23.5e9, rank_group(cluster, range(16)))
    assert across == pytest.approx(8 / 16 + 4 * US), (
        "7 of 16 parts stay in the node, over links of their own"
    )


def test_where_members_are() -> None:
    cluster = load_cluster("h100x8*4")
    assert rank_group(cluster, range(8)) == RankGroup(8, 1, 8, 8)
    assert rank_group(cluster, (0, 8, 16, 24)) == RankGroup(4, 4, 1, 1)
    assert rank_group(cluster, (0, 1, 8)) == RankGroup(3, 2, 1, 2)
    railed = changed(cluster, rails=8)
    assert not rank_group(railed, (0, 8)).changes_rail and rank_group(railed, (0, 9)).changes_rail


def test_oversubscription_is_for_what_leaves_its_rail() -> None:
    flat = changed(load_cluster("h100x8*4"), oversubscription=2.0)
    railed = changed(flat, rails=8)

    def seconds(cluster: Cluster, *members: int) -> float:
        return by_formula(cluster, "p2p", 48.5e9, rank_group(cluster, members))

    assert (
        seconds(flat, 0, 8)
        == seconds(flat, 0, 9)
        == seconds(railed, 0, 9)
        == pytest.approx(2.0, rel=1e-4)
    )
    assert seconds(railed, 0, 8) == pytest.approx(1.0, rel=1e-4)
    assert seconds(railed, 0, 1) == pytest.approx(48.5 / 370, rel=1e-4)


def test_a_slow_link_slows_the_messages_that_need_it() -> None:
    cluster = changed(
        load_cluster("h100x8*3"), slow_links=(SlowLink(0, 2, 4.0), SlowLink(1, 1, 3.0))
    )

    def seconds(*members: int) -> float:
        return by_formula(cluster, "p2p", 48.5e9, rank_group(cluster, members))

    assert [round(seconds(*m), 3) for m in ((0, 8), (0, 16), (8, 9), (0, 1))] == [
        1.0,
        4.0,
        0.393,
        0.131,
    ]


def test_the_table_comes_before_the_formula() -> None:
    """Azure's published logs of ND A100 v4: bus bandwidth of 1 GiB and 16 MiB, seconds of 8 KiB."""
    cluster = load_cluster("a100-40g-sxm:8*16")

    def measured(n: int, nbytes: int) -> Duration:
        return duration(cluster, "all_reduce", nbytes, rank_group(cluster, range(n)))

    for n, large, medium, small in (
        (2, 206, 123, 10.4), (4, 225, 135, 16.3), (8, 231, 125, 31.0), (16, 124, 86, 41), (32, 126, 77, 62), (64, 124, 71, 84),
        (128, 128, 66, 103),
    ):  # fmt: skip
        for nbytes, gbps in ((GIB, large), (16 * MIB, medium)):
            found = measured(n, nbytes)
            assert found.source == "table"
            assert 2 * (n - 1) / n * nbytes / found.seconds / GB == pytest.approx(gbps, rel=0.06)
        assert measured(n, 8192).seconds == pytest.approx(small * US, rel=0.06)
    between = measured(8, 24 * MIB)
    assert (
        between.source == "interpolated"
        and measured(8, 16 * MIB).seconds < between.seconds < measured(8, 32 * MIB).seconds
    )
    assert measured(8, 64 * GIB).source == "formula", "too far beyond the table"
    assert measured(3, MIB).source == "formula"
    assert duration(cluster, "all_gather", MIB, rank_group(cluster, range(8))).source == "formula"
    assert (
        duration(cluster, "all_reduce", MIB, rank_group(cluster, range(4, 12))).source == "formula"
    ), "8 ranks, and on two nodes"


@each_case("sizes", [(MIB,), (MIB, 2 * MIB, 8 * MIB)])
def test_above_the_largest_size_measured_the_formula_is_scaled_to_meet_it(
    sizes: tuple[int, ...],
) -> None:
    """Links ten times as slow as the constants say stay so for any size; the label does not claim more than is
    known."""
    plain = load_cluster("h100x8")
    eight = rank_group(plain, range(8))
    table = tuple(
        CommDuration("all_reduce", n, 8, Duration(10 * by_formula(plain, "all_reduce", n, eight)))
        for n in sizes
    )
    cluster = changed(plain, messages=table)
    for nbytes in (sizes[-1], sizes[-1] + 1, 3 * sizes[-1], GIB):
        found = duration(cluster, "all_reduce", nbytes, eight)
        assert found.seconds == pytest.approx(10 * by_formula(plain, "all_reduce", nbytes, eight))
        assert (found.source == "formula") is (nbytes > sizes[-1])


def test_what_the_table_measured_does_not_hold_for_a_slow_link() -> None:
    table = (CommDuration("all_reduce", MIB, 8, Duration(1.0)),)
    cluster = changed(load_cluster("h100x8"), messages=table)
    assert duration(cluster, "all_reduce", MIB, rank_group(cluster, range(8))).seconds == 1.0
    slow = changed(cluster, slow_links=(SlowLink(0, 0, 2.0),))
    assert duration(slow, "all_reduce", MIB, rank_group(slow, range(8))).source == "formula"
