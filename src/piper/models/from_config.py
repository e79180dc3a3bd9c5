"""Read a config.json of Hugging Face as the sizes of one of the models here, if that has the same blocks.

A decoder is described by its sizes. Every field of the file is used, has no effect on the time or memory of a step, is
taken in the nearest form, or is refused; none is passed over without a word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piper.models.gpt import GPTConfig
from piper.models.llama import LlamaConfig
from piper.models.moe import MoEConfig
from piper.models.presets import Config
from piper_ir.ground.errors import JobError

CONFIG = "config.json"
"""The file of a published model's folder that has its sizes."""
_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "vocab": "vocab_size",
    "length": "max_position_embeddings",
    "head_dim": "head_dim",
    "theta": "rope_theta",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_MIXTURE = {**_LLAMA, "experts": "num_local_experts", "top_k": "num_experts_per_tok"}
_QWEN_MIXTURE = {**_MIXTURE, "hidden": "moe_intermediate_size", "experts": "num_experts"}
_GPT2 = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "length": "n_positions",
    "tied": "tie_word_embeddings",
}
DEFAULTS: Mapping[str, Any] = {"tie_word_embeddings": False, "rope_theta": 10_000.0}
"""The values of fields that transformers leaves out of a file, where the models here have others."""


@dataclass(frozen=True)
class Family:
    """Say which of the models here a type of Hugging Face's is.

    Attributes:
        make: the sizes' class here.
        fields: names of sizes here -> names of the file's fields.
        fixed: sizes that are the same in all models of the type.
        activation: the only activation that the models here have.
        defaults: values of the type's fields that a file may leave out.
    """

    make: Callable[..., Config]
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    activation: str = "silu"
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(LlamaConfig, _LLAMA, {}),
    "mistral": Family(LlamaConfig, _LLAMA, {}, defaults={"num_key_value_heads": 8}),
    "qwen3": Family(LlamaConfig, _LLAMA, {"qk_norm": True}, defaults={"head_dim": 128}),
    "mixtral": Family(
        MoEConfig, _MIXTURE, {"capacity_factor": None}, defaults={"num_key_value_heads": 8}
    ),
    "qwen3_moe": Family(MoEConfig, _QWEN_MIXTURE, {"qk_norm": True, "capacity_factor": None}),
    "gpt2": Family(GPTConfig, _GPT2, {}, "gelu_new"),
}
"""The types (`model_type`) that have the same blocks as a model here, to the parameter."""
MUST: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "n_inner": (None,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "pretraining_tp": (1,),
}
"""The values of fields for which the models here say the same."""
NEAREST: Mapping[str, str] = {
    "attention_dropout": "taken as 0: the time of its draws is not counted",
    "attn_pdrop": "taken as 0: the time of its draws is not counted",
    "embd_pdrop": "taken as 0: the time of its draws is not counted",
    "resid_pdrop": "taken as 0: the time of its draws is not counted",
    "output_router_logits": "the loss that balances experts is left out: it takes almost no time",
}
"""The fields that are taken in the nearest form if they are set, and how."""
NO_EFFECT = frozenset({
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "use_cache",
    "transformers_version", "initializer_range", "rope_scaling", "rope_parameters", "router_aux_loss_coef",
    "router_jitter_noise", "norm_topk_prob", "max_window_layers", "layer_norm_epsilon", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "n_ctx",
    "scale_attn_weights", "_name_or_path", "name_or_path", "auto_map", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "is_encoder_decoder", "layer_types", "return_dict", "output_attentions",
    "output_hidden_states", "unsloth_version", "original_max_position_embeddings", "n_special", "predict_special_tokens",
    "output_past", "is_llama_config", "rope_interleaved", "attn_implementation", "_attn_implementation", "do_sample",
    "temperature", "top_p", "max_length",
})  # fmt: skip
"""The fields that change neither time nor memory of a training step."""


OTHERS: Mapping[str, str] = {
    "qwen2": "its queries, keys and values have biases",
    "phi3": "its queries, keys and values are one matrix",
    "gemma2": "its scores are capped, and its blocks have norms behind attention and feed-forward",
    "gemma3_text": "its layers have windows, and norms behind attention and feed-forward",
    "deepseek_v3": "its attention is latent, and its layers have shared experts",
    "gpt_oss": "its experts have biases, its attention sinks",
}
"""The parts of other types that no model here has."""


