"""Define Muon for stacks of matrices, such as the weights of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer


class BatchedMuon(Muon):
    """Update each matrix of a parameter [..., rows, columns] as `torch.optim.Muon` updates a parameter of its own.

    The last two dimensions belong to a matrix and all others count matrices, so that each expert of [experts, rows,
    columns] is updated by itself. Megatron-LM does the same with a parameter for each expert, and a later version of
    torch with batch dimensions (github.com/pytorch/pytorch/pull/197202). Arguments and defaults are the ones of
    `torch.optim.Muon`. Devices may have some of the matrices each.

    Raises ValueError for a parameter of less than two dimensions.
    """

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        # Torch 2.13 refuses stacks in its constructor, which checks all other settings.
        defaults = Muon([torch.nn.Parameter(torch.empty(1, 1))], lr=lr, **settings).defaults
        Optimizer.__init__(self, params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise ValueError(
                    f"BatchedMuon takes parameters of two dimensions or more, and found one of size {list(p.shape)}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient, one after the other; return the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {name: group[name] for name in self.defaults}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                stacks = map(_matrices, (p, p.grad, state["momentum_buffer"]))
                for matrix, grad, momentum in zip(*stacks, strict=True):
                    _update(matrix, grad, momentum, settings)
                    if p.is_meta:
                        break  # nothing is computed, and each matrix has the temporaries of the first
        return loss


def _matrices(stack: Tensor) -> Iterator[Tensor]:
    flat = stack.view(-1, *stack.shape[-2:])
    for number in range(len(flat)):
        yield flat[number]


def _update(matrix: Tensor, grad: Tensor, momentum: Tensor, settings: dict[str, Any]) -> None:
    """Update a matrix and its momentum in place."""
    matrix.grad = grad
    one = Muon([matrix], **settings)
    one.state[matrix]["momentum_buffer"] = momentum
    one.step()
