"""An op of one's own in a model: a kernel with its gradient, and what it costs.

piper verify examples/own_op.py; piper simulate examples/own_op.py --cluster h100x8
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piper


@torch.library.custom_op("own_op::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    """x * relu(y)^2; stands for a kernel of C++ or Triton. Its result is new memory, as the gradients below are."""
    return x * y.relu().square()


@torch.library.custom_op("own_op::gate_dgrad", mutates_args=())
def gate_dgrad(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return g * y.relu().square(), 2 * g * x * y.relu()


gate.register_fake(lambda x, y: torch.empty_like(x))
gate_dgrad.register_fake(lambda g, x, y: (torch.empty_like(x), torch.empty_like(y)))
gate.register_autograd(
    lambda ctx, g: gate_dgrad(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
piper.op_cost("own_op::gate", flops=lambda call: 3 * call.tensor("x").numel())
piper.op_cost(
    "own_op::gate_dgrad", flops=lambda call: 6 * call.tensor("x").numel()
)  # bytes: inputs and outputs, once each


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            left, right, down = layer
            x = x + down(gate(left(x), right(x)))
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, dims=1)


job = piper.Job(
    Gated,
    batch,
    nn.functional.mse_loss,
    lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    global_batch=16,
)
strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.zb_h1(pp=2, microbatches=4))
