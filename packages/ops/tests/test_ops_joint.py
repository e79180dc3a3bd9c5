"""AOTAutograd's joint graph of a transformer block: the same on meta and on CPU, with dgrad and wgrad as nodes of their
own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper_ops import replace_portable

T, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self, rms: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH) if rms else nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (
            t.view(x.shape[0], T, 2, 8).transpose(1, 2)
            for t in self.qkv(self.norm(x)).split(WIDTH, 2)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + a.transpose(1, 2).reshape(x.shape))
        return F.cross_entropy(logits.view(-1, 7), target.view(-1))


def graph(
    capture: Any, joint: Any, block: nn.Module, device: str, *, replace: bool = True
) -> fx.GraphModule:
    x = torch.randn(2, T, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.zeros(2, T, dtype=torch.int64, device=device)
    gm, inputs = capture(copy.deepcopy(block).bfloat16().to(device), x, target)
    if replace:
        replace_portable(gm)
    result: fx.GraphModule = joint(gm, inputs)
    return result


def described(gm: fx.GraphModule) -> list[tuple[str, Any]]:
    def spec(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype, value.stride()
        return tuple(spec(v) for v in value) if isinstance(value, (list, tuple)) else None

    return [
        (str(n.target), spec(n.meta.get("val"))) for n in gm.graph.nodes if n.op == "call_function"
    ]


def piper_targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if str(n.target).startswith("piper.")]


def quadratic(gm: fx.GraphModule) -> list[str]:
    """Nodes with a tensor of T x T."""
    tensors = [
        (n.name, v) for n in gm.graph.nodes for v in [n.meta.get("val")] if isinstance(v, Tensor)
    ]
    return [name for name, v in tensors if v.dim() >= 2 and tuple(v.shape[-2:]) == (T, T)]


def test_joint_graph_is_the_same_on_meta_and_cpu(capture: Any, joint: Any) -> None:
    meta, cpu = (graph(capture, joint, Block(), device) for device in ("meta", "cpu"))
    assert described(meta) == described(cpu)
    assert sorted(piper_targets(meta)) == [
        "piper.attention.default",
        "piper.attention_dgrad.default",
        "piper.cross_entropy.default",
        "piper.cross_entropy_dgrad.default",
        "piper.layer_norm.default",
        "piper.layer_norm_backward.default",
    ]
    assert not quadratic(meta)


@pytest.mark.filterwarnings("ignore:aten..nll_loss:UserWarning")
def test_without_replacement_the_graphs_differ(capture: Any, joint: Any) -> None:
    """What this package is for: the control for the test above."""
    meta, cpu = (
        graph(capture, joint, Block(), device, replace=False) for device in ("meta", "cpu")
    )
    assert described(meta) != described(cpu)
    assert quadratic(meta)


def ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return seen


def named(gm: fx.GraphModule, target: torch._ops.OpOverload) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    return node


def test_input_and_weight_gradient_can_be_cut_apart(capture: Any, joint: Any) -> None:
    """Neither gradient of an rms_norm is computed from the other, and the weight's reads no parameter of the norm."""
    gm = graph(capture, joint, Block(rms=True), "cpu")
    dgrad, wgrad = (
        named(gm, getattr(torch.ops.piper, f"rms_norm_{part}").default)
        for part in ("dgrad", "wgrad")
    )
    assert dgrad not in ancestors(wgrad) and wgrad not in ancestors(dgrad)
    weight = named(gm, torch.ops.piper.rms_norm.default).args[2]
    assert weight in dgrad.args and weight not in wgrad.args


def test_frozen_norm_has_no_wgrad_and_a_first_layer_no_dgrad(capture: Any, joint: Any) -> None:
    frozen = nn.LayerNorm(WIDTH).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    gm, inputs = capture(frozen, x.clone().requires_grad_())
    replace_portable(gm)
    assert piper_targets(joint(gm, inputs)) == [
        "piper.layer_norm.default",
        "piper.layer_norm_dgrad.default",
    ]
    gm, inputs = capture(nn.LayerNorm(WIDTH), x)
    replace_portable(gm)
    assert piper_targets(joint(gm, inputs)) == [
        "piper.layer_norm.default",
        "piper.layer_norm_wgrad.default",
    ]


def test_joint_graph_runs_as_autograd_does(capture: Any, joint: Any) -> None:
    block = Block().double()
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(7, (2, T))
    gm, inputs = capture(block, x, target)
    replace_portable(gm)
    traced = joint(gm, inputs)
    with torch.no_grad():
        tangent = torch.ones((), dtype=torch.float64)
        loss, *grads = fx.Interpreter(traced).run(*inputs, tangent, enable_io_processing=False)
    eager = block(x, target)
    leaves = [i for i in inputs if i.requires_grad]
    expected = (eager, *torch.autograd.grad(eager, leaves))
    got = (loss, *(g for g in grads if g is not None))
    assert len(got) == len(expected)
    assert max(float((a - b).detach().abs().max()) for a, b in zip(got, expected)) < 1e-12
