"""Compute attention of decoders: of grouped heads or latent, with rotary positions, windows, ALiBi and sinks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.decoder_config import DecoderFields
from piper.models.parts import NamedFunction, norm_of, rotate
from piper_ops import attention, attention_with_sinks


def windowed(length: int, window: int) -> Tensor:
    """Return which key [T, T] each query reads: its own and the window - 1 before it."""
    places = torch.arange(length)
    distance = places.unsqueeze(1) - places
    return (distance >= 0) & (distance < window)


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each head: powers of 2 ** (-8 / heads) (Press et al., arXiv 2108.12409, section 3).

    Heads above a power of two take every second slope of twice as many, as the authors' code does.
    """
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    return first + (slopes(2 * power)[::2][: heads - power] if heads > power else [])


def share_dropped(config: DecoderFields) -> float:
    """Return the share of attention's probabilities that is set to 0."""
    share = config.attention_dropout
    return float(config.dropout if share is None else share)


def writes_out(config: DecoderFields) -> bool:
    """Return whether all scores are computed, so that a window is a mask of them."""
    return config.attention == "math" or share_dropped(config) > 0


class Heads(nn.Module):
    """Attend with queries, keys and values of heads, as a kernel or written out."""

    slopes: Tensor

    def __init__(self, config: DecoderFields, window: int | None = None) -> None:
        """Attend to the last `window` tokens alone, if it is less than a row has; a mask says so if written out."""
        super().__init__()
        self.heads, self.dropout = config.heads, share_dropped(config)
        # no kernel draws the dropout of probabilities as others do
        self.written = config.attention == "math" or (config.sinks and self.dropout > 0)
        self.core = NamedFunction(self.attend)
        skips = window is not None and window < config.length and not writes_out(config)
        self.window = window if skips and window is not None else 0
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(config.heads).normal_(std=0.02))
        self.has_sinks, self.alibi = config.sinks, config.positions == "alibi"
        self.causal = config.causal
        if self.alibi:
            self.register_buffer("slopes", torch.tensor(slopes(config.heads)), persistent=False)

    def biased(self, q: Tensor) -> Tensor:
        """Return ALiBi's bias [heads, T, T] of scores, which falls with the distance of a key.

        Each layer makes its own: devices that share heads need the biases of theirs.
        """
        places = torch.arange(q.shape[1], device=q.device)
        distance = places.unsqueeze(1) - places
        bias = self.slopes.to(q.dtype).view(-1, 1, 1) * -distance.to(q.dtype)
        return bias.masked_fill(distance < 0, float("-inf"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention [rows, T, heads x value_dim] of q, k and v, all [rows, T, heads, head_dim].

        `mask` says by True which keys are read, or is added to the scores; None is as `config.causal` says.
        """
        rows, length = q.shape[:2]
        grouped = k.shape[2] != q.shape[2]
        if self.alibi:
            mask = self.biased(q)
        causal = self.causal and mask is None
        if self.has_sinks and not self.written:
            options = mask, causal, None, grouped, self.window
            mixed = attention_with_sinks(q, k, v, self.sinks, *options)
            return mixed.reshape(rows, length, -1)
        if self.window:
            mixed = attention(q, k, v, None, True, None, grouped, self.window)[0]
            return mixed.reshape(rows, length, -1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.written:
            mixed = self.written_out(q, k, v, mask)
        else:
            mixed = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal,
                enable_gqa=grouped,
            )
        return mixed.transpose(1, 2).reshape(rows, length, -1)

    def written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the same [rows, heads, T, value_dim] by matmul and softmax, of heads [rows, heads, T, head_dim]."""
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            q, k, v = q.unflatten(1, (-1, groups)), k.unsqueeze(2), v.unsqueeze(2)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.causal or mask is not None:
            scores = scores + additive(scores, mask, groups)
        shares = torch.softmax(self._with_sinks(scores), -1)
        if self.has_sinks:
            shares = shares[..., :-1]
        if self.dropout:
            shares = F.dropout(shares, self.dropout, self.training)
        mixed = shares @ v
        return mixed.flatten(1, 2) if groups > 1 else mixed

    def _with_sinks(self, scores: Tensor) -> Tensor:
        """Return the scores with one more, that of the head's sink."""
        if not self.has_sinks:
            return scores
        sinks = self.sinks.view(*scores.shape[1:-2], 1, 1)
        return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)


def additive(scores: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """Return the addend of scores [rows, heads, T, T], or [rows, kv_heads, groups, T, T], for a mask of `attend`."""
    if mask is None:
        shape, inf = scores.shape[-2:], float("-inf")
        return torch.full(shape, inf, dtype=scores.dtype, device=scores.device).triu(1)
    if mask.dtype == torch.bool:
        nothing = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
        return nothing.masked_fill(~mask, float("-inf"))
    return mask.unflatten(0, (-1, groups)) if groups > 1 else mask


class NormOverHeads(nn.Module):
    """Compute the RMSNorm of x [..., heads x head_dim] over all heads.

    It is written out: devices that share the heads add up the squares of theirs; a kernel needs all heads at once.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        wide = x.to(exact)
        mean = wide.square().sum(-1, keepdim=True) / x.shape[-1]
        return (wide * (mean + self.eps).rsqrt()).to(x.dtype) * self.weight


class Attention(Heads):
    """Compute grouped-query attention (GQA, arXiv 2305.13245) of x: [rows, T, width].

    With `qk_norm` there is a norm over queries and keys before they are turned: over each head's (Qwen3, arXiv
    2505.09388, section 2) or over all heads together (OLMo 2, arXiv 2501.00656, section 3.2).
    """

    def __init__(self, config: DecoderFields, window: int | None = None) -> None:
        super().__init__(config, window)
        self.head_dim, self.turned = config.dim_of_head, config.rotary_dim
        inner, grouped = config.heads * self.head_dim, config.key_heads * self.head_dim
        bias = config.attention_bias
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(config.width, 3 * inner, bias=bias != "none")
        else:
            self.q = nn.Linear(config.width, inner, bias=bias != "none")
        self.out = nn.Linear(inner, config.width, bias=bias == "all")
        if not self.fused:
            self.k, self.v = (
                nn.Linear(config.width, grouped, bias=bias != "none") for _ in range(2)
            )
        self.qk_norm, self.over_all = config.qk_norm, config.qk_norm_over == "all"
        if self.qk_norm:
            self.norm_q, self.norm_k = (
                NormOverHeads(size, config.eps) if self.over_all else norm_of(config, self.head_dim)
                for size in (inner, grouped)
            )

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        if self.fused:
            q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
            if self.qk_norm and self.over_all:
                q, k = self.norm_q(q), self.norm_k(k)
            q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm and not self.over_all:
            q, k = self.norm_q(q), self.norm_k(k)
        if cos is not None and sin is not None:
            q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        return self.out(self.core(q, k, v, mask))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [rows, T, heads, head_dim] with its first elements turned."""
        if self.turned == self.head_dim:
            return rotate(x, cos, sin)
        first, rest = x.split([self.turned, self.head_dim - self.turned], -1)
        return torch.cat([rotate(first, cos, sin), rest], -1)


class LatentAttention(Heads):
    """Compute multi-head latent attention (MLA, arXiv 2405.04434, section 2.1) of x: [rows, T, width].

    Keys and values of all heads come from one small vector of each token, and queries, with `q_rank`, from another. A
    part of keys and queries is turned; that of keys is one for all heads.
    """

    def __init__(self, config: DecoderFields, window: int | None = None) -> None:
        super().__init__(config, window)
        assert config.latent is not None
        sizes = self.sizes = config.latent
        self.turn = NamedFunction(self.turned)
        inner = config.heads * config.dim_of_head
        if sizes.q_rank is None:
            self.q = nn.Linear(config.width, inner, bias=False)
        else:
            self.q_down = nn.Linear(config.width, sizes.q_rank, bias=False)
            self.norm_q = norm_of(config, sizes.q_rank)
            self.q_up = nn.Linear(sizes.q_rank, inner, bias=False)
        self.kv_down = nn.Linear(config.width, sizes.kv_rank + sizes.rope_dim, bias=False)
        self.norm_kv = norm_of(config, sizes.kv_rank)
        values = config.heads * (sizes.nope_dim + sizes.value_dim)
        self.kv_up = nn.Linear(sizes.kv_rank, values, bias=False)
        self.out = nn.Linear(config.heads * sizes.value_dim, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        sizes = self.sizes
        q = self.q(x) if sizes.q_rank is None else self.q_up(self.norm_q(self.q_down(x)))
        q, turned_q = q.unflatten(-1, (self.heads, -1)).split([sizes.nope_dim, sizes.rope_dim], -1)
        small, turned_k = self.kv_down(x).split([sizes.kv_rank, sizes.rope_dim], -1)
        both = self.kv_up(self.norm_kv(small)).unflatten(-1, (self.heads, -1))
        k, v = both.split([sizes.nope_dim, sizes.value_dim], -1)
        q, k = self.turn(q, turned_q, k, turned_k.unsqueeze(2), cos, sin)
        return self.out(self.core(q, k, v, mask))

    def turned(
        self, q: Tensor, turned_q: Tensor, k: Tensor, turned_k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys [rows, T, heads, head_dim] of their plain parts and the parts that are turned."""
        turned_k = rotate(turned_k, cos, sin).expand(-1, -1, self.heads, -1)
        q = torch.cat([q, rotate(turned_q, cos, sin)], -1)
        return q, torch.cat([k, turned_k], -1)
