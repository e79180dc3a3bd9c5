"""The generated source: its literals, its determinism, its behaviour on other devices and in other processes."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

from packages.capture.tests.joint_cases import CASES, rand
from packages.capture.tests.joint_harness import Case, capture, check, trace, trace_chunk
from piper_capture.steps.codegen import StepCode, _literal, compile_step
from piper_ir.ground.errors import CaptureError
from tests.helpers.cases import each_case

torch.set_num_threads(1)


@each_case(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (0.1, "0.1"),
        (float("-inf"), "float('-inf')"),
        (float("nan"), "float('nan')"),
        (1 - 2j, "complex(1.0, -2.0)"),
        ("mean", "'mean'"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cuda:1"), "DEVICE"),
        (torch.channels_last, "torch.channels_last"),
        (torch.strided, "torch.strided"),
        ([1, [None, 2.0]], "[1, [None, 2.0]]"),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, "a"), "(1, 'a',)"),
    ],
)
def test_literals(value: Any, text: str) -> None:
    assert _literal(value) == text
    if value == value:
        assert eval(text, {"torch": torch, "DEVICE": torch.device("cuda:1")}) == value


def test_an_argument_that_has_no_text_is_refused() -> None:
    with pytest.raises(CaptureError, match="argument of type Generator"):
        _literal([torch.Generator()])


@each_case("name", ["gpt block", "aliased outputs", "constants"])
def test_equal_graphs_give_equal_text(name: str) -> None:
    case = CASES[name]
    again = trace_chunk(capture(case), case.inputs(), trace(case).output_grads)
    assert {s: c.source for s, c in again.code.items()} == {
        s: c.source for s, c in trace(case).code.items()
    }


def test_code_travels_by_pickle() -> None:
    case = CASES["constants"]
    code: StepCode = pickle.loads(pickle.dumps(trace(case).code["F"]))
    x, w = (t.clone() for t in case.tensors)
    with torch.no_grad():
        (out,) = compile_step(code)([x, w])[:1]
    torch.testing.assert_close(out, case.function(*case.tensors))
    assert len(pickle.dumps(trace(CASES["gpt block"]).code)) < 16_000


def test_factories_and_constants_follow_the_device() -> None:
    """A chunk captured on the CPU runs on meta; with a device baked in, the ops would mix devices."""

    def positions(x: Tensor, w: Tensor) -> Tensor:
        return (
            x + torch.arange(8, device=x.device) + torch.tensor([0.5] * 8, dtype=torch.float64)
        ) @ w

    traced = check(Case(positions, ("value", "param"), (rand(4, 8), rand(8, 8))))
    assert "device=DEVICE" in traced.code["F"].source and "'cpu'" not in traced.code["F"].source
    out = compile_step(traced.code["F"], "meta")([rand(4, 8).to("meta"), rand(8, 8).to("meta")])[0]
    assert out.is_meta and out.shape == (4, 8)


def test_the_list_of_arguments_is_emptied() -> None:
    given = [t.clone() for t in CASES["linear"].tensors]
    with torch.no_grad():
        compile_step(trace(CASES["linear"]).code["F"])(given)
    assert given == []


def test_gradients_are_added_to_accumulators_of_another_dtype() -> None:
    """float32 buckets take bf16 gradients."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    traced = trace(Case(layer, ("value", "param"), (rand(4, 8).bfloat16(), rand(8, 8).bfloat16())))
    accumulator = torch.ones(8, 8)
    x, tangent = rand(4, 8).bfloat16(), rand(4, 8).bfloat16()
    with torch.no_grad():
        compile_step(traced.code["W"])([x.clone(), tangent.clone(), accumulator])
    torch.testing.assert_close(accumulator, 1 + (x.t() @ tangent).float())


def test_a_traceback_shows_the_generated_line() -> None:
    with pytest.raises(RuntimeError) as failure:
        compile_step(trace(CASES["linear"]).code["F"])([rand(4, 8), rand(6, 9), rand(6)])
    text = "".join(traceback.format_exception(failure.value))
    assert "<piper step F" in text and "addmm = in2.addmm(in0, t)" in text


def test_an_op_that_is_not_registered_is_named() -> None:
    with pytest.raises(CaptureError, match=r"nowhere.*import the module that registers the op"):
        compile_step(StepCode("# step F\n_op = torch.ops.pipertest.nowhere.default\n"))
