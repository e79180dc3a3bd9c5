"""Small models do what those of transformers do in passing: each equals plain PyTorch, or is refused by name."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import WIDTH, job

STRATEGY = piper.Strategy(piper.Mesh(pp=2), piper.recipes.pipeline(pp=2, microbatches=2))
LOCK = threading.Lock()


class Layer(nn.Module):
    """Rotate all features, of which none are left over; a number is the first operand of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        turned, rest = y[..., :WIDTH], y[..., WIDTH:]
        turned = 2 * turned + torch.cat([-turned[..., 1::2], turned[..., ::2]], -1)
        return torch.add(0.3, torch.cat([turned, rest], -1), alpha=0.7)


def set_up(model: Net) -> None:
    """Install a hook in the first forward, as transformers do for hidden states."""
    if not model.ready:
        with LOCK:
            model.layers[0].register_forward_hook(
                lambda module, given, output: output + given[0].sin()
            )
            model.ready = True


class Net(nn.Module):
    """Three layers in a list whose last entry is None; the first forward sets something up under a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer(), None])  # type: ignore[list-item]  # torch allows it
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        set_up(self)
        x = x.clone()
        x.requires_grad = True
        with TransformGetItemToIndex():
            for layer in self.layers:
                x = x if layer is None else layer(x)
        return x


@pytest.mark.long
def test_equal_to_one_device() -> None:
    report = verify_strategy(job(Net), STRATEGY, steps=2)
    assert report.equal, report.text()


class Counting(nn.Module):
    """Take the lock in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        count(self)
        return self.linear(x)


def count(module: Counting) -> None:
    with LOCK:
        module.calls += 1


def test_a_lock_in_every_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"with LOCK(.|\n)*lock"):
        piper.compile(job(Counting), STRATEGY)
