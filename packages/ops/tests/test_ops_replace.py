"""replace_portable on graphs that Dynamo makes of the usual modules and calls, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.traceback import annotate
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from piper_ops import replace_portable

TOLERANCE = 1e-12


def x() -> Tensor:
    return torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)


def heads(count: int = 4) -> Tensor:
    return torch.randn(2, count, 8, 16, dtype=torch.float64, requires_grad=True)


def ops(gm: fx.GraphModule) -> list[str]:
    return [
        n.target.name().removeprefix("piper::")
        for n in gm.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
    ]


TARGET = torch.tensor([[0, 5, -1, 3, 15, 2, 2, -1], [1, 1, -1, 9, 0, 4, 7, 8]])
MASK = torch.ones(8, 8, dtype=torch.bool).tril()
f64 = torch.float64

REPLACED: dict[str, tuple[str, Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = {
    "nn.LayerNorm": ("layer_norm", nn.LayerNorm(16, dtype=f64), lambda: (x(),)),
    "nn.LayerNorm plain": (
        "layer_norm",
        nn.LayerNorm((8, 16), elementwise_affine=False),
        lambda: (x(),),
    ),
    "F.layer_norm eps": ("layer_norm", lambda a: F.layer_norm(a, (16,), eps=1e-2), lambda: (x(),)),
    "torch.layer_norm": ("layer_norm", lambda a: torch.layer_norm(a, (16,)), lambda: (x(),)),
    "nn.RMSNorm": ("rms_norm", nn.RMSNorm(16, dtype=f64), lambda: (x(),)),
    "nn.RMSNorm eps": (
        "rms_norm",
        nn.RMSNorm(16, eps=0.1, elementwise_affine=False),
        lambda: (x(),),
    ),
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
    "sdpa one head of keys": (
        "attention",
        F.scaled_dot_product_attention,
        lambda: (heads(), heads(1), heads(1)),
    ),
    "F.cross_entropy": (
        "cross_entropy",
        lambda a, t: F.cross_entropy(a.view(-1, 16), t.view(-1), ignore_index=-1),
        lambda: (x(), TARGET),
    ),
    "nn.CrossEntropyLoss": (
        "cross_entropy",
        lambda a, t: nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")(
            a.view(-1, 16), t.view(-1)
        ),
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


WEIGHTS = torch.linspace(0.5, 2, 16, dtype=f64)
LOSSES: dict[str, Callable[..., Tensor]] = {
    "class weights": lambda a, t: F.cross_entropy(
        a.view(-1, 16), t.view(-1), WEIGHTS.to(a), ignore_index=-1
    ),
    "smoothing": lambda a, t: F.cross_entropy(
        a.view(-1, 16), t.view(-1), ignore_index=-1, label_smoothing=0.1
    ),
    "both": lambda a, t: F.cross_entropy(
        a.transpose(1, 2), t, WEIGHTS.to(a), ignore_index=-1, reduction="none", label_smoothing=0.1
    ),
    "probabilities": lambda a, t: nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.2)(
        a[:, 0], (a[:, 1] * 2).softmax(1)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_cross_entropies_stay_torchs(name: str, capture: Any) -> None:
    """The loss is float32 in half precision, as that of the fused operation."""
    fn = LOSSES[name]
    for a in (x(), x().detach().bfloat16().requires_grad_()):
        gm, inputs = capture(fn, a, TARGET)
        replace_portable(gm)
        assert ops(gm) == []
        ours, wide = gm(*inputs)[0], a.detach().to(f64).requires_grad_()
        eager = fn(wide, TARGET)
        assert ours.dtype == (f64 if a.dtype == f64 else torch.float32)
        off = TOLERANCE if a.dtype == f64 else 0.03
        torch.testing.assert_close(ours.to(f64), eager, rtol=off, atol=off)
        grads = torch.autograd.grad(ours.sum(), a)[0], torch.autograd.grad(eager.sum(), wide)[0]
        torch.testing.assert_close(grads[0].to(f64), grads[1], rtol=off, atol=off)


def split(a: Tensor) -> Tensor:
    return a.unflatten(2, (4, 4)).transpose(1, 2)


@pytest.fixture(autouse=True)
def flex_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients of flex_attention on a CPU, in eager mode and in what it traces."""
    monkeypatch.setattr(
        sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *_: None
    )


