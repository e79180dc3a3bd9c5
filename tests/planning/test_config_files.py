"""Protect that a config.json of Hugging Face gives the same model, and that no field of it is ignored silently."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper import models
from piper.models.config_rows import ROWS
from piper.models.from_config import describe
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case
from tests.planning.public_configs import PUBLIC

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
        (
            MIXTRAL,
            dict(experts=models.Experts(number=4, top_k=2, hidden=96), hidden=96, qk_norm=False),
        ),
        (
            QWEN | {"mlp_only_layers": [0]},
            dict(
                experts=models.Experts(number=8, top_k=2, hidden=48, normalized=False),
                hidden=96,
                qk_norm=True,
                dense_layers=1,
            ),
        ),
        (
            GPT2,
            dict(
                layers=3,
                width=48,
                heads=4,
                length=64,
                vocab=99,
                tied=True,
                activation="gelu_tanh",
                hidden=192,
            ),
        ),
        (GPT2 | {"n_inner": 100}, dict(hidden=100)),
        (
            LLAMA | {"attention_bias": True, "mlp_bias": True},
            dict(attention_bias="all", mlp_bias=True),
        ),
        (LLAMA | {"hidden_act": "gelu"}, dict(activation="gelu")),
        (
            LLAMA | {"model_type": "mistral", "sliding_window": 128},
            dict(window=128, window_every=1),
        ),
        (
            LLAMA
            | {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 0,
            },
            dict(window=9, attention_bias="qkv"),
        ),
        (
            LLAMA
            | {
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            dict(window=5, window_every=3, norms="sandwich", head_dim=256),
        ),
        (
            LLAMA | {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 2},
            dict(window=None, window_every=1),
        ),
        (
            {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"},
            dict(tied=False, kv_heads=2),
        ),
        ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, dict(key_heads=8)),
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
        (LLAMA | {"attention_bias": "some"}, "attention_bias='some'"),
        (LLAMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (LLAMA | {"sliding_window": 128}, "sliding_window=128"),
        (LLAMA | {"hidden_act": "xielu"}, "the activation 'xielu'"),
        (
            LLAMA
            | {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 1,
                "sliding_window": 9,
            },
            "max_window_layers=1 with use_sliding_window",
        ),
        (
            LLAMA
            | {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=['full_attention', 'sliding_attention']",
        ),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"q_lora_rank": 7}, "unknown fields: q_lora_rank"),
        (QWEN | {"mlp_only_layers": [1]}, r"mlp_only_layers=[1]"),
        (QWEN | {"decoder_sparse_step": 2}, r"decoder_sparse_step=2"),
        (
            PUBLIC["deepseek-v3"][0] | {"topk_method": "greedy"},
            "topk_method='greedy' with scoring_func='sigmoid'",
        ),
        (PUBLIC["mpt-7b"][0] | {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv=6"),
        (GPT2 | {"n_inner": -1}, "n_inner=-1"),
        ({"model_type": "jamba"}, "most of its layers are no attention"),
        (PUBLIC["gpt-oss-20b"][0] | {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        (PUBLIC["gpt-oss-20b"][0] | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "bert"}, "no row describes that type"),
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
    with pytest.raises(JobError, match="no such file"):
        describe(tmp_path / "other.json")


def test_damage_of_any_kind_is_one_message_and_no_field_is_lost(tmp_path: Path) -> None:
    """300 files with a field taken out, renamed, or of another type."""
    draw = random.Random(0)
    refused = 0
    for number in range(300):
        fields = dict(
            draw.choice([LLAMA, MIXTRAL, QWEN, GPT2, *(fields for fields, _ in PUBLIC.values())])
        )
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
        if number % 3 == 1 and fields[f"{name}_x"] is not None:  # null says nothing under any name
            assert described.missing, f"{name}_x is passed over"
    assert refused > 100


@pytest.mark.long
@each_case("name", PUBLIC)
def test_a_public_file_has_as_many_parameters_as_was_published(name: str, tmp_path: Path) -> None:
    fields, published = PUBLIC[name]
    described = describe(written(tmp_path, fields))
    assert described.missing == "" and described.config is not None
    digits = len(published.partition(".")[2])
    assert f"{models.parameter_count(described.config) / 1e9:.{digits}f}" == published


def test_every_type_has_a_public_file() -> None:
    assert {fields["model_type"] for fields, _ in PUBLIC.values()} >= {*ROWS} - {"qwen3", "gemma"}


def test_a_description_is_written_as_python_that_makes_it(tmp_path: Path) -> None:
    for fields, _ in PUBLIC.values():
        config = describe(written(tmp_path, fields)).config
        assert config is not None and len(config.source()) < 700
        assert eval(config.source(), {"piper": piper}) == config


def test_what_has_a_note_is_said(tmp_path: Path) -> None:
    notes = describe(written(tmp_path, PUBLIC["deepseek-v3"][0])).notes
    scaled = (
        "rope_scaling (yarn): positions are not scaled: time and memory are the same, but planned.py trains another model "
        "than the published one"
    )
    assert notes == (scaled, "quantization_config: weights have the precision of the job")
    (strange,) = describe(
        written(tmp_path, LLAMA | {"rope_scaling": {"rope_type": "spiral"}})
    ).notes
    assert "a type that is not known (spiral)" in strange
    assert not describe(
        written(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "default"}})
    ).notes


def test_a_window_that_begins_behind_the_last_layer_is_none(tmp_path: Path) -> None:
    qwen = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}
    config = describe(
        written(tmp_path, qwen | {"max_window_layers": LLAMA["num_hidden_layers"]})
    ).config
    assert config is not None and config.window is None


def test_a_misspelt_field_is_told_the_nearest(tmp_path: Path) -> None:
    wrong = {("intermediat_size" if n == "intermediate_size" else n): v for n, v in LLAMA.items()}
    assert (
        describe(written(tmp_path, wrong)).missing
        == "unknown fields: intermediat_size (intermediate_size?)"
    )
    (note,) = describe(written(tmp_path, LLAMA | {"num_mtp_layers": 1})).notes
    assert note.startswith("num_mtp_layers=1: the blocks")


def test_a_gpt_oss_computes_what_its_class_of_transformers_does(tmp_path: Path) -> None:
    """Sinks, windows, biases and bounded gates, at small sizes, with the weights of the class."""
    transformers = pytest.importorskip("transformers", reason="needs transformers with GPT-OSS")
    fields = PUBLIC["gpt-oss-20b"][0] | {
        "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 12, "num_local_experts": 4,
        "num_experts_per_tok": 2, "experts_per_token": 2, "sliding_window": 3, "swiglu_limit": 0.5,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_scaling": None, "quantization_config": None,
    }  # fmt: skip
    config = describe(written(tmp_path, fields)).config
    assert config is not None
    plain = {
        k: v for k, v in fields.items() if k not in ("rope_scaling", "rope_theta", "model_type")
    }
    rotation = {"rope_type": "default", "rope_theta": 150_000.0}
    theirs = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **plain,
            rope_parameters=rotation,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    ).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = config.build().double()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        parameter.data = weight_of_gpt_oss(name, named)
    assert not named, "every weight of the class is used"
    tokens = torch.randint(0, 64, (2, 12))
    expected = theirs(tokens).logits.detach()
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)  # angles in float32
    assert float(expected.std()) > 0.1


def weight_of_gpt_oss(name: str, named: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    """Take a parameter here out of those of the class, whose experts hold gate and up in turn."""
    for ours, theirs in (
        ("tokens.", "model.embed_tokens."), ("head.", "lm_head."), ("layers.", "model.layers."), ("norm1", "input_layernorm"),
        ("norm2", "post_attention_layernorm"), ("attention.out", "self_attn.o_proj"), ("attention.", "self_attn."),
        ("feed_forward.router", "mlp.router"), ("feed_forward.", "mlp.experts."),
    ):  # fmt: skip
        name = name.replace(ours, theirs, 1) if not name.startswith(theirs) else name
    name = re.sub(r"self_attn\.([qkv])\.", r"self_attn.\1_proj.", name)
    name = "model.norm.weight" if name == "norm.weight" else name
    part = re.search(r"experts\.(gate|up)(_bias)?$", name)
    if part is None:
        return named.pop(re.sub(r"experts\.down(_bias)?$", r"experts.down_proj\1", name)).data
    whole = f"{name[: part.start()]}experts.gate_up_proj{part[2] or ''}"
    both = named[whole] if part[1] == "gate" else named.pop(whole)
    return both.data[..., part[1] == "up" :: 2].contiguous()
