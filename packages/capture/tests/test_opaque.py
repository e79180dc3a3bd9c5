"""Opaque regions: run by autograd as they are, with exact memory; everything around them as if they were not there."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_capture import capture, region, tag
from piper_capture.steps.codegen import compile_step
from piper_ir.ground.errors import CaptureError
from piper_ir.program.program import Program
from piper_ops.written.opaque import backward_step, forward_step
from tests.helpers.cases import each_case
from tests.helpers.models import D, captured, feature_batch, squared_error


def program(model: object, batch: object = feature_batch) -> Program:
    return capture(model, functools.partial(batch, 0), squared_error).program  # type: ignore[arg-type, operator]  # local classes


def test_a_region_is_a_chunk_of_its_own_and_nothing_joins_it() -> None:
    found = captured("opaque").program
    assert [c.id for c in found.chunks] == [
        "layer0",
        "layer0_opaque1",
        "layer0.1",
        "layer1",
        "layer1_opaque1",
        "layer1.1",
        "root",
    ]
    assert found.chunk("layer1_opaque1").coords == {"layer": 1, "opaque": 1}


def test_parameters_gradients_are_made_by_i_and_added_up_by_w() -> None:
    steps = captured("opaque").program.chunk("layer1_opaque1").steps
    assert steps["F"].writes == ("out0", "saved0")
    assert [p for p in steps["I"].writes if p.startswith("iw")] == list(steps["W"].reads)
    assert len(steps["W"].accumulates) == len(steps["W"].reads) == 5
    assert not steps["I"].accumulates


def test_costs_are_those_of_the_operations_that_run() -> None:
    steps = captured("opaque").bind(4).chunk("layer0_opaque1").steps
    assert steps["F"].cost.flops > 0
    assert (
        1.5 < steps["I"].cost.flops / steps["F"].cost.flops < 3
    )  # two products for one, attention about twice


def test_a_tagged_module_is_opaque_and_takes_coordinates_from_around_it() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    found = program(
        lambda: tag(Plain(), {"layers.1.0": {"opaque": True}, "layers.*": {"stage": 3}})
    )
    assert [c.id for c in found.chunks] == [
        "stage3_layer0",
        "stage3_layer1_opaque1",
        "stage3_layer1",
        "stage3",
    ]


def test_equal_regions_share_code_and_opaque_is_part_of_it() -> None:
    a, b = (captured("opaque").program.chunk(f"layer{i}_opaque1").code for i in (0, 1))
    assert a == b

    class Same(nn.Module):
        def __init__(self, opaque: bool) -> None:
            super().__init__()
            self.linear, self.opaque = nn.Linear(D, D), opaque

        def forward(self, x: Tensor) -> Tensor:
            with region(opaque=self.opaque):
                return self.linear(x)

    assert (
        len({program(functools.partial(Same, flag)).chunks[0].code for flag in (True, False)}) == 2
    )


def test_a_region_without_gradient_keeps_nothing() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.out = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            with region(opaque=True):
                x = torch.tanh(self.fixed(x))
            return self.out(x)

    chunk = program(Frozen).chunks[0]
    assert chunk.steps["F"].writes == ("out0",)
    assert chunk.steps["I"].empty and chunk.steps["W"].empty


def test_an_input_without_influence_gets_no_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            with region(opaque=True):
                return torch.tanh(a) + b.detach()

    chunk = next(c for c in program(Half).chunks if c.coords.get("opaque"))
    assert [i.needs_grad for i in chunk.inputs] == [True, False]


def test_a_buffer_that_the_region_changes_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with region(opaque=True):
                self.count.add_(1)
                return self.linear(x) * self.count

    with pytest.raises(CaptureError, match="an opaque region changes buffer 'count' in place"):
        program(Counting)


def test_a_forward_that_autograd_cannot_go_back_through_is_refused_with_its_line() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            with region(opaque=True):
                y = torch.tanh(self.linear(x))
                y[:, 0] = 0
                return y

    with pytest.raises(
        CaptureError,
        match=r"test_opaque.py:\d+ .*: the backward of this opaque region fails: .*inplace",
    ):
        program(Overwriting)


def test_the_code_of_a_region_gives_what_autograd_gives() -> None:
    """And each returned tensor has a storage of its own, although autograd hands out one tensor twice."""

    def body(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = x + y
        return h, h.t(), (h * w).sum()

    x, y, w = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
    *outs, handle = forward_step(body, [True] * 3, [True] * 3)([x, y, w])
    tangents = [torch.randn_like(o) for o in outs]
    grads = backward_step(3, [True] * 3)([handle, *tangents])
    leaves = [t.clone().requires_grad_() for t in (x, y, w)]
    with torch.enable_grad():
        expected = body(*leaves)
    wanted = torch.autograd.grad(expected, leaves, tangents)
    assert all(
        torch.equal(a, b) for a, b in zip((*outs, *grads), (*expected, *wanted), strict=True)
    )
    assert len({t.untyped_storage().data_ptr() for t in (*outs, *grads, *tangents, x, y, w)}) == 12
    assert all(t.is_contiguous() and not t.requires_grad for t in (*outs, *grads))


def recurrent(x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
    """An LSTM, whose kernel takes all weights at once."""
    start = (torch.zeros(1, x.shape[0], D, dtype=x.dtype),) * 2
    return (torch.lstm(x, start, params, True, 1, 0.0, True, False, True)[0],)


def attended(x: Tensor, qkv: Tensor, out: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (
        F.multi_head_attention_forward(
            x, x, x, D, 2, qkv, bias, None, None, False, 0.0, out, None, need_weights=False
        )[0],
    )


def viewed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Autograd saves a part of the parameter under another dtype, and its square, which is no part of it."""
    return (x * weight[2:].t().square() * weight[1].view(torch.int64).bitwise_and(1),)