@dataclass(frozen=True)
class Described:
    """Hold a model that a config.json describes.

    Attributes:
        type: the file's `model_type`.
        config: the sizes of one of the models here; None if none has the same blocks.
        fields: the file's fields.
        notes: the fields that are taken in the nearest form.
        missing: why the models here do not say the same; "" if they do.
    """

    type: str
    config: Config | None
    fields: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    missing: str = ""


def describe(path: str | Path) -> Described:
    """Read a config.json, or that of a folder; raise JobError, with the file's name, if it is none."""
    path = Path(path)
    file = path / CONFIG if path.is_dir() else path
    fields = _read(file)
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise JobError(
            f"{file} has no model_type, so that it is no config.json of Hugging Face; give the file of a published "
            f"model, its folder, the name of a preset, or a FILE.py that defines `job`"
        )
    family = FAMILIES.get(kind)
    if family is None:
        why = OTHERS.get(kind, "no model here is of that type")
        return Described(kind, None, fields, missing=why)
    if missing := _missing(family, fields):
        return Described(kind, None, fields, missing=missing)
    notes = tuple(
        f"{name}={fields[name]}: {how}" for name, how in NEAREST.items() if fields.get(name)
    )
    return Described(kind, _config(family, fields, file), fields, notes)


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise JobError(
            f"{file}: {e.strerror}; give a config.json, its folder, or a preset"
        ) from None
    except ValueError as e:
        raise JobError(f"{file} is no JSON: {e}") from None
    if not isinstance(fields, dict):
        raise JobError(
            f"{file} holds a {type(fields).__name__}; an object with model_type is needed"
        )
    return fields


def _missing(family: Family, fields: Mapping[str, Any]) -> str:
    """Return which fields the models here cannot follow, as a text; "" if there are none."""
    for name, accepted in MUST.items():
        if name == "sliding_window" and fields.get("use_sliding_window") is False:
            continue
        if name in fields and fields[name] not in accepted:
            return f"{name}={fields[name]!r}"
    activation = fields.get("hidden_act", fields.get("activation_function", family.activation))
    if activation != family.activation:
        return f"the activation {activation!r}"
    known = {
        *family.fields.values(),
        *MUST,
        *NEAREST,
        *NO_EFFECT,
        "hidden_act",
        "activation_function",
    }
    unread = sorted(
        name for name, value in fields.items() if name not in known and value is not None
    )
    if "intermediate_size" in unread and "moe_intermediate_size" in family.fields.values():
        unread.remove(
            "intermediate_size"
        )  # of layers without experts, which such a model has none of
    return f"unknown fields: {', '.join(unread)}" if unread else ""


def _config(family: Family, fields: Mapping[str, Any], file: Path) -> Config:
    sizes: dict[str, Any] = dict(family.fixed)
    for ours, theirs in family.fields.items():
        value = fields.get(theirs, {**DEFAULTS, **family.defaults}.get(theirs))
        if ours == "theta" and isinstance(fields.get("rope_parameters"), Mapping):
            value = fields["rope_parameters"].get("rope_theta", value)
        if ours == "kv_heads" and value is None:
            value = fields.get("num_attention_heads")
        if value is not None:
            _check_kind(file, theirs, value, ours)
            sizes[ours] = value
        elif theirs not in ("head_dim", "rms_norm_eps"):
            raise JobError(
                f"{file} has no {theirs}, which a model of type {fields['model_type']} needs"
            )
    if family.make is GPTConfig:
        sizes["tied"] = fields.get("tie_word_embeddings", True)
    return family.make(**sizes)


def _check_kind(file: Path, name: str, value: Any, size: str) -> None:
    """Raise JobError for a value that is no number, or no truth value where one is needed."""
    if size == "tied":
        wrong = not isinstance(value, bool)
    else:
        wrong = isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
    if wrong or value == math.inf:
        needed = "true or false" if size == "tied" else "a number above 0"
        raise JobError(f"{file}: {name} is {value!r}; {needed} is needed")
