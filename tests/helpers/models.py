"""Small models for every suite: tiny in size, rich in what a capture must handle. d_model 16, 8 positions, 32 tokens.

CASES[name] is a constructor, a batch function with Job's signature whose row r is the same whatever range it is asked
for, and a loss. Numbers are float32; suites that compare in float64 cast model and batch with `cast`. `captured(name)`
captures a case in float64, once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from piper.models import DecoderConfig, Experts, MoEConfig
from piper.models.jobs import job as library_job
from piper.models.jobs import weighted_losses
from piper_capture import Captured, capture, region
from tests.helpers import losses, steered, transformers
from tests.helpers.small_transformers import VOCAB, D, DeepGPT, TinyGPT, TinyLlama
from tests.helpers.small_transformers import T as T

SEED_STRIDE = 100_003


@dataclass(frozen=True)
class Case:
    """`random`: draws random numbers in forward; `buffers`: updates buffers in forward; `layers`: has a ModuleList."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, range], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any] | None
    random: bool = False
    buffers: bool = False
    layers: bool = True


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A nest of tensors with the floating ones in `dtype`."""
    return pytree.tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value
    )


def _rows(
    draw: Callable[[torch.Generator], Tensor], step: int, rows: range, salt: int = 0
) -> Tensor:
    generators = (
        torch.Generator().manual_seed(SEED_STRIDE * (step + 1) + 7 * r + salt) for r in rows
    )
    return torch.stack([draw(g) for g in generators])


def _tokens(step: int, rows: range) -> Tensor:
    return _rows(lambda g: torch.randint(VOCAB, (T + 1,), generator=g), step, rows)


def _features(step: int, rows: range, salt: int = 0) -> Tensor:
    return _rows(lambda g: torch.randn(T, D, generator=g), step, rows, salt)


def token_batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Next-token prediction: (tokens, targets), int64 [rows, T]."""
    tokens = _tokens(step, rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


_FILLED: dict[int, tuple[Tensor, Tensor]] = {}


def refilled_batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    """As `token_batch`, but in the same two tensors every time, as loaders of pinned memory do."""
    new = token_batch(step, rows)
    for tensor, content in zip(_FILLED.setdefault(len(rows), new), new, strict=True):
        tensor.copy_(content)
    return _FILLED[len(rows)]


def masked_batch(step: int, rows: range) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Keyword inputs; the mask leaves rows with uneven numbers of tokens, every fifth row with none."""
    tokens, targets = token_batch(step, rows)
    kept = torch.stack([torch.arange(T) < (3 * r) % 5 * 2 for r in rows])
    return {"tokens": tokens, "mask": kept}, {"next": targets, "mask": kept}


def feature_batch(step: int, rows: range) -> tuple[tuple[Tensor], Tensor]:
    return (_features(step, rows),), _features(step, rows, salt=1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def masked_cross_entropy(logits: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum over unmasked tokens, their number)."""
    each = F.cross_entropy(logits.reshape(-1, VOCAB), targets["next"].reshape(-1), reduction="none")
    mask = targets["mask"].reshape(-1)
    return (each * mask).sum(), mask.sum()


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class SkipMLP(nn.Module):
    """Four tagged regions; stage 0 hands two tensors to stage 1 and one straight to stage 3, stage 2 splits its result
    in two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(D, D) for _ in range(4))
        self.gate, self.out = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        with region(stage=0):
            h = torch.tanh(self.a(x))
            gate = torch.sigmoid(self.gate(x))
            skip = h * 2 - x
        with region(stage=1):
            h = torch.tanh(self.b(h)) * gate
        with region(stage=2):
            left, right = torch.tanh(self.c(h)).chunk(2, dim=-1)
        with region(stage=3):
            h = self.d(torch.cat([right, left], dim=-1)) + skip
            return self.out(torch.cat([h, skip * gate], dim=-1))


class Branches(nn.Module):
    """A stem, two independent branches whose layers the program interleaves, and a join that reads both and the
    stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.join = nn.Linear(D, D), nn.Linear(2 * D, D)
        self.left = nn.ParameterList(torch.randn(D, D) / 4 for _ in range(2))
        self.right = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    @region(branch=1)
    def one(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(x @ weight)

    @region(branch=2)
    def other(self, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    def forward(self, x: Tensor) -> Tensor:
        with region(branch=0):
            x = torch.tanh(self.stem(x))
        a = self.one(x, self.left[0])
        b = self.other(x, self.right[0])
        a = self.one(a, self.left[1])
        b = self.other(b, self.right[1:])
        with region(branch=3):
            return self.join(torch.cat([a, b], dim=-1)) + x


class SliceAssign(nn.Module):
    """Fills a tensor slice by slice in one layer, and overwrites a slice of its input in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with region(stage=0):
            h = torch.zeros_like(x)
            h[:, : T // 2] = self.layers[0](x[:, : T // 2])
            h[:, T // 2 :] = torch.tanh(x[:, T // 2 :])
        with region(stage=1):
            h[:, 0] = self.layers[1](h[:, 1].clone())
            h[:, 1:, 0] *= 2.0
        with region(stage=2):
            return self.layers[2](h)


class Frozen(nn.Module):
    """Frozen parameters: the whole first layer, the weight of the second, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.layers[1].weight.requires_grad_(False)  # type: ignore[union-attr]  # a Linear
        self.head, self.unused = nn.Linear(D, VOCAB), nn.Linear(D, D)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class KeywordInputs(nn.Module):
    """Keyword inputs, of which the mask is used in every layer and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, *, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask[..., None]
        return self.head(x)


class BufferModel(nn.Module):
    """Buffers: a constant, a step counter (the same on every replica), and, if `statistics`, a running mean of
    activations that other layers read before and after its update."""

    count: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, statistics: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.linspace(-1, 1, D), persistent=statistics)
        self.statistics = statistics
        self.mask = torch.ones(D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) * self.scale * self.mean
        with region(part=1):
            self.count += 1
            x = self.layers[1](x * self.mask) * (1 + 0.1 * self.mean)
            if self.statistics:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 1))
        with region(part=2):
            return self.layers[2](x - self.mean) * self.count


@torch.library.custom_op("piper_tests::soft_clip", mutates_args=())
def soft_clip(x: Tensor, limit: float) -> Tensor:
    return limit * torch.tanh(x / limit)


@soft_clip.register_fake
def _soft_clip_shape(x: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("piper_tests::soft_clip_backward", mutates_args=())
def soft_clip_backward(grad: Tensor, y: Tensor, limit: float) -> Tensor:
    return grad * (1 - (y / limit).square())


@soft_clip_backward.register_fake
def _soft_clip_backward_shape(grad: Tensor, y: Tensor, limit: float) -> Tensor:
    return torch.empty_like(grad)


def _soft_clip_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.limit = inputs[1]


def _soft_clip_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return soft_clip_backward(grad, y, ctx.limit), None


soft_clip.register_autograd(_soft_clip_grad, setup_context=_soft_clip_save)


class CustomOp(nn.Module):
    """An op registered with torch.library between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = soft_clip(layer(x), 0.5)
        return x


class InPlaceRegion(nn.Module):
    """A region that changes its input in place, which a later region reads again under its old name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with region(stage=0):
            h = self.a(x)
        with region(stage=1):
            h.add_(x)
            h.transpose(1, 2).mul_(0.5)
            y = torch.tanh(self.b(h))
        with region(stage=2):
            return self.c(y) * h


class OpaqueBlock(nn.Module):
    """nn.MultiheadAttention and a slice assignment, in an opaque region between other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = (
            nn.LayerNorm(D),
            nn.MultiheadAttention(D, 2, batch_first=True),
            nn.Linear(D, D),
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        with region(opaque=True):
            z, _ = self.attention(y, y, y, need_weights=False)
            z[:, 0] = z[:, 1].clone() * self.scale
            y = z + torch.arange(T, device=y.device)[:, None]
        return x + torch.tanh(self.out(y))


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OpaqueBlock() for _ in range(2))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _case(
    name: str, model: Callable[[], nn.Module], batch: Any, loss: Any, **flags: bool
) -> tuple[str, Case]:
    return name, Case(name, model, batch, loss, **flags)


CASES: dict[str, Case] = dict(
    (
        _case("gpt", TinyGPT, token_batch, cross_entropy),
        _case("gpt_untied", functools.partial(TinyGPT, tied=False), token_batch, cross_entropy),
        _case(
            "gpt_dropout",
            functools.partial(TinyGPT, dropout=0.2),
            token_batch,
            cross_entropy,
            random=True,
        ),
        _case(
            "gpt_refilled",
            functools.partial(TinyGPT, layers=4, tied=False),
            refilled_batch,
            cross_entropy,
        ),
        _case("llama", TinyLlama, token_batch, cross_entropy),
        _case("skip", SkipMLP, feature_batch, squared_error, layers=False),
        _case("branches", Branches, feature_batch, squared_error, layers=False),
        _case("slices", SliceAssign, feature_batch, squared_error),
        _case("frozen", Frozen, token_batch, cross_entropy),
        _case("keywords", KeywordInputs, masked_batch, masked_cross_entropy),
        _case("buffers", BufferModel, feature_batch, squared_error, buffers=True),
        _case(
            "counter",
            functools.partial(BufferModel, statistics=False),
            feature_batch,
            squared_error,
            buffers=True,
        ),
        _case("custom_op", CustomOp, feature_batch, squared_error),
        _case("in_place", InPlaceRegion, feature_batch, squared_error, layers=False),
        _case("opaque", Opaque, feature_batch, squared_error),
        _case("deep", DeepGPT, token_batch, cross_entropy),
    )
)
"""Every case by name."""

MORE: dict[str, Case] = dict(
    (
        _case(
            "moe",
            lambda: MoEConfig(
                layers=2,
                width=D,
                heads=2,
                vocab=VOCAB,
                length=T,
                kv_heads=1,
                hidden=D,
                experts=4,
                top_k=2,
            ).build(),
            token_batch,
            cross_entropy,
        ),
        _case(
            "steered",
            functools.partial(steered.SteeredMixture, "all to one"),
            steered.batch,
            F.mse_loss,
        ),
    )
)
"""Cases that only suites use which name them: mixtures of experts, which take long to capture."""


_DECODER = DecoderConfig(
    layers=2, width=D, heads=4, kv_heads=2, hidden=24, vocab=VOCAB, length=T, theta=1e4
)
_WIDE = DecoderConfig(layers=2, width=32, heads=2, hidden=64, vocab=64, length=32)
_EXPERTS = Experts(number=4, top_k=2, hidden=20)
DECODERS: dict[str, Case] = dict(
    (
        _case(
            "shared_experts",
            replace(
                _DECODER, experts=replace(_EXPERTS, shared_hidden=12, shared_within=True)
            ).build,
            token_batch,
            cross_entropy,
        ),
        _case(
            "biased_experts",
            replace(_DECODER, experts=replace(_EXPERTS, bias=True)).build,
            token_batch,
            cross_entropy,
        ),
        _case(
            "mtp",
            replace(_DECODER, mtp=1).build,
            token_batch,
            functools.partial(weighted_losses, 0.0, 0.3),
        ),
        _case("quantised", _WIDE.build, library_job(_WIDE, global_batch=1).batch, cross_entropy),
    )
)
"""Decoders of the library: a shared expert beside the others, biases of experts, multi-token prediction, and products
that are large enough for float8."""
MORE |= DECODERS


def _transformer(name: str, of: transformers.Recipe, loss: str) -> Case:
    """A model of tests/helpers/transformers.py with its loss, or with the one that it computes itself."""
    batch = transformers.labelled if of.own_loss else transformers.batch
    function = None if of.own_loss else losses.LOSSES[loss][1]
    model = functools.partial(transformers.Transformer, of)
    return Case(name, model, batch, function, random=of.dropout > 0)


MORE |= {name: _transformer(name, *of) for name, of in transformers.NAMED.items()}


def is_transformer(name: str) -> bool:
    """Return whether a case is one of tests/helpers/transformers.py, whose batches have as many rows as are there."""
    return name in transformers.NAMED or name.startswith("any ")


@functools.cache
def case(name: str) -> Case:
    """A case of either table, or the transformer of a number: "any 17"."""
    if name.startswith("any "):
        return _transformer(name, *transformers.drawn(int(name.removeprefix("any "))))
    return CASES.get(name) or MORE[name]


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float64) -> Captured:
    """A case, captured once for the whole suite."""
    found = case(name)
    return capture(found.model, functools.partial(found.batch, 0), found.loss, dtype=dtype)
