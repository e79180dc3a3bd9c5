"""Protects: where the time of a step went, counted by hand; and one clear error for every file that is no trace."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from packages.traces.tests.kineto_files import KinetoFile
from piper_ir.ground.errors import FormatError
from piper_traces import breakdown, read_events, read_ranks, stragglers
from piper_traces.events import DeviceEvent, SentMessage, kind_of
from piper_traces.matching import PlannedMessage, _pairs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a step of 100 us: compute 10-40 and 60-80, a message 30-70, a copy 75-90, nothing from 90 on."""
    trace = KinetoFile()
    trace.range("ProfilerStep#3", 0, 100)
    trace.kernel("sm90_xmma_gemm_bf16", 10, 40, launched=5)
    trace.message("allreduce", 4096, (0, 1), 30, 70, launched=20)
    trace.kernel("flash_fwd_kernel", 60, 80, launched=25)
    trace.kernel("Memcpy DtoD", 75, 90, launched=30, cat="gpu_memcpy")
    trace.kernel("late", 100, 110, launched=101)
    return trace.write(tmp_path)


def test_seconds_of_a_step_are_counted_by_hand(path: Path) -> None:
    part = breakdown(read_events(path))
    us = 1e-6
    assert part.step_s == pytest.approx(
        90 * us
    )  # from the first kernel of the step to the next step's
    assert part.compute_s == pytest.approx(50 * us)
    assert (part.message_s, part.exposed_s) == pytest.approx((40 * us, 20 * us))
    assert part.copy_s == pytest.approx(10 * us)
    assert part.idle_s == pytest.approx(10 * us)
    assert part.by_kind == pytest.approx(
        {"attention": 20 * us, "copy": 15 * us, "message": 40 * us, "product": 30 * us}
    )
    (traffic,) = part.traffic
    assert (traffic.group, traffic.op, traffic.count, traffic.nbytes) == (
        "7",
        "all_reduce",
        1,
        4096,
    )


def test_the_last_step_ends_as_long_after_the_host_as_it_began(tmp_path: Path) -> None:
    trace = KinetoFile()
    for number, at in ((1, 0), (2, 100)):
        trace.range(f"ProfilerStep#{number}", at, at + 100)
        trace.kernel("a_gemm", at + 10, at + 80, launched=at + 5)
    events = read_events(trace.write(tmp_path))
    for step in (1, 2):
        part = breakdown(events, step)
        assert (part.step_s, part.idle_s) == pytest.approx((100e-6, 30e-6))


def test_idle_time_before_a_late_launch_is_the_hosts(tmp_path: Path) -> None:
    trace = KinetoFile()
    trace.kernel("a_gemm", 0, 10, launched=-5)
    trace.kernel("b_gemm", 30, 40, launched=26)  # waited for the host
    trace.kernel("c_gemm", 60, 70, launched=12)  # was queued: it waited for something else
    part = breakdown(read_events(trace.write(tmp_path)))
    assert (part.gaps.count, part.gaps.known) == (1, True)
    assert part.gaps.seconds == pytest.approx(20e-6)


def test_operators_of_a_cpu_count_without_the_ones_that_they_call(tmp_path: Path) -> None:
    trace = KinetoFile()
    trace.operator("aten::linear", 0, 100)
    trace.operator("aten::mm", 20, 70)
    trace.operator("c10d::allreduce_", 100, 130)
    trace.range("gloo:all_reduce", 100, 130)
    part = breakdown(read_events(trace.write(tmp_path, deviceProperties=[])))
    assert part.by_kind == pytest.approx({"other": 50e-6, "product": 50e-6, "message": 30e-6})
    assert (part.compute_s, part.exposed_s) == pytest.approx((100e-6, 30e-6))


def test_the_rank_that_arrives_last_is_named(tmp_path: Path) -> None:
    for rank, late, clock in ((0, 0, 0.0), (1, 25, 1e6)):  # rank 1's clock is a second ahead
        trace = KinetoFile(rank)
        for at in (100, 200, 300):
            trace.message("allreduce", 64, (0, 1), clock + at + late, clock + at + 50, clock + at)
        trace.write(tmp_path)
    (found,) = stragglers(read_ranks(sorted(tmp_path.iterdir())))
    assert (found.count, found.last, found.share) == (3, 1, 1.0)
    assert found.spread_s == pytest.approx(25e-6)


