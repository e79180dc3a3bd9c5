"""Map the names of published weights to the names of the models here, for Job(init=FOLDER, rename=...).

The names come from Hugging Face's transformers. A family whose blocks have parameters that the described decoder lacks
(a bias), or lack parameters that it has (OLMo's norms), is refused with these names when a job is run.
"""

from __future__ import annotations

from piper.models.decoder import DecoderConfig
from piper_ir.ground.errors import JobError
from piper_runtime.weights import Into, RenameTarget


def hugging_face(config: DecoderConfig) -> dict[str, RenameTarget]:
    """Return the `rename` of a job for published weights, with and without the prefix that whole models have.

    A decoder with learned positions takes the names of GPT-2, any other the ones of Llama, Mistral, Qwen, OLMo 2 and
    Phi-3, a mixture of experts the ones of Mixtral, Qwen2-MoE and Qwen3-MoE. The sizes of `config` must be the sizes of
    the weights. Raises JobError for an encoder.
    """
    if not isinstance(config, DecoderConfig):
        raise JobError(
            f"hugging_face: {config!r} stands here; a DecoderConfig is needed, such as piper.models.preset(...)"
        )
    if not config.causal:
        raise JobError("hugging_face: weights of an encoder have no names here; start without them")
    if config.positions == "learned":
        return {
            prefix + pattern: target
            for prefix in ("transformer.", "")
            for pattern, target in _gpt2().items()
        }
    parts = {
        **_LLAMA,
        **(_BEHIND if config.norms == "after" else {}),
        **_fused(config),
        **_FEED_FORWARD,
        **(_experts() if config.experts is not None else {}),
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
_BEHIND: dict[str, RenameTarget] = {
    "layers.*.post_attention_layernorm.*": "layers.*.after1.*",
    "layers.*.post_feedforward_layernorm.*": "layers.*.after2.*",
}
_FEED_FORWARD: dict[str, RenameTarget] = {
    "layers.*.mlp.gate_proj.*": "layers.*.feed_forward.gate.*",
    "layers.*.mlp.up_proj.*": "layers.*.feed_forward.up.*",
    "layers.*.mlp.down_proj.*": "layers.*.feed_forward.down.*",
}


def _fused(config: DecoderConfig) -> dict[str, RenameTarget]:
    """Return the places of matrices that Phi-3 has one below the other."""
    queries, grouped, hidden = (
        config.heads * config.dim_of_head,
        config.key_heads * config.dim_of_head,
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
        "mlp.shared_expert.gate_proj.weight": "shared.gate.weight",
        "mlp.shared_expert.up_proj.weight": "shared.up.weight",
        "mlp.shared_expert.down_proj.weight": "shared.down.weight",
        "mlp.shared_expert_gate.weight": "shared_gate.weight",
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
    matrices = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
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