BODIES = {
    "LSTM": (recurrent, ((4 * D, D), (4 * D, D), (4 * D,), (4 * D,))),
    "attention": (attended, ((3 * D, D), (D, D), (3 * D,))),
    "views": (viewed, ((2 + D, D),)),
}


def flat_params(shapes: tuple[tuple[int, ...], ...], seed: int) -> list[Tensor]:
    """Parameters that are views of one tensor, as those of a bucket."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.randn(
        sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return [piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]


@each_case("name", BODIES)
def test_parameters_may_die_between_forward_and_backward(name: str) -> None:
    """And are given anew, with other values if one so wishes: the negative control."""
    body, shapes = BODIES[name]
    count = len(shapes)
    x = torch.randn(D, D, D, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, *flat_params(shapes, 0))]
    with torch.enable_grad():
        expected = body(*leaves)
    tangent = torch.randn_like(expected[0])
    wanted = torch.autograd.grad(expected, leaves, tangent)
    forward = forward_step(
        body, [True] * (1 + count), [True], returns="all", params=range(1, 1 + count)
    )
    backward = backward_step(1, [True] * (1 + count), {1 + k: k for k in range(count)})
    for seed in (0, 1):
        params = flat_params(shapes, 0)
        died: list[bool] = []
        weakref.finalize(params[0].untyped_storage(), died.append, True)
        out, handle = forward([x, *params])
        assert torch.equal(out, expected[0])
        del params
        assert died == [True]
        found = backward([handle, tangent, *flat_params(shapes, seed)])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) == (seed == 0)


def test_source_reaches_another_process_as_text() -> None:
    """With its constants, and with the device that it runs on in place of the one in the model."""
    code = captured("opaque").code
    step = code.get(captured("opaque").program.chunk("layer0_opaque1").code, 2)["F"]
    assert "return DEVICE" in step.source and "MultiheadAttention" not in step.source
    function = compile_step(step)
    chunk = captured("opaque").bind(2).chunk("layer0_opaque1")
    args = [torch.randn(*i.spec.shape, dtype=torch.float64) for i in chunk.inputs]
    out, handle = function(list(args))
    assert tuple(out.shape) == chunk.outputs[0].spec.shape and handle.numel() == 0


def test_questions_about_a_tensor_are_no_kernels() -> None:
    """Each kernel of a region takes a launch in predictions."""
    forward = captured("opaque").bind(2).chunk("layer0_opaque1").steps["F"]
    assert sum(k.count for k in forward.cost.kernels if k.kind == "other") <= 3
    assert 10 < sum(k.count for k in forward.cost.kernels) < 20
