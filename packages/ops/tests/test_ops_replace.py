"""replace_portable on graphs that Dynamo makes of the usual modules and calls, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.traceback import annotate

import piper_ops
from piper_ops import UnsupportedVariant, replace_portable

TOLERANCE = 1e-12


def x() -> Tensor:
    return torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)


def heads(count: int = 4) -> Tensor:
    return torch.randn(2, count, 8, 16, dtype=torch.float64, requires_grad=True)


def ops(gm: fx.GraphModule) -> list[str]:
    return [n.target.name().removeprefix("piper::") for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


TARGET = torch.tensor([[0, 5, -1, 3, 15, 2, 2, -1], [1, 1, -1, 9, 0, 4, 7, 8]])
MASK = torch.ones(8, 8, dtype=torch.bool).tril()
f64 = torch.float64

REPLACED: dict[str, tuple[str, Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = {
    "nn.LayerNorm": ("layer_norm", nn.LayerNorm(16, dtype=f64), lambda: (x(),)),
    "nn.LayerNorm plain": ("layer_norm", nn.LayerNorm((8, 16), elementwise_affine=False), lambda: (x(),)),
    "F.layer_norm eps": ("layer_norm", lambda a: F.layer_norm(a, (16,), eps=1e-2), lambda: (x(),)),
    "torch.layer_norm": ("layer_norm", lambda a: torch.layer_norm(a, (16,)), lambda: (x(),)),
    "nn.RMSNorm": ("rms_norm", nn.RMSNorm(16, dtype=f64), lambda: (x(),)),
    "nn.RMSNorm eps": ("rms_norm", nn.RMSNorm(16, eps=0.1, elementwise_affine=False), lambda: (x(),)),
    "F.rms_norm": ("rms_norm", lambda a: F.rms_norm(a, (16,)), lambda: (x(),)),
    "torch.rms_norm": ("rms_norm", lambda a: torch.rms_norm(a, (16,), eps=0.1), lambda: (x(),)),
    "sdpa": ("attention", F.scaled_dot_product_attention, lambda: (heads(), heads(), heads())),
    "sdpa causal": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        lambda: (heads(), heads(), heads()),
    ),
    "sdpa mask": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK),
        lambda: (heads(), heads(), heads()),
    ),
    "sdpa grouped": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True),
        lambda: (heads(), heads(2), heads(2)),
    ),
    "F.cross_entropy": (
        "cross_entropy",
        lambda a, t: F.cross_entropy(a.view(-1, 16), t.view(-1), ignore_index=-1),
        lambda: (x(), TARGET),
    ),
    "nn.CrossEntropyLoss": (
        "cross_entropy",
        lambda a, t: nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")(a.view(-1, 16), t.view(-1)),
        lambda: (x(), TARGET),
    ),
    "cross_entropy classes second": (
        "cross_entropy",
        lambda a, t: F.cross_entropy(a.transpose(1, 2), t, ignore_index=-1, reduction="none"),
        lambda: (x(), TARGET),
    ),
    "cross_entropy one row": (
        "cross_entropy",
        lambda a, t: F.cross_entropy(a[0, 0], t[0, 0], reduction="none"),
        lambda: (x(), TARGET),
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_graph_equals_eager(name: str, capture: Any) -> None:
    op, fn, inputs = REPLACED[name]
    args = inputs()
    gm, graph_inputs = capture(fn, *args)
    replace_portable(gm)
    assert ops(gm) == [op]
    (ours,) = gm(*graph_inputs)
    eager = fn(*args)
    assert ours.shape == eager.shape and ours.dtype == eager.dtype
    leaves = [a for a in args if a.is_floating_point()] + (list(fn.parameters()) if isinstance(fn, nn.Module) else [])
    tangent = torch.randn(eager.shape, dtype=eager.dtype)
    grads = [torch.autograd.grad(out, leaves, tangent) for out in (ours, eager)]
    assert max(float((a - b).detach().abs().max()) for a, b in zip((ours, *grads[0]), (eager, *grads[1]))) < TOLERANCE


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, dtype=f64)

    def forward(self, a: Tensor) -> Tensor:
        q, k, v = (t.view(a.shape[0], 8, 4, 4).transpose(1, 2) for t in self.qkv(a).split(16, 2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous().view(a.shape[0], 8, 16)


def test_attention_block_has_no_copy_left(capture: Any, joint: Any) -> None:
    """The exchanges of heads and positions cancel against the model's own: no clone of the attention's output is saved."""
    gm, inputs = capture(Attention(), x())
    replace_portable(gm)
    targets = [n.target for n in joint(gm, inputs).graph.nodes]
    assert torch.ops.piper.attention_dgrad.default in targets
    assert torch.ops.aten.clone.default not in targets


def test_captured_with_dynamic_rows(capture: Any) -> None:
    """No size of the rows is baked into the new nodes."""

    def fn(a: Tensor, t: Tensor) -> Tensor:
        loss = F.cross_entropy(a.transpose(1, 2), t, ignore_index=-1, reduction="none")
        return loss + F.scaled_dot_product_attention(*[F.layer_norm(a, (16,)).unflatten(2, (4, 4)).transpose(1, 2)] * 3).sum()

    a = x()
    torch._dynamo.mark_dynamic(a, 0)
    target = TARGET.clone()
    torch._dynamo.mark_dynamic(target, 0)
    gm, inputs = capture(fn, a, target)
    replace_portable(gm)
    assert ops(gm) == ["cross_entropy", "layer_norm", "attention"]
    wide = torch.randn(3, 8, 16, dtype=f64)
    target = torch.randint(16, (3, 8))
    new = [3 if isinstance(i, (int, torch.SymInt)) else target if i.dtype == torch.int64 else wide for i in inputs]
    torch.testing.assert_close(gm(*new)[0], fn(wide, target), rtol=TOLERANCE, atol=TOLERANCE)


def test_meta_of_the_call_stays(capture: Any) -> None:
    class Tagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.LayerNorm(16, dtype=f64)])

        def forward(self, a: Tensor) -> Tensor:
            with annotate({"stage": 3}):
                a = self.layers[0](a)
                return F.scaled_dot_product_attention(*[a.unflatten(2, (4, 4)).transpose(1, 2)] * 3)

    gm, _ = capture(Tagged(), x())
    before = {n.name: n.meta for n in gm.graph.nodes if n.target is F.layer_norm}
    (norm_meta,) = before.values()
    replace_portable(gm)
    new = [n for n in gm.graph.nodes if n.op.startswith("call")]
    assert all(n.meta["custom"] == {"stage": 3} for n in new)
    for node in new[:2]:  # piper.layer_norm and its getitem
        assert node.meta["nn_module_stack"] == norm_meta["nn_module_stack"]
        assert node.meta["stack_trace"] == norm_meta["stack_trace"]
    assert isinstance(new[0].meta["example_value"], tuple) and new[1].meta["example_value"].shape == (2, 8, 16)
    assert new[-1].meta["example_value"].shape == (2, 4, 8, 4)


def test_disabled_autocast_is_dropped(capture: Any) -> None:
    def fn(a: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return a @ a.mT

    gm, _ = capture(fn, x())
    replace_portable(gm)
    assert [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"] == ["getattr", "matmul"]


def test_nested_graphs_are_rewritten(capture: Any) -> None:
    inner, _ = capture(nn.LayerNorm(16, dtype=f64), x())
    graph = fx.Graph()
    graph.output(graph.call_module("inner", ()))
    outer = fx.GraphModule({"inner": inner}, graph)
    replace_portable(outer)
    assert ops(inner) == ["layer_norm"]


def autocast(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return a @ a.mT


def lstm(a: Tensor) -> Tensor:
    out: Tensor = LSTM(a)[0]
    return out


LSTM = nn.LSTM(16, 16, dtype=f64)
MHA = nn.MultiheadAttention(16, 4, batch_first=True, dtype=f64)
LINEAR = nn.Linear(16, 16, dtype=f64)
ROWS = TARGET.clamp(0)

REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "attention dropout": (
        lambda a: F.scaled_dot_product_attention(*[a.unflatten(2, (4, 4)).transpose(1, 2)] * 3, dropout_p=0.1),
        "scaled_dot_product_attention: dropout_p=0.1",
        "Write this attention out",
    ),
    "attention of 3 dimensions": (
        lambda a: F.scaled_dot_product_attention(a, a, a),
        r"scaled_dot_product_attention: .*\[3, 3, 3\] dimensions",
        r"\[batch, heads, T, head_dim\]",
    ),
    "attention with a learned bias": (
        lambda a: F.scaled_dot_product_attention(*[a.unflatten(2, (4, 4)).transpose(1, 2)] * 3, attn_mask=(a[0] @ a[0].mT)),
        "attn_mask requires a gradient",
        r"region\(opaque=True\)",
    ),
    "norm of two dtypes": (
        lambda a: F.layer_norm(a.bfloat16(), (16,), torch.ones(16)),
        "layer_norm: weight or bias .*float32 beside an input of torch.bfloat16",
        "one shape and dtype",
    ),
    "class weights": (
        lambda a: F.cross_entropy(a.view(-1, 16), ROWS.view(-1), torch.ones(16, dtype=f64)),
        "cross_entropy: class weights",
        "reduction='none'",
    ),
    "label smoothing": (
        lambda a: nn.CrossEntropyLoss(label_smoothing=0.1)(a.view(-1, 16), ROWS.view(-1)),
        "cross_entropy: label_smoothing=0.1",
        "log_softmax",
    ),
    "class probabilities": (
        lambda a: F.cross_entropy(a.view(-1, 16), a.detach().view(-1, 16)),
        "cross_entropy: class probabilities",
        "log_softmax",
    ),
    "legacy reduction": (
        lambda a: F.cross_entropy(a.view(-1, 16), ROWS.view(-1), size_average=False),
        "cross_entropy: the legacy arguments",
        "reduction='mean'",
    ),
    "nn.MultiheadAttention": (
        lambda a: MHA(a, a, a, need_weights=False)[0],
        "multi_head_attention_forward: ",
        "F.scaled_dot_product_attention",
    ),
    "nn.LSTM": (lstm, "lstm: fused recurrent", r"region\(opaque=True\)"),
    "batch norm in training": (nn.BatchNorm1d(8, dtype=f64), "batch_norm: batch statistics", "LayerNorm"),
    "batch norm without running statistics": (
        nn.BatchNorm1d(8, track_running_stats=False, dtype=f64).eval(),
        "batch_norm: batch statistics",
        "LayerNorm",
    ),
    "instance norm": (nn.InstanceNorm1d(8, dtype=f64), "instance_norm: ", "group_norm"),
    "native layer norm": (
        lambda a: torch.native_layer_norm(a, (16,), None, None, 1e-5)[0],
        "native_layer_norm: ",
        "F.layer_norm",
    ),
    "autocast": (autocast, "autocast: autocast inside", "Precision"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_refused_with_op_variant_line_and_way_out(name: str, capture: Any) -> None:
    fn, words, way_out = REFUSED[name]
    gm, _ = capture(fn, x())
    with pytest.raises(UnsupportedVariant, match=f"(?s){words}.*{way_out}") as caught:
        replace_portable(gm)
    if not isinstance(fn, nn.Module):  # a bare torch module has no line of the user's
        lines, first = inspect.getsourcelines(fn)
        named = [f"{__file__}:{first + i}" for i in range(len(lines))]
        assert any(f"{line})" in str(caught.value) for line in named)


def test_eval_batch_norm_passes(capture: Any) -> None:
    gm, _ = capture(nn.BatchNorm1d(8, dtype=f64).eval(), x())
    replace_portable(gm)
    assert ops(gm) == []


def test_every_refusal_is_a_sentence_with_a_way_out() -> None:
    for refusal in piper_ops.REFUSALS.values():
        assert refusal.reason and refusal.way_out.endswith(".")
