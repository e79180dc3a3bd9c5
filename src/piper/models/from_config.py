"""Read a config.json of Hugging Face as the description of a decoder, if one says the same.

Every field of the file is used, has no effect on the time or memory of a step, is taken in the nearest form, or is
refused; none is passed over without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from piper.models.config_parts import ACTIVATION_FIELDS, ACTIVATIONS, ConfigRow, Unsaid, count
from piper.models.config_rows import OTHERS, ROWS
from piper.models.decoder import DecoderConfig
from piper.models.decoder_config import Experts, Latent
from piper_ir.ground.errors import JobError
from piper_ir.tools import json_fields, unread

CONFIG = "config.json"
"""The file of a published model's folder that has its sizes."""
MUST: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "decoder_sparse_step": (1, None),
    "moe_layer_freq": (1, None),
    "mlp_only_layers": ([], None),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "use_bidirectional_attention": (False, None),
    "embedding_fraction": (1, None),
}
"""The values of fields for which a DecoderConfig says the same, where a type's row says nothing of them."""
_NOT_DRAWN = "taken as 0: the time of its draws is not counted"
NEAREST: Mapping[str, str] = {
    **dict.fromkeys(
        ("attention_dropout", "attn_pdrop", "embd_pdrop", "emb_pdrop", "resid_pdrop", "hidden_dropout", "residual_dropout",
         "embedding_dropout"),
        _NOT_DRAWN,
    ),
    "output_router_logits": "the loss that balances experts is left out: it takes almost no time",
    "aux_loss_alpha": "the loss that balances experts is left out: it takes almost no time",
    "attn_logit_softcapping": "scores of attention are not capped: a kernel that caps them takes longer",
    "num_nextn_predict_layers": "the blocks that predict further tokens are left out: they take time and memory",
    "num_mtp_layers": "the blocks that predict further tokens are left out: they take time and memory",
}  # fmt: skip
"""The fields that are taken in the nearest form if they are set, and how."""
NO_EFFECT = frozenset({
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "torch_dtype", "dtype",
    "use_cache", "transformers_version", "initializer_range", "rope_scaling", "router_aux_loss_coef", "router_jitter_noise",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "n_ctx", "scale_attn_weights", "_name_or_path", "name_or_path", "auto_map", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "return_dict", "output_attentions", "output_hidden_states", "unsloth_version",
    "original_max_position_embeddings", "n_special", "predict_special_tokens", "output_past", "is_llama_config",
    "rope_interleaved", "rope_interleave", "attn_implementation", "_attn_implementation", "do_sample", "temperature", "top_p",
    "max_length", "pretraining_tp", "gradient_checkpointing", "rotary", "tokenizer_class", "tokenizer_name", "is_decoder",
    "classifier_dropout", "query_pre_attn_scalar", "rope_local_base_freq", "cache_implementation", "logit_scale",
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "ep_size", "seq_aux", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
    "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "init_config", "init_device", "verbose", "fc_type",
})  # fmt: skip
"""The fields that change neither time nor memory of a training step, or almost nothing of them."""
_READ = frozenset({
    *MUST, *NEAREST, *NO_EFFECT, *ACTIVATION_FIELDS, "rope_parameters", "rope_theta", "quantization_config", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
})  # fmt: skip
"""The fields that count in more than one type."""
SCALED = frozenset(
    {"linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional"}
)
"""The `rope_type` of a config.json: scalings of rotary positions that published models have."""
_OPTIONAL = {"kv_heads", "head_dim", "rotary_part", "latent.q_rank", "logit_cap", "eps"}
"""The fields of a DecoderConfig that have a default if a file leaves them out."""
_FROM_ZERO = {"dense_layers", "experts.shared_hidden", "mtp"}
_SWITCHES = {"tied", "experts.normalized"}


@dataclass(frozen=True)
class Described:
    """Hold a model that a config.json describes.

    Attributes:
        type: the file's `model_type`.
        config: the description of the decoder; None if none says the same.
        fields: the file's fields.
        notes: the fields that are taken in the nearest form.
        missing: why no description says the same; "" if one does.
    """

    type: str
    config: DecoderConfig | None
    fields: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    missing: str = ""


