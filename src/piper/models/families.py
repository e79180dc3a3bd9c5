"""Map the names of published weights to the names of the models here, for Job(init=FOLDER, rename=...).

The names come from Hugging Face's transformers. A family whose blocks have parameters that the models here lack
(Qwen2's biases), or lack parameters that they have (OLMo's norms), is refused with these names when a job is run.
"""

from __future__ import annotations

from piper.models.gpt import GPTConfig
from piper.models.llama import LlamaConfig
from piper.models.moe import MoEConfig
from piper.models.presets import Config
from piper_runtime.weights import Into, RenameTarget


def hugging_face(config: Config) -> dict[str, RenameTarget]:
    """Return the `rename` of a job for published weights, with and without the prefix that whole models have.

    A GPT takes the names of GPT-2, a Llama the ones of Llama, Mistral, Qwen3 and Phi-3, a mixture of experts the ones
    of Mixtral and Qwen3-MoE. The sizes of `config` must be the sizes of the weights.
    """
    if isinstance(config, GPTConfig):
        return {
            prefix + pattern: target
            for prefix in ("transformer.", "")
            for pattern, target in _gpt2().items()
        }
    parts = {
        **_LLAMA,
        **_fused(config),
        **(_experts() if isinstance(config, MoEConfig) else _FEED_FORWARD),
    }
    return {
        prefix + pattern: target for prefix in ("model.", "") for pattern, target in parts.items()
    }


_LLAMA: dict[str, RenameTarget] = {
    "embed_tokens.weight": "tokens.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "layers.*.input_layernorm.*": "layers.*.norm1.*",
    "layers.*.post_attention_layernorm.*": "layers.*.norm2.*",
    "layers.*.self_attn.q_proj.*": "layers.*.attention.q.*",
    "layers.*.self_attn.k_proj.*": "layers.*.attention.k.*",
    "layers.*.self_attn.v_proj.*": "layers.*.attention.v.*",
    "layers.*.self_attn.o_proj.*": "layers.*.attention.out.*",
    "layers.*.self_attn.q_norm.*": "layers.*.attention.norm_q.*",
    "layers.*.self_attn.k_norm.*": "layers.*.attention.norm_k.*",
    "layers.*.self_attn.rotary_emb.inv_freq": None,
}
_FEED_FORWARD: dict[str, RenameTarget] = {
    "layers.*.mlp.gate_proj.*": "layers.*.feed_forward.gate.*",
    "layers.*.mlp.up_proj.*": "layers.*.feed_forward.up.*",
    "layers.*.mlp.down_proj.*": "layers.*.feed_forward.down.*",
}


def _fused(config: LlamaConfig) -> dict[str, RenameTarget]:
    """Return the places of matrices that Phi-3 has one below the other."""
    queries, grouped, hidden = (
        config.heads * config.dim_of_head,
        config.kv_heads * config.dim_of_head,
        config.hidden,
    )
    return {
        "layers.*.self_attn.qkv_proj.weight": (
            Into("layers.*.attention.q.weight", rows=(0, queries)),
            Into("layers.*.attention.k.weight", rows=(queries, queries + grouped)),
            Into("layers.*.attention.v.weight", rows=(queries + grouped, queries + 2 * grouped)),
        ),
        "layers.*.mlp.gate_up_proj.weight": (
            Into("layers.*.feed_forward.gate.weight", rows=(0, hidden)),
            Into("layers.*.feed_forward.up.weight", rows=(hidden, 2 * hidden)),
        ),
    }


def _experts() -> dict[str, RenameTarget]:
    """Return the places of experts: one tensor holds all of a layer here, with rows of inputs."""
    names = {
        "block_sparse_moe.gate.weight": "router.weight",
        "mlp.gate.weight": "router.weight",
    }
    stacked = {
        "block_sparse_moe.experts.*.w1.weight": "gate[*]",
        "block_sparse_moe.experts.*.w3.weight": "up[*]",
        "block_sparse_moe.experts.*.w2.weight": "down[*]",
        "mlp.experts.*.gate_proj.weight": "gate[*]",
        "mlp.experts.*.up_proj.weight": "up[*]",
        "mlp.experts.*.down_proj.weight": "down[*]",
    }
    plain: dict[str, RenameTarget] = {
        f"layers.*.{p}": f"layers.*.feed_forward.{name}" for p, name in names.items()
    }
    return plain | {
        f"layers.*.{p}": Into(f"layers.*.feed_forward.{name}", transposed=True)
        for p, name in stacked.items()
    }


def _gpt2() -> dict[str, RenameTarget]:
    """Return the places of GPT-2's tensors; its matrices have a row per input."""
    matrices = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    targets: dict[str, RenameTarget] = {
        "wte.weight": "tokens.weight",
        "wpe.weight": "positions.weight",
        "ln_f.*": "norm.*",
        "lm_head.weight": "head.weight",
        "h.*.ln_1.*": "layers.*.norm1.*",
        "h.*.ln_2.*": "layers.*.norm2.*",
        "h.*.attn.bias": None,  # the causal mask
        "h.*.attn.masked_bias": None,
    }
    targets |= {
        f"h.*.{theirs}.weight": Into(f"layers.*.{ours}.weight", transposed=True)
        for theirs, ours in matrices.items()
    }
    return targets | {
        f"h.*.{theirs}.bias": f"layers.*.{ours}.bias" for theirs, ours in matrices.items()
    }
