"""Describe the model that options of Megatron-LM make: the fields of `piper.models.DecoderConfig`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

from piper_interop.megatron.degrees import further, layers, vocabulary
from piper_interop.megatron.table_model import (
    DISCARDING,
    beside,
    clamp,
    encoder,
    latent,
    mixture,
    written_out,
)
from piper_interop.neutral.described import ModelSizes
from piper_interop.neutral.foreign import Foreign
from piper_ir.ground.errors import JobError
from piper_ir.program.ops import BESIDE, WITHIN

DEFAULTS: dict[str, Any] = {
    "kv_heads": None, "head_dim": None, "activation": "silu", "gated": True, "norm": "rmsnorm", "eps": 1e-5,
    "attention_bias": "none", "mlp_bias": False, "positions": "rotary", "theta": 500_000.0, "rotary_part": 1.0,
    "qk_norm": False, "window": None, "window_every": 1, "sinks": False, "tied": False, "dropout": 0.0, "attention_dropout": None,
    "attention": "fused", "latent": None, "experts": None, "dense_layers": 0, "mtp": 0, "mtp_weight": 0.3,
    "head_bias": False, "causal": True, "token_types": 0, "head_transform": False, "pooled_classes": 0,
}  # fmt: skip
EXPERT_DEFAULTS: dict[str, Any] = {
    "capacity_factor": None, "shared_hidden": 0, "shared_gate": False, "shared_within": False,
    "score": "softmax", "normalized": True,
    "scale": 1.0, "groups": 1, "top_groups": 1, "balance": 0.0, "bias": False, "clamp": None,
}  # fmt: skip
_POSITIONS = {"learned_absolute": "learned", "none": "none"}


def sizes(foreign: Foreign) -> ModelSizes:
    """Return the sizes of the model; raise JobError for sizes that are missing or do not fit together."""
    fields: dict[str, Any] = {
        "layers": layers(foreign),
        "width": _needed(foreign, "hidden-size"),
        "heads": _needed(foreign, "num-attention-heads"),
        "hidden": hidden(foreign),
        "vocab": vocabulary(foreign),
        "length": positions_of(foreign),
    }
    more = (
        _attention(foreign)
        | _feed_forward(foreign)
        | _positions(foreign)
        | {
            "norm": foreign["normalization"].lower(),
            "eps": foreign["norm-epsilon"],
            "tied": not foreign["untie-embeddings-and-output-weights"],
            "dropout": foreign["hidden-dropout"],
            "attention_dropout": _of_probabilities(foreign),
            "experts": experts(foreign) if mixture(foreign) else None,
            "dense_layers": dense_layers(foreign) if mixture(foreign) else 0,
            "mtp": further(foreign),
            "mtp_weight": foreign["mtp-loss-scaling-factor"] if further(foreign) else 0.3,
        }
        | encoder_fields(encoded=encoder(foreign), binary=not foreign["bert-no-binary-head"])
    )
    return ModelSizes(
        fields | {name: more[name] for name in DEFAULTS if more[name] != DEFAULTS[name]}
    )


def _of_probabilities(foreign: Foreign) -> float | None:
    """Return the dropout of attention's probabilities, None if it is as elsewhere."""
    share: float = foreign["attention-dropout"] if written_out(foreign) else 0.0
    return None if share == foreign["hidden-dropout"] else share


def encoder_fields(*, encoded: bool, binary: bool) -> dict[str, Any]:
    """Return the fields that an encoder of pretrain_bert.py has at other values than a decoder.

    `binary` says whether a second head tells whether two sentences follow each other.
    """
    return {
        "causal": not encoded,
        "head_transform": encoded,
        "head_bias": encoded,
        "token_types": 2 if encoded and binary else 0,
        "pooled_classes": 2 if encoded and binary else 0,
    }


def length(foreign: Foreign) -> int:
    """Return the tokens of a row; raise JobError if nobody says them."""
    tokens = foreign.get("seq-length", foreign.get("encoder-seq-length"))
    if not tokens:
        raise JobError(f"{foreign.source}: --seq-length is needed")
    return int(tokens)