def test_nobody_is_last_where_all_arrive_at_once(tmp_path: Path) -> None:
    for rank in range(2):
        trace = KinetoFile(rank)
        trace.message("allreduce", 64, (0, 1), 100, 150, 90)
        trace.write(tmp_path)
    (found,) = stragglers(read_ranks(sorted(tmp_path.iterdir())))
    assert (found.spread_s, found.share) == (0.0, 0.0)


def test_traces_of_two_jobs_are_refused(tmp_path: Path) -> None:
    for rank, world in ((0, 2), (1, 4)):
        trace = KinetoFile(rank, world=world)
        trace.kernel("k", 0, 1, launched=0)
        trace.write(tmp_path)
    with pytest.raises(FormatError, match="of several jobs"):
        read_ranks(sorted(tmp_path.iterdir()))


DAMAGED = {
    "cut off": lambda raw: raw[: len(raw) // 2],
    "no JSON": lambda raw: gzip.compress(b"{"),
    "no trace": lambda raw: b'{"a": 1}',
    "a number": lambda raw: b"3",
    "an event without a time": lambda raw: (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": 1}]}'
    ),
    "a time that is text": lambda raw: (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "x", "dur": 1}]}'
    ),
    "a time that runs backwards": lambda raw: (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1}]}'
    ),
    "a time that is no number": lambda raw: (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "k", "ts": 1, "dur": NaN}]}'
    ),
    "a time of years": lambda raw: (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "k", "ts": 1, "dur": 1e300}]}'
    ),
    "lists in lists": lambda raw: b"[" * 100_000,
    "nothing in it": lambda raw: b'{"traceEvents": []}',
}


def test_a_padded_message_is_the_planned_one() -> None:
    planned = [PlannedMessage(0, "dp", "all_reduce", n, 2, 0.0) for n in (1_054_269, 900)]
    sent = [
        DeviceEvent("", 0, 0.0, 1.0, "message", None, SentMessage("all_reduce", n, 2))
        for n in (1_054_270, 950, 900)
    ]
    assert _pairs(planned, sent) == [(0, 0), (1, 2)]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_error(damage: str, path: Path) -> None:
    path.write_bytes(DAMAGED[damage](path.read_bytes()))
    with pytest.raises(FormatError, match=path.name):
        breakdown(read_events(path))


def test_wrong_steps_and_ranks_are_refused(path: Path, tmp_path: Path) -> None:
    events = read_events(path)
    with pytest.raises(FormatError, match=r"no step 9; its steps are 3"):
        breakdown(events, 9)
    again = tmp_path / "again.json"
    again.write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match="both of rank 0"):
        read_ranks([path, again])
    with pytest.raises(FormatError, match="is given twice"):
        read_ranks([path, path])
    with pytest.raises(FormatError, match="no such file"):
        read_events(tmp_path / "absent.json")


@pytest.mark.skipif(
    "PIPER_HTA_TRACES" not in os.environ or importlib.util.find_spec("hta") is None,
    reason="needs HolisticTraceAnalysis, and a folder of public traces in PIPER_HTA_TRACES",
)
def test_exposed_communication_is_that_of_holistic_trace_analysis() -> None:
    from hta.trace_analysis import TraceAnalysis

    folder = Path(os.environ["PIPER_HTA_TRACES"])
    theirs = TraceAnalysis(trace_dir=str(folder)).get_comm_comp_overlap(visualize=False)
    for rank in read_ranks(folder.glob("*.json.gz")):
        (number, start, _), *_, (_, _, end), _ = [rank.steps[0], *rank.steps]
        part = breakdown(
            replace(rank, steps=[(number, start, end)])
        )  # they leave out the last step
        overlapped = theirs[theirs["rank"] == rank.rank]["comp_comm_overlap_pctg"].iloc[0] / 100
        assert part.exposed_s / part.message_s == pytest.approx(1 - overlapped, abs=0.01)


def test_json_without_an_object_of_its_own_is_read(path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    path.write_text(json.dumps(document["traceEvents"]))
    assert read_events(path).rank == 0  # by the name of the file


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::normal_", "other"),
        ("void distribution_elementwise_grid_stride_kernel<normal_and_transform>", "other"),
        ("aten::linalg_vector_norm", "other"),
        ("multi_tensor_apply_kernel<LpNormFunctor>", "optimizer"),
        ("vectorized_layer_norm_kernel", "norm"),
        ("aten::native_batch_norm", "norm"),
        ("RmsNormFwd", "norm"),
    ],
)
def test_draws_and_gradient_norms_are_no_norms_of_layers(name: str, kind: str) -> None:
    assert kind_of(name) == kind
