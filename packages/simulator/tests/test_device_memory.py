"""What is gone on a device beside tensors, and the verdict on what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packages.simulator.tests.test_simulation import two_devices
from packages.simulator.tests.toys import changed
from piper_ir.fold.memory import with_peaks
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, State
from piper_ir.program.costs import AllocatorCosts
from piper_ir.program.ops import Update
from piper_simulator import load_cluster, simulate
from piper_simulator.cluster.named import DEVICES
from piper_simulator.memory.device_memory import DeviceMemory, device_memory, device_type
from piper_simulator.memory.footprint import BESIDE, LINES
from piper_simulator.memory.oom import OomVerdict
from piper_simulator.memory.software import software_buffers
from tests.helpers.cases import each_case

H100 = load_cluster("h100x8")
GIB = 1 << 30
NCCL_CHANNELS = 32
"""NCCL has at most so many channels (MAXCHANNELS, src/include/device.h, until 2.18; later versions may have more and
use no more between GPUs of a node)."""
NCCL_SIMPLE = 4 << 20
NCCL_LL = 8 * 512 * 8 * 16
NCCL_LL128 = 120 * 640 * 8 * 8
"""A connection's buffer has so many bytes by protocol (NCCL: src/init.cc, DEFAULT_BUFFSIZE; DEFAULT_LL_BUFFSIZE: lines
per thread, threads, steps, bytes of a line; DEFAULT_LL128_BUFFSIZE: elements per thread, threads, steps, bytes of an
element)."""
RECEIVED = 4
"""A rank receives from so many connections of a channel: one of the ring, and of its tree the parent and two children.
"""


def heavy(nbytes: int, role: int = 0) -> Plan:
    """Two devices, one of them with a parameter of so many bytes. The second makes a buffer of 16 bytes in its one
    computation, at 3 s."""
    plan = two_devices().plan()
    first, second = plan.roles
    program = [
        replace(i, allocs_after=("v0>1@0",)) if i.stream == COMPUTE else i for i in second.program
    ]
    roles = (first, replace(second, program=tuple(program)))
    state = State("param", "w", nbytes)
    return with_peaks(
        replace(
            plan,
            roles=tuple(replace(r, states=(state,) * (k == role)) for k, r in enumerate(roles)),
        )
    )


def test_communicators_by_nccls_defaults() -> None:
    """4 MiB, 512 KiB and 4.7 MiB per connection; 32 channels; and they are near what the built-in devices have.

    A communicator has one buffer for each protocol and each connection where it receives; that of a pair, on which one
    broadcasts to the other, is a ring alone.
    """
    connection = NCCL_SIMPLE + NCCL_LL + NCCL_LL128
    assert connection == 4_194_304 + 524_288 + 4_915_200
    pair_bytes = NCCL_CHANNELS * connection
    assert pair_bytes == 294 << 20
    for device in (kind.device for kind in DEVICES.values()):
        assert device.p2p_bytes == pair_bytes
        assert pair_bytes * RECEIVED == pytest.approx(device.group_bytes, rel=0.1), (
            "measured: 1.27 GiB"
        )


def test_the_totals_apart() -> None:
    plan, kib = heavy(1000), 1000
    assert device_memory(plan, plan.roles[0], kib, None) == DeviceMemory(1000)
    of = device_memory(plan, plan.roles[0], kib, H100.device)
    assert of == DeviceMemory(1000, 50, H100.device.context_bytes, 0, 2 * H100.device.p2p_bytes)
    assert of.total == 1050 + H100.device.context_bytes + 2 * H100.device.p2p_bytes
    measured = AllocatorCosts(77, 1.5)
    assert device_memory(plan, plan.roles[0], kib, None, measured) == DeviceMemory(1000, 500, 77)
    here = device_memory(plan, plan.roles[0], kib, H100.device, measured)
    assert here == DeviceMemory(1000, 500, 77, 0, 2 * H100.device.p2p_bytes)


def test_a_memory_has_a_line_for_everything() -> None:
    s = simulate(heavy(1000), H100)
    for rank in range(2):
        found = s.memory(rank)
        assert tuple(found) == (*LINES, *BESIDE)
        assert (
            sum(found[line] for line in LINES) == s.peak_bytes[rank]
            and sum(found.values()) == s.device_bytes[rank]
        )
    assert s.memory(0)["parameters"] == 1000 and s.memory(1)["activations"] == 16
    assert s.summary()["memory"] == s.memory(0) and s.summary()["oom"] is None
    with pytest.raises(IndexError):
        s.memory(2)


def test_the_pool_of_a_graph_is_held_while_the_optimizer_runs() -> None:
    """1000 bytes of parameters, then 16 of a buffer; the update holds 12 more than what is left then, 16 + 1000."""
    plan = heavy(1000, role=1)
    role = plan.roles[1]
    update = Instr(COMPUTE, (Part("u", Update((), workspace=12)),), frees_before=("v0>1@0",))
    compute = [i for i in role.program if i.stream == COMPUTE]
    plan = with_peaks(
        replace(plan, roles=(plan.roles[0], replace(role, program=(*role.program, update))))
    )
    assert plan.roles[1].peak_bytes == 1016 and len(compute) == 1
    graphed = replace(plan, cuda_graph=True)
    assert software_buffers(plan, plan.roles[1], None) == 0
    assert software_buffers(graphed, graphed.roles[1], None) == 12


def test_whose_kernels_hold_memory() -> None:
    assert (device_type(None), device_type(load_cluster("cpu-local")), device_type(H100)) == (
        "",
        "",
        "cuda",
    )


def test_what_fits_to_the_byte_fits() -> None:
    cluster = changed(H100, allocator_factor=1.0)
    room = cluster.device.memory_bytes - simulate(heavy(0), cluster).device_bytes[0]
    most = simulate(heavy(room), cluster)
    assert most.device_bytes[0] == cluster.device.memory_bytes and most.fits and most.oom is None
    over = simulate(heavy(room + 1), cluster).oom
    assert over is not None and over.over == 1


def test_a_verdict_says_where_when_and_how_much() -> None:
    """Rank 1 has room for its parameter, and not for the buffer beside it."""
    cluster = changed(H100, allocator_factor=1.0)
    fixed = simulate(heavy(0, role=1), cluster)
    plan = heavy(
        cluster.device.memory_bytes - fixed.device_bytes[1] + fixed.peak_bytes[1] - 15, role=1
    )
    s = simulate(plan, cluster)
    verdict = s.oom
    assert not s.fits and verdict is not None and s.ooms == (verdict,)
    assert (verdict.ranks, verdict.role, verdict.over) == ((1,), plan.roles[1].role, 1)
    assert (verdict.needs, verdict.limit) == (s.device_bytes[1], cluster.device.memory_bytes)
    span = next(x for x in s.trace.spans if x.rank == 1 and x.instr == verdict.instr)
    assert verdict.time_s == span.start == 3.0 and span.name == "b.F@0" and span.name in verdict.at
    assert (
        verdict.owners[0].category == "param"
        and sum(o.bytes for o in verdict.owners) == s.peak_bytes[1]
    )
    assert verdict.text.startswith(
        f"out of memory {verdict.time_s:g} s into the step, in instruction {verdict.instr} {span.name}"
    )
    assert (
        "rank 1" in verdict.text
        and "1 B more than the limit" in verdict.text
        and "w: param" in verdict.text
    )
    data = s.summary()["oom"]
    assert (
        data["over_bytes"] == 1
        and data["owners"][0]["category"] == "param"
        and data["text"] == verdict.text
    )


def test_what_is_there_before_the_step_is_too_much_at_its_start() -> None:
    verdict = simulate(heavy(100 * GIB), H100).oom
    assert verdict is not None and (verdict.instr, verdict.time_s, verdict.at) == (
        -1,
        0.0,
        "its start",
    )
    assert verdict.text.startswith("out of memory before the step begins: rank 0")


def test_of_several_roles_the_first_in_time_is_the_headline() -> None:
    cluster = changed(H100, memory_bytes=H100.device.context_bytes)
    s = simulate(heavy(1000), cluster)
    assert len(s.ooms) == 2 and s.oom is not None and s.oom.time_s == min(v.time_s for v in s.ooms)
    assert simulate(heavy(1000)).fits, "without a cluster there is no limit"


@each_case(
    ("beside", "said"),
    [
        (2**30, "1 GiB are no tensors"),
        (-(2**30), "less 1 GiB that the software stack does not hold"),
    ],
)
def test_a_verdict_says_the_bytes_beside_tensors(beside: int, said: str) -> None:
    full = OomVerdict((0,), "r", 3 * 2**30, 2**30, "F", "F", 0, 1.0, beside, list)
    assert said in full.text
