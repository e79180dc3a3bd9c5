"""Define the rows that make a DecoderConfig of a config.json, and the parts that many of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Fields = Mapping[str, Any]
"""The fields of a config.json."""


class Unsaid(Exception):
    """Stop at a field for which a DecoderConfig cannot say the same; its text is the field and its value."""


@dataclass(frozen=True)
class ConfigRow:
    """Say how a type's fields become the fields of a DecoderConfig.

    Attributes:
        sizes: names of a DecoderConfig ("experts.number" is one of its Experts) -> the file's field, or the fields of
            which the first that is there counts.
        fixed: fields of a DecoderConfig that are the same in all models of the type.
        defaults: values of fields that a file may leave out.
        switches: fields -> their values -> the fields of a DecoderConfig that these set; other values are refused.
        window: how `sliding_window` counts: "always", if `use_sliding_window` is true ("asked"), in the layers that
            `layer_types` or a pattern names ("typed"), or not at all ("").
        derived: a function of all fields that returns further fields of a DecoderConfig.
        reads: the fields that it reads.
        notes: the parts that are taken in the nearest form in all models of the type.
    """

    sizes: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    window: Literal["", "always", "asked", "typed"] = ""
    derived: Callable[[Fields], Mapping[str, Any]] | None = None
    reads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "squared_relu",
}  # fmt: skip
"""The names of activations in files -> the names that a DecoderConfig has for them."""
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "activation")

BASE = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
LLAMA = {
    **BASE,
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "head_dim": "head_dim",
    "theta": "rope_theta",
    "eps": "rms_norm_eps",
}
PARTLY = {**LLAMA, "rotary_part": "partial_rotary_factor"}
LAYERNORM = {**PARTLY, "eps": "layer_norm_eps"}
DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
WITH_NORMS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "layer_norm_eps": 1e-5}
PLAIN = {"gated": False, "norm": "layernorm"}
OFF: Mapping[Any, Mapping[str, Any]] = {False: {}, None: {}}
ATTENTION = {"attention_bias": {**OFF, True: {"attention_bias": "all"}}}
MLP = {"mlp_bias": {**OFF, True: {"mlp_bias": True}}}
QKV = {"attention_bias": {**OFF, True: {"attention_bias": "qkv"}}}
UNROTATED = ("some layers do not rotate queries and keys there: that takes almost no time",)
SPLIT = ("queries, keys and values are one matrix there and three here",)


def count(fields: Fields, name: str, usual: int) -> int:
    """Return a field that is an integer from 0 on, or the usual number if it is null or not there."""
    value = fields.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unsaid(f"{name}={value!r}")
    return value
