"""F, I and W of a chunk against plain autograd in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from packages.capture.tests.joint_cases import CASES
from packages.capture.tests.joint_harness import capture, check, compare, trace, trace_chunk
from piper_capture.steps.codegen import StepCode
from piper_capture.torch_api import _torch_joint
from tests.helpers.cases import each_case

torch.set_num_threads(1)


@each_case("name", CASES)
def test_steps_equal_autograd(name: str) -> None:
    check(CASES[name], 1e-6 if name == "cast" else 1e-12)


@pytest.mark.long
@each_case("name", CASES)
def test_meta_and_real_examples_give_the_same_chunk(name: str) -> None:
    real, meta = trace(CASES[name]), trace(CASES[name], "meta")
    assert (real.ports, real.steps) == (meta.ports, meta.steps)
    assert {s: c.source for s, c in real.code.items()} == {
        s: c.source for s, c in meta.code.items()
    }


@pytest.mark.parametrize(
    "name, recorded",
    [("overwritten buffer", True), ("overwritten viewed", False), ("buffer", False)],
)
def test_what_overwrites_a_whole_tensor_is_recorded(
    name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd is asked where a view shows the old tensor, or an operation changes one in another way."""
    asked: list[object] = []
    functionalised = _torch_joint._functionalised
    monkeypatch.setattr(
        _torch_joint,
        "_functionalised",
        lambda module, args: asked.append(module) or functionalised(module, args),
    )
    case = CASES[name]
    trace_chunk(capture(case), case.inputs(), [True])
    assert bool(asked) is not recorded


def test_a_wrong_gradient_is_noticed() -> None:
    """Negative control: the check fails for a step whose code forgets an addition."""
    case = CASES["gpt block"]
    traced = trace(case)
    wrong = traced.code["I"].source.replace(".add_(tan0)", ".add_(tan0 * 0)")
    assert wrong != traced.code["I"].source
    broken = dataclasses.replace(
        traced, code={**traced.code, "I": StepCode(wrong, traced.code["I"].constants)}
    )
    with pytest.raises(AssertionError, match="not close"):
        compare(case, broken)