sdpa = F.scaled_dot_product_attention
EVERY_OTHER = torch.arange(64).view(8, 8) % 3 > 0
NOTHING_SEEN = EVERY_OTHER & (torch.arange(8) != 2)[:, None]  # the third query attends to nothing
WRITTEN: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = {
    "dropout": (lambda q, k, v: sdpa(q, k, v, dropout_p=0.4), lambda: (heads(), heads(), heads())),
    "dropout causal scaled": (
        lambda q, k, v: sdpa(q, k, v, dropout_p=0.4, is_causal=True, scale=0.7),
        lambda: (heads(), heads(), heads()),
    ),
    "dropout masked grouped": (
        lambda q, k, v: sdpa(q, k, v, NOTHING_SEEN, 0.4, enable_gqa=True),
        lambda: (heads(), heads(2), heads(2)),
    ),
    "learned bias": (
        sdpa,
        lambda: (heads(), heads(), heads(), torch.randn(4, 8, 8, dtype=f64, requires_grad=True)),
    ),
    "keys of one row": (
        sdpa,
        lambda: (heads(), *(torch.randn(1, 4, 3, 16, dtype=f64, requires_grad=True) for _ in "kv")),
    ),
    "one head of keys alone": (sdpa, lambda: (heads(), heads(1), heads())),
    "one head of queries": (sdpa, lambda: (heads(1), heads(), heads())),
    "of two dimensions": (
        sdpa,
        lambda: tuple(torch.randn(8, 16, dtype=f64, requires_grad=True) for _ in range(3)),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_written_out_equals_eager_with_the_same_dropout(name: str, capture: Any) -> None:
    fn, inputs = WRITTEN[name]
    args = inputs()
    for a in args if name == "keys of one row" else ():
        if a.shape[0] == 2:
            torch._dynamo.mark_dynamic(a, 0)  # rows, which are a symbol
    gm, graph_inputs = capture(fn, *args)
    replace_portable(gm)
    assert ops(gm) == []
    given = [2 if isinstance(i, (int, torch.SymInt)) else i for i in graph_inputs]
    eager, ours = (seeded(call) for call in (lambda: fn(*args), lambda: gm(*given)[0]))
    tangent = torch.randn(eager.shape, dtype=f64)
    grads = [torch.autograd.grad(out, args, tangent) for out in (ours, eager)]
    assert (
        max(
            float((a - b).detach().abs().max())
            for a, b in zip((ours, *grads[0]), (eager, *grads[1]))
        )
        < TOLERANCE
    )
    if name.startswith("dropout"):
        assert float((seeded(lambda: gm(*given)[0], 7) - eager).detach().abs().max()) > 0.01


def seeded(call: Callable[[], Tensor], seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    return call()


def test_attention_of_three_dimensions_is_one_operation(capture: Any) -> None:
    q, k, v = (torch.randn(2, 8, 16, dtype=f64, requires_grad=True) for _ in range(3))
    gm, inputs = capture(lambda q, k, v: sdpa(q, k, v, EVERY_OTHER[None].expand(2, 8, 8)), q, k, v)
    replace_portable(gm)
    assert ops(gm) == ["attention"]
    torch.testing.assert_close(
        gm(*inputs)[0], sdpa(q, k, v, EVERY_OTHER), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_half_precision_is_computed_in_float32_inside(capture: Any) -> None:
    q, k, v = (t.bfloat16() for t in (heads(), heads(), heads()))
    gm, inputs = capture(lambda q, k, v: sdpa(q, k, v, dropout_p=0.4), q, k, v)
    replace_portable(gm)
    ours = seeded(lambda: gm(*inputs)[0])
    assert ours.dtype == torch.bfloat16 and torch.equal(
        ours, seeded(lambda: sdpa(q, k, v, dropout_p=0.4))
    )


BLOCKS = create_block_mask(
    lambda b, h, i, j: (i >= j) & (i - j < 3), None, None, 8, 8, device="cpu"
)
SLOPES = torch.linspace(0.1, 0.9, 4, dtype=f64)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=BLOCKS, enable_gqa=True)  # type: ignore[return-value]  # one result is asked for


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(b % 2 == 0, 5 * torch.tanh((score + SLOPES[h] * (j - i)) / 5), score)

    out, lse = flex_attention(q, k, v, score_mod=change, block_mask=BLOCKS, return_lse=True)
    return out * torch.sigmoid(lse)[..., None]


def sunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(8)
    distance, rows = place[:, None] - place, torch.arange(2).view(2, 1, 1, 1)
    scores = q @ k.mT * 0.25
    scores = torch.where(
        rows == 0, 5 * torch.tanh((scores - SLOPES.view(4, 1, 1) * distance) / 5), scores
    )
    scores = scores.masked_fill(~((distance >= 0) & (distance < 3)), float("-inf"))
    return scores.softmax(-1) @ v * torch.sigmoid(scores.logsumexp(-1))[..., None]


WINDOW = (torch.arange(8)[:, None] - torch.arange(8) < 3) & MASK


@pytest.mark.parametrize(
    "fn, same, kv, found",
    [
        (windowed, lambda q, k, v: sdpa(q, k, v, WINDOW, enable_gqa=True), 2, ["attention"]),
        (capped, sunk, 4, []),
        (
            lambda q, k, v: flex_attention(q, k, v, scale=0.3),
            lambda q, k, v: sdpa(q, k, v, scale=0.3),
            4,
            ["attention"],
        ),
    ],
    ids=["block mask", "scores and statistics", "plain"],
)
def test_flex_attention_equals_what_it_means(
    fn: Any, same: Any, kv: int, found: list[str], capture: Any
) -> None:
    args = heads(), heads(kv), heads(kv)
    gm, inputs = capture(fn, *args)
    replace_portable(gm)
    assert ops(gm) == found
    ours, eager = gm(*inputs)[0], same(*args)
    tangent = torch.randn(eager.shape, dtype=f64)
    grads = [torch.autograd.grad(out, args, tangent) for out in (ours, eager)]
    assert (
        max(
            float((a - b).detach().abs().max())
            for a, b in zip((ours, *grads[0]), (eager, *grads[1]))
        )
        < TOLERANCE
    )


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
    leaves = [a for a in args if a.is_floating_point()] + (
        list(fn.parameters()) if isinstance(fn, nn.Module) else []
    )
    tangent = torch.randn(eager.shape, dtype=eager.dtype)
    grads = [torch.autograd.grad(out, leaves, tangent) for out in (ours, eager)]
    assert (
        max(
            float((a - b).detach().abs().max())
            for a, b in zip((ours, *grads[0]), (eager, *grads[1]))
        )
        < TOLERANCE
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, dtype=f64)

    def forward(self, a: Tensor) -> Tensor:
        q, k, v = (t.view(a.shape[0], 8, 4, 4).transpose(1, 2) for t in self.qkv(a).split(16, 2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous().view(a.shape[0], 8, 16)


def test_attention_block_has_no_copy_left(capture: Any, joint: Any) -> None:
    """The exchanges of heads and positions cancel against the model's own: no clone of the attention's output is
    saved."""
    gm, inputs = capture(Attention(), x())
    replace_portable(gm)
    targets = [n.target for n in joint(gm, inputs).graph.nodes]
    assert torch.ops.piper.attention_dgrad.default in targets
    assert torch.ops.aten.clone.default not in targets


def test_captured_with_dynamic_rows(capture: Any) -> None:
    """No size of the rows is baked into the new nodes."""

    def fn(a: Tensor, t: Tensor) -> Tensor:
        loss = F.cross_entropy(a.transpose(1, 2), t, ignore_index=-1, reduction="none")
        return (
            loss
            + F.scaled_dot_product_attention(
                *[F.layer_norm(a, (16,)).unflatten(2, (4, 4)).transpose(1, 2)] * 3
            ).sum()
        )

    a = x()
    torch._dynamo.mark_dynamic(a, 0)
    target = TARGET.clone()
    torch._dynamo.mark_dynamic(target, 0)
    gm, inputs = capture(fn, a, target)
    replace_portable(gm)
    assert ops(gm) == ["cross_entropy", "layer_norm", "attention"]
    wide = torch.randn(3, 8, 16, dtype=f64)
    target = torch.randint(16, (3, 8))
    new = [
        3 if isinstance(i, (int, torch.SymInt)) else target if i.dtype == torch.int64 else wide
        for i in inputs
    ]
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
    assert isinstance(new[0].meta["example_value"], tuple) and new[1].meta[
        "example_value"
    ].shape == (2, 8, 16)
    assert new[-1].meta["example_value"].shape == (2, 4, 8, 4)


def test_disabled_autocast_is_dropped(capture: Any) -> None:
    def fn(a: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return a @ a.mT

    gm, _ = capture(fn, x())
    replace_portable(gm)
    assert [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"] == [
        "getattr",
        "matmul",
    ]


def test_nested_graphs_are_rewritten(capture: Any) -> None:
    inner, _ = capture(nn.LayerNorm(16, dtype=f64), x())
    graph = fx.Graph()
    graph.output(graph.call_module("inner", ()))
    outer = fx.GraphModule({"inner": inner}, graph)
    replace_portable(outer)
    assert ops(inner) == ["layer_norm"]


@pytest.mark.parametrize(
    "norm",
    [
        nn.InstanceNorm1d(8, affine=True, dtype=f64),
        F.instance_norm,
        lambda a: torch.instance_norm(a, *[None] * 4, True, 0.1, 0.1, True),
    ],
    ids=["module", "function", "torch's"],
)
def test_instance_norm_is_a_group_norm(norm: Callable[[Tensor], Tensor], capture: Any) -> None:
    given = x()
    gm, inputs = capture(norm, given)
    replace_portable(gm)
    assert any(node.target is F.group_norm for node in gm.graph.nodes)
    (ours,), eager = gm(*inputs), norm(given)
    tangent = torch.randn(eager.shape, dtype=f64)
    grads = [torch.autograd.grad(out, given, tangent)[0] for out in (ours, eager)]
    torch.testing.assert_close((ours, grads[0]), (eager, grads[1]), rtol=TOLERANCE, atol=TOLERANCE)


def test_eval_batch_norm_passes(capture: Any) -> None:
    gm, _ = capture(nn.BatchNorm1d(8, dtype=f64).eval(), x())
    replace_portable(gm)
    assert ops(gm) == []
