"""Snapshots of predicted memory: torch's own tools read them, and they add up to the prediction."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from piper.api.ground.results import save_snapshots
from piper_ir.ground.errors import OutputError
from piper_simulator import Simulation, simulate
from tests.helpers import compositions
from tests.helpers.compositions import Composition, fitted

CASES = [
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.003, clip=0.05),
    Composition("llama", 2, 1, 4, backward="split"),
    Composition("skip", 4, 1, 4, "random", "random", seed=2),
]
SEGMENT = {
    "address",
    "total_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "allocated_size",
    "active_size",
    "blocks",
}
BLOCK = {"size", "requested_size", "address", "state", "frames"}
EVENT = {"action", "addr", "frames", "size", "stream", "time_us"}
FRAME = {"filename", "line", "name"}
"""Keys in the documentation of `torch.cuda.memory._snapshot`, and `time_us`, which the visualiser draws by."""


def predicted(c: Composition, cluster: str = "h100x8") -> Simulation:
    return simulate(compositions.compiled(fitted(c)).plan, cluster)


def replayed(snapshot: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """Most bytes asked for at once, and what is there at the end: address -> bytes. No block overlaps another while
    both live, each lies in a segment, and time does not go back."""
    live: dict[int, int] = {}
    segments: dict[int, int] = {}
    now = most = total = 0
    for event in snapshot["device_traces"][0]:
        assert event["time_us"] >= now
        now, at, size = event["time_us"], event["addr"], event["size"]
        match event["action"]:
            case "segment_alloc":
                segments[at] = size
            case "alloc":
                assert not any(a < at + size and at < a + n for a, n in live.items()), (
                    "two live blocks overlap"
                )
                assert any(a <= at and at + size <= a + n for a, n in segments.items()), (
                    "outside of every segment"
                )
                live[at] = size
                total += size
                most = max(most, total)
            case "free_requested":
                assert live[at] == size
            case "free_completed":
                total -= live.pop(at)
    return most, live


@pytest.mark.parametrize("c", CASES, ids=str)
def test_the_peak_is_the_predictions_to_the_byte(c: Composition) -> None:
    s = predicted(c)
    for rank, peak in enumerate(s.peak_bytes):
        snapshot = s.memory_snapshot(rank)
        most, left = replayed(snapshot)
        assert most == peak
        held = {
            b["address"]: b["requested_size"]
            for seg in snapshot["segments"]
            for b in seg["blocks"]
            if b["requested_size"]
        }
        assert held == left, "the segments show what is there after the step"
        lines = s.memory(rank)
        assert sum(left.values()) == sum(
            lines[n] for n in ("parameters", "gradients", "optimizer", "buffers")
        )


def test_what_training_holds_has_lines_of_its_own() -> None:
    """On two stages: buckets, optimizer and received values on both, the loss on the last."""
    first, last = (predicted(CASES[1]).memory(rank) for rank in (0, 1))
    for line in ("parameters", "gradients", "optimizer", "activations", "communication_buffers"):
        assert min(first[line], last[line]) > 0, line
    assert first["logits_and_loss"] == 0 < last["logits_and_loss"]
    assert first["context"] == last["context"] > 0 and first["allocator_reserve"] > 0
    alone = predicted(CASES[1], "cpu-local").memory(1)
    assert alone["context"] == alone["allocator_reserve"] == alone["pair_communicators"] == 0


def test_a_forgotten_free_is_seen() -> None:
    """Negative control of the replay: without one free, the peak is another, or a block is given twice."""
    snapshot = predicted(CASES[0]).memory_snapshot(0)
    events = snapshot["device_traces"][0]
    large = max(
        (e for e in events if e["action"] == "free_completed"), key=lambda e: int(e["size"])
    )
    events.remove(large)
    with pytest.raises(AssertionError):
        most, _ = replayed(snapshot)
        assert most == predicted(CASES[0]).peak_bytes[0]


def test_it_has_what_torchs_documentation_says() -> None:
    snapshot = predicted(CASES[0]).memory_snapshot(0)
    assert snapshot["segments"] and len(snapshot["device_traces"]) == 1
    for segment in snapshot["segments"]:
        assert segment.keys() >= SEGMENT and segment["segment_type"] in ("small", "large")
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
        for block in segment["blocks"]:
            assert block.keys() == BLOCK and block["state"] in ("active_allocated", "inactive")
    actions = set()
    for event in snapshot["device_traces"][0]:
        assert event.keys() >= EVENT and all(f.keys() == FRAME for f in event["frames"])
        assert isinstance(event["time_us"], int)
        actions.add(event["action"])
    assert actions == {"segment_alloc", "alloc", "free_requested", "free_completed"}


def test_frames_name_value_category_and_instruction() -> None:
    events = predicted(CASES[1]).memory_snapshot(0)["device_traces"][0]
    found = {
        (e["frames"][0]["filename"], e["frames"][0]["name"], e["frames"][1]["name"]) for e in events
    }
    assert any(c == "activation" and ":saved" in v and ".F@" in i for c, v, i in found)
    assert any(c == "param" and i == "before the step" for c, _, i in found)
    assert any(c == "workspace" for c, _, _ in found)


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    c = CASES[0]
    plan, s = compositions.compiled(fitted(c)).plan, predicted(c)
    said = save_snapshots(tmp_path / "m", plan, s)
    files = sorted(p.name for p in (tmp_path / "m").iterdir())
    assert (
        files == [f"rank{role.ranks[0]}.pickle" for role in plan.roles]
        and "rank0 (and 1 like it)" in said
    )
    snapshot = pickle.loads((tmp_path / "m" / files[0]).read_bytes())
    reserved = sum(seg["total_size"] for seg in snapshot["segments"])
    assert f"total_reserved: {reserved / 2**20:.1f}MiB" in _memory_viz.segsum(snapshot)
    drawn = _memory_viz.trace(snapshot)
    assert (
        f"{len(snapshot['device_traces'][0])} entries" in drawn
        and "cudaMalloc(" in drawn
        and "\ndel " in drawn
    )
    states = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    assert "active_allocated;plan:0:before the step;param:0:param:" in states
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    _memory_viz.filter_alloc_free_pairs(snapshot)
    assert {e["action"] for e in snapshot["device_traces"][0]} == {"segment_alloc", "alloc"}, (
        "what stays is never freed"
    )


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("a file")
    with pytest.raises(OutputError, match="--memory-snapshot"):
        save_snapshots(
            tmp_path / "m", compositions.compiled(fitted(CASES[1])).plan, predicted(CASES[1])
        )
