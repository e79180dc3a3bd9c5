"""Modules of torch that ordinary models use as they are: what is captured of them equals one device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError, PiperWarning
from tests.helpers.capture_jobs import sgd

WIDTH, LENGTH = 8, 5


class Recurrent(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], opaque: bool = True) -> None:
        super().__init__()
        self.recurrent, self.opaque = make(), opaque
        self.head = nn.Linear(self._width(), WIDTH)

    def _width(self) -> int:
        return WIDTH * (2 if getattr(self.recurrent, "bidirectional", False) else 1)

    def forward(self, x: Tensor) -> Tensor:
        with piper.region(opaque=self.opaque):
            x = self.recurrent(x)[0]
        return self.head(x)


class Encoded(nn.Module):
    """nn.Transformer copies its layers and initialises them afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(WIDTH, 2, 2, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with piper.region(opaque=True):
            return self.whole(x, x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
            y = F.scaled_dot_product_attention(q, k, v)
        return x + 0.1 * y.transpose(1, 2).flatten(2)


class Attentive(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Warped(nn.Module):
    """affine_grid compares the rows with the channels, to see whether the smallest size is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(LENGTH * WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        images = F.interpolate(
            x[:, None].expand(-1, 4, -1, -1), size=(LENGTH, WIDTH), mode="bicubic"
        )
        grid = F.affine_grid(
            self.place(x.flatten(1)).view(-1, 2, 3), list(images.shape), align_corners=False
        )
        return F.grid_sample(images, grid, align_corners=False).mean(1)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    size = 8 * LENGTH * WIDTH
    x = torch.linspace(-1, 1, size).view(8, LENGTH, WIDTH)[rows.start : rows.stop] + step
    return x, x.sin()


def job(model: Callable[[], nn.Module]) -> piper.Job:
    return piper.Job(model, batch, F.mse_loss, sgd, global_batch=8)


SPLIT = piper.Strategy(
    piper.Mesh(dp=2), (piper.split(piper.where(), microbatches=2), *piper.recipes.data_parallel())
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(
        lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
    ),
    "gru": lambda: Recurrent(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "rnn": lambda: Recurrent(lambda: nn.RNN(WIDTH, WIDTH, batch_first=True)),
    "transformer": Encoded,
    "affine_grid": Warped,
    "sdpa_kernel": lambda: Attentive(1),
    "sdpa_kernel in many layers": lambda: Attentive(16),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "transformer")) for n in MODELS]
)
@pytest.mark.filterwarnings("ignore:sdpa_kernel:piper_ir.ground.errors.PiperWarning")
def test_equal_to_one_device(name: str) -> None:
    report = verify_strategy(job(MODELS[name]), SPLIT)
    assert report.equal, report.text()


def test_a_choice_of_attention_kernels_is_left_out_and_said_with_its_line() -> None:
    line = Attention.forward.__code__.co_firstlineno + 3
    with pytest.warns(
        PiperWarning, match=rf"sdpa_kernel \(before .*test_ordinary_models.py:{line}\) is left out"
    ):
        piper.compile(job(lambda: Attentive(1)), SPLIT)


@pytest.mark.long
def test_constructors_on_fake_tensors_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "enable_nested_tensor", UserWarning)
        piper.compile(job(Encoded), SPLIT)


LIBRARY = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        x = self.linear(x)
        {line}
        return x
"""


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.nn.functional.batch_norm(x.flatten(1), None, None, training=True).view_as(x)",
        "x = x[x > 0].sum() + x",
        "open(__file__)",
        "x = x.reshape(3, 7)",
    ],
)
def test_a_library_whose_name_begins_like_torch_is_not_torch(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The innermost line outside of torch itself is named."""
    file = Path(torch.__path__[0] + "vision") / "blocks.py"
    library = ModuleType("blocks")
    monkeypatch.setitem(sys.modules, "blocks", library)
    exec(compile(LIBRARY.format(line=line), file, "exec"), vars(library))
    number = LIBRARY[: LIBRARY.index("{line}")].count("\n") + 1
    with pytest.raises(CaptureError, match=rf"torchvision/blocks.py:{number}\b") as caught:
        piper.compile(job(library.Block), SPLIT)
    assert "capture/" not in str(caught.value)


def test_a_failure_in_a_loss_of_torchs_own_says_so() -> None:
    """No line of the model's is to blame, and none of Piper's."""
    wrong = replace(job(lambda: nn.Linear(WIDTH, 3)), loss=F.cross_entropy)
    with pytest.raises(CaptureError, match=r"^the loss: cannot be captured: ") as caught:
        piper.compile(wrong, SPLIT)
    assert "capture/" not in str(caught.value)
