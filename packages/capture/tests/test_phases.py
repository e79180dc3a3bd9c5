"""What each step reads, writes and saves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packages.capture.tests.joint_cases import CASES, block_tensors, gpt_block, rand
from packages.capture.tests.joint_harness import Case, capture, check, run, saved_bytes, trace
from piper_capture.steps import phases
from piper_capture.steps.codegen import compile_step, generate
from piper_capture.steps.joint import TracedChunk, cut_chunk, trace_joint
from piper_capture.steps.schedule import schedule
from piper_ir.ground.sizes import bind
from tests.helpers.cases import each_case

torch.set_num_threads(1)


def reads(traced: TracedChunk) -> dict[str, tuple[str, ...]]:
    return {step: signature.reads for step, signature in traced.steps.items()}


def writes(traced: TracedChunk) -> dict[str, tuple[str, ...]]:
    return {step: signature.writes for step, signature in traced.steps.items()}


def test_a_linear_layer_saves_nothing() -> None:
    traced = trace(CASES["linear"])
    assert reads(traced) == {"F": ("in0", "in1", "in2"), "I": ("in1", "tan0"), "W": ("in0", "tan0")}
    assert writes(traced) == {"F": ("out0",), "I": ("gin0",), "W": ()}
    assert traced.steps["W"].accumulates == (1, 2)


def test_an_output_is_not_saved_twice() -> None:
    traced = check(Case(lambda x: x.exp(), ("value",), (rand(4, 8),)))
    assert reads(traced) == {"F": ("in0",), "I": ("out0", "tan0"), "W": ()}
    assert traced.steps["W"].empty


def test_an_output_in_another_shape_is_not_saved_twice() -> None:
    traced = check(Case(lambda x: x.exp().t().reshape(-1, 2), ("value",), (rand(4, 8),)))
    reshaped = check(Case(lambda x: x.exp().view(2, 16), ("value",), (rand(4, 8),)))
    assert reads(reshaped)["I"] == ("out0", "tan0")
    assert reads(traced)["I"] == ("saved0", "tan0")


def test_views_and_casts_of_parameters_are_not_saved() -> None:
    """bf16 copies of a float64 weight, a transposed weight and a row of one are made again where they are needed."""

    def layer(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return (x.bfloat16() @ w.bfloat16().t()).float() * scale[0]

    traced = trace(
        Case(layer, ("value", "param", "param"), (rand(4, 8), rand(8, 8), rand(2, 8).float()))
    )
    saved = {str(s) for p, s in traced.ports.items() if p.startswith("saved")}
    assert saved == {"bfloat16[4,8]", "float32[4,8]"}
    assert {"in1", "in2"} <= set(traced.steps["I"].reads)


def test_one_storage_is_saved_once_for_its_views() -> None:
    traced = trace(CASES["qkv"])
    assert [str(s) for p, s in traced.ports.items() if p.startswith("saved")] == ["float64[3,9]"]


def test_a_strided_tensor_is_saved_in_the_order_of_its_bytes() -> None:
    traced = check(
        Case(lambda x, w: (x @ w).t().exp().sin(), ("value", "param"), (rand(4, 8), rand(8, 6)))
    )
    assert str(traced.ports["saved0"]) == "float64[4,6]"
    assert traced.code["F"].source.count("clone = ") == 1, (
        "only the output, which must be contiguous, is copied"
    )


def test_a_dropout_mask_is_saved_and_not_drawn_again() -> None:
    traced = trace(CASES["dropout"])
    assert traced.random
    assert "bool[4,8]" in {str(s) for p, s in traced.ports.items() if p.startswith("saved")}
    assert not any("native_dropout_default" in traced.code[s].source for s in ("I", "W"))
    assert not trace(CASES["mlp"]).random


def test_parameter_gradients_that_i_makes_go_to_w() -> None:
    """A fused layer norm backward returns the gradients of weight and bias with the input's; W only adds them up."""
    traced = trace(CASES["norm"])
    assert [str(traced.ports[p]) for p in traced.steps["I"].writes] == [
        "float64[4,8]",
        "float64[8]",
        "float64[8]",
    ]
    assert not any(s.accumulates for step, s in traced.steps.items() if step != "W")
    assert traced.steps["W"].accumulates == (1, 2, 3)


