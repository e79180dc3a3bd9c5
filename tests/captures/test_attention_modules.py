"""Attention as people write it, under plans, against the unmodified module in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import piper
from piper.api.reference.verification import verify_strategy
from piper_ops.rewriting import attention_calls
from tests.helpers.capture_jobs import sgd

WIDTH, HEADS, LENGTH, ROWS = 8, 2, 5, 8
attend = F.scaled_dot_product_attention
BLOCKS = create_block_mask(
    lambda b, h, i, j: (i >= j) & (i - j < 3), None, None, LENGTH, LENGTH, device="cpu"
)


def place() -> Tensor:
    return torch.arange(LENGTH)


def later() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def padding(x: Tensor) -> Tensor:
    return (x[..., 0] > 0.5) & (place() > 0)


class Part(nn.Module):
    """Queries, keys and values, what a case makes of them, and what a case has beside them."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mix
        self.bias, self.slopes = nn.Embedding(4, HEADS), nn.Parameter(torch.linspace(0.5, 1, HEADS))
        self.latent = nn.Parameter(torch.linspace(-1, 1, HEADS * 12).view(1, HEADS, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        return x + self.out(self.mix(self, q, k, v).transpose(1, 2).reshape(x.shape))

    def places(self) -> Tensor:
        """T5's bias: a number for each head and distance."""
        return self.bias((place() - place()[:, None]).abs().clamp(max=3)).permute(2, 0, 1)[None]


class Modules(nn.Module):
    """nn.MultiheadAttention in its spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.2)
        self.first = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2)
        self.other = nn.MultiheadAttention(
            WIDTH, HEADS, batch_first=True, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True
        )

    def forward(self, x: Tensor) -> Tensor:
        y, shares = self.plain(
            x, x, x, average_attn_weights=False, key_padding_mask=padding(x), attn_mask=later()
        )
        x = x + y * shares[:, 0, :, :1]
        swapped = x.transpose(0, 1)
        x = x + self.first(
            swapped, swapped, swapped, attn_mask=later(), is_causal=True, need_weights=False
        )[0].transpose(0, 1)
        return x + self.other(x, x[..., :6], x[..., :4])[0]


class Layered(nn.Module):
    def __init__(self, *make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for layer in make)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Encoder(nn.Module):
    """An encoder that is trained, and with `frozen` one before it that is not."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, 0.1, batch_first=True)
        self.fixed = (
            nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, 0.1, batch_first=True).eval()
            if frozen
            else None
        )
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.fixed is not None:
            with torch.no_grad():
                x = self.fixed(x)
        return self.head(self.encoder(x, mask=later(), src_key_padding_mask=padding(x)))


class Translator(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, WIDTH, 0.1, batch_first=batch_first)
        self.swap = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        made: Tensor = self.transformer(self.swap(x), self.swap(x.roll(1, 1)), tgt_mask=mask)
        return self.swap(made)


def dropped_and_biased(part: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dropout inside, a bias and slopes that are learned, grouped heads, a kernel that is asked for, keys of one
    row."""
    q = q + attend(q, k, v, part.places(), dropout_p=0.2 if part.training else 0.0)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        q = q + attend(q, k[:, :1], v[:, :1], ~later(), dropout_p=0.2, enable_gqa=True)
    q = q + attend(q, k, v, (place() - place()[:, None]).clamp(max=0) * part.slopes[:, None, None])
    q = q + attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view(q.shape)
    return attend(q, part.latent, part.latent)


def sink(part: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A soft cap, a sliding window and a sink, as Gemma 2 and gpt-oss write them."""
    scores = 3 * torch.tanh(q @ k.mT / math.sqrt(4) / 3)
    scores = scores.masked_fill(later() | (place()[:, None] - place() >= 3), float("-inf"))
    scores = torch.cat(
        [scores, part.slopes.view(1, -1, 1, 1).expand(q.shape[0], -1, LENGTH, 1)], -1
    )
    shares = F.softmax((scores - scores.max(-1, keepdim=True).values).float(), -1).to(q.dtype)
    return F.dropout(shares[..., :-1], 0.1, part.training) @ v


def flexible(part: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 3 * torch.tanh((score + part.slopes[h] * (j - i)) / 3)

    return flex_attention(q, k, v, score_mod=change, block_mask=BLOCKS)  # type: ignore[return-value]  # one result is asked for


def masked_blocks(part: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=BLOCKS)  # type: ignore[return-value]  # one result is asked for


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(
        ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    x = drawn[rows.start : rows.stop]
    return x, x.roll(1, 1)


def job(model: Callable[[], nn.Module]) -> piper.Job:
    return piper.Job(
        model,
        batch,
        F.mse_loss,
        sgd,
        global_batch=ROWS,
        precision=piper.Precision(params="float64"),
    )


def parts(mix: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Layered(*[lambda: Part(mix)] * 2)


PIPELINE = piper.Strategy(
    piper.Mesh(pp=2, dp=2),
    (*piper.recipes.one_f_one_b(pp=2, microbatches=2), *piper.recipes.data_parallel()),
)
SHARED = piper.Strategy(
    piper.Mesh(tp=2), (*piper.recipes.tensor_parallel(), piper.split(piper.where(), microbatches=2))
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "modules and calls": lambda: Layered(Modules, lambda: Part(dropped_and_biased)),
    "encoder": Encoder,
    "decoder, batch first": lambda: Translator(True),
    "decoder, rows in dimension 1": lambda: Translator(False),
    "sinks": parts(sink),
    "scores of flex_attention": parts(flexible),
    "blocks of flex_attention": parts(masked_blocks),
}
QUICK = "sinks"


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_attention_equals_plain_pytorch(name: str) -> None:
    report = verify_strategy(job(MODELS[name]), PIPELINE)
    assert report.equal, report.text()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != QUICK)) for n in MODELS]
)
def test_shared_attention_is_computed_whole_where_it_must_be(name: str) -> None:
    report = verify_strategy(job(MODELS[name]), SHARED)
    assert report.equal, report.text()


@pytest.mark.long
def test_negative_control_attention_with_another_scale_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = attention_calls.scores_of
    monkeypatch.setattr(
        attention_calls, "scores_of", lambda build, q, k, scale: scores(build, q, k, 0.6)
    )
    report = verify_strategy(
        job(parts(lambda part, q, k, v: attend(q, k, v, part.places()))), PIPELINE
    )
    assert not report.equal and "NOT what one device computes" in report.text()


@pytest.mark.long
def test_negative_control_attention_without_its_dropout_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighted = attention_calls.weighted
    monkeypatch.setattr(
        attention_calls,
        "weighted",
        lambda build, scores, v, _, *, masked: weighted(build, scores, v, 0.0, masked=masked),
    )
    report = verify_strategy(
        job(parts(lambda part, q, k, v: attend(q, k, v, dropout_p=0.3))), PIPELINE
    )
    assert not report.equal and "NOT what one device computes" in report.text()


@pytest.mark.long
def test_kernels_of_written_out_attention_have_formulas() -> None:
    """Two products with T x T numbers are in F, each of 2 B H T T D FLOPs, and four in the backward; nothing is
    guessed."""
    compiled = piper.compile(
        job(parts(lambda part, q, k, v: attend(q, k, v, dropout_p=0.2))),
        piper.Strategy(piper.Mesh()),
    )
    layer = next(c for c in compiled.program.chunks if c.id == "layer0").bind(ROWS)
    listed = {
        step: [k for k in made.cost.kernels for _ in range(k.count)]
        for step, made in layer.steps.items()
    }
    assert all(k.formula for kernels in listed.values() for k in kernels)
    each = 2 * ROWS * HEADS * LENGTH * LENGTH * WIDTH // HEADS
    found = {step: [k.flops for k in kernels if k.op == "bmm"] for step, kernels in listed.items()}
    assert found["F"] == [each] * 2 and found["I"] + found["W"] == [each] * 4
