"""The casts of torch.autocast inside a model are part of what is captured, and equal plain PyTorch's in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import FLOAT32, RunOutcome, differences
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import explain
from piper_capture.trace import autocast
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import sgd

ROWS, LENGTH, WIDTH = 8, 3, 8

BOTH = piper.Strategy(
    piper.Mesh(pp=2, dp=2),
    (*piper.recipes.pipeline(pp=2, microbatches=2), *piper.recipes.data_parallel()),
)


class Block(nn.Module):
    """Products, a norm, a joined tensor, and a block without autocast in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.qkv(x)
            y = F.layer_norm(torch.cat([y, x], -1), (2 * WIDTH,))[..., :WIDTH]
            with torch.autocast(x.device.type, enabled=False):
                y = y + x.softmax(-1)
            return x + self.out(y)


class OfOneDevice(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return x + self.out(x)


class Attention(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q = self.qkv(x)[:, None]
            return x + self.out(F.scaled_dot_product_attention(q, q, q)[:, 0])


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)  # type: ignore[no-any-return]  # modules have no types


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))[
        rows.start : rows.stop
    ]
    return x, (x[:, 0, 0] * 10).long() % 3


def job(block: Callable[[], nn.Module]) -> piper.Job:
    return piper.Job(
        partial(Net, block),
        batch,
        F.cross_entropy,
        sgd,
        ROWS,
        precision=piper.Precision(params="float32"),
    )


def found_differences(block: Callable[[], nn.Module] = Block, limit: float = FLOAT32) -> list[str]:
    """Return what differs from plain PyTorch in float32, without the parameters after the last step."""
    made = job(block)
    run = piper.execute(piper.compile(made, BOTH), steps=2, launcher="inline", gradients=True)
    expected = reference(
        made, replicas=2, microbatches=2, steps=2, whole=False
    )  # bfloat16 rounds a sum over other rows
    return [str(d) for d in differences(RunOutcome.of(run), expected, limit, parameters=False)]


def test_equal_to_one_device_with_the_casts_of_autocast() -> None:
    """Both agree to 2e-5, though bfloat16 has three digits: the very same numbers are cast."""
    assert not found_differences()
    compiled = piper.compile(job(Block), BOTH)
    line = Block.forward.__code__.co_firstlineno + 2
    assert f"test_autocast_inside.py:{line}): its casts are part of what is captured" in explain(
        compiled
    )
    saved = [
        str(s) for c in compiled.program.chunks for p, s in c.ports.items() if p.startswith("saved")
    ]
    assert any(s.startswith("bfloat16") for s in saved)


@pytest.mark.long
def test_in_float64_autocast_casts_nothing() -> None:
    report = verify_strategy(job(Block), BOTH, steps=1)
    assert report.equal, report.text()


def test_without_the_casts_it_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(autocast, "_write", lambda *_: None)
    monkeypatch.setattr(
        "piper.api.captures.capturing.capture_key", lambda job, **_: None
    )  # not the capture of another test
    assert found_differences()


@pytest.mark.long
def test_attention_in_bfloat16_equals_to_its_rounding() -> None:
    """Its backward is another kernel than plain PyTorch's."""
    assert not found_differences(Attention, 1e-2)


def test_casts_of_one_device_are_refused() -> None:
    says = r"autocast_inside.py:\d+.*torch.autocast\('cuda'\) .*on this device only.*torch.autocast\(x.device.type"
    with pytest.raises(CaptureError, match=says):
        piper.compile(job(OfOneDevice), BOTH)