def describe(path: str | Path) -> Described:
    """Read a config.json, or that of a folder; raise JobError, with the file's name, if it is none."""
    path = Path(path)
    file = path / CONFIG if path.is_dir() else path
    fields = read_fields(file)
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise JobError(
            f"{file} has no model_type, so that it is no config.json of Hugging Face; give the file of a published "
            f"model, its folder, the name of a preset, or a FILE.py that defines `job`"
        )
    row = ROWS.get(kind)
    if row is None:
        return Described(kind, None, fields, missing=OTHERS.get(kind, "no row describes that type"))
    try:
        said = _said(row, fields, file)
        config = _built(said, file)
        notes = tuple(_notes(row, fields))
    except Unsaid as error:
        return Described(kind, None, fields, missing=str(error))
    return Described(kind, config, fields, notes)


def read_fields(file: Path) -> dict[str, Any]:
    """Return the fields of a config.json; raise JobError, with the file's name, if it is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        advice = "give a config.json, its folder, or a preset such as llama3-8b"
        raise JobError(unread("the model", file, e, advice)) from None
    return json_fields(text, file, "an object with model_type")


def _said(row: ConfigRow, fields: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the fields of a DecoderConfig; raise Unsaid for values that it cannot hold, JobError for wrong ones."""
    _check_all(row, fields)
    said = {**row.fixed, "activation": _activation(row, fields)}
    for name, values in row.switches.items():
        value = fields.get(name, row.defaults.get(name, False if False in values else None))
        if not any(value is known or value == known for known in values):
            raise Unsaid(f"{name}={value!r}")
        said |= values[value]
    said |= dict(_sizes(row, fields, file))
    if row.derived is not None:
        said |= row.derived(fields)
    return said | _window(row, fields)


def _check_all(row: ConfigRow, fields: Mapping[str, Any]) -> None:
    """Raise Unsaid for a field that is not known, or whose value no description says."""
    for name, accepted in MUST.items():
        if (
            name in fields
            and name not in {*row.switches, *row.reads}
            and fields[name] not in accepted
        ):
            raise Unsaid(f"{name}={fields[name]!r}")
    quantized = fields.get("quantization_config")
    if quantized is not None and not _kept_in_fewer_bits(quantized):
        raise Unsaid("quantization_config")
    theirs = {
        name
        for names in row.sizes.values()
        for name in ([names] if isinstance(names, str) else names)
    }
    known = {*theirs, *row.switches, *row.reads, *row.defaults, *_READ}
    if unread := sorted(
        name for name, value in fields.items() if name not in known and value is not None
    ):
        near = {name: get_close_matches(name, known - fields.keys(), 1, 0.85) for name in unread}
        texts = (f"{n} ({near[n][0]}?)" if near[n] else n for n in unread)
        raise Unsaid(f"unknown fields: {', '.join(texts)}")


def _kept_in_fewer_bits(quantized: object) -> bool:
    """Return whether a file keeps the weights of products in fewer bits (DeepSeek-V3, GPT-OSS), and nothing else."""
    return isinstance(quantized, Mapping) and quantized.get("quant_method") in ("fp8", "mxfp4")


def _activation(row: ConfigRow, fields: Mapping[str, Any]) -> str:
    names = (fields[name] for name in ACTIVATION_FIELDS if fields.get(name) is not None)
    usual = next((row.defaults[name] for name in ACTIVATION_FIELDS if name in row.defaults), "silu")
    value = next(names, usual)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise Unsaid(f"the activation {value!r}")
    return ACTIVATIONS[value]


