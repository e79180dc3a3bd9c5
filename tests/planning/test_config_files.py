"""Protect that a config.json of Hugging Face gives the same model, and that no field of it is ignored silently."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from piper import models
from piper.models.from_config import FAMILIES, MUST, describe
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 48,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 99,
    "activation_function": "gelu_new",
}


def written(folder: Path, fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def test_a_decoder_has_the_sizes_of_its_file(tmp_path: Path) -> None:
    sizes = models.LlamaConfig(
        layers=2,
        width=64,
        heads=8,
        kv_heads=2,
        hidden=96,
        vocab=128,
        length=512,
        theta=1e6,
        eps=1e-6,
        tied=True,
    )
    assert describe(written(tmp_path, LLAMA)).config == sizes
    assert describe(tmp_path).config == sizes, "its folder will do"


@each_case(
    ("fields", "config"),
    [
        (MIXTRAL, dict(experts=4, top_k=2, capacity_factor=None, hidden=96, qk_norm=False)),
        (QWEN, dict(experts=8, top_k=2, capacity_factor=None, hidden=48, qk_norm=True)),
        (GPT2, dict(layers=3, width=48, heads=4, length=64, vocab=99, tied=True)),
        (
            {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"},
            dict(tied=False, kv_heads=2),
        ),
        ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, dict(kv_heads=8)),
        (LLAMA | {"rope_parameters": {"rope_theta": 5.0}}, dict(theta=5.0)),
        (
            {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
            | {"model_type": "mistral"},
            dict(kv_heads=8, head_dim=None),
        ),
        (LLAMA | {"model_type": "qwen3"}, dict(head_dim=128)),
        (
            LLAMA | {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 9},
            dict(qk_norm=True),
        ),
    ],
)
def test_a_family_has_its_own_names(
    fields: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    described = describe(written(tmp_path, fields))
    assert described.missing == "" and described.config is not None
    assert {name: getattr(described.config, name) for name in config} == config


@each_case(
    ("fields", "missing"),
    [
        (LLAMA | {"attention_bias": True}, "attention_bias=True"),
        (LLAMA | {"sliding_window": 128}, "sliding_window=128"),
        (LLAMA | {"hidden_act": "gelu"}, "the activation 'gelu'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"q_lora_rank": 7}, "unknown fields: q_lora_rank"),
        (QWEN | {"mlp_only_layers": [0]}, r"mlp_only_layers=[0]"),
        ({"model_type": "deepseek_v3"}, "its attention is latent"),
        ({"model_type": "falcon"}, "no model here is of that type"),
    ],
)
def test_another_model_is_named_by_its_field(
    fields: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    described = describe(written(tmp_path, fields))
    assert described.config is None and missing in described.missing


def test_what_is_nearest_is_said(tmp_path: Path) -> None:
    (note,) = describe(written(tmp_path, LLAMA | {"attention_dropout": 0.1})).notes
    assert note.startswith("attention_dropout=0.1: taken as 0")


@each_case(
    ("fields", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds a list; an object with model_type is needed"),
        ({}, "has no model_type"),
        ({"model_type": 3}, "has no model_type"),
        (LLAMA | {"rope_theta": "big"}, "rope_theta is 'big'; a number above 0 is needed"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "true or false is needed"),
        ({"model_type": "llama"}, "has no num_hidden_layers, which a model of type llama needs"),
        (LLAMA | {"num_attention_heads": 7}, "heads"),
    ],
)
def test_a_file_that_is_none_is_one_message(fields: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        describe(written(tmp_path, fields))
    assert says in str(error.value)
    with pytest.raises(JobError, match="No such file"):
        describe(tmp_path / "other.json")


def test_damage_of_any_kind_is_one_message_and_no_field_is_lost(tmp_path: Path) -> None:
    """300 files with a field taken out, renamed, or of another type."""
    draw = random.Random(0)
    refused = 0
    for number in range(300):
        fields = dict(draw.choice([LLAMA, MIXTRAL, QWEN, GPT2]))
        name = draw.choice(sorted(fields))
        match number % 3:
            case 0:
                del fields[name]
            case 1:
                fields[f"{name}_x"] = fields.pop(name)
            case _:
                fields[name] = draw.choice([None, -1, 0, 2.5, "many", [], {}, True, 10**40])
        try:
            described = describe(written(tmp_path, fields))
        except JobError:
            refused += 1
            continue
        if number % 3 == 1:
            assert described.missing, f"{name}_x is passed over"
    assert refused > 100


def test_every_family_names_its_fields_once() -> None:
    for family in FAMILIES.values():
        assert len({*family.fields.values()}) == len(family.fields)
        assert not {*family.fields.values()} & {*MUST}
