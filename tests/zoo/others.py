"""List models of torch.nn itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import Entry, features

WIDTH = 16
SIZE = 16


class Attended(nn.Module):
    """nn.MultiheadAttention in a block of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = (
            nn.LayerNorm(WIDTH),
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.recurrent(self.layers[0](x))[0])


class Bags(nn.Module):
    """Bags of words, whose words are where the features of a row are largest."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(WIDTH, WIDTH, mode=mode) for mode in ("sum", "mean", "sum")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for bag in self.bags:
            x = x + bag(x.argsort(-1)[..., :4].flatten(0, 1)).view(x.shape)
        return x


class Crossed(nn.Module):
    """nn.TransformerDecoder, whose memory is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(
            x,
            x.flip(1),
            tgt_is_causal=True,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
        )


class Paired(nn.Module):
    """nn.Bilinear of what comes in with itself, and how alike the two are."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.like, self.norm = (
            nn.Bilinear(WIDTH, WIDTH, WIDTH),
            nn.CosineSimilarity(-1),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.pair(x, x.flip(1)))
        return y + self.like(x, y)[..., None]


class Both(nn.Module):
    """nn.Transformer, which takes two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x, x)


def stacked(block: Callable[[], nn.Module]) -> nn.Module:
    """Return four blocks in an nn.Sequential."""
    return nn.Sequential(*(block() for _ in range(4)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def blocks(*parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return the function that makes four blocks, each of these parts behind one another."""
    return partial(stacked, lambda: nn.Sequential(*(part() for part in parts)))


ROW, IMAGE = features(6, WIDTH), features(WIDTH, 8, 8)
LINEAR, CONVOLUTION = (
    partial(nn.Linear, WIDTH, WIDTH),
    partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1),
)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "TransformerEncoder": (encoder, ROW),
    "Transformer": (Both, ROW),
    "MultiheadAttention": (partial(stacked, Attended), ROW),
    "LSTM": (partial(Recurrent, nn.LSTM), ROW),
    "GRU": (partial(Recurrent, nn.GRU), ROW),
    "Linear, LayerNorm, GELU": (blocks(LINEAR, partial(nn.LayerNorm, WIDTH), nn.GELU), ROW),
    "Linear, RMSNorm, SiLU": (blocks(LINEAR, partial(nn.RMSNorm, WIDTH), nn.SiLU), ROW),
    "Conv2d, GroupNorm, ReLU": (
        blocks(CONVOLUTION, partial(nn.GroupNorm, 4, WIDTH), nn.ReLU),
        IMAGE,
    ),
    "Conv2d, InstanceNorm2d, Mish": (
        blocks(CONVOLUTION, partial(nn.InstanceNorm2d, WIDTH), nn.Mish),
        IMAGE,
    ),
    "Conv2d, BatchNorm2d, ReLU": (
        blocks(CONVOLUTION, partial(nn.BatchNorm2d, WIDTH), nn.ReLU),
        IMAGE,
    ),
    "Conv1d, PReLU": (blocks(partial(nn.Conv1d, 6, 6, 3, padding=1), nn.PReLU), ROW),
    "ConvTranspose2d, ELU": (
        blocks(partial(nn.ConvTranspose2d, WIDTH, WIDTH, 3, padding=1), nn.ELU),
        IMAGE,
    ),
    "TransformerDecoder": (Crossed, ROW),
    "RNN": (partial(Recurrent, nn.RNN), ROW),
    "EmbeddingBag": (Bags, ROW),
    "Bilinear, CosineSimilarity": (partial(stacked, Paired), ROW),
    "Conv3d, AvgPool3d": (
        blocks(partial(nn.Conv3d, 4, 4, 3, padding=1), partial(nn.AvgPool3d, 3, 1, 1)),
        features(4, 4, 4, 4),
    ),
    "MaxPool2d, Upsample": (
        blocks(CONVOLUTION, partial(nn.MaxPool2d, 2), partial(nn.Upsample, scale_factor=2)),
        IMAGE,
    ),
    "PixelUnshuffle, PixelShuffle": (
        blocks(
            partial(nn.PixelUnshuffle, 2),
            partial(nn.Conv2d, 4 * WIDTH, 4 * WIDTH, 1),
            partial(nn.PixelShuffle, 2),
        ),
        IMAGE,
    ),
    "Conv2d with groups, ReflectionPad2d": (
        blocks(partial(nn.ReflectionPad2d, 1), partial(nn.Conv2d, WIDTH, WIDTH, 3, groups=4)),
        IMAGE,
    ),
    "Unfold, Fold": (
        blocks(
            partial(nn.Unfold, 2, stride=2),
            partial(nn.Linear, 16, 16),
            partial(nn.Fold, (8, 8), 2, stride=2),
        ),
        IMAGE,
    ),
    "LocalResponseNorm, Hardswish": (
        blocks(CONVOLUTION, partial(nn.LocalResponseNorm, 3), nn.Hardswish),
        IMAGE,
    ),
    "Linear, GLU": (blocks(partial(nn.Linear, WIDTH, 2 * WIDTH), nn.GLU), ROW),
    "Linear, Softplus, LogSoftmax": (blocks(LINEAR, nn.Softplus, partial(nn.LogSoftmax, -1)), ROW),
    "weight_norm": (blocks(lambda: nn.utils.parametrizations.weight_norm(LINEAR())), ROW),
    "spectral_norm": (blocks(lambda: nn.utils.parametrizations.spectral_norm(LINEAR())), ROW),
    "orthogonal": (blocks(lambda: nn.utils.parametrizations.orthogonal(LINEAR())), ROW),
    "Conv1d, BatchNorm1d, Dropout": (
        blocks(
            partial(nn.Conv1d, 6, 6, 3, padding=1),
            partial(nn.BatchNorm1d, 6),
            partial(nn.Dropout, 0.2),
        ),
        ROW,
    ),
    "AlphaDropout, SELU": (blocks(LINEAR, nn.SELU, partial(nn.AlphaDropout, 0.2)), ROW),
}
"""Name -> the function that makes a model, its rows."""


def entries() -> Iterator[Entry]:
    """Yield blocks of one or a few kinds of modules, four of each behind one another."""
    for name, (make, rows) in MODELS.items():
        yield Entry("torch.nn", name, make, rows)