def _sizes(row: ConfigRow, fields: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a DecoderConfig that a row names; raise JobError for one that is not there."""
    for ours, names in row.sizes.items():
        theirs = (names,) if isinstance(names, str) else names
        name = next((n for n in theirs if fields.get(n) is not None), theirs[0])
        value = fields.get(name)
        if ours in ("theta", "rotary_part"):
            value = _of_rotation(fields, theirs, value)
        if value is None and name not in fields:
            value = next((row.defaults[n] for n in theirs if n in row.defaults), None)
        if value is not None:
            _check_kind(file, name, value, ours)
            yield ours, value
        elif ours not in _OPTIONAL:
            raise JobError(
                f"{file} has no {name}, which a model of type {fields['model_type']} needs"
            )


def _of_rotation(fields: Mapping[str, Any], names: tuple[str, ...], value: Any) -> Any:
    """Return a field of `rope_parameters`, as transformers 5 writes it, of full attention if it has several."""
    rotation = fields.get("rope_parameters")
    if isinstance(rotation, Mapping) and isinstance(rotation.get("full_attention"), Mapping):
        rotation = rotation["full_attention"]
    if not isinstance(rotation, Mapping):
        return value
    return next((rotation[name] for name in names if name in rotation), value)


def _window(row: ConfigRow, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of a type and the layers that have it."""
    window = fields.get("sliding_window", row.defaults.get("sliding_window"))
    if window is None or (row.window == "asked" and not fields.get("use_sliding_window")):
        return {}
    if not row.window:
        raise Unsaid(f"sliding_window={window!r}")
    if row.window == "asked" and not fields.get("layer_types"):
        first = fields.get("max_window_layers", 28)
        if (
            "qwen" in fields["model_type"]
            and count(fields, "max_window_layers", 28) >= fields["num_hidden_layers"]
        ):
            return {}  # layers have a window from that one on
        if first not in (0, None):
            own = "" if "max_window_layers" in fields else ", its default,"
            raise Unsaid(f"max_window_layers={first!r}{own} with use_sliding_window")
    every = _every(row, fields) if row.window == "typed" or fields.get("layer_types") else 1
    return {"window": window, "window_every": every} if every else {}


def _every(row: ConfigRow, fields: Mapping[str, Any]) -> int:
    """Return n if every n-th layer attends to all tokens, 1 if none does, 0 if all do."""
    types = fields.get("layer_types")
    if types is None:
        return fields.get("sliding_window_pattern") or row.defaults["sliding_window_pattern"]
    layers = len(types) if isinstance(types, list) else 0
    for every in range(layers + 1):
        full = (every == 0 or (every > 1 and (k + 1) % every == 0) for k in range(layers))
        if types == ["full_attention" if f else "sliding_attention" for f in full]:
            return every
    raise Unsaid(f"layer_types={types!r}")


def _built(said: Mapping[str, Any], file: Path) -> DecoderConfig:
    """Return the description, with the parts whose fields have a dot; raise JobError for sizes that do not fit."""
    plain = {name: value for name, value in said.items() if "." not in name}
    try:
        for part, make in (("experts", Experts), ("latent", Latent)):
            dotted = {n: value for n, value in said.items() if n.startswith(f"{part}.")}
            if dotted:
                plain[part] = make(**{n.partition(".")[2]: value for n, value in dotted.items()})
        return DecoderConfig(**plain)
    except JobError as error:
        raise JobError(f"{file}: {error}") from None


def _notes(row: ConfigRow, fields: Mapping[str, Any]) -> Iterator[str]:
    yield from row.notes
    yield from (
        f"{name}={fields[name]}: {how}"
        for name, how in NEAREST.items()
        if fields.get(name) and name not in row.sizes.values()
    )
    yield from _scaled(fields)
    if fields.get("quantization_config") is not None:
        yield "quantization_config: weights have the precision of the job"


def _scaled(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for positions that the published model scales."""
    for name in ("rope_scaling", "rope_parameters"):
        found = fields.get(name)
        parts = [found, *found.values()] if isinstance(found, Mapping) else []
        kinds = [p.get("rope_type", p.get("type")) for p in parts if isinstance(p, Mapping)]
        if scaled := sorted({str(kind) for kind in kinds if kind not in (None, "default")}):
            strange = "".join(
                f", a type that is not known ({k})" for k in scaled if k not in SCALED
            )
            yield (
                f"{name} ({', '.join(scaled)}{strange}): positions are not scaled: time and memory are the same, but "
                f"planned.py trains another model than the published one"
            )
            return


def _check_kind(file: Path, name: str, value: Any, size: str) -> None:
    """Raise JobError for a value that is no number, or no truth value where one is needed."""
    if size in _SWITCHES:
        wrong, needed = not isinstance(value, bool), "true or false"
    else:
        least = 0 if size in _FROM_ZERO else 1e-30
        wrong = (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value < math.inf
        )
        needed = "a number from 0 on" if size in _FROM_ZERO else "a number above 0"
    if wrong:
        raise JobError(f"{file}: {name} is {value!r}; {needed} is needed")
