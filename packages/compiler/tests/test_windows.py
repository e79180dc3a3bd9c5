"""The planned cache of buckets: windows of uses between which a bucket is kept."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from piper_compiler.passes.steps.windows import windows

SIZES = {"a": 4, "b": 4, "c": 8}
USES = st.lists(
    st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2, unique=True), max_size=24
)


def runs(uses: list[list[str]], room: int | None) -> list[tuple[str, list[int]]]:
    return [(w.bucket, w.uses) for w in windows(uses, SIZES, room)]


def test_without_room_neighbouring_uses_share_a_window() -> None:
    assert runs([["a"], ["a"], ["b"], ["a"]], 0) == [("a", [0, 1]), ("b", [2]), ("a", [3])]


def test_with_room_for_one_what_is_needed_last_goes() -> None:
    uses = [["a"], ["b"], ["c"], ["b"], ["a"]]
    assert runs(uses, 4) == [("a", [0]), ("b", [1, 3]), ("c", [2]), ("a", [4])]


def test_any_room_is_one_window_each() -> None:
    assert runs([["a"], ["b"], ["a"], ["b"]], None) == [("a", [0, 2]), ("b", [1, 3])]


@given(uses=USES, room=st.sampled_from((0, 4, 8, 12, None)))
def test_windows_cover_all_uses_within_the_room(uses: list[list[str]], room: int | None) -> None:
    found = windows(uses, SIZES, room)
    covered = sorted((use, w.bucket) for w in found for use in w.uses)
    assert covered == sorted((k, b) for k, needed in enumerate(uses) for b in needed)
    for k, _ in enumerate(uses[:-1]):
        between = [
            w.bucket for w in found if w.uses[0] <= k < w.uses[-1] and w.bucket not in uses[k + 1]
        ]
        assert room is None or sum(SIZES[b] for b in between) <= room
    for bucket in SIZES:
        own = [w for w in found if w.bucket == bucket]
        assert all(a.uses[-1] < b.earliest <= b.uses[0] for a, b in pairwise(own))


@given(uses=USES)
def test_more_room_never_needs_more_windows(uses: list[list[str]]) -> None:
    counts = [len(windows(uses, {"a": 4, "b": 4, "c": 4}, room)) for room in (0, 4, 8, None)]
    assert counts == sorted(counts, reverse=True)