def positions_of(foreign: Foreign) -> int:
    """Return the positions that the model knows: all that it learns, else as many as a row has."""
    learned = _kind(foreign) == "learned"
    return (
        int(foreign.get("max-position-embeddings", length(foreign))) if learned else length(foreign)
    )


def hidden(foreign: Foreign) -> int:
    """Return the width of the feed-forward part, as Megatron chooses it where it is not given."""
    given = foreign.get("ffn-hidden-size")
    if given is not None:
        return int(given)
    width = _needed(foreign, "hidden-size")
    return int((4 * width * 2 / 3) / 64) * 64 if foreign["swiglu"] else 4 * width


def experts(foreign: Foreign) -> ModelSizes:
    """Return the sizes of the mixture."""
    softmax = foreign["moe-router-score-function"] == "softmax"
    several = foreign["moe-router-topk"] > 1
    limited = foreign.get("moe-router-group-topk")  # without it Megatron limits no token to groups
    if limited and foreign.get("moe-router-num-groups") is None:
        raise JobError(
            f"{foreign.source}: --moe-router-group-topk {limited} needs --moe-router-num-groups"
        )
    if softmax and not several and not foreign["moe-router-pre-softmax"] and not _sinkhorn(foreign):
        raise JobError(
            f"{foreign.source}: --moe-router-topk 1 with a softmax needs --moe-router-pre-softmax, as Megatron asks: the "
            f"share of one expert is 1, with no gradient"
        )
    more = {
        "capacity_factor": foreign.get("moe-expert-capacity-factor"),
        "shared_hidden": foreign.get("moe-shared-expert-intermediate-size", 0),
        "shared_gate": foreign["moe-shared-expert-gate"],
        "shared_within": beside(foreign),
        "score": "softmax" if softmax else "sigmoid",
        "normalized": not foreign["moe-router-pre-softmax"] if softmax else several,
        "scale": foreign.get("moe-router-topk-scaling-factor", 1.0),
        "groups": foreign["moe-router-num-groups"] if limited else 1,
        "top_groups": limited or 1,
        "balance": _balance(foreign),
        "bias": not foreign["disable-bias-linear"],
        "clamp": clamp(foreign),
    }
    fields = {
        "number": foreign["num-experts"],
        "top_k": foreign["moe-router-topk"],
        "hidden": foreign.get("moe-ffn-hidden-size", hidden(foreign)),
    }
    return ModelSizes(
        fields | {name: value for name, value in more.items() if value != EXPERT_DEFAULTS[name]},
        "Experts",
    )


def _sinkhorn(foreign: Foreign) -> bool:
    return "sinkhorn" in foreign["moe-router-load-balancing-type"]


def dense_layers(foreign: Foreign) -> int:
    """Return the first layers, which have no experts; raise JobError if others have none, too."""
    text, number = foreign["moe-layer-freq"], layers(foreign)
    kinds = pattern(text)
    if isinstance(kinds, int):
        kinds = [0 if layer % kinds else 1 for layer in range(number)] if kinds else []
    dense = kinds.index(1) if 1 in kinds else len(kinds)
    if len(kinds) != number or dense == number or 0 in kinds[dense:]:
        raise JobError(
            f"{foreign.source}: --moe-layer-freq {text}{foreign.at('moe-layer-freq')} of {number} layers: experts in all "
            "layers but some first ones can be said here"
        )
    return dense


def _balance(foreign: Foreign) -> float:
    """Return the weight of the loss that balances experts; kinds of it are added up."""
    kinds, weights = foreign["moe-router-load-balancing-type"], foreign["moe-aux-loss-coeff"]
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        raise JobError(
            f"{foreign.source}: --moe-aux-loss-coeff {' '.join(weights)}{foreign.at('moe-aux-loss-coeff')}: numbers are "
            "needed"
        ) from None
    pairs = zip(kinds, numbers * len(kinds) if len(numbers) == 1 else numbers, strict=False)
    return sum((weight for kind, weight in pairs if kind.endswith("aux_loss")), 0.0)


