"""Kernels by kind, with published numbers of devices; and that without a stack nothing is different."""

from dataclasses import replace

import pytest

from piper_ir.program.program import Cost, Kernel
from piper_simulator import load_cluster
from piper_simulator.cluster.stacks import GENERAL, STACKS
from piper_simulator.durations.alignment import UNALIGNED
from piper_simulator.durations.kernels import (
    TAIL,
    by_kind,
    filled,
    launched,
    memory_fraction,
    plain,
    step_seconds,
    step_took,
)

H100, STARTED, A100 = (
    load_cluster("h100x8").device,
    load_cluster("h100x8@eager").device,
    load_cluster("a100x8@eager").device,
)
EAGER, A100 = replace(STARTED, kernel_s=0.0), replace(A100, kernel_s=0.0)
MATMUL = Kernel(
    "matmul",
    (8192, 8192, 2048),
    "bfloat16",
    2 * 8192 * 8192 * 2048,
    2 * (2 * 8192 * 2048 + 8192 * 8192),
)
ATTENTION = Kernel(
    "attention",
    (8, 16, 1024, 1024, 128),
    "bfloat16",
    4 * 8 * 16 * 1024**2 * 128 // 2,
    10**8,
    lowering="flash",
)


def moving(nbytes: int, kind: str = "elementwise", count: int = 1) -> Kernel:
    return Kernel(kind, (), "bfloat16", 0, nbytes, count)  # type: ignore[arg-type]  # a kind by name


def test_tiles_come_in_waves_and_a_tail() -> None:
    """132 SMs: as many tiles fill one wave, and then there is the tail."""
    whole = 1 / (1 + TAIL)
    assert filled((132 * 128, 128, 64), 132) == pytest.approx(whole)
    assert filled((133 * 128, 128, 64), 132) == pytest.approx(133 / (133 + 132 * TAIL)), "no step"
    assert filled((66 * 128, 128, 64), 132) == 0.5, "half of the SMs have nothing to do"
    assert filled((2, 66 * 128, 128, 64), 132) == pytest.approx(whole), "two products side by side"
    assert filled((132 * 128 - 64, 128, 64), 132) == pytest.approx(whole * 131.5 / 132), (
        "a tile that is not full takes as long"
    )


def test_a_sum_takes_whole_steps_of_k() -> None:
    of_k = [filled((66 * 128, 128, k), 132) for k in (32, 48, 64, 33)]
    assert of_k == [0.5, 0.375, 0.5, 33 / 128]
    assert filled((0, 128, 64), 132) == 1.0 and filled((7, 7, 7), 0) == 1.0, "no work, no SMs known"


def test_a_matrix_product_reaches_what_was_measured_at_best() -> None:
    """MAMF 794.5 of 989 TFLOP/s; 8192 x 8192 in tiles of 128 x 128 are 31 waves and their tail."""
    peak = MATMUL.flops / by_kind(EAGER, MATMUL, "F")
    waves = 4096 / 132
    assert peak == pytest.approx(794.5e12 * waves / (waves + TAIL), rel=1e-3)
    assert plain(H100, MATMUL) == pytest.approx(MATMUL.flops / 794.5e12, rel=1e-3)
    thin = replace(MATMUL, dims=(8192, 8192, 32), flops=2 * 8192 * 8192 * 32)
    nbytes = thin.bytes / (3.35e12 * 0.90)
    assert by_kind(EAGER, thin, "F") == pytest.approx(nbytes), "its bytes take longer"
    convolution = replace(MATMUL, dims=(), op="convolution")
    seconds = by_kind(EAGER, convolution, "F")
    assert seconds == pytest.approx(MATMUL.flops / 794.5e12, rel=1e-3), "it counts by its FLOPs"


def test_rows_that_begin_at_no_multiple_of_16_bytes_are_slow() -> None:
    """A vocabulary of 50,257 makes each product of a head slow; a number of tokens makes none slow."""
    tokens, vocab, width = 8192, 50_257, 2048
    head = {"F": (tokens, vocab, width), "I": (tokens, width, vocab), "W": (vocab, width, tokens)}
    odd = {"F": (8191, 50_304, width), "I": (8191, width, 50_304), "W": (50_304, width, 8191)}
    flops = 2 * tokens * vocab * width
    for step in ("F", "I", "W"):
        slow, padded = (
            by_kind(EAGER, replace(MATMUL, dims=dims[step], flops=flops), step)  # type: ignore[arg-type]  # a step
            for dims in (head, odd)
        )
        assert slow / padded == pytest.approx(1 / UNALIGNED["hopper"], rel=0.02), step
    wide = replace(MATMUL, dims=head["F"], flops=flops, dtype="float32")
    assert by_kind(EAGER, wide, "F") == pytest.approx(
        by_kind(EAGER, replace(wide, dims=odd["F"]), "F"), rel=0.02
    )


def test_attention_reaches_what_its_kernel_does() -> None:
    """FlashAttention-2: 35 % of an H100, 73 % forward and 63 % backward of an A100."""
    reached = [
        ATTENTION.flops / by_kind(c, ATTENTION, "I" if b else "F") / c.peak("bfloat16")
        for c in (EAGER, A100)
        for b in (False, True)
    ]
    assert reached == pytest.approx([0.35, 0.35, 0.73, 0.63])
    for c in (EAGER, replace(load_cluster("b200x8@eager").device, kernel_s=0.0)):
        other = replace(ATTENTION, dtype="float32" if c is EAGER else "bfloat16")
        rate = other.flops / by_kind(c, other, "I") / c.peak(other.dtype)
        assert rate == pytest.approx(c.matmul_fraction), (
            "nothing is published of it: a matrix product"
        )


