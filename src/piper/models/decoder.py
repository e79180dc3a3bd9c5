"""Build the decoder that a `DecoderConfig` describes: embedding, blocks of attention and feed-forward part, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.decoder_attention import Attention, LatentAttention, windowed, writes_out
from piper.models.decoder_config import DecoderFields
from piper.models.mixture import ExpertLayer
from piper.models.parts import FeedForward, norm_of, rotary, start
from piper_ir.ground.errors import JobError
from piper_ir.ground.keywords import checked_fields


class DecoderBlock(nn.Module):
    """Add attention over earlier tokens and the feed-forward part to the tokens [rows, T, width].

    `norm1` and `norm2` stand before the two parts, `after1` and `after2` behind them. In a parallel block both parts
    read the tokens as they come in.
    """

    def __init__(self, config: DecoderFields, number: int) -> None:
        super().__init__()
        self.parallel, self.balanced = config.parallel, config.balanced
        self.one_norm = config.parallel and config.parallel_norms == 1
        before, after = config.norms != "after", config.norms != "before"
        self.norm1, self.norm2 = (
            norm_of(config, config.width) if wanted else nn.Identity()
            for wanted in (before, before and not self.one_norm)
        )
        self.after1, self.after2 = (
            norm_of(config, config.width) if after else nn.Identity() for _ in range(2)
        )
        kind = Attention if config.latent is None else LatentAttention
        self.attention = kind(config, config.window_of(number))
        self.feed_forward: nn.Module
        if config.experts is not None and config.has_experts(number):
            self.feed_forward = ExpertLayer(
                config.width, config.experts, config.activation, gated=config.gated
            )
        else:
            self.feed_forward = FeedForward(
                config.width,
                config.hidden,
                config.activation,
                gated=config.gated,
                bias=config.mlp_bias,
            )
        self.dropout = float(config.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        balance: Tensor | None = None,
    ) -> Any:
        """Return the tokens, and `balance` with the block's own term if the model balances experts."""
        read = self.norm1(x)
        attended = dropped(self, self.after1(self.attention(read, cos, sin, mask)))
        y = x + attended
        if not self.one_norm:
            read = self.norm2(x if self.parallel else y)
        if self.balanced and isinstance(self.feed_forward, ExpertLayer):
            result, more = self.feed_forward.balanced(read)
            balance = more if balance is None else balance + more
        else:
            result = self.feed_forward(read)
        y = y + dropped(self, self.after2(result))
        return (y, balance) if self.balanced else y


