"""Read the sizes of a decoder from torchtitan's tree of modules; name the parts that the decoder here lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from piper_interop.neutral.described import Float8Layers, ModelSizes

Tree = Mapping[str, Any]
LINEAR = {"Linear", "RowParallelLinear", "ScaledBiasRowwiseLinear"}
"""The matrices that compute in the precision of the job."""
QUANTIZED = {"Float8Linear", "MXFP8Linear"}
"""The matrices that multiply in float8."""
TORCHAO = "_torchao_config"
"""The field of a quantized product with the configuration of torchao, which is no module."""
KNOWN = LINEAR | {
    "AllGatherFusedFeedForward", "AllGatherFusedQKVLinear", "AllToAllTokenDispatcher", "Attention", "ComplexRoPE", "CosSinRoPE",
    "DeepEPTokenDispatcher", "DeepSeekV3Model", "DeepSeekV3TransformerBlock", "Embedding", "FeedForward", "FlexAttention",
    "FusedQKVLinear", "GQAttention", "GptOssGroupedExperts", "GptOssMoE", "GptOssModel", "GptOssTransformerBlock",
    "GroupedExperts", "HybridEPTokenDispatcher", "Llama3Model", "Llama3TransformerBlock",
    "MinimalAsyncEPTokenDispatcher", "MoE", "QKVLinear", "Qwen3Model", "Qwen3TransformerBlock", "RMSNorm", "RoutedExperts",
    "ScaledDotProductAttention", "TokenChoiceTopKRouter", "TorchAOTokenDispatcher", "VarlenAttention", "MTPTransformerBlock",
}  # fmt: skip
"""The classes whose blocks the decoder here has."""


@dataclass
class Parts:
    """Hold the facts of a tree.

    Attributes:
        sizes: of the decoder; None if it has another form.
        layers: the number of layers.
        float8: its linear layers that multiply in float8.
        options: facts beside the sizes, which rows of the table judge.
    """

    sizes: ModelSizes | None = None
    layers: int = 0
    float8: Float8Layers | None = None
    options: dict[str, Any] = field(default_factory=dict)


def parts_of(spec: Tree) -> Parts:
    """Return the parts of a `model_spec`."""
    model = spec.get("model") or {}
    kinds = sorted({_kind(tree) for tree in _trees(model)})
    options: dict[str, Any] = {
        "name": spec.get("name"),
        "flavor": spec.get("flavor"),
        "quantized": [k for k in kinds if any(word in k for word in ("Float8", "MX", "NVFP4"))],
        "adapters": [k for k in kinds if "LoRA" in k],
        "dispatcher": next((k for k in kinds if k.endswith("TokenDispatcher")), None),
        "fused_messages": [k for k in kinds if k.startswith("AllGatherFused")],
        "sinks": any("sliding_window_size" in tree for tree in _trees(model)),
    }
    plain = set(options["quantized"]) | set(options["adapters"])
    float8 = float8_of(model)
    if float8 is not None:
        options["float8"] = float8.recipe
        options["quantized"] = [k for k in options["quantized"] if k not in QUANTIZED]
    other = [k for k in kinds if k not in KNOWN and k not in plain]
    layers = model.get("layers") or []
    if other or not layers:
        options["other"] = other or [_kind(model)]
        return Parts(None, len(layers), float8, options)
    sizes, unlike = _decoder(model, layers)
    options["other"] = unlike
    return Parts(sizes if not unlike else None, len(layers), float8, options)


def float8_of(model: Tree) -> Float8Layers | None:
    """Return the linear layers that multiply in float8; None for none, and where they cannot be said here.

    They are all linear layers of all blocks whose features 16 divides, by one recipe, and the head or not.
    """
    layers = map(_without_router, model.get("layers") or ())
    blocks = [tree for layer in layers for tree in _trees(layer)]
    recipes = {_float8_recipe(tree) for tree in blocks if _divided(tree)}
    head = _float8_recipe(model.get("lm_head") or {})
    (recipe,) = recipes if len(recipes) == 1 else ("",)
    if not recipe or head not in ("", recipe):
        return None
    return Float8Layers(recipe, modules=("*",) if head else ("layers.*",))


def _without_router(layer: Tree) -> Tree:
    """Return a layer without the product that chooses experts, which stays in float32 here."""
    mixture = layer.get("moe") or {}
    return {**layer, "moe": {name: part for name, part in mixture.items() if name != "router"}}


def _divided(tree: Tree) -> bool:
    linear = _kind(tree) in LINEAR | QUANTIZED
    return linear and tree["in_features"] % 16 == 0 and tree["out_features"] % 16 == 0


def _float8_recipe(tree: Tree) -> str:
    """Return the recipe of a linear layer by its configuration of torchao; "" for one in the precision of the job."""
    if _kind(tree) == "MXFP8Linear":
        return "mxfp8"
    how = tree.get(TORCHAO) or {}
    try:
        by_row = how["cast_config_input"]["scaling_granularity"] == "axiswise"
        wide = how["cast_config_input_for_grad_weight"]["scaling_type"] == "disabled"
    except (KeyError, TypeError):
        return ""
    return ("rowwise_with_gw_hp" if wide else "rowwise") if by_row else "tensorwise"


def _kind(tree: Tree) -> str:
    return str(tree.get("__class__", "")).removesuffix(".Config").rpartition(".")[2]


def _trees(tree: Any) -> Iterator[Tree]:
    """Yield every part of a tree that is a module's configuration."""
    if isinstance(tree, Mapping):
        if "__class__" in tree:
            yield tree
        for name, value in tree.items():
            if name not in ("param_init", "sharding_config", TORCHAO):
                yield from _trees(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _trees(value)


def _decoder(model: Tree, layers: list[Tree]) -> tuple[ModelSizes, list[str]]:
    """Return the sizes of a decoder, and the ways in which its layers are not like each other."""
    dense = next((k for k, layer in enumerate(layers) if layer.get("moe")), len(layers))
    plain = next((layer for layer in layers if not layer.get("moe")), None)
    mixed = next((layer for layer in layers if layer.get("moe")), None)
    fields: dict[str, Any] = {"layers": len(layers), "width": model["dim"]}
    unlike: list[str] = []
    attention = layers[0]["attention"]
    windows = _windows([layer["attention"].get("sliding_window_size") for layer in layers])
    first = _alike(attention)
    if windows is None or any(_alike(layer["attention"]) != first for layer in layers):
        unlike.append("layers whose attention differs")
    fields |= _attention(attention, unlike) | (windows or {})
    if plain is not None:
        fields["hidden"] = plain["feed_forward"]["w1"]["out_features"]
    if mixed is not None:
        if dense and any(not layer.get("moe") for layer in layers[dense:]):
            unlike.append("layers without experts between the others")
        fields.setdefault("hidden", mixed["moe"]["routed_experts"]["inner_experts"]["hidden_dim"])
        fields["experts"] = experts = _experts(mixed["moe"])
        if "clamp" in experts.fields:
            fields["activation"] = "quick_gelu"
        if dense:
            fields["dense_layers"] = dense
    fields["vocab"] = model["vocab_size"]
    fields["length"] = (
        attention["rope"].get("max_context_length") or attention["rope"]["max_seq_len"]
    )
    if further := len(model.get("mtp_layers") or ()):
        fields["mtp"] = further
    if model["norm"]["eps"] != 1e-5:
        fields["eps"] = model["norm"]["eps"]
    if model.get("enable_weight_tying"):
        fields["tied"] = True
    return ModelSizes(fields), unlike


def _alike(tree: Any) -> Any:
    """Return a tree without the windows of its attention and the quantization of its products."""
    if isinstance(tree, list):
        return [_alike(part) for part in tree]
    if not isinstance(tree, Mapping):
        return tree
    alike = {
        k: _alike(v)
        for k, v in tree.items()
        if k not in ("window_size", "sliding_window_size", TORCHAO)
    }
    return {**alike, "__class__": ""} if _kind(tree).endswith("Linear") else alike


def _windows(sizes: list[int | None]) -> dict[str, Any] | None:
    """Return the fields of layers with these windows: all but every n-th one have the same; None for other patterns."""
    window = next((size for size in sizes if size is not None), None)
    if window is None:
        return {}
    every = sizes.index(None) + 1 if None in sizes else 1
    pattern = [window if every == 1 or (k + 1) % every else None for k in range(len(sizes))]
    return {"window": window, "window_every": every} if sizes == pattern else None


def _attention(tree: Tree, unlike: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"heads": tree["n_heads"]}
    if "kv_lora_rank" in tree:
        ranks = {"q_rank": tree["q_lora_rank"] or None, "kv_rank": tree["kv_lora_rank"]}
        dims = {
            "nope_dim": tree["qk_nope_head_dim"],
            "rope_dim": tree["qk_rope_head_dim"],
            "value_dim": tree["v_head_dim"],
        }
        fields["latent"] = ModelSizes({**ranks, **dims}, "Latent")
    else:
        if tree["n_kv_heads"] not in (None, tree["n_heads"]):
            fields["kv_heads"] = tree["n_kv_heads"]
        if tree["head_dim"] not in (None, tree["dim"] // tree["n_heads"]):
            fields["head_dim"] = tree["head_dim"]
        if tree.get("qk_norm"):
            fields["qk_norm"] = True
        # The attention of GPT-OSS has sinks without a field that says so.
        if "sliding_window_size" in tree:
            fields["sinks"] = True
        biases = {bool(part["bias"]) for part in _trees(tree) if "bias" in part}
        if len(biases) > 1:
            unlike.append("biases of some products of attention")
        elif biases == {True}:
            fields["attention_bias"] = "all"
    theta = tree["rope"]["theta"]
    if theta != 500_000.0:
        fields["theta"] = theta
    return fields


def _experts(moe: Tree) -> ModelSizes:
    router, experts = moe["router"], moe["routed_experts"]["inner_experts"]
    fields = {
        "number": moe["num_experts"],
        "top_k": router["top_k"],
        "hidden": experts["hidden_dim"],
    }
    if moe.get("shared_experts"):
        fields["shared_hidden"] = moe["shared_experts"]["w1"]["out_features"]
    if "swiglu_limit" in experts:  # products of GPT-OSS, which have biases, and so has its router
        fields |= {"bias": True, "clamp": experts["swiglu_limit"]}
    if router["score_func"] != "softmax":
        fields["score"] = router["score_func"]
    if not router["route_norm"]:
        fields["normalized"] = False
    if router.get("num_expert_groups"):
        fields["groups"] = router["num_expert_groups"]
        fields["top_groups"] = router["num_limited_groups"]
    return ModelSizes(fields, "Experts")
