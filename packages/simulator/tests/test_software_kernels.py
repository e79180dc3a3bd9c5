"""A software stack runs other kernels than a plan counts: more bytes, fewer, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ir.ground.sizes import bind
from piper_ir.program.program import Cost, Kernel, Step
from piper_simulator import STACKS, load_cluster
from piper_simulator.durations.kernels import by_kind, launch_count
from piper_simulator.durations.software_kernels import FUSION, SUM, run_kernels

COPY = Kernel("elementwise", (), "bfloat16", 0, 1000, op="clone")
ADD = replace(COPY, op="add")


@pytest.mark.parametrize(("factor", "sizes"), [(0.25, [250, 1000]), (0, [1000])])
def test_an_operator_moves_as_much_as_the_stack_says(factor: float, sizes: list[int]) -> None:
    stack = replace(STACKS["eager"], passes={"clone": factor})
    assert [k.bytes for k in run_kernels(stack, [COPY, ADD], "F")] == sizes
    assert [k.bytes for k in run_kernels(STACKS["eager"], [COPY, ADD], "F")] == [1000, 1000]


PRODUCT = Kernel("matmul", (64, 32, 16), "bfloat16", 65_536, 7_168, count=2, op="mm")
ATTENTION = Kernel("attention", (2, 4, 64, 64, 8), "bfloat16", 0, 0, op="attention")
NORM = Kernel("norm", (), "bfloat16", 0, 6_000, op="layer_norm")


def test_results_are_filled_before_they_are_written() -> None:
    """A product fills 64 x 32 elements, attention 4,096 of each tensor, a norm a half or a third of its bytes."""
    stack = replace(STACKS["eager"], fills=("matmul", "attention", "norm"))

    def filled(step: Step) -> list[tuple[int, int]]:
        found = run_kernels(stack, [PRODUCT, ATTENTION, NORM, COPY], step)
        return [(bind(k.bytes, 0), k.count) for k in found if k.op == "fill"]

    assert filled("F") == [(4_096, 2), (8_192, 1), (3_000, 1)]
    assert filled("I") == [(4_096, 2), (24_576, 1), (2_000, 1)]
    assert filled("W") == [(4_096, 2), (24_576, 1)]
    assert not [k for k in run_kernels(STACKS["eager"], [PRODUCT], "F") if k.op == "fill"]


def test_a_product_that_adds_to_a_sum_moves_the_sum_as_well() -> None:
    """The kernel of 100 elements moves 1,000 bytes, less 2 + 2 each for a gradient that nobody writes and reads."""
    add = Kernel("elementwise", (), "float32", 100, 1_000, op="add")
    device = load_cluster("h100x1@hopper-megatron").device
    assert device.stack is not None and device.stack.accumulate == "product"
    kernels = run_kernels(device.stack, [add, PRODUCT], "W")
    assert [(k.op, bind(k.bytes, 0)) for k in kernels if k.op != "mm"] == [(SUM, 600)]
    assert launch_count(device, Cost(tuple(kernels))) == len(kernels) - 1
    assert [k.op for k in run_kernels(STACKS["eager"], [add], "W")] == ["add"]


def test_sums_of_gradients_are_kernels_of_their_own() -> None:
    """A run of element-wise kernels would drop the float32 one, since it holds one of 16 bit."""
    stack = STACKS["hopper-megatron-deterministic"]
    add, other = replace(ADD, dtype="float32"), replace(COPY, op="sum")
    third = replace(COPY, op="cat")
    steps: tuple[Step, ...] = ("F", "W", "B")
    found = [[k.op for k in run_kernels(stack, [other, add, third], step)] for step in steps]
    assert found == [["sum"], ["sum", "add", "cat"], ["sum", "add", "cat"]]


def test_a_factor_of_one_step_leaves_the_others() -> None:
    stack = replace(STACKS["eager"], passes={"I.clone": 0})
    assert [len(run_kernels(stack, [COPY, ADD], step)) for step in ("F", "I")] == [2, 1]


def test_a_backward_that_is_one_graph_adds_to_sums_in_its_products() -> None:
    """Additions of 16 bit are of input gradients; products of I and W in turn are not joined."""
    stack = STACKS["hopper-megatron"]
    add = Kernel("elementwise", (), "float32", 100, 1_000, op="add")
    found = run_kernels(stack, [add, PRODUCT, ADD, replace(PRODUCT, dims=(64, 99, 16))], "B")
    assert [(k.op, bind(k.bytes, 0)) for k in found] == [
        ("mm", 7_168), ("add", 1_000), ("mm", 7_168), (SUM, 600),
    ]  # fmt: skip


def test_kernels_that_inductor_made_for_a_plan_are_launched_as_they_are() -> None:
    """A stack that fuses would make one kernel of the three."""
    fusion = replace(COPY, op=FUSION)
    for name in ("inductor", "hopper-torch-compile"):
        device = load_cluster(f"h100x1@{name}").device
        assert device.stack is not None
        for kernels, count in (([fusion, fusion, fusion], 3), ([COPY, ADD, COPY], 1)):
            cost = Cost(tuple(run_kernels(device.stack, kernels, "F")))
            assert launch_count(device, cost) == count, name
    two = replace(fusion, bytes=0)
    assert by_kind(device, two, "F") == device.kernel_s > 0


@pytest.mark.parametrize(("chosen", "launches"), [("topk", 3), ("scatter", 3), ("silu", 1)])
def test_the_kernels_of_a_router_are_launched_each(chosen: str, launches: int) -> None:
    stack = STACKS["hopper-megatron"]
    assert len(run_kernels(stack, [ADD, replace(ADD, op=chosen), WIDE], "F")) == launches


def product(*dims: int) -> Kernel:
    return Kernel("matmul", dims, "bfloat16", 1, 1, op="mm")


WIDE = replace(COPY, op="silu_backward")


@pytest.mark.parametrize("ffn", [24, 16])
def test_gate_and_up_are_one_product_around_their_activation(ffn: int) -> None:
    """The product behind them is none of theirs, whatever its size is: 16 is the width of the model."""
    stack, mul = STACKS["hopper-nemo"], replace(COPY, op="mul")
    gate, down = product(8, ffn, 16), product(8, 16, ffn)
    forward = run_kernels(stack, [NORM, gate, replace(COPY, op="silu"), gate, mul, down, ADD], "F")
    assert len(forward) == 5
    assert [k.dims for k in forward if k.op == "mm"] == [(8, 2 * ffn, 16), (8, 16, ffn)]
    back, alone = product(8, 16, ffn), product(8, ffn, 16)
    kernels = [alone, mul, mul, back, WIDE, back, ADD, NORM, ADD]
    backward = run_kernels(stack, kernels, "I")
    assert [k.dims for k in backward if k.op == "mm"] == [(8, ffn, 16), (8, 16, 2 * ffn)]
    assert [k.op for k in backward if k.op != "mm"][-2:] == ["layer_norm", "add"]


def test_plain_layers_of_one_width_are_two_products() -> None:
    """Four devices that share 4 h hidden elements have such products."""
    stack, gelu = STACKS["hopper-nemo"], replace(COPY, op="gelu")
    each = product(8, 16, 16)
    for step, kernels in (("F", [each, gelu, each, ADD]), ("I", [each, gelu, each, NORM, ADD])):
        found = run_kernels(stack, kernels, step)  # type: ignore[arg-type]  # a step
        assert [k.dims for k in found if k.op == "mm"] == [(8, 16, 16)] * 2


def test_one_product_gives_the_sum_of_its_input_gradients() -> None:
    """Three products need two sums; the third addition is of something else, such as the residual stream."""
    stack = STACKS["hopper-nemo"]
    keys, queries = replace(product(8, 16, 4), count=2), product(8, 16, 16)
    found = run_kernels(stack, [keys, ADD, queries, ADD, ADD], "I")
    assert [(k.op, k.dims) for k in found] == [("mm", (8, 16, 24)), ("add", ())]
    router = run_kernels(stack, [product(8, 16, 4), ADD], "I")
    assert [k.op for k in router] == ["mm", "add"]


def test_a_run_is_as_many_kernels_as_it_has_of_one_operator() -> None:
    """Rotary embeddings of queries and of fewer keys are two kernels, each with its own bytes."""
    stack = STACKS["hopper-nemo"]
    cat, small = replace(COPY, op="cat", bytes=700), replace(COPY, op="cat", bytes=70)
    run = [cat, ADD, small, replace(ADD, bytes=100)]
    assert [bind(k.bytes, 0) for k in run_kernels(stack, run, "F")] == [1000, 100]
    alike = [replace(cat, count=2), replace(ADD, count=2)]
    assert [bind(k.bytes, 0) for k in run_kernels(stack, alike, "F")] == [1000, 1000]