def test_attention_with_wide_heads_reaches_less() -> None:
    """SimuMax's kernels on a B200: heads of 192 reach 0.92 forward and 0.78 backward of heads of 128."""
    b200 = replace(load_cluster("b200x8@blackwell-megatron").device, kernel_s=0.0)
    wide = replace(ATTENTION, dims=(*ATTENTION.dims[:-1], 192))
    for backward, factor in ((False, 0.92), (True, 0.78)):
        one, other = (by_kind(b200, k, "I" if backward else "F") for k in (ATTENTION, wide))
        assert one / other == pytest.approx(factor, rel=1e-6)
        assert by_kind(EAGER, wide, "I" if backward else "F") == pytest.approx(
            by_kind(EAGER, ATTENTION, "I" if backward else "F")
        ), "nothing is known of this kernel's"


@pytest.mark.parametrize(
    ("width", "factors"),
    [(128, (1, 1)), (96, (0.855, 0.92)), (64, (0.71, 0.84)), (32, (0.71, 0.84))],
)
def test_attention_with_narrow_heads_reaches_less(width: int, factors: tuple[float, float]) -> None:
    """FlashAttention-3, figures 5 and 6: cuDNN's kernels on an H100, between heads of 64 and 128 in proportion."""
    h100 = replace(load_cluster("h100x8@hopper-nemo").device, kernel_s=0.0)
    narrow = replace(ATTENTION, dims=(*ATTENTION.dims[:-1], width))
    for step, factor in zip(("F", "I"), factors, strict=True):
        one, other = (by_kind(h100, k, step) for k in (ATTENTION, narrow))
        assert one / other == pytest.approx(factor, rel=1e-6)


def test_small_transfers_reach_less_of_the_memory() -> None:
    """Calculon's H100: from 100, 10 and 1 MB on 0.90, 0.75 and 0.60, else 0.30."""
    assert [
        memory_fraction(EAGER, b) for b in (200_000_000, 100_000_000, 20_000_000, 2_000_000, 999)
    ] == [
        0.9,
        0.9,
        0.75,
        0.6,
        0.3,
    ]
    assert memory_fraction(A100, 1) == 0.91
    for kind in ("norm", "elementwise", "embedding", "loss", "other"):
        assert by_kind(EAGER, moving(20_000_000, kind), "F") == pytest.approx(
            20e6 / (3.35e12 * 0.75)
        )


def test_a_kernel_starts_before_it_moves_anything() -> None:
    """2.5 us, then its bytes at 90 % of the bandwidth; or the part that few bytes reach, where that is longer."""
    nothing, some, many = (by_kind(STARTED, moving(n), "F") for n in (0, 20_000_000, 2_000_000_000))
    assert nothing == 2.5e-6 and some == pytest.approx(2.5e-6 + 20e6 / (3.35e12 * 0.9))
    assert many == pytest.approx(2.5e-6 + 2e9 / (3.35e12 * 0.9)) and plain(STARTED, moving(0)) == 0
    assert by_kind(STARTED, MATMUL, "F") == pytest.approx(2.5e-6 + by_kind(EAGER, MATMUL, "F"))
    few = replace(STARTED, memory_steps=((0, 0.1),))
    assert by_kind(few, moving(20_000_000), "F") == pytest.approx(20e6 / 3.35e11), "not both"
    one = replace(STARTED, stack=STACKS["inductor"])
    assert by_kind(one, moving(0), "F") == 0 < by_kind(one, moving(0, "other"), "F"), "one for all"


def test_a_host_launches_kernels_beside_its_device_unless_it_is_the_device() -> None:
    for device in (EAGER, H100):
        assert launched(device, 70e-6, 20) == (70e-6, pytest.approx(100e-6))
    assert launched(replace(H100, synchronous=True), 70e-6, 20) == (pytest.approx(170e-6), 0.0)


def test_a_stack_may_launch_several_kernels_as_one() -> None:
    cost = Cost((moving(1, "elementwise", 30), moving(1, "norm", 10), moving(1, "other", 4)))
    times = {
        name: step_took(replace(H100, stack=stack, kernel_s=0.0), cost, "F").launch_s
        for name, stack in STACKS.items()
    }
    assert times["eager"] == pytest.approx(44 * 5e-6)
    assert times["inductor"] == pytest.approx(6 * 5e-6), "one of each fused kind and 4 others"


def test_without_a_stack_kinds_do_not_differ() -> None:
    cost = Cost((MATMUL, ATTENTION, moving(20_000_000)))
    for step in ("F", "I"):
        seconds = step_seconds(H100, cost, step)
        assert seconds == pytest.approx(
            (MATMUL.flops + ATTENTION.flops) / (989e12 * 0.803) + 20e6 / (3.35e12 * 0.9)
        )
        assert seconds < step_seconds(EAGER, cost, step)


def test_every_stack_has_its_source_and_its_kernel() -> None:
    assert {*GENERAL} == {"eager", "inductor", "megatron"}
    for stack in GENERAL.values():
        assert (
            stack.source and stack.saved and {"ampere", "hopper"} == stack.attention_fraction.keys()
        )
