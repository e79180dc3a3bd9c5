"""The paper's interference figure: its options against closed forms, and its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paper import figures
from benchmarks.paper.stage import MIB, OPTIONS, Option, Setting, pair, step
from piper_ir.ground.errors import ClusterError
from tests.helpers.cases import each_case

SMALL = replace(figures.setting("h100x2*2"), layers=3, microbatches=2, bucket_mb=4)
ISSUE = 3 * SMALL.cluster.device.host_issue_s
"""The host issues a message after the other: these many seconds may lie between."""


def test_one_stream_waits_for_the_whole_bucket() -> None:
    s = SMALL
    expected = s.seconds("all_reduce", s.head) + s.seconds("all_to_all", s.exchanged)
    assert pair(s, "one stream").exchange_s("B") == pytest.approx(expected, abs=ISSUE)


def test_separate_streams_share_the_link() -> None:
    """Both want all of their NICs but for their latency; alone, nothing slows the exchange."""
    s = SMALL
    alone = s.seconds("all_to_all", s.exchanged)
    assert pair(s, "alone").exchange_s("B") == pytest.approx(alone)
    used = s.exchanged / 2 / s.cluster.links.inter_bandwidth / alone
    assert pair(s, "separate streams").exchange_s("B") == pytest.approx(2 * used * alone, abs=ISSUE)


def test_partitioned_buckets_let_an_exchange_wait_for_a_piece_at_most() -> None:
    s = SMALL
    piece, exchange = (
        s.seconds("all_reduce", s.bucket_mb * MIB),
        s.seconds("all_to_all", s.exchanged),
    )
    assert pair(s, "partitioned, one stream").exchange_s("B") == pytest.approx(
        piece + exchange, abs=ISSUE
    )
    waited = [
        start - ready for _, ready, start, _ in step(s, "partitioned, one stream").spans("exchange")
    ]
    assert 0 < max(waited) <= piece * (1 + 1e-9) < exchange
    waited = [start - ready for _, ready, start, _ in step(s, "one stream").spans("exchange")]
    assert max(waited) > s.seconds("all_reduce", s.head) - ISSUE


def test_pieces_on_a_stream_of_their_own_meet_an_exchange_part_of_the_time() -> None:
    """The piece under way is half as fast, and so is the exchange meanwhile; the next piece waits for it."""
    s = SMALL
    piece, alone = s.seconds("all_reduce", s.bucket_mb * MIB), s.seconds("all_to_all", s.exchanged)
    longest = pair(s, "partitioned, separate streams").exchange_s("B")
    assert alone < longest <= alone + piece + ISSUE
    assert longest < pair(s, "separate streams").exchange_s("B")


@each_case("option", OPTIONS)
def test_every_option_moves_the_same_bytes_in_a_possible_order(option: Option) -> None:
    s, ran = SMALL, step(SMALL, option)
    reduced = sum(x.nbytes for x in ran.items if x.kind == "reduce")
    assert reduced == (0 if option == "alone" else s.head + s.layers * s.dense)
    assert sum(x.kind == "exchange" for x in ran.items) == 4 * s.layers * s.microbatches
    begin, end = (
        {x.name: t for x, t in zip(ran.items, times)} for times in (ran.times.start, ran.times.end)
    )
    for x in ran.items:
        assert all(begin[x.name] >= end[y] for y in x.after)
        if x.kind == "reduce":
            made = x.name.split(".")[1]
            assert (
                begin[x.name] >= end[f"B1.{made}" if made == "head" else f"B1.{made}.attention"]
            ), "its gradients are there"


def test_a_slower_all_to_all_loses_less() -> None:
    """2 u, of what it reaches alone: the reduction leaves it half."""
    rows = list(figures.reached("h100x2*2"))
    assert [times for _, _, times in rows] == pytest.approx([2 * u for _, u, _ in rows], rel=0.01)
    assert rows[-1][2] == pytest.approx(figures.PAPER, rel=0.01)


def test_bytes_are_those_of_the_model() -> None:
    s = Setting(SMALL.cluster)
    assert (s.exchanged, s.dense) == (
        4 * 512 * 2 * 2048 * 2,
        2 * 2048 * (2048 + 512 + 512 + 2048 + 8),
    )


def test_the_rows_of_a_cluster_have_every_option_beside_the_paper() -> None:
    rows = [*figures.rows(True)]
    beside = [row for row in rows if row.note.endswith(f"{figures.PAPER} in the paper")]
    assert len(rows) == 2 + 2 * len(figures.PIECES_MB) + 5 and len(beside) == 1 + 5
    assert [round(row.value, 2) for row in rows].count(1.46) == 1
    assert all(row.value >= 0.99 for row in rows)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [("h100x1", "no two devices"), ("cpu-local", "no two devices"), ("x", "unknown")],
)
def test_a_cluster_without_links_is_refused(cluster: str, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        figures.setting(cluster)