def test_without_input_gradient_all_is_in_w() -> None:
    traced = trace(CASES["norm without input gradient"])
    assert traced.steps["I"].empty and "I" not in traced.code
    assert traced.input_grads == (False, True, True, True)


def test_frozen_parameters_accumulate_nothing() -> None:
    traced = trace(CASES["frozen"])
    assert traced.steps["W"].accumulates == (1, 4)


def test_a_chunk_without_gradient_has_only_f() -> None:
    traced = trace(CASES["no gradient"])
    assert [s for s, sig in traced.steps.items() if not sig.empty] == ["F"]
    assert traced.output_grads == (False, False) == traced.input_grads


def test_a_mask_that_leads_nowhere_is_dropped() -> None:
    traced = trace(
        Case(lambda x, w: (x @ w, (x > 0).double()), ("value", "param"), (rand(4, 8), rand(8, 8)))
    )
    assert traced.output_grads == (True, False)
    assert "tan1" not in traced.ports


def test_changed_inputs_are_further_outputs() -> None:
    for name in ("changed input", "buffer", "old buffer"):
        outputs = [port for port in trace(CASES[name]).ports if port.startswith("out")]
        assert outputs == ["out0", "out1"], name


def test_a_copied_buffer_is_saved_because_the_buffer_changes() -> None:
    traced = trace(CASES["old buffer"])
    assert "in2" not in traced.steps["I"].reads + traced.steps["W"].reads
    assert "float64[8]" in {str(s) for p, s in traced.ports.items() if p.startswith("saved")}


def test_parts_send_back_one_concatenation() -> None:
    source = trace(CASES["parts"]).code["I"].source
    assert "torch.cat(" in source and "torch.stack(" in source
    assert "select_backward" not in source and "slice_backward" not in source


def test_parts_of_a_permuted_tensor_are_taken_first_and_stacked_in_its_order() -> None:
    code = trace(CASES["fused projection"]).code
    assert "reshape(2, 6, 3, 2, 4)" in code["F"].source and ".select(2, 1)" in code["F"].source
    (stack,) = (line for line in code["I"].source.splitlines() if "torch.stack(" in line)
    assert "], 2)" in stack and "clone" not in code["I"].source


def test_a_sum_of_parts_that_leaves_a_gap_keeps_its_zeros() -> None:
    traced = check(Case(lambda x: x[0] * x[2] + x[2].sin(), ("value",), (rand(3, 8),)))
    assert "select_backward" in traced.code["I"].source