def _attention(foreign: Foreign) -> dict[str, Any]:
    width, heads = _needed(foreign, "hidden-size"), _needed(foreign, "num-attention-heads")
    grouped, written = foreign["group-query-attention"], written_out(foreign)
    biased = "none" if foreign["disable-bias-linear"] else "all"
    if biased == "none" and foreign["add-qkv-bias"]:
        biased = "qkv"
    channels, one_by_one = foreign.get("kv-channels"), not latent(foreign)
    if channels is None and width % heads and one_by_one:
        raise JobError(
            f"{foreign.source}: --hidden-size {width} is no multiple of {heads} heads; give --kv-channels"
        )
    fields = {
        "kv_heads": foreign["num-query-groups"] if grouped else None,
        "head_dim": channels if channels is not None and channels * heads != width else None,
        "attention_bias": biased,
        "qk_norm": foreign["qk-layernorm"],
        "sinks": foreign["softmax-type"] == "learnable",
        "attention": "math" if written else "fused",
        "latent": None,
        **_window(foreign),
    }
    if fields["kv_heads"] == heads:
        fields["kv_heads"] = None
    if one_by_one:
        return fields
    own = {
        "q_rank": foreign.get("q-lora-rank"),
        "kv_rank": foreign["kv-lora-rank"],
        "nope_dim": foreign["qk-head-dim"],
        "rope_dim": foreign["qk-pos-emb-head-dim"],
        "value_dim": foreign["v-head-dim"],
    }
    ranks = {name: value for name, value in own.items() if value is not None}
    plain = {"kv_heads": None, "head_dim": None, "attention_bias": "none", "qk_norm": False}
    return fields | plain | {"latent": ModelSizes(ranks, "Latent")}


def _window(foreign: Foreign) -> dict[str, Any]:
    """Return the window of attention: a pair (w, 0) lets a token attend to itself and to w before it."""
    text = foreign.get("window-size")
    if text is None:
        return {"window": None, "window_every": 1}
    match = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if match is None or match[2] != "0" or int(match[1]) < 0:
        raise JobError(
            f'{foreign.source}: --window-size {text!r}{foreign.at("window-size")}: a pair such as "127,0", of tokens before '
            "and none behind, can be said here"
        )
    kinds = pattern(foreign.get("window-attn-skip-freq", "1"))
    number = layers(foreign)
    every = kinds if isinstance(kinds, int) else (kinds.index(0) + 1 if 0 in kinds else 1)
    if not every:
        raise JobError(f"{foreign.source}: --window-attn-skip-freq 0: a number from 1 on is needed")
    said = [int(every == 1 or (layer + 1) % every != 0) for layer in range(number)]
    if isinstance(kinds, list) and kinds != said:
        raise JobError(
            f"{foreign.source}: --window-attn-skip-freq {foreign['window-attn-skip-freq']}: one layer of n without a "
            "window can be said here"
        )
    return {"window": int(match[1]) + 1, "window_every": every}


def _feed_forward(foreign: Foreign) -> dict[str, Any]:
    kinds = (
        ("swiglu", "silu", True),
        ("quick-geglu", "quick_gelu", True),
        ("squared-relu", "squared_relu", False),
        ("openai-gelu", "gelu_tanh", False),
    )
    given = [kind for kind in kinds if foreign[kind[0]]]
    if len(given) > 1:
        raise JobError(f"{foreign.source}: --{given[0][0]} and --{given[1][0]} exclude each other")
    _, activation, gated = given[0] if given else ("", "gelu", False)
    biased = not foreign["disable-bias-linear"] and not mixture(foreign)
    return {"activation": activation, "gated": gated, "mlp_bias": biased}


def _positions(foreign: Foreign) -> dict[str, Any]:
    kind = _kind(foreign)
    rotary = kind == "rotary"
    return {
        "positions": kind,
        "theta": float(foreign["rotary-base"]) if rotary else DEFAULTS["theta"],
        "rotary_part": foreign["rotary-percent"] if rotary and not latent(foreign) else 1.0,
    }


