"""Write the sizes of a model as options of Megatron-LM."""

from __future__ import annotations

from typing import Any

from piper_interop.megatron.exported import WrittenOptions
from piper_interop.megatron.sizes import DEFAULTS, EXPERT_DEFAULTS, encoder_fields
from piper_interop.neutral.described import USUAL_SIZES, ModelSizes

_ACTIVATIONS = {
    ("silu", True): "swiglu",
    ("quick_gelu", True): "quick-geglu",
    ("squared_relu", False): "squared-relu",
    ("gelu_tanh", False): "openai-gelu",
    ("gelu", False): None,
}
_ELSEWHERE: dict[str, Any] = {
    "norm_bias": True, "embedding_norm": False, "norms": "before", "parallel": False,
    "qk_norm_over": "head", "logit_cap": None,
}  # fmt: skip
"""The fields that Megatron's models have at one value alone."""


def write_sizes(sizes: ModelSizes, length: int, tp: int, options: WrittenOptions) -> None:
    """Add the options of a model; note in `options` the fields that Megatron cannot say.

    Args:
        sizes: of the model.
        length: tokens of a row.
        tp: devices that share each layer, of which the vocabulary is a multiple.
        options: that are added to.
    """
    fields = DEFAULTS | USUAL_SIZES | {"parallel_norms": 1} | dict(sizes.fields)
    for name, only in _ELSEWHERE.items():
        if fields.get(name, only) != only:
            options.refuse(f"{name}={fields[name]!r}", f"{name}={only!r}")
    _encoder(fields, options)
    options.add("num-layers", fields["layers"])
    options.add("hidden-size", fields["width"])
    options.add("ffn-hidden-size", fields["hidden"])
    options.add("num-attention-heads", fields["heads"])
    options.add("seq-length", length)
    _vocabulary(fields, tp, options)
    _attention(fields, options)
    _positions(fields, length, options)
    _feed_forward(fields, options)
    options.add("normalization", {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[fields["norm"]])
    options.add("norm-epsilon", fields["eps"])
    options.add("untie-embeddings-and-output-weights", not fields["tied"])
    if fields["experts"] is not None:
        _experts(fields, options)
    if fields["mtp"]:
        options.add("mtp-num-layers", fields["mtp"])
        options.add("mtp-loss-scaling-factor", fields["mtp_weight"])


def _encoder(fields: dict[str, Any], options: WrittenOptions) -> None:
    """Say an encoder by the options of pretrain_bert.py; refuse parts that it has and decoders have not."""
    encoded, binary = not fields["causal"], bool(fields["pooled_classes"])
    made = encoder_fields(encoded=encoded, binary=binary)
    made |= (
        {"positions": "learned", "sinks": False, "latent": None, "experts": None} if encoded else {}
    )
    for name, only in made.items():
        if fields[name] != only:
            options.refuse(f"{name}={fields[name]!r} with causal={not encoded}", f"{name}={only!r}")
    options.add("bert-no-binary-head", encoded and not binary)


def _vocabulary(fields: dict[str, Any], tp: int, options: WrittenOptions) -> None:
    if fields["causal"]:
        options.add("tokenizer-type", "NullTokenizer")
        options.add("vocab-size", fields["vocab"])
        options.add("make-vocab-size-divisible-by", 1)
    else:
        options.add("tokenizer-type", "BertWordPieceLowerCase")
        options.add("padded-vocab-size", fields["vocab"])
    if fields["vocab"] % tp:
        options.near(f"vocab={fields['vocab']}", f"Megatron fills it up to a multiple of tp={tp}")


def _attention(fields: dict[str, Any], options: WrittenOptions) -> None:
    latent, written = fields["latent"], fields["attention"] == "math"
    if fields["kv_heads"] not in (None, fields["heads"]):
        options.add("group-query-attention")
        options.add("num-query-groups", fields["kv_heads"])
    if fields["head_dim"] is not None:
        options.add("kv-channels", fields["head_dim"])
    options.add("attention-backend", "unfused" if written else None)
    options.add("softmax-type", "learnable" if fields["sinks"] else None)
    options.add("hidden-dropout", fields["dropout"])
    share = fields["attention_dropout"]
    options.add("attention-dropout", fields["dropout"] if share is None else share)
    options.add("qk-layernorm", fields["qk_norm"] or latent is not None)
    if fields["window"] is not None:
        options.add("window-size", f"{fields['window'] - 1},0")
        options.add(
            "window-attn-skip-freq", fields["window_every"] if fields["window_every"] > 1 else None
        )
    if latent is not None:
        options.add("multi-latent-attention")
        names = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        theirs = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        for name, their in zip(names, theirs, strict=True):
            options.add(their, latent.fields.get(name))


def _positions(fields: dict[str, Any], length: int, options: WrittenOptions) -> None:
    kind = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}.get(
        fields["positions"]
    )
    if kind is None:
        options.refuse(f"positions={fields['positions']!r}", "positions='rotary'")
        return
    options.add("position-embedding-type", kind)
    options.add(
        "max-position-embeddings", fields["length"] if kind == "learned_absolute" else length
    )
    if kind != "rope":
        return
    if fields["theta"] != int(fields["theta"]):
        options.refuse(f"theta={fields['theta']!r}", f"theta={round(fields['theta'])}")
    options.add("rope-type", "rope" if fields["latent"] is not None else None)  # else YaRN's angles
    options.add("rotary-base", int(fields["theta"]))
    options.add("rotary-percent", fields["rotary_part"] if fields["rotary_part"] != 1 else None)


