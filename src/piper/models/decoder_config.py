"""Say how a decoder is built: the fields of `DecoderConfig`, `Latent` attention and the `Experts` of a mixture.

Public configurations of decoders differ in these fields. A combination that cannot be built or run is refused by
its name, with the accepted alternative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self, get_args

from piper.models.parts import Activation, check_multiple, check_sizes
from piper_ir.ground.errors import JobError
from piper_ir.ground.keywords import checked_fields

Norm = Literal["rmsnorm", "layernorm"]
Norms = Literal["before", "sandwich", "after"]
Biases = Literal["none", "qkv", "all"]
PositionKind = Literal["rotary", "learned", "alibi", "none"]
Written = Literal["fused", "math"]
Score = Literal["softmax", "sigmoid"]


@checked_fields(JobError)
@dataclass(frozen=True, kw_only=True)
class Latent:
    """Hold the sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        q_rank: Elements of the vector that a token's queries are made of; None makes them of the token itself.
        kv_rank: Elements of the vector that a token's keys and values are made of.
        nope_dim: Elements of a head's queries and keys without positions.
        rope_dim: Elements of them that are turned; in keys they are the same for all heads.
        value_dim: Elements of a head's values.
    """

    q_rank: int | None = None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("kv_rank", "nope_dim", "rope_dim")}
        check_sizes(self, **sizes, value_dim=self.value_dim)
        if self.q_rank is not None:
            check_sizes(self, q_rank=self.q_rank)
        check_multiple(self, "rope_dim", self.rope_dim, "the pair", 2)


@checked_fields(JobError)
@dataclass(frozen=True, kw_only=True)
class Experts:
    """Hold the sizes of a mixture of experts.

    Attributes:
        number: How many a layer has.
        top_k: Experts that a token goes to.
        hidden: Width of an expert's feed-forward part.
        capacity_factor: Places of an expert over the tokens that it would get if all experts got equally many. None is
            dropless: an expert takes every token that chose it.
        shared_hidden: Width of a feed-forward part that every token goes through beside its experts; 0 for none.
        shared_gate: Whether its result is multiplied by a sigmoid of a product with the token (Qwen2-MoE).
        shared_within: Whether it is computed in the region of the experts, so that devices that share these may compute
            it while rows travel (`piper.shard(beside=True)`); along other axes it is whole then.
        score: How the router's products become scores.
        normalized: Whether the shares of a token's experts are its scores divided by their sum.
        scale: The shares are multiplied by this.
        groups: How many groups of equal size the experts are in.
        top_groups: Groups that a token's experts are chosen from. The score of a group is the sum of its two best
            (sigmoid; DeepSeek-V3, arXiv 2412.19437, section 2.1.2) or its best (softmax; DeepSeek-V2).
        balance: The weight of the loss that balances experts; 0 for none. The model then returns that loss, too.
        bias: Whether the products of experts and of their router have biases (GPT-OSS).
        clamp: The bound of an expert's gate and up products (GPT-OSS: 7.0), which are then multiplied as
            activation(min(gate, clamp)) x (1 + max(min(up, clamp), -clamp)); None for no bound and no 1.
    """

    number: int
    top_k: int
    hidden: int
    capacity_factor: float | None = None
    shared_hidden: int = 0
    shared_gate: bool = False
    shared_within: bool = False
    score: Score = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    balance: float = 0.0
    bias: bool = False
    clamp: float | None = None

    def __post_init__(self) -> None:
        sizes = ("number", "top_k", "hidden", "groups", "top_groups")
        check_sizes(self, **{name: getattr(self, name) for name in sizes})
        _check_choices(self, score=Score)
        _check_switches(self, "shared_gate", "shared_within", "normalized", "bias")
        if self.top_k > self.number:
            raise JobError(f"Experts(top_k={self.top_k}): there are {self.number} experts")
        self._check_groups()
        self._check_numbers()

    def _check_groups(self) -> None:
        check_multiple(self, "number", self.number, "groups", self.groups)
        if self.top_groups > self.groups:
            raise JobError(f"Experts(top_groups={self.top_groups}): there are {self.groups} groups")
        size = self.number // self.groups
        if self.top_k > self.top_groups * size:
            raise JobError(
                f"Experts(top_k={self.top_k}): {self.top_groups} groups of {size} have fewer; choose more groups"
            )
        if self.top_groups < self.groups and self.score == "sigmoid" and size < 2:
            raise JobError("Experts(score='sigmoid'): groups of at least two experts are needed")

    def _check_numbers(self) -> None:
        factor, shared = self.capacity_factor, self.shared_hidden
        if factor is not None and not (_is_number(factor) and factor > 0):
            raise JobError(
                f"Experts(capacity_factor={factor!r}): a positive number is needed, or None for a dropless mixture"
            )
        if isinstance(shared, bool) or not isinstance(shared, int) or shared < 0:
            raise JobError(f"Experts(shared_hidden={shared!r}): an integer from 0 on is needed")
        if self.clamp is not None and not (_is_number(self.clamp) and self.clamp > 0):
            raise JobError(
                f"Experts(clamp={self.clamp!r}): a positive number is needed, such as 7.0, or None"
            )
        if self.shared_gate and not shared:
            raise JobError("Experts(shared_gate=True): shared_hidden is needed, too")
        if self.shared_within and (not shared or factor is not None):
            raise JobError(
                "Experts(shared_within=True): shared_hidden is needed, and no capacity_factor"
            )
        for name in ("scale", "balance"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise JobError(
                    f"Experts({name}={value!r}): a number from 0 on is needed, such as 0.001"
                )

    def capacity(self, length: int) -> int:
        """Return the tokens that an expert takes of a row: length x top_k / number x capacity_factor, rounded up.

        A token goes to an expert once, so there are never more than `length`.
        """
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(length * self.top_k / self.number * self.capacity_factor))


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


_NUMBERS: Sequence[tuple[tuple[str, ...], Callable[[Any], bool], str]] = (
    (
        ("dropout", "attention_dropout"),
        lambda x: isinstance(x, float | int) and 0 <= x < 1,
        "a share of at least 0 and below 1 is needed",
    ),
    (("theta", "eps"), lambda x: _is_number(x) and x > 0, "a number above 0 is needed"),
    (
        ("logit_cap",),
        lambda x: _is_number(x) and 0 < x < math.inf,
        "a number above 0 is needed, or None",
    ),
    (
        ("mtp", "token_types", "pooled_classes"),
        lambda x: _is_number(x) and isinstance(x, int) and x >= 0,
        "an integer from 0 on is needed",
    ),
    (
        ("mtp_weight",),
        lambda x: _is_number(x) and 0 < x < math.inf,
        "a number above 0 is needed, such as 0.3",
    ),
)
"""The fields that hold numbers, with the condition of each, and the words of its error."""


@dataclass(frozen=True, kw_only=True)
class DecoderFields:
    """Hold the fields of a DecoderConfig; raise JobError if they do not fit together or cannot be built.

    Attributes:
        layers: Number of blocks.
        width: Elements of a token's vector.
        heads: Heads of queries.
        hidden: Width of the feed-forward part, in layers without experts.
        vocab: Number of tokens.
        length: Tokens of a row, and learned positions, if there are any.
        kv_heads: Heads of keys and values; as many as of queries when it is None.
        head_dim: Elements of a head; width / heads when it is None.
        activation: The function of the feed-forward part; "gelu_tanh" is GPT-2's approximation of GELU.
        gated: Whether a second product gates it: down(activation(gate(x)) * up(x)), or down(activation(up(x))).
        norm: The kind of all norms.
        norm_bias: Whether layer norms have biases.
        embedding_norm: Whether there is a norm behind the embedding (BLOOM).
        eps: Of the norms.
        norms: Where the norms of a part stand: before it, behind it (OLMo 2), or both (Gemma 2).
        parallel: Whether attention and feed-forward part read the same tokens, and both are added to them (GPT-J).
        parallel_norms: Whether these share one norm, 1, or have one each, 2 (GPT-NeoX).
        attention_bias: The products of attention that have biases.
        mlp_bias: Whether the products of the feed-forward part have biases.
        head_bias: Whether the head has.
        fused_qkv: Whether queries, keys and values come from one product, in this order.
        positions: How attention knows the order of tokens.
        theta: Base of the rotary angles.
        rotary_part: The share of a head's elements that is turned, its first ones.
        qk_norm: Whether queries and keys have norms, before they are turned.
        qk_norm_over: The elements of such a norm: of a "head" (Qwen3), or of "all" heads (OLMo 2).
        window: Tokens that a token attends to, itself among them; None for all before it.
        window_every: With n > 1, layer i attends to all tokens when (i + 1) % n == 0; with 1 none does.
        sinks: Whether each head has a score that is learned and takes a part of the attention (GPT-OSS).
        logit_cap: Logits are bounded by it, as logit_cap x tanh(logits / logit_cap) (Gemma 2); None bounds none.
        tied: Whether embedding and head are one parameter.
        dropout: The share of the output that each part adds to the tokens, and of the embedding, that is set to 0.
        attention_dropout: The share of attention's probabilities that is set to 0; None is as much as `dropout`. With
            it, "fused" is written out as well, without sinks in float32.
        causal: Whether a token attends to itself and the tokens before it alone. With False it attends to all tokens of
            its row: an encoder (BERT, arXiv 1810.04805), whose job is to find tokens that are masked.
        token_types: Kinds of tokens, each with a vector that is added to the embedding of its tokens (BERT: 2, for two
            sentences); 0 for none. With them the model maps (tokens, types) [rows, T] int64.
        head_transform: Whether a product, GELU and a norm stand between the norm behind the layers and the head (BERT).
        pooled_classes: Classes of a row, which a second head tells from its first token, through a product and tanh
            (BERT: 2, whether the second sentence follows the first); 0 for none. The model then returns (logits,
            logits of classes [rows, pooled_classes]).
        attention: "fused" keeps no matrix of tokens x tokens if a device has such a kernel. "math" writes attention out
            with matmul, softmax and dropout, as stacks did before such kernels, and saves the tensors that these save.
        latent: The sizes of latent attention, in place of heads' own keys and values.
        experts: The sizes of a mixture, in place of the feed-forward part.
        dense_layers: The first layers, which have no experts.
        mtp: Tokens behind the next one that are predicted, too, each by a block of its own behind the layers
            (multi-token prediction; DeepSeek-V3, arXiv 2412.19437, section 2.2). They are the last layers of stages.
        mtp_weight: The weight of the mean of their losses (there 0.3, later 0.1).
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int = 128_256
    length: int = 8_192
    kv_heads: int | None = None
    head_dim: int | None = None
    activation: Activation = "silu"
    gated: bool = True
    norm: Norm = "rmsnorm"
    norm_bias: bool = True
    embedding_norm: bool = False
    eps: float = 1e-5
    norms: Norms = "before"
    parallel: bool = False
    parallel_norms: int = 1
    attention_bias: Biases = "none"
    mlp_bias: bool = False
    head_bias: bool = False
    fused_qkv: bool = False
    positions: PositionKind = "rotary"
    theta: float = 500_000.0
    rotary_part: float = 1.0
    qk_norm: bool = False
    qk_norm_over: Literal["head", "all"] = "head"
    window: int | None = None
    window_every: int = 1
    sinks: bool = False
    logit_cap: float | None = None
    tied: bool = False
    dropout: float = 0.0
    attention_dropout: float | None = None
    causal: bool = True
    token_types: int = 0
    head_transform: bool = False
    pooled_classes: int = 0
    attention: Written = "fused"
    latent: Latent | None = None
    experts: Experts | None = None
    dense_layers: int = 0
    mtp: int = 0
    mtp_weight: float = 0.3

    def __post_init__(self) -> None:
        for name, kind in (("latent", Latent), ("experts", Experts)):
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                raise JobError(
                    f"DecoderConfig({name}={value!r}): piper.models.{kind.__name__} or None is needed"
                )
        sizes = ("layers", "width", "heads", "hidden", "vocab", "length", "parallel_norms")
        check_sizes(self, **{name: getattr(self, name) for name in sizes}, kv_heads=self.key_heads)
        check_multiple(self, "heads", self.heads, "kv_heads", self.key_heads)
        if self.head_dim is None and self.latent is None:
            check_multiple(self, "width", self.width, "heads", self.heads)
        check_sizes(self, head_dim=self.dim_of_head, window_every=self.window_every)
        _check_choices(self, activation=Activation, norm=Norm, norms=Norms, attention_bias=Biases)
        _check_choices(self, positions=PositionKind, attention=Written)
        _check_choices(self, qk_norm_over=Literal["head", "all"])
        _check_switches(self, "gated", "norm_bias", "parallel", "mlp_bias", "head_bias", "qk_norm")
        _check_switches(self, "sinks", "tied", "embedding_norm", "fused_qkv", "causal")
        _check_switches(self, "head_transform")
        self._check_numbers()
        self._check_positions()
        for field, value, refused, accepted in self._refusals():
            if refused:
                raise JobError(f"DecoderConfig({field}={value!r}): {accepted}")

    @property
    def key_heads(self) -> int:
        """Return the heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def dim_of_head(self) -> int:
        """Return the elements of a head's queries and keys."""
        if self.latent is not None:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Return the elements of a head that are turned; 0 without rotary positions."""
        if self.positions != "rotary":
            return 0
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.dim_of_head * self.rotary_part)

    @property
    def balanced(self) -> bool:
        """Return whether the model returns the loss that balances experts beside its logits."""
        return self.experts is not None and self.experts.balance > 0

    def window_of(self, layer: int) -> int | None:
        """Return the tokens that a token of this layer attends to; None for all before it."""
        full = self.window_every > 1 and (layer + 1) % self.window_every == 0
        return None if full else self.window

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer is a mixture."""
        return self.experts is not None and layer >= self.dense_layers

    def with_experts(self, **changes: Any) -> Self:
        """Return the description with other fields of its `Experts`; raise JobError if it has none."""
        if self.experts is None:
            raise JobError(f"with_experts({', '.join(changes)}): this description has no experts")
        return replace(self, experts=replace(self.experts, **changes))

    def source(self) -> str:
        """Return Python that makes this description, with the fields that are not as by default."""
        return _source(self)

    def _check_numbers(self) -> None:
        if self.window is not None:
            check_sizes(self, window=self.window)
        for names, fits, needed in _NUMBERS:
            for name in names:
                value = getattr(self, name)
                may_be_none = name in ("attention_dropout", "logit_cap")
                if not fits(value) and not (value is None and may_be_none):
                    raise JobError(f"DecoderConfig({name}={value!r}): {needed}")
        dense = self.dense_layers
        if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < self.layers:
            raise JobError(
                f"DecoderConfig(dense_layers={dense!r}): an integer from 0 to {self.layers - 1} is needed"
            )

    def _check_positions(self) -> None:
        if not isinstance(self.rotary_part, float | int) or not 0 < self.rotary_part <= 1:
            raise JobError(
                f"DecoderConfig(rotary_part={self.rotary_part!r}): a share above 0 and up to 1 is needed"
            )
        if self.positions == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise JobError(
                f"DecoderConfig: heads of {self.dim_of_head} elements, of which {self.rotary_dim} are turned, cannot be "
                f"turned in pairs; make that even"
            )

    def _refusals(self) -> list[tuple[str, Any, bool, str]]:
        """Return combinations: a field, its value, whether it is refused, and the alternative as a text."""
        one_by_one, latent = not self.parallel, self.latent is not None
        own = self.head_dim is not None or self.kv_heads not in (None, self.heads)
        return [
            ("parallel", True, self.parallel and self.norms != "before", "norms='before' is needed"),
            ("parallel_norms", self.parallel_norms, self.parallel_norms > 2, "1 or 2 is needed"),
            ("parallel_norms", 2, one_by_one and self.parallel_norms > 1, "parallel=True is needed"),
            ("window_every", self.window_every, self.window is None and self.window_every > 1, "it needs a window"),
            ("window", self.window, self.window is not None and self.positions == "alibi",
             "positions='rotary', 'learned' or 'none' are accepted with it"),
            ("sinks", True, self.sinks and latent, "they are accepted without `latent`"),
            ("fused_qkv", True, self.fused_qkv and (self.key_heads != self.heads or latent or self.qk_norm_over == "all"),
             "as many heads of keys as of queries, with norms over a head or none, are needed"),
            ("rotary_part", self.rotary_part, self.rotary_part != 1 and (self.positions != "rotary" or latent),
             "positions='rotary' without `latent` is needed"),
            ("qk_norm_over", self.qk_norm_over, self.qk_norm_over != "head" and not self.qk_norm, "it needs qk_norm=True"),
            ("qk_norm_over", self.qk_norm_over, self.qk_norm_over != "head" and self.norm != "rmsnorm",
             "norm='rmsnorm' is needed"),
            ("latent", self.latent, latent and self.positions != "rotary", "positions='rotary' is needed"),
            ("latent", self.latent, latent and own,
             "head_dim and kv_heads follow from it; leave them out"),
            ("latent", self.latent, latent and (self.qk_norm or self.attention_bias != "none"),
             "qk_norm=False and attention_bias='none' are accepted with it"),
            ("mlp_bias", True, self.mlp_bias and self.experts is not None, "experts say their own: Experts(bias=True)"),
            ("gated", False, not self.gated and self.experts is not None and self.experts.clamp is not None,
             "Experts(clamp=...) bounds a gate and needs one; True is accepted"),
            ("dense_layers", self.dense_layers, self.dense_layers > 0 and self.experts is None, "it needs `experts`"),
            ("mtp", self.mtp, self.mtp >= self.length, f"fewer tokens than the {self.length} of a row are needed"),
            ("mtp", self.mtp, self.mtp > 0 and (self.positions == "learned" or self.embedding_norm),
             "positions='rotary', 'alibi' or 'none' without a norm behind the embedding are accepted with it"),
            ("causal", False, not self.causal and (self.window is not None or self.positions == "alibi" or self.mtp > 0),
             "without window, ALiBi and mtp, which know earlier tokens alone, False is accepted"),
            ("pooled_classes", self.pooled_classes, self.pooled_classes > 0 and (self.mtp > 0 or self.balanced),
             "without mtp and Experts(balance=) it is accepted"),
        ]  # fmt: skip


def _source(config: Any) -> str:
    said = (
        f"{f.name}={_source(value) if is_dataclass(value) else repr(value)}"
        for f in fields(config)
        if (value := getattr(config, f.name)) != f.default
    )
    return f"piper.models.{type(config).__name__}({', '.join(said)})"


def _check_choices(config: object, **choices: Any) -> None:
    """Raise JobError for a field that is none of its words."""
    for name, kind in choices.items():
        value, words = getattr(config, name), get_args(kind)
        if value not in words:
            needed = " or ".join([", ".join(map(repr, words[:-1])), repr(words[-1])])
            raise JobError(f"{type(config).__name__}({name}={value!r}): {needed} is needed")


def _check_switches(config: object, *names: str) -> None:
    """Raise JobError for a field that is neither True nor False."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise JobError(f"{type(config).__name__}({name}={value!r}): True or False is needed")