def _kind(foreign: Foreign) -> str:
    if encoder(foreign):
        return "learned"  # pretrain_bert.py passes no other kind on
    if foreign["use-rotary-position-embeddings"] or latent(foreign):
        return "rotary"
    return _POSITIONS.get(foreign["position-embedding-type"], "rotary")


def _needed(foreign: Foreign, name: str) -> int:
    value = foreign.get(name)
    if not value or value < 1:
        raise JobError(f"{foreign.source}: --{name} is needed, a number from 1 on")
    return int(value)


def pattern(text: str) -> list[int] | int:
    """Return a frequency as Megatron-LM has it: a number, or a list with 0 or 1 for each layer.

    Raises JobError for another text.
    """
    if text.strip().isdigit():
        return int(text)
    try:
        values = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        values = None
    if not isinstance(values, list) or not set(values) <= {0, 1}:
        raise JobError(
            f'{text!r}: a number, or a list of 0 and 1 such as "([0]*3+[1]*11)", is needed'
        )
    return values


def _value(node: ast.expr) -> list[int] | int:
    """Return the value of lists, their sums, and their products with numbers; raise ValueError for anything else."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements):
            values = [_value(element) for element in elements]
            if all(isinstance(value, int) for value in values):
                return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _value(left), _value(right)
            if isinstance(operator, ast.Add) and isinstance(a, list) and isinstance(b, list):
                return a + b
            if isinstance(operator, ast.Mult) and isinstance(a, list) != isinstance(b, list):
                return a * b  # type: ignore[operator]  # one is a list, one a number
    raise ValueError(ast.dump(node))


def parts_of(sizes: ModelSizes) -> dict[str, tuple[str, ...]]:
    """Return the names of a decoder's modules that Megatron's --recompute-modules has words for, by these words."""
    fields = sizes.fields
    experts, latent, dense = (fields.get(k) for k in ("experts", "latent", "dense_layers"))
    activated = ("activation", "times") if fields.get("gated", True) else ("activation",)
    mixed = f"layers.{dense}-{fields['layers'] - 1}" if dense else "*"
    parts: dict[str, tuple[str, ...]] = {
        "core_attn": ("*.attention.core",),
        "layernorm": ("*.norm[12]",),
    }
    if experts is None:
        parts["mlp"] = ("*.feed_forward",)
    else:
        parts["mlp"] = (f"layers.0-{dense - 1}.feed_forward",) if dense else ()
        parts["moe"] = (f"{mixed}.feed_forward",)
        parts["moe_act"] = tuple(f"{mixed}.feed_forward.{name}" for name in activated)
        if experts.fields.get("shared_hidden"):
            parts["shared_experts"] = ("*.feed_forward.shared",)
    if latent is not None:
        queries = "q" if latent.fields.get("q_rank") is None else "q_up"
        names = (queries, "kv_up", "turn")
        parts["mla_up_proj"] = tuple(f"*.attention.{name}" for name in names)
    return parts


def makers_of(parts: Collection[str], sizes: ModelSizes) -> tuple[str, ...]:
    """Return the modules that make the inputs of the parts in Megatron's --offload-modules; no module makes residuals.

    Source: Megatron-LM, core/transformer/transformer_config.py, `offload_modules`.
    """
    experts = () if sizes.fields.get("experts") is None else parts_of(sizes)["moe"]
    makers = {
        "qkv_linear": ("*.norm1",),
        "core_attn": ("*.attention",),
        "attn_proj": ("*.attention.core",),
        "expert_fc1": experts,
        "moe_act": experts,
    }
    return tuple(dict.fromkeys(pattern for part in parts for pattern in makers.get(part, ())))


def policy_of(parts: Collection[str], sizes: ModelSizes) -> str:
    """Return the policy that computes parts of layers again; "" if the model has none of them."""
    modules, policies = parts_of(sizes), []
    for keep, chosen in (("inputs", DISCARDING & {*parts}), ("outputs", {*parts} - DISCARDING)):
        if patterns := sorted({pattern for part in chosen for pattern in modules.get(part, ())}):
            policies.append(f"{keep}{WITHIN}{'+'.join(patterns)}")
    return BESIDE.join(policies)
