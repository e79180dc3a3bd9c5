"""Small models in the spelling of public families, without their packages: each equals plain PyTorch in float64.

`make zoo` tries the families themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy

WIDTH, LENGTH, ROWS = 8, 4, 4


class Falcon(nn.Module):
    """Attention with one head of keys, which is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH + 4),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split((WIDTH, 2, 2), -1)
        heads = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
        return x + self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )


class Alibi(nn.Module):
    """Bloom and MPT: a bias by distance, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        bias = (places[None] - places[:, None]) * torch.tensor([0.5, 0.25])[:, None, None]
        scores = (q @ k.transpose(-1, -2) + bias).masked_fill(
            places[None] > places[:, None], torch.finfo(x.dtype).min
        )
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Rotary(nn.Module):
    """Meta's and torchtitan's Llama: rotary embedding by complex numbers, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1]))
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)) for t in self.qkv(x).chunk(3, -1))
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(t.unflatten(-1, (2, 2))) * self.turns[:, None]
            ).flatten(3)
            for t in (q, k)
        )
        heads = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
        return x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


class Mixer(nn.Module):
    """MLP-Mixer: what runs over words is a linear layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.channels, self.norm = (
            nn.Linear(LENGTH, LENGTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.words(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(F.gelu(x))


class Mobile(nn.Module):
    """MobileNet and EfficientNet: depthwise convolutions, and channels that are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.point = (
            nn.Conv1d(LENGTH, LENGTH, 3, padding=1, groups=LENGTH),
            nn.Conv1d(LENGTH, LENGTH, 1),
        )
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool1d(1), nn.Conv1d(LENGTH, 2, 1), nn.SiLU(), nn.Conv1d(2, LENGTH, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depth(x))
        return x + self.point(y * self.weigh(y).sigmoid())


class Generator(nn.Module):
    """A generator of images: instance norms, and layers that upsample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = (
            nn.InstanceNorm1d(LENGTH, affine=True),
            nn.ConvTranspose1d(LENGTH, LENGTH, 2, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.max_pool1d(F.leaky_relu(self.up(self.norm(x)), 0.2), 2)


class Scan(nn.Module):
    """Mamba: a loop over places that carries a state."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.conv = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 2, padding=1, groups=WIDTH),
        )
        self.decay = nn.Parameter(torch.ones(WIDTH).log())

    def forward(self, x: Tensor) -> Tensor:
        given, gate = self.steps(x).chunk(2, -1)
        given = F.silu(self.conv(given.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        state, found = torch.zeros_like(given[:, 0]), []
        for place in range(x.shape[1]):
            state = state * torch.exp(-self.decay.exp()) + given[:, place]
            found.append(state)
        return x + torch.stack(found, 1) * F.silu(gate)


class Quantised(nn.Module):
    """VQ-VAE: the nearest of a table's entries, whose gradient goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nearest = self.table(torch.cdist(y.flatten(0, 1), self.table.weight).argmin(-1)).view(
            y.shape
        )
        return x + y + (nearest - y).detach() + 0.1 * (nearest - y.detach()).square()


class Windows(nn.Module):
    """Swin: attention inside of windows that are shifted, with a bias from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("index", torch.tensor([[1, 2], [0, 1]]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.roll(-1, 1).view(-1, 2, WIDTH)
        q, k, v = self.qkv(windows).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.table[self.index.view(-1)].view(2, 2, 2).permute(2, 0, 1)
        )
        return x + y.transpose(1, 2).reshape(x.shape).roll(1, 1)


class Conditioned(nn.Module):
    """DiT: shifts and scales from an embedding of labels, some of which are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.linear = Labels(), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.labels(x).chunk(2, -1)
        return x + self.linear(self.norm(x) * (1 + scale[:, None]) + shift[:, None])


class Labels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.where(torch.rand(x.shape[0], device=x.device) < 0.5, 1, 0))


class Relative(nn.Module):
    """T5: a learned bias by distance, and a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias, self.weight = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Embedding(7, 2),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        scores = q @ k.transpose(3, 2) + self.bias(places - places[:, None] + 3).permute(
            2, 0, 1
        ).unsqueeze(0)
        return x + (F.softmax(scores.float(), -1).type_as(scores) @ v).transpose(1, 2).flatten(2)


class Mixture(nn.Module):
    """A mixture with all experts computed, and those that were not chosen left out by weights of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(WIDTH, 3, bias=False),
            nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        weights = torch.zeros_like(self.gate(x)).scatter(
            -1, chosen, shares / shares.sum(-1, keepdim=True)
        )
        return x + torch.einsum("bte,btw,ewv->btv", weights, x, self.up).relu()


FAMILIES = [
    Falcon, Alibi, Rotary, Mixer, Mobile, Generator, Scan, Quantised, Windows, Conditioned, Relative, Mixture,
]  # fmt: skip


class Stack(nn.Module):
    def __init__(self, families: Sequence[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(family() for family in families)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if isinstance(block, Conditioned):
                first = block
        return self.head(
            x * first.labels(x)[:, None, :WIDTH] if Conditioned in map(type, self.blocks) else x
        )


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))[
        :, rows.start : rows.stop
    ]
    return x[0], x[1]


def check(*families: Callable[[], nn.Module]) -> None:
    job = piper.Job(
        lambda: Stack(families),
        batch,
        F.mse_loss,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
        global_batch=ROWS,
    )
    recipe = piper.recipes.one_f_one_b(pp=2, microbatches=2)
    report = verify_strategy(job, piper.Strategy(piper.Mesh(pp=2), [*recipe]), steps=1)
    assert not report.differences, report.text()


@pytest.mark.long
def test_a_block_of_each_family_equals_plain_pytorch() -> None:
    check(*FAMILIES)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_this_family_equals_plain_pytorch(family: Callable[[], nn.Module]) -> None:
    check(family, family)
