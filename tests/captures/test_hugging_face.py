"""Published families by the names of their weights: each is read into piper.models, or refused by the names that do not
fit.

The states here are made by hand in the layout that transformers' models save: fused, stacked or transposed where they
do that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piper
from piper import Job, Mesh, Precision, Strategy, models, recipes
from piper.api.reference.verification import verify_strategy
from piper.models import DecoderConfig
from piper_ir.ground.errors import JobError
from piper_runtime.rank import materialize
from tests.helpers.cases import each_case
from tests.helpers.safetensors_writer import write_folder, write_safetensors

WIDTH, HEADS, KV, HIDDEN, VOCAB, LENGTH, LAYERS = 16, 4, 2, 24, 40, 6, 2
HEAD = WIDTH // HEADS
LLAMA = models.LlamaConfig(
    layers=LAYERS, width=WIDTH, heads=HEADS, kv_heads=KV, hidden=HIDDEN, vocab=VOCAB, length=LENGTH
)
GPT = models.GPTConfig(layers=LAYERS, width=WIDTH, heads=HEADS, vocab=VOCAB, length=LENGTH)
MOE = models.MoEConfig(
    layers=LAYERS,
    width=WIDTH,
    heads=HEADS,
    kv_heads=KV,
    hidden=HIDDEN,
    vocab=VOCAB,
    length=LENGTH,
    experts=3,
    top_k=2,
)
State = dict[str, Tensor]


def numbers(config: DecoderConfig) -> State:
    """The state of the model here, to be found again."""
    torch.manual_seed(11)
    model = config.build()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    return {n: p.detach() for n, p in model.named_parameters()}


def llama(state: State) -> State:
    """Llama, Mistral and Qwen3: a tensor for each of ours."""
    names = {
        "tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight",
        "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj", "attention.norm_q": "self_attn.q_norm", "attention.norm_k": "self_attn.k_norm",
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj", "feed_forward.down": "mlp.down_proj",
    }  # fmt: skip
    found = {}
    for name, tensor in state.items():
        if name in names:
            found[names[name]] = tensor
            continue
        _, layer, part = name.split(".", 2)
        found[f"model.layers.{layer}.{names[part.removesuffix('.weight')]}.weight"] = tensor
    return found


def qwen2(state: State) -> State:
    biases = {
        f"model.layers.{k}.self_attn.{p}_proj.bias": torch.zeros(n * HEAD)
        for k in range(LAYERS)
        for p, n in QKV
    }
    return llama(state) | biases


QKV = (("q", HEADS), ("k", KV), ("v", KV))


def olmo(state: State) -> State:
    """OLMo: its norms have no parameters."""
    return {n: t for n, t in llama(state).items() if "norm" not in n}


def phi3(state: State) -> State:
    """Phi-3: queries, keys and values in one matrix, gate and up in another."""
    found = llama(state)
    for k in range(LAYERS):
        layer = f"model.layers.{k}"
        found[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(
            [found.pop(f"{layer}.self_attn.{p}_proj.weight") for p in "qkv"]
        )
        found[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(
            [found.pop(f"{layer}.mlp.{p}_proj.weight") for p in ("gate", "up")]
        )
    return found


def experts(state: State, router: str, expert: str, parts: Mapping[str, str]) -> State:
    """A matrix per expert, with rows of outputs; ours have all experts of a layer and rows of inputs."""
    found = llama({n: t for n, t in state.items() if "feed_forward" not in n})
    for k in range(LAYERS):
        ours, theirs = f"layers.{k}.feed_forward", f"model.layers.{k}"
        found[f"{theirs}.{router}.weight"] = state[f"{ours}.router.weight"]
        for e in range(3):
            found |= {
                f"{theirs}.{expert}.{e}.{p}.weight": state[f"{ours}.{name}"][e].t()
                for p, name in parts.items()
            }
    return found


def mixtral(state: State) -> State:
    return experts(
        state,
        "block_sparse_moe.gate",
        "block_sparse_moe.experts",
        {"w1": "gate", "w2": "down", "w3": "up"},
    )


def qwen3_moe(state: State) -> State:
    return experts(
        state,
        "mlp.gate",
        "mlp.experts",
        {"gate_proj": "gate", "down_proj": "down", "up_proj": "up"},
    )


def gpt2(state: State) -> State:
    """GPT-2: matrices with rows of inputs, the causal mask as a buffer, one embedding for both ends."""
    ends = {
        "tokens.weight": "wte.weight",
        "positions.weight": "wpe.weight",
        "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    }
    parts = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    found = {
        f"h.{k}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH).tril().bool() for k in range(LAYERS)
    }
    for name, tensor in state.items():
        if name in ends:
            found[ends[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        matrix = kind == "weight" and not part.startswith("norm")
        found[f"h.{layer}.{parts[part]}.{kind}"] = tensor.t() if matrix else tensor
    return found


def whole_gpt2(state: State) -> State:
    """The same as GPT2LMHeadModel saves it."""
    return {f"transformer.{n}": t for n, t in gpt2(state).items()}


FAMILIES: dict[str, tuple[DecoderConfig, Callable[[State], State]]] = {
    "GPT-2": (GPT, gpt2),
    "GPT-2 with a head": (GPT, whole_gpt2),
    "Llama": (LLAMA, llama),
    "Llama, tied": (replace(LLAMA, tied=True), llama),
    "Mistral": (replace(LLAMA, theta=1e4), llama),
    "Qwen3": (replace(LLAMA, qk_norm=True, head_dim=8, tied=True), llama),
    "Phi-3": (LLAMA, phi3),
    "Mixtral": (MOE, mixtral),
    "Qwen3-MoE": (replace(MOE, qk_norm=True), qwen3_moe),
}


def job_of(config: DecoderConfig, path: Path) -> Job:
    job = models.job(config, global_batch=4)
    return replace(
        job, init=path, rename=models.hugging_face(config), precision=Precision(params="float32")
    )


@each_case("name", FAMILIES)
def test_a_family_is_read_into_the_model_here(name: str, tmp_path: Path) -> None:
    config, published = FAMILIES[name]
    state = numbers(config)
    theirs = {n: t.contiguous() for n, t in published(state).items()}
    for path in (
        write_folder(tmp_path / "folder", theirs, shards=3),
        write_safetensors(tmp_path / "x.safetensors", theirs),
    ):
        found = materialize(job_of(config, path)).params
        assert found.keys() == state.keys()
        assert [n for n, t in state.items() if not torch.equal(found[n], t)] == []


@each_case(
    ("config", "published", "says"),
    [
        (
            LLAMA,
            qwen2,
            r"the model has no place for 'layers\.0\.attention\.q\.bias "
            r"\(model\.layers\.0\.self_attn\.q_proj\.bias\)'",
        ),
        (
            LLAMA,
            olmo,
            r"the files lack 'layers\.0\.norm1\.weight', 'layers\.0\.norm2\.weight', .* of the "
            r"model",
        ),
        (MOE, llama, r"the files lack 'layers\.0\.feed_forward\.gate'"),
        (
            LLAMA,
            mixtral,
            r"lack 'layers\.0\.feed_forward\.gate\.weight'.*no place for "
            r"'model\.layers\.0\.block_sparse_moe",
        ),
        (
            replace(LLAMA, hidden=HIDDEN * 2),
            llama,
            r"'layers\.0\.feed_forward\.gate\.weight' has shape \[48, 16\]",
        ),
        (
            replace(LLAMA, hidden=HIDDEN * 2),
            phi3,
            r"gate_up_proj\.weight' has shape \[48, 16\]; rename takes rows 48 to 96",
        ),
        (GPT, llama, r"the files lack 'positions\.weight'"),
    ],
)
def test_other_families_are_refused_by_the_names_that_do_not_fit(
    config: DecoderConfig, published: Callable[[State], State], says: str, tmp_path: Path
) -> None:
    source = numbers(MOE if published is mixtral else LLAMA)
    path = write_safetensors(
        tmp_path / "x.safetensors", {n: t.contiguous() for n, t in published(source).items()}
    )
    with pytest.raises(JobError, match=says):
        materialize(job_of(config, path))


def test_negative_control_another_order_of_the_parts_is_seen(tmp_path: Path) -> None:
    """Phi-3's gate and up have equal sizes: only their numbers tell them apart."""
    state = numbers(LLAMA)
    theirs = phi3(state)
    for k in range(LAYERS):
        both = f"model.layers.{k}.mlp.gate_up_proj.weight"
        theirs[both] = theirs[both].roll(HIDDEN, 0)
    found = materialize(job_of(LLAMA, write_safetensors(tmp_path / "x.safetensors", theirs))).params
    assert {n for n, t in state.items() if not torch.equal(found[n], t)} == {
        f"layers.{k}.feed_forward.{part}.weight" for k in range(LAYERS) for part in ("gate", "up")
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT-2", "Phi-3", "Mixtral"])
def test_published_weights_train_as_on_one_device(name: str, tmp_path: Path) -> None:
    """The judge reads the folder and applies the renames by code of its own."""
    config, published = FAMILIES[name]
    job = job_of(
        config,
        write_folder(
            tmp_path / "x", {n: t.contiguous() for n, t in published(numbers(config)).items()}
        ),
    )
    assert verify_strategy(
        job, Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=2)), steps=2
    ).equal


def test_the_models_have_it_at_the_front_door() -> None:
    assert piper.models.hugging_face is models.hugging_face
