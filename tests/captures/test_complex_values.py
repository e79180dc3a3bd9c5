"""Complex values in models: rotary embedding by view_as_complex, conjugates, transforms; and lines of failing ops."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError, RankError
from tests.helpers.capture_jobs import sgd

WIDTH, LENGTH, HEADS, VOCAB = 8, 4, 2, 11
RECIPE = (*piper.recipes.one_f_one_b(pp=2, microbatches=2), *piper.recipes.data_parallel())
BOTH = piper.Strategy(piper.Mesh(pp=2, dp=2), RECIPE)


def angles(width: int, end: int) -> Tensor:
    each = torch.outer(
        torch.arange(end).float(), 1.0 / (100.0 ** (torch.arange(0, width, 2).float() / width))
    )
    return torch.polar(torch.ones_like(each), each)


def turned(x: Tensor, by: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * by.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], HEADS, -1) for w in (self.wq, self.wk, self.wv))
        q, k = (turned(t, freqs_cis).transpose(1, 2) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return x + self.wo(y.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """The spelling of Meta's and torchtitan's Llama: layers in an nn.ModuleDict, angles as a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleDict({str(number): Attention() for number in range(2)})
        self.register_buffer("freqs_cis", angles(WIDTH // HEADS, 2 * LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h, freqs_cis = self.words(tokens), self.freqs_cis[: tokens.shape[1]]
        for layer in self.layers.values():
            h = layer(h, freqs_cis)
        return self.output(h)


class Between(nn.Module):
    """A function of two layers and of a parameter, with complex values."""

    def __init__(self, function: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.function = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)),
            function,
        )
        self.phase = nn.Parameter(torch.linspace(0, 1, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def flat(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


def a_conjugate_crosses(m: Between, x: Tensor) -> Tensor:
    z = pairs(m.layers[0](x)).conj()
    return flat(z * pairs(m.layers[1](x)))


def a_resolved_conjugate(m: Between, x: Tensor) -> Tensor:
    return m.layers[1](flat(pairs(m.layers[0](x)).conj().resolve_conj()))


def a_number_is_conjugated(m: Between, x: Tensor) -> Tensor:
    z = torch.fft.ifft(torch.fft.fft(pairs(m.layers[0](x))) * torch.exp(1j * m.phase))
    return m.layers[1](torch.cat([z.real, z.conj().imag], -1))


def tokens(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = (torch.arange(8 * LENGTH).view(8, LENGTH) * 7 + step)[rows.start : rows.stop] % VOCAB
    return x, x.roll(1, 1)


def points(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop] + step
    return x, x.sin()


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def job(model: Callable[[], nn.Module], batch: Any = points, loss: Any = F.mse_loss) -> piper.Job:
    return piper.Job(
        model, batch, loss, sgd, global_batch=8, precision=piper.Precision(params="float64")
    )


JOBS = {
    "rotary": lambda: job(Rotary, tokens, of_tokens),
    **{
        f.__name__: lambda f=f: job(lambda: Between(f))
        for f in (a_conjugate_crosses, a_resolved_conjugate, a_number_is_conjugated)
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_equal_to_one_device_and_to_the_planned_memory(name: str) -> None:
    work = JOBS[name]()
    report = verify_strategy(work, BOTH)
    assert report.equal, report.text()
    piper.execute(piper.compile(work, BOTH), steps=1, launcher="inline")  # counts every byte


class ComplexWeight(Between):
    def __init__(self) -> None:
        super().__init__(a_conjugate_crosses)
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def test_complex_parameters_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        CaptureError,
        match=r"parameter 'weight' is torch.complex64; .*torch.complex\(real, imaginary\)",
    ):
        piper.compile(job(ComplexWeight), BOTH)


def test_an_op_that_fails_only_when_it_runs_names_the_users_line() -> None:
    def beyond(step: int, rows: range) -> tuple[Tensor, Tensor]:
        x, y = tokens(step, rows)
        return x + VOCAB, y

    line = Rotary.forward.__code__.co_firstlineno + 1
    said = rf": IndexError: index out of range in self, at {re.escape(__file__)}:{line} \(h, freqs_cis = self.words\(tokens\)"
    with pytest.raises(RankError, match=said):
        piper.execute(
            piper.compile(job(Rotary, beyond, of_tokens), BOTH),
            steps=1,
            launcher="inline",
            memory=False,
        )


class Normed(nn.Module):
    """Normalise and rotate queries, return float32, and if `centred` subtract their mean over the rows of the batch."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.first, self.query = (nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(2))
        self.register_buffer("angles", angles(4 * WIDTH // HEADS, 4 * LENGTH), persistent=False)
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        q = turned(self.query(normed).unflatten(-1, (HEADS, -1)), self.angles).flatten(2)
        return (x + (q - q.mean(0) if self.centred else q)).float()


def test_the_rounding_of_half_precision_is_no_reading_of_other_rows() -> None:
    def rows_of(step: int, rows: range) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8 * 16 * LENGTH * WIDTH).view(8, 4 * LENGTH, 4 * WIDTH)
        return x[rows.start : rows.stop] + step, x[rows.start : rows.stop]

    half = piper.Precision(params="float32", compute="bfloat16")

    def compiled(centred: bool) -> None:
        made = piper.Job(lambda: Normed(centred), rows_of, F.mse_loss, sgd, global_batch=8)
        strategy = piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())
        piper.compile(replace(made, precision=half), strategy)

    compiled(centred=False)
    with pytest.raises(CaptureError, match="combines rows of the batch"):
        compiled(centred=True)