def test_a_sum_reuses_a_term_that_dies_but_no_other() -> None:
    def residual(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        kept = h.exp()
        return x + h, kept + kept.sin() + x

    source = check(Case(residual, ("value", "param"), (rand(8, 8), rand(8, 8)))).code["F"].source
    assert "= mm.add_(in0)" in source
    assert "exp.add_(" not in source


def test_element_wise_ops_overwrite_an_argument_that_dies() -> None:
    code = trace(CASES["activations"]).code
    forward = code["F"].source
    assert all(
        f"aten_{op}_(" in forward or f"_aten_{op}__" in forward
        for op in ("tanh", "sigmoid", "relu")
    )
    inner = code["I"].source
    for op in ("gelu", "silu", "tanh", "sigmoid", "threshold"):
        assert f"_aten_{op}_backward_grad_input(" in inner and f"{op}_backward_default" not in inner
    assert "approximate='tanh', grad_input=" in inner


def test_what_is_needed_later_is_not_overwritten() -> None:
    """x, which the caller owns; h and the factors, which the backward reads."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return h.relu() * h.square(), x.neg() * h.tanh()

    source = check(Case(function, ("value", "param"), (rand(4, 8), rand(8, 8)))).code["F"].source
    assert "mul(" in source and "mul_(" not in source and "__default" not in source


def test_a_product_is_summed_up_in_its_accumulator() -> None:
    traced = trace(CASES["linear"])
    assert "acc1.addmm_(" in traced.code["W"].source and ".mm(" not in traced.code["W"].source
    assert traced.steps["W"].liveness.peak({}) == 6 * 8, (
        "the gradient of the bias alone takes memory"
    )
    (matmul,) = (k for k in traced.steps["W"].cost.kernels if k.kind == "matmul")
    assert matmul.dims == (6, 8, 4)


def test_a_product_that_is_used_again_is_made() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return x @ (w + v)  # one gradient for two accumulators

    assert (
        ".mm("
        in check(Case(function, ("value", "param", "param"), (rand(4, 8), rand(8, 8), rand(8, 8))))
        .code["W"]
        .source
    )


def test_gpt_block_saves_what_autograd_saves_on_a_real_cpu() -> None:
    """With a fused attention: the inputs of matmuls and of gelu, q k v, the output and logsumexp, the norms'
    statistics."""
    tensors = [t.requires_grad_() for t in block_tensors(2, 6, 8)]
    case = Case(gpt_block, ("value", *["param"] * 12), tensors, portable=True)
    storages: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = gpt_block(*tensors)
    given = {t.untyped_storage().data_ptr() for t in (*tensors, out)}
    assert saved_bytes(trace(case)) == sum(
        size for storage, size in storages.items() if storage not in given
    )


def test_a_bf16_block_on_meta_saves_no_score_matrix() -> None:
    tensors = [t.to("meta", torch.bfloat16) for t in block_tensors(2, 96, 8)]
    traced = trace(Case(gpt_block, ("value", *["param"] * 12), tensors, portable=True), "meta")
    assert not any(list(spec.shape).count(96) > 1 for spec in traced.ports.values())


def test_w_of_a_block_reads_no_matrix_of_weights() -> None:
    """ZeRO-3 need not gather for W; nor does W keep the norms' inputs, because I makes the gradients of their
    parameters."""
    traced = trace(CASES["gpt block"])
    assert [p for p in traced.steps["W"].reads if p.startswith("in")] == []


def test_flops_of_a_block() -> None:
    """Matmuls: 24 n t d^2 in F, as many in I and in W; attention 4 n t^2 d halved by causality, 2.5 times that in I."""
    n, t, d = 2, 6, 8
    kernels = {step: s.cost.kernels for step, s in trace(CASES["gpt block"]).steps.items()}

    def flops(step: Any, kind: str) -> int:
        return sum(bind(k.flops, 0) * k.count for k in kernels[step] if k.kind == kind)

    assert [flops(s, "matmul") for s in "FIW"] == [24 * n * t * d * d] * 3
    assert [flops(s, "attention") for s in "FIW"] == [2 * n * t * t * d, 5 * n * t * t * d, 0]


@each_case("rows", [1, 2, 5])
def test_sizes_are_affine_in_rows(rows: int) -> None:
    def trace_at(n: int) -> TracedChunk:
        return trace(
            Case(F.linear, ("value", "param", "param"), (rand(n, 3, 8), rand(6, 8), rand(6)))
        )

    one, here = trace_at(3), trace_at(rows)
    assert bind(here.ports["out0"].nbytes, 0) * 3 == bind(one.ports["out0"].nbytes, 0) * rows
    assert here.steps["F"].reads == one.steps["F"].reads


@each_case("keep", ["all", "products", "inputs"])
def test_a_whole_backward_reads_what_f_keeps_and_makes_the_same_gradients(keep: str) -> None:
    """B takes nothing from I to W, and computes again what the policy leaves out, with the numbers of R, I and W."""
    case = CASES["gpt block"]
    joint = trace_joint(capture(case), case.inputs(), [True])
    apart = cut_chunk(joint, keep)
    graphs = phases.cut(joint, keep, joined=True).steps
    b = graphs["B"]
    kept = {p for p in graphs["F"].writes if p.startswith("saved")}
    assert {p for p in b.reads if p.startswith(("saved", "iw"))} == kept
    assert (b.writes, b.accumulates) == (("gin0",), apart.steps["W"].accumulates)
    assert any(p.startswith("iw") for p in apart.steps["I"].writes)

    ports = run(apart, case.tensors, [rand(2, 6, 8)])
    code = generate("B", b, schedule(b), joint.constants)
    total = [torch.ones_like(case.tensors[k]) for k in b.accumulates]
    with torch.no_grad():
        (gradient,) = compile_step(code)([ports[p] for p in b.reads] + total)
    torch.testing.assert_close(gradient, ports["gin0"], rtol=1e-12, atol=1e-12)
    for k, each in zip(b.accumulates, total, strict=True):
        torch.testing.assert_close(each, ports[f"acc{k}"], rtol=1e-12, atol=1e-12)