class FurtherBlock(nn.Module):
    """Predict a further token from the tokens so far and the embedding of the one `ahead` of each.

    That is a module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) with its norm before the
    head, which the next such module reads, as in Megatron-LM. Embedding and head are the model's own. The last `ahead`
    tokens of a row read those at its begin; no token before them sees that, and they have no loss.
    """

    def __init__(self, config: DecoderFields, number: int, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.norm_tokens, self.norm_embedding, self.norm = (
            norm_of(config, config.width) for _ in range(3)
        )
        self.project = nn.Linear(2 * config.width, config.width, bias=False)
        self.block = DecoderBlock(config, number)

    def forward(self, x: Tensor, tokens: Tensor, embedding: Tensor, *rest: Tensor | None) -> Any:
        """Return the normed tokens [rows, T, width], and the loss that balances experts if the block has one."""
        ahead = F.embedding(tokens.roll(-self.ahead, 1), embedding)
        read = torch.cat([self.norm_tokens(x), self.norm_embedding(ahead)], -1)
        y = self.block(self.project(read), *rest)
        return (self.norm(y[0]), y[1]) if self.block.balanced else self.norm(y)


def dropped(module: DecoderBlock | Decoder, x: Tensor) -> Tensor:
    """Return x with the module's share of it set to 0 in training."""
    return F.dropout(x, module.dropout, module.training) if module.dropout else x


class MaskedHead(nn.Module):
    """Compute the norm of the GELU of a product of x [rows, T, width], which BERT's head reads.

    See BERT, arXiv 1810.04805, appendix A.2; the authors' code has it in `get_masked_lm_output`.
    """

    def __init__(self, config: DecoderFields) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(config.width, config.width), norm_of(config, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class PooledHead(nn.Module):
    """Map tokens [rows, T, width] to logits of classes [rows, pooled_classes], from the first token of each row."""

    def __init__(self, config: DecoderFields) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.head = nn.Linear(config.width, config.pooled_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dense(x[:, 0]).tanh())


class Decoder(nn.Module):
    """Map tokens [rows, T] int64, T at most `config.length`, to logits [rows, T, vocab].

    The rotary angles are buffers that no state_dict holds. They are in float32 beside parameters of bfloat16, too.
    Another such buffer, if attention is written out, is `read`: the keys [length, length] that layers with a window
    read. Each stage has it, so that no stage sends it.

    If the config balances experts or predicts further tokens, the result is a tuple of the logits, those of each
    further token, and `balance` [rows], the sum over layers of `ExpertLayer.balance`. Its mean over rows is a part of
    the loss, which is the same however rows are cut into microbatches and over replicas, since it is a number of each
    row. An encoder (`causal=False`) is built of the same parts.
    """

    cos: Tensor
    sin: Tensor
    read: Tensor

    def __init__(self, config: DecoderFields) -> None:
        super().__init__()
        self.config, self.dropout = config, float(config.dropout)
        self.tokens = nn.Embedding(config.vocab, config.width)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.length, config.width)
        if config.token_types:
            self.types = nn.Embedding(config.token_types, config.width)
        self.embedding_norm = (
            norm_of(config, config.width) if config.embedding_norm else nn.Identity()
        )
        self.layers = nn.ModuleList(DecoderBlock(config, k) for k in range(config.layers))
        self.norm = norm_of(config, config.width)
        self.mtp = nn.ModuleList(
            FurtherBlock(config, config.layers + k, k + 1) for k in range(config.mtp)
        )
        self.transform = MaskedHead(config) if config.head_transform else nn.Identity()
        self.head = nn.Linear(config.width, config.vocab, bias=config.head_bias)
        if config.pooled_classes:
            self.pooled = PooledHead(config)
        if config.rotary_dim:
            cos, sin = rotary(config.length, config.rotary_dim, config.theta)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        small = config.window is not None and config.window < config.length
        self.masked = small and writes_out(config)
        if config.window is not None and self.masked:
            self.register_buffer("read", windowed(config.length, config.window), persistent=False)
        start(self)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, types: Tensor | None = None) -> Any:
        length, balance = tokens.shape[1], None
        x = self.tokens(tokens)
        if self.config.positions == "learned":
            x = x + self.positions.weight[:length]
        if types is not None:
            x = x + self.types(types)
        x = dropped(self, self.embedding_norm(x))
        cos, sin = (
            (self.cos[:length], self.sin[:length]) if self.config.rotary_dim else (None, None)
        )
        mask = self.read[:length, :length] if self.masked else None
        for number, layer in enumerate(self.layers):
            window = self.config.window_of(number)
            x = layer(x, cos, sin, None if window is None else mask, balance)
            if self.config.balanced:
                x, balance = x
        read = [self.norm(x)]
        for number, block in enumerate(self.mtp, self.config.layers):
            masked = None if self.config.window_of(number) is None else mask
            x = block(read[-1], tokens, self.tokens.weight, cos, sin, masked, balance)
            if self.config.balanced:
                x, balance = x
            read.append(x)
        results = [self._capped(self.head(self.transform(x))) for x in read]
        if self.config.pooled_classes:
            results.append(self.pooled(read[0]))
        if balance is not None:
            results.append(balance)
        return tuple(results) if len(results) > 1 else results[0]

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.logit_cap
        return logits if cap is None else cap * (logits / cap).tanh()


@checked_fields(JobError)
@dataclass(frozen=True, kw_only=True)
class DecoderConfig(DecoderFields):
    """Describe a decoder that can be built; its fields stand in `DecoderFields`."""

    def build(self) -> Decoder:
        """Return the module, on the device that is current; on meta nothing is allocated."""
        return Decoder(self)
