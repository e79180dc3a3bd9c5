"""Define Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Llama 3, arXiv 2407.21783)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from piper.models.parts import Attention, SwiGLU, check_multiple, check_sizes, rotary, start
from piper_ir.ground.errors import JobError


@dataclass(frozen=True)
class LlamaConfig:
    """Hold the sizes of a Llama; raise JobError if they do not fit together.

    Attributes:
        layers: Number of blocks.
        width: Elements of a token's vector.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        hidden: Width of the feed-forward part.
        vocab: Number of tokens.
        length: Tokens of a row.
        head_dim: Elements of a head; width / heads when it is None.
        theta: Base of the rotary angles.
        eps: Of the norms.
        qk_norm: Whether queries and keys have norms, as in Qwen3.
        tied: Whether embedding and head are one parameter.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128_256
    length: int = 8_192
    head_dim: int | None = None
    theta: float = 500_000.0
    eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "kv_heads", "hidden", "vocab", "length")
        check_sizes(self, **{name: getattr(self, name) for name in sizes})
        check_multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)
        if self.head_dim is None:
            check_multiple(self, "width", self.width, "heads", self.heads)
        check_sizes(self, head_dim=self.dim_of_head)
        if self.dim_of_head % 2:
            raise JobError(
                f"{type(self).__name__}: heads of {self.dim_of_head} elements cannot be turned in "
                f"pairs; make it even"
            )

    @property
    def dim_of_head(self) -> int:
        """Return the elements of a head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    def build(self) -> Llama:
        """Return the module, on the device that is current; on meta nothing is allocated."""
        return Llama(self)

    def block(self) -> LlamaBlock:
        """Return a block of the model."""
        return LlamaBlock(self)

    def feed_forward(self) -> nn.Module:
        """Return the part of a block after attention: [rows, T, width] -> [rows, T, width]."""
        return SwiGLU(self.width, self.hidden)


class LlamaBlock(nn.Module):
    """Compute attention over all earlier tokens, then the feed-forward part, each after a norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.RMSNorm(config.width, eps=config.eps),
            nn.RMSNorm(config.width, eps=config.eps),
        )
        self.attention, self.feed_forward = Attention(config), config.feed_forward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Map tokens [rows, T] int64, T at most `config.length`, to logits [rows, T, vocab].

    The rotary angles are buffers that no state_dict holds. They are in float32 beside parameters of bfloat16, too.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(config.block() for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary(config.length, config.dim_of_head, config.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        start(self)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.tokens(tokens), tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
