"""What cannot become steps is refused by name, with the user's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from packages.capture.tests.joint_cases import rand
from packages.capture.tests.joint_harness import Case, capture, trace, trace_chunk
from piper_capture.steps.joint import JointInput
from piper_ir.ground.errors import CaptureError
from tests.helpers.cases import each_case


@torch.library.custom_op("pipertest::halve_", mutates_args=("x",))
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


@halve_.register_fake
def _(x: Tensor) -> None:
    return None


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.rand_like(grads[0])


def changes_parameter(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(2)
    return x @ w


def overwrites_saved(x: Tensor, w: Tensor) -> Tensor:
    h = x.sin()
    y = h @ w
    h.mul_(2)
    return y + h


def mutating_custom_op(x: Tensor, w: Tensor) -> Tensor:
    h = x.detach() * 2
    torch.ops.pipertest.halve_(h)
    return (x + h) @ w


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda t: (t @ w).sin(), x, use_reentrant=False)


def attention(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w)[None, None]
    return F.scaled_dot_product_attention(h, h, h)


def noisy_gradient(x: Tensor, w: Tensor) -> Tensor:
    return NoisyGradient.apply(x @ w)


def masks_a_view(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).view(4, 2, 4).transpose(1, 2)
    h.masked_fill_(h > 0.5, 0.0)
    return h


REFUSED: dict[Callable[..., Any], str] = {
    changes_parameter: "changes its parameter .*w",
    overwrites_saved: r"test_joint_refusals.py:\d+: y = h @ w: .*modified by an inplace operation",
    mutating_custom_op: r"halve_|auto_functionalized.* test_joint_refusals.py:\d+: "
    r"torch.ops.pipertest.halve_\(h\)",
    checkpointed: r"cannot be cut .* at .*test_joint_refusals.py:\d+|checkpoint",
    attention: r"_scaled_dot_product.* exists on one kind of device .*test_joint_refusals.py:\d+: "
    r"return F.scaled_dot",
    masks_a_view: r"masked_fill_\(h > 0.5.*Cannot view a tensor.*use the result of masked_fill in place",
    noisy_gradient: "aten.rand_like.default draws random numbers in the backward",
}


@each_case("function", REFUSED, ids=lambda f: f.__name__)
def test_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[function]):
        trace(Case(function, ("value", "param"), (rand(4, 8), rand(8, 8))))


def test_a_refusal_names_its_line_whatever_warnings_are_hidden() -> None:
    """Autograd names the line of the forward in a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError, match=REFUSED[overwrites_saved]):
            trace(Case(overwrites_saved, ("value", "param"), (rand(4, 8), rand(8, 8))))


def test_a_tensor_with_gradient_that_is_no_parameter_is_refused() -> None:
    hidden = rand(4).requires_grad_()
    module = fx.symbolic_trace(lambda x: x * 2)
    module.hidden = torch.nn.Parameter(hidden)
    node = module.graph.output_node().all_input_nodes[0]
    with module.graph.inserting_before(node):
        node.args = (node.args[0], module.graph.get_attr("hidden"))
    with pytest.raises(CaptureError, match="make it a parameter of the model"):
        trace_chunk(module, [JointInput("value", rand(4), True)], [True])


def test_a_mask_of_the_wrong_length_is_refused() -> None:
    case = Case(lambda x: x * 2, ("value",), (rand(4),))
    with pytest.raises(CaptureError, match="1 outputs but tangent_mask has 2"):
        trace_chunk(capture(case), case.inputs(), [True, False])


class Notes(torch.autograd.Function):
    """Writes its gradient to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: Tensor) -> Tensor:
        ctx.noted = noted
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.noted.copy_(grads[0])
        return grads[0] * 2, None


def test_a_backward_that_overwrites_a_buffer_is_refused() -> None:
    module = fx.symbolic_trace(lambda x, noted: x + noted)
    add = module.graph.output_node().all_input_nodes[0]
    add.target = Notes.apply
    inputs = [JointInput("value", rand(4), True), JointInput("buffer", rand(4), False)]
    with pytest.raises(CaptureError, match=r"copy_\.default changes a tensor in place"):
        trace_chunk(module, inputs, [True])


def test_a_changed_value_needs_an_entry_in_the_mask() -> None:
    case = Case(lambda x: x.mul_(2) + 1, ("value",), (rand(4),))
    with pytest.raises(
        CaptureError, match="changes 1 of its inputs in place, so tangent_mask needs 2 entries"
    ):
        trace_chunk(capture(case), case.inputs(), [True])


def test_inputs_must_match_the_placeholders() -> None:
    case = Case(lambda x: x * 2, ("value",), (rand(4),))
    with pytest.raises(CaptureError, match="1 placeholders but 2 inputs"):
        trace_chunk(capture(case), [*case.inputs(), *case.inputs()], [True])


def test_the_users_line_is_named() -> None:
    def mismatch(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    case = Case(mismatch, ("value", "param"), (rand(4, 8), rand(8, 8)))
    module = capture(case)
    case.tensors = (rand(4, 8), rand(4, 8))
    with pytest.raises(CaptureError, match=r"test_joint_refusals.py:\d+: return x @ w"):
        trace_chunk(module, case.inputs(), [True])
