"""List models of transformers by its registries, with configurations shrunk by the names of their fields."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import Entry, without_dropout

VOCAB, LENGTH, SIZE = 64, 12, 32
MOST_PARAMETERS = 20_000_000
"""The parameters of a model that is still tried."""

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "dim",
            "emb_dim",
            "word_embed_proj_dim",
            "dim_model",
            "d_embed",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "d_ff",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "hidden_dim",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "d_head", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"),
        64,
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"),
        16,
    ),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "n_shared_experts",
            "first_k_dense_replace",
            "num_shared_experts",
        ),
        1,
    ),
    **dict.fromkeys(("embedding_size", "text_embed_dim"), 32),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "bos_token_id"), 1),
    **dict.fromkeys(("use_cache", "add_pooling_layer"), False),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "vocab_size": VOCAB,
    "image_size": SIZE,
    "patch_size": 8,
    "num_labels": 5,
    "embed_dim": 32,
    "sliding_window": 8,
}
"""Values by the names of fields, for any configuration that has them."""

SEEN = {
    name: SMALL[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
SEEN |= {"image_size": SIZE, "patch_size": 8}
"""The sizes of a part of a model that has several."""

MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
"""Rotary angles of three dimensions."""

OWN: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": True},
    **{
        key: {"hidden_sizes": [16] * 4, "depths": [1, 1, 2, 1], "patch_size": 4}
        for key in ("convnext", "convnextv2")
    },
    "swin": {
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 4,
        "patch_size": 2,
    },
    "swinv2": {
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 4,
        "patch_size": 2,
    },
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "layer_type": "basic",
    },
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "patch_size": 4},
    "pvt": {
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "num_encoder_blocks": 2,
        "patch_sizes": [4, 2],
        "strides": [4, 2],
    },
    **{key: {"attention_type": "original_full"} for key in ("big_bird", "bigbird_pegasus")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mpt": {"expansion_ratio": 2},
    **{f"{key}_text": MROPE for key in ("qwen2_vl", "qwen2_5_vl")},
    "falcon": {"new_decoder_architecture": False},
    **{key: {"head_dim": 4, "num_key_value_heads": 4} for key in ("deepseek_v2", "deepseek_v3")},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    **{key: {"vision_config": SEEN, "text_config": SEEN} for key in ("siglip", "clip")},
}
"""Further values by model type."""

FIRST = """
gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt_neox gpt_neo gptj opt bloom falcon mpt olmo olmo2
starcoder2 stablelm cohere cohere2 granite glm glm4 smollm3 bert roberta electra albert distilbert deberta-v2 modernbert
xlm-roberta t5 mt5 bart mbart pegasus marian vit deit beit dinov2 swin convnext whisper codegen persimmon helium nemotron
ernie4_5 seed_oss exaone4 mixtral qwen2_moe qwen3_moe olmoe gpt_oss deepseek_v3 biogpt xglm gpt_bigcode ctrl
openai-gpt arcee apertus hunyuan_v1_dense olmo3 diffllama mamba mamba2 rwkv camembert megatron-bert roc_bert rembert
convbert esm fnet layoutlm mpnet nystromformer squeezebert ijepa siglip clip convnextv2 swinv2 poolformer segformer resnet
olmo_hybrid jamba zamba granitemoe deepseek_v2 minimax glm4_moe ernie4_5_moe phimoe jetmoe dots1 lfm2 bitnet doge
longformer big_bird reformer perceiver data2vec-text xlm flaubert xlnet ernie ibert nezha mobilebert mra yoso luke
focalnet pvt mobilevit mobilevitv2 mobilenet_v2 efficientnet vit_msn dinov2_with_registers data2vec-vision bit regnet
longt5 umt5 m2m_100 plbart led prophetnet switch_transformers mvp bigbird_pegasus blenderbot blenderbot-small
"""
"""The types that are tried first; the others follow in the order of the registry."""


def entries() -> Iterator[Entry]:
    """Yield an entry for each type of model that has a language model or a classifier of images."""
    from transformers.models.auto import modeling_auto as auto

    heads: dict[str, tuple[str, str]] = {}
    for kind, names in (
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("image", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ):
        heads.update({model_type: (kind, name) for model_type, name in names.items()})
    yield Entry("transformers", "from_pretrained", pretrained, row_of("causal"), own_loss=True)
    yield Entry("peft", "lora", adapted, row_of("causal"), own_loss=True)
    for model_type in dict.fromkeys([*(t for t in FIRST.split() if t in heads), *heads]):
        kind, name = heads[model_type]
        name = name if isinstance(name, str) else name[0]
        yield Entry(
            "transformers", model_type, partial(made, model_type, name), row_of(kind), own_loss=True
        )


def made(model_type: str, name: str, **more: Any) -> nn.Module:
    """Return a shrunken model with random weights, as `AutoModel.from_config` makes it, with `more` fields."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    config = kind(
        **{
            "num_labels": 5,
            "decoder_start_token_id": 0,
            **shrunk(kind()),
            **OWN.get(model_type, {}),
            **more,
        }
    )
    config._experts_implementation = "eager"  # the grouped kernels know no float64
    module = importlib.import_module(f"transformers.models.{kind.__module__.split('.')[-2]}")
    model_class: Any = getattr(transformers, name, None) or getattr(module, name)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters: its configuration has sizes of other names")
    model: nn.Module = model_class(config)
    return without_dropout(model.train())


def shrunk(default: Any) -> dict[str, Any]:
    """Return small values for the fields of a configuration, and of the configurations in it."""
    values: dict[str, Any] = {}
    for field in {**default.to_dict(), **getattr(default, "attribute_map", {})}:
        value = getattr(default, field, None)
        if hasattr(value, "to_dict"):
            values[field] = {
                **shrunk(value),
                **OWN.get(value.model_type, {}),
                "model_type": value.model_type,
            }
        elif "drop" in field and isinstance(value, float):
            values[field] = 0.0
        elif field in SMALL and not isinstance(value, list | tuple):
            values[field] = SMALL[field]
    return values


def pretrained() -> nn.Module:
    """Return a Llama that was saved and is read from its folder."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        made("llama", "LlamaForCausalLM").save_pretrained(folder)  # type: ignore[operator]  # a method of transformers
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model


def adapted() -> nn.Module:
    """Return a Llama whose projections have adapters of low rank, which alone are trained."""
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model: nn.Module = peft.get_peft_model(made("llama", "LlamaForCausalLM"), lora)
    return model


def row_of(kind: str) -> Any:
    """Return the function that draws a row of what models of this kind take."""

    def tokens(generator: torch.Generator) -> dict[str, torch.Tensor]:
        drawn = torch.randint(2, VOCAB, (LENGTH,), generator=generator)
        return {"input_ids": drawn, "labels": drawn.clone()}

    def pixels(generator: torch.Generator) -> dict[str, torch.Tensor]:
        shown = torch.randn(3, SIZE, SIZE, generator=generator)
        return {"pixel_values": shown, "labels": torch.randint(5, (), generator=generator)}

    return pixels if kind == "image" else tokens