def _feed_forward(fields: dict[str, Any], options: WrittenOptions) -> None:
    kind = (fields["activation"], fields["gated"])
    if kind not in _ACTIVATIONS:
        options.refuse(
            f"activation={kind[0]!r} with gated={kind[1]}",
            f"activation={'silu' if kind[1] else 'squared_relu'!r}",
        )
    elif name := _ACTIVATIONS[kind]:
        options.add(name)
    bias, products = fields["attention_bias"], fields["mlp_bias"]
    mixture, latent = fields["experts"] is not None, fields["latent"] is not None
    if mixture:
        products = bool(fields["experts"].fields.get("bias"))
    said = "all" if products else "none"
    if bias == "qkv" and not products:
        options.add("add-qkv-bias")
    elif bias != said and not latent:
        options.refuse(
            f"attention_bias={bias!r} with {'bias of experts' if mixture else 'mlp_bias'}={products}",
            "biases in all products, or in none but queries'",
        )
    options.add("disable-bias-linear", said == "none")
    if kind == ("gelu", False) and said == "all":
        options.add("no-bias-gelu-fusion")  # which is that of gelu_tanh


def _experts(fields: dict[str, Any], options: WrittenOptions) -> None:
    own = EXPERT_DEFAULTS | dict(fields["experts"].fields)
    softmax, top_k = own["score"] == "softmax", own["top_k"]
    if not softmax and own["normalized"] != (top_k > 1):
        options.refuse(
            f"Experts(score='sigmoid', normalized={own['normalized']}, top_k={top_k})",
            f"normalized={top_k > 1}",
        )
    options.add("activation-func-clamp-value", own["clamp"])
    options.add("glu-linear-offset", 1.0 if own["clamp"] is not None else None)
    options.add("num-experts", own["number"])
    options.add("moe-ffn-hidden-size", own["hidden"])
    options.add("moe-router-topk", top_k)
    options.add("moe-router-pre-softmax", softmax and not own["normalized"])
    options.add("moe-router-score-function", None if softmax else "sigmoid")
    options.add("moe-router-topk-scaling-factor", own["scale"] if own["scale"] != 1 else None)
    if softmax and top_k == 1 and own["normalized"]:
        options.refuse("Experts(score='softmax', normalized=True, top_k=1)", "normalized=False")
    if own["groups"] != 1:
        summed, best = top_k // own["top_groups"], 1 if softmax else 2
        if not summed:
            options.refuse(
                f"Experts(top_k={top_k}, top_groups={own['top_groups']})", f"top_groups={top_k}"
            )
        elif summed != best:
            options.near(
                f"groups are scored by their {best} best experts", f"by {summed} in Megatron"
            )
        options.add("moe-router-num-groups", own["groups"])
        options.add("moe-router-group-topk", own["top_groups"])
    if own["shared_hidden"]:
        options.add("moe-shared-expert-intermediate-size", own["shared_hidden"])
        options.add("moe-shared-expert-gate", own["shared_gate"])
    options.add("moe-router-load-balancing-type", "seq_aux_loss" if own["balance"] else "none")
    options.add("moe-aux-loss-coeff", own["balance"] or None)
    options.add("moe-expert-capacity-factor", own["capacity_factor"])
    if own["capacity_factor"] is not None:
        options.add("moe-pad-expert-input-to-capacity")
        options.add("moe-token-drop-policy", "position")
        options.near(
            "the capacity of an expert for the tokens of a row", "Megatron's is for a microbatch"
        )
    options.add("moe-grouped-gemm")
    options.add("moe-token-dispatcher-type", "alltoall")
    dense = fields["dense_layers"]
    if dense:
        options.add("moe-layer-freq", f"([0]*{dense}+[1]*{fields['layers'] - dense})")
