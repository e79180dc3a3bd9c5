"""Give the verdict on the options that make the model."""

from __future__ import annotations

from piper_interop.megatron.degrees import degrees
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.options import Ignored, Mapped, Nearest, OptionTable, Unsupported

FAST, SLOW = "predicted too fast", "predicted too slow"
MORE, LESS = "too much memory", "too little memory"


def mixture(foreign: Foreign) -> bool:
    """Return whether the model has experts."""
    return bool(foreign["num-experts"])


def encoder(foreign: Foreign) -> bool:
    """Return whether the model is pretrain_bert.py's: by the program, or by word pieces where nobody says a program."""
    program = foreign.get("program", "")
    pieces = str(foreign.get("tokenizer-type", "")).startswith("Bert")
    pieces = pieces or str(foreign.get("vocab-file", "")).endswith(".txt")
    return bool(program == "pretrain_bert.py" or (not program and pieces))


def exchanged(foreign: Foreign) -> bool:
    """Return whether devices share the experts of a dropless mixture."""
    several = foreign["expert-model-parallel-size"] > 1
    return mixture(foreign) and several and foreign.get("moe-expert-capacity-factor") is None


def beside(foreign: Foreign) -> bool:
    """Return whether shared experts, whole on each device, are computed while rows of others travel."""
    shared = bool(foreign.get("moe-shared-expert-intermediate-size"))
    whole = foreign["tensor-model-parallel-size"] == 1
    return foreign["moe-shared-expert-overlap"] and exchanged(foreign) and shared and whole


def latent(foreign: Foreign) -> bool:
    """Return whether attention is latent."""
    return bool(foreign["multi-latent-attention"])


def _groups_differ(foreign: Foreign) -> bool:
    """Return whether Megatron's score of a group of experts is another one than that of `piper.models`."""
    best = 1 if foreign["moe-router-score-function"] == "softmax" else 2
    return bool(foreign["moe-router-topk"] // foreign["moe-router-group-topk"] != best)


def clamp(foreign: Foreign) -> float | None:
    """Return the bound of the experts' gate and up products; None without one, or where nothing is added to up."""
    gated = foreign["swiglu"] or foreign["quick-geglu"]
    value = foreign.get("activation-func-clamp-value")
    return value if gated and foreign["glu-linear-offset"] == 1 else None


def written_out(foreign: Foreign) -> bool:
    """Return whether attention makes its matrix of tokens x tokens: kernels of torch's own, not fused ones."""
    written = foreign["attention-backend"] in ("unfused", "local")
    return bool(
        written or (foreign["transformer-impl"] == "local" and not foreign["use-flash-attn"])
    )


def parts_again(foreign: Foreign) -> tuple[str, ...]:
    """Return Megatron's names of the parts of a layer that are computed again."""
    more = ("moe",) if foreign["moe-layer-recompute"] else ()
    selective = foreign["recompute-activations"] or foreign["recompute-granularity"] == "selective"
    return (*(foreign.get("recompute-modules") or ["core_attn"]), *more) if selective else more


DISCARDING = frozenset({"layernorm", "moe_act", "mla_up_proj"})
"""The parts whose results Megatron computes again, too; those of others it keeps for the operations behind them."""
WORDS_OF_PARTS = frozenset({*DISCARDING, "core_attn", "mlp", "moe", "shared_experts"})
"""The parts of layers that models here have."""


def _others_have_biases(foreign: Foreign) -> bool:
    others = foreign.get("moe-shared-expert-intermediate-size") or foreign["moe-layer-freq"] != "1"
    return mixture(foreign) and bool(others) and not foreign["disable-bias-linear"]


def _not_clamped(foreign: Foreign) -> bool:
    return not mixture(foreign) or clamp(foreign) is None


_OF_DECODERS = Unsupported(
    "a part of decoders in an encoder (BERT)",
    "leave it out with --set",
    unless=(None, 0, False),
    when=encoder,
)
_T5 = "an encoder and a decoder (T5)"

MODEL: OptionTable = {
    # sizes
    "num-layers": Mapped("layers"),
    "encoder-num-layers": Mapped("layers, as --num-layers"),
    "hidden-size": Mapped("width"),
    "ffn-hidden-size": Mapped("hidden; without it 4 x width, with SwiGLU two thirds of that"),
    "num-attention-heads": Mapped("heads"),
    "group-query-attention": Mapped("kv_heads, with --num-query-groups"),
    "num-query-groups": (
        Nearest(
            "keys and values by messages of their own, where Megatron gathers them with the queries",
            f"{SLOW}, most where steps wait for the host",
            when=lambda f: bool(f["group-query-attention"]) and f["num-query-groups"] < degrees(f).tp,
        ),
        Mapped("kv_heads, with --group-query-attention"),
    ),
    "kv-channels": Mapped("head_dim"),
    "seq-length": Mapped("length"),
    "encoder-seq-length": Mapped("length, as --seq-length"),
    "max-position-embeddings": Mapped("learned positions, if there are any"),
    "vocab-size": Mapped("vocab"),
    "padded-vocab-size": Mapped("vocab"),
    "make-vocab-size-divisible-by": Mapped("vocab"),
    "no-pad-vocab-size": Mapped("vocab"),
    "disable-pad-vocab-size": Mapped("vocab"),
    "tokenizer-type": (
        Unsupported(
            "a model of pictures and text",
            "import its language model alone",
            when=lambda foreign: "Multimodal" in foreign["tokenizer-type"],
        ),
        Mapped("vocab, where it is that of a public tokenizer; causal, with word pieces"),
    ),
    "tokenizer-model": Mapped("vocab, where it is a public tokenizer"),
    "vocab-file": Mapped("vocab, where it is that of a public tokenizer; causal, with word pieces (.txt)"),
    "vocab-extra-ids": (
        Unsupported(_T5, "take a decoder, or an encoder (BERT)", unless=(0,), when=encoder),
        Ignored("data, which a step waits for only if it is late"),
    ),
    "merge-file": Mapped("vocab: pairs of bytes as GPT-2's, with 50,257 tokens"),
    "untie-embeddings-and-output-weights": (
        Nearest(
            "sums of tied embeddings' gradients between shards of the first and the last stage",
            f"{FAST}: Megatron adds them up whole",
            unless=(True,),
            when=lambda f: f["use-distributed-optimizer"] and degrees(f).pp > 1,
        ),
        Mapped("tied"),
    ),
    # parts of a layer
    "swiglu": Mapped("activation and gated"),
    "squared-relu": Mapped("activation"),
    "openai-gelu": Mapped("activation"),
    "quick-geglu": Mapped("activation and gated"),
    "glu-linear-offset": (
        Nearest("no offset in the gate", "as fast within one addition", unless=(0, 0.0, None), when=_not_clamped),
        Mapped("clamp of experts"),
    ),
    "activation-func-clamp-value": (Nearest("no bound on the gate", FAST, when=_not_clamped), Mapped("clamp of experts")),
    "normalization": Mapped("norm"),
    "norm-epsilon": Mapped("eps"),
    "apply-layernorm-1p": Ignored("a norm's weights are stored less 1, in as many bytes"),
    "apply-residual-connection-post-layernorm": Unsupported(
        "a residual that begins behind the norm", "take pre-norm, Megatron's default"
    ),
    "fp32-residual-connection": Nearest("residuals in bfloat16", f"{FAST}, {LESS}"),
    "disable-bias-linear": (
        Nearest(
            "shared experts and layers without experts have no biases",
            f"{LESS}, by 1 / width of these",
            unless=(True,),
            when=_others_have_biases,
        ),
        Mapped("attention_bias, mlp_bias and bias of experts"),
    ),
    "add-qkv-bias": Mapped("attention_bias"),
    "qk-layernorm": (
        Nearest("norms of the latents", f"{SLOW}, by two norms", unless=(True,), when=latent),
        Mapped("qk_norm; norms of the latents with latent attention"),
    ),
    "qk-l2-norm": Nearest("queries and keys without the norm", FAST),
    "qk-clip": Nearest("no clipping of queries and keys", FAST),
    "qk-clip-*": Ignored("a part of --qk-clip"),
    "attention-output-gate": Unsupported(
        "a gate behind attention", "leave it out with --set, if a job without it is worth a look"
    ),
    "position-embedding-type": (
        Unsupported(
            "an attention bias by distance (T5's positions)",
            "take rope",
            when=lambda foreign: foreign["position-embedding-type"] == "relative",
        ),
        Nearest(
            "rotary positions of one axis",
            "as fast within a table",
            when=lambda foreign: foreign["position-embedding-type"] in ("mrope", "yarn"),
        ),
        Nearest(
            "rotary positions alone, inside of latent attention",
            f"{LESS}, by one table of positions",
            when=lambda f: latent(f) and f["position-embedding-type"] == "learned_absolute"
            and not f["use-rotary-position-embeddings"],
        ),
        Mapped("positions"),
    ),
    "use-rotary-position-embeddings": Mapped("positions"),
    "no-position-embedding": Ignored("it says nothing beside --position-embedding-type"),
    "rotary-percent": Mapped("rotary_part"),
    "rotary-base": Mapped("theta"),
    "no-rope-freq": Nearest("rotary positions in every layer", SLOW),
    "rotary-*": Ignored("rotary angles have other values, in as many operations"),
    "use-rope-scaling": Ignored("rotary angles have other values, in as many operations"),
    "rope-*": Ignored("rotary angles have other values, in as many operations"),
    "yarn-*": Ignored("rotary angles have other values, in as many operations"),
    "no-yarn-*": Ignored("rotary angles have other values, in as many operations"),
    "mrope-section": Ignored("a part of --position-embedding-type mrope"),
    "relative-attention-*": Ignored("a part of --position-embedding-type relative"),
    "mscale*": Ignored("a factor on attention's scores"),
    "softmax-type": (
        Nearest(
            "no constant in the sum of a softmax",
            "as fast within one addition",
            when=lambda foreign: foreign["softmax-type"] == "off-by-one",
        ),
        Mapped("sinks"),
    ),
    "window-size": (_OF_DECODERS, Mapped("window")),
    "window-attn-skip-freq": Mapped("window_every"),
    "hidden-dropout": Mapped("dropout"),
    "attention-dropout": (
        Nearest(
            "no dropout of attention's probabilities, which a fused kernel draws again backward",
            f"{FAST}, by what the kernel draws",
            unless=(0.0,),
            when=lambda foreign: not written_out(foreign),
        ),
        Mapped("attention_dropout"),
    ),
    "attention-backend": Mapped("attention: fused, or written out"),
    "use-flash-attn": Mapped("attention: fused"),
    "flash-attention-version": Ignored("clusters say how fast attention is"),
    "attention-softmax-in-fp32": Ignored("attention's sums are in float32 here, too"),
    "apply-query-key-layer-scaling": Ignored("a factor on attention's scores"),
    "transformer-impl": Nearest(
        "the kernels that the cluster has for Megatron", FAST, unless=("transformer_engine",)
    ),
    "spec": Unsupported(
        "layers that a Python file builds (--spec)",
        "give the options of a decoder without it",
        unless=(None, ["local"]),
    ),
    # latent attention
    "multi-latent-attention": (_OF_DECODERS, Mapped("latent")),
    "q-lora-rank": Mapped("latent.q_rank"),
    "kv-lora-rank": Mapped("latent.kv_rank"),
    "qk-head-dim": Mapped("latent.nope_dim"),
    "qk-pos-emb-head-dim": Mapped("latent.rope_dim"),
    "v-head-dim": Mapped("latent.value_dim"),
    "cache-mla-latents": Ignored("a part of inference"),
    "mla-down-proj-fusion": Ignored("clusters say how fast products are"),
    # mixtures
    "num-experts": (_OF_DECODERS, Mapped("experts.number")),
    "moe-ffn-hidden-size": Mapped("experts.hidden; --ffn-hidden-size without it"),
    "moe-router-topk": Mapped("experts.top_k"),
    "moe-layer-freq": Mapped("dense_layers"),
    "moe-router-pre-softmax": Mapped("experts.normalized"),
    "moe-router-score-function": (
        Nearest(
            "scores by a sigmoid",
            "as fast within the formula of a score",
            when=lambda foreign: foreign["moe-router-score-function"] == "sqrtsoftplus",
        ),
        Mapped("experts.score"),
    ),
    "moe-router-topk-scaling-factor": Mapped("experts.scale"),
    "moe-router-num-groups": Mapped("experts.groups"),
    "moe-router-group-topk": (
        Nearest(
            "groups with the best expert, or with the two best under a sigmoid",
            "as fast; Megatron sums the best topk / group-topk of a group",
            when=_groups_differ,
        ),
        Mapped("experts.top_groups"),
    ),
    "moe-shared-expert-intermediate-size": Mapped("experts.shared_hidden"),
    "moe-shared-expert-gate": Mapped("experts.shared_gate"),
    "moe-expert-capacity-factor": Nearest(
        "a capacity for the tokens of a row, beyond which the last ones are dropped",
        "as fast; Megatron's is for the tokens of a microbatch, and drops the lowest scores or the last ones",
    ),
    "moe-router-load-balancing-type": (
        Nearest(
            "a router of scores and top k, without the iterations that balance it",
            FAST,
            when=lambda foreign: mixture(foreign)
            and bool({"sinkhorn", "quantile_balancing"} & set(foreign["moe-router-load-balancing-type"])),
        ),
        Mapped("experts.balance"),
    ),
    "moe-aux-loss-coeff": Mapped("experts.balance"),
    "moe-z-loss-coeff": Nearest("no loss on the router's scores", "as fast within one sum", unless=(None, 0, 0.0)),
    "moe-input-jitter-eps": Nearest("no noise in the router's input", FAST),
    "moe-router-enable-expert-bias": Nearest(
        "a router without a bias for each expert", "as fast within one addition"
    ),
    "moe-router-bias-update-rate": Ignored("a part of --moe-router-enable-expert-bias"),
    "moe-router-quantile-balancing-ema": Ignored("a part of the router's balancing"),
    "moe-router-force-*": Ignored("simulations say by `load` how experts are chosen"),
    "moe-router-dtype": Ignored("the router is in float32 here"),
    "moe-router-padding-for-*": Ignored("a part of fp8"),
    "moe-router-fusion": Ignored("clusters say how fast the router is"),
    "moe-enable-routing-replay": Ignored("it replays routes that are given"),
    "moe-latent-size": Unsupported("experts behind a projection to fewer elements", "leave it out with --set"),
    "moe-grouped-gemm": Ignored("experts are one grouped product here"),
    "moe-use-grouped-tensor": Ignored("clusters say how fast grouped products are"),
    "moe-single-grouped-*": Ignored("how weights are stored, in as many bytes"),
    "use-grouped-gemm-for-*": Ignored("clusters say how fast grouped products are"),
    "moe-*-glu-interleave-size": Ignored("how weights are stored, in as many bytes"),
    "moe-pad-*": Ignored("places of experts are filled up, as they are here"),
    "moe-token-drop-policy": Ignored("it says which tokens are left out, not how many"),
    "moe-apply-probs-on-input": Ignored("the shares are multiplied in before experts or behind them"),
    "moe-permute-*": Ignored("clusters say how fast rows are moved"),
    "moe-per-layer-logging": Ignored("a message, no part of a step"),
    "moe-use-upcycling": Ignored("it makes the first weights"),
    "moe-upcycling-granularity": Ignored("it makes the first weights"),
    "moe-expert-rank-capacity-factor": Nearest("no bound on the rows of a device", MORE),
    "moe-paged-stash": Nearest("activations of experts in plain memory", MORE),
    "moe-paged-stash-*": Ignored("a part of --moe-paged-stash"),
    "moe-routing-trace-*": Ignored("a record, no part of a step"),
    # models that are no decoders of equal layers
    "mtp-num-layers": (_OF_DECODERS, Mapped("mtp")),
    "mtp-loss-scaling-factor": Mapped("mtp_weight"),
    "mtp-use-repeated-layer": Nearest("a layer of its own for each further token", MORE),
    "mtp-*": Ignored("a part of --mtp-num-layers"),
    "decoder-num-layers": Unsupported(_T5, "take a decoder, or an encoder (BERT)"),
    "decoder-seq-length": Unsupported(_T5, "take a decoder, or an encoder (BERT)"),
    "bert-no-binary-head": Mapped("token_types and pooled_classes"),
    "hybrid-layer-pattern": Unsupported("layers of several kinds, such as Mamba's", "take a transformer"),
    "hybrid-override-pattern": Unsupported("layers of several kinds, such as Mamba's", "take a transformer"),
    "is-hybrid-model": Unsupported("layers of several kinds, such as Mamba's", "take a transformer"),
    "mamba-*": Ignored("a part of --hybrid-layer-pattern"),
    "disable-mamba-mem-eff-path": Ignored("a part of --hybrid-layer-pattern"),
    "gdp-*": Ignored("a part of --hybrid-layer-pattern"),
    "experimental-attention-variant": Unsupported("attention of another kind", "take plain or latent attention"),
    "linear-*": Ignored("a part of --experimental-attention-variant"),
    "dsa-*": Ignored("a part of --experimental-attention-variant"),
    "*-dsa-*": Ignored("a part of --experimental-attention-variant"),
    "heterogeneous-layers-config-*": Unsupported("layers of several shapes", "take a model of equal layers"),
    "enable-mhc-connections": Unsupported("several residual streams (mHC)", "leave them out with --set"),
    "mhc-*": Ignored("a part of --enable-mhc-connections"),
    "vision-*": Unsupported("a model of pictures", "take a decoder of text"),
    "ict-head-size": Unsupported("an encoder for retrieval", "take a decoder of text"),
    "biencoder-*": Ignored("a part of --ict-head-size"),
    "freeze-all-layers": Unsupported("a model whose layers do not train", "leave it out with --set"),
    "program": Unsupported(
        "the model of this program",
        "take pretrain_gpt.py or pretrain_bert.py, whose options make a decoder or an encoder",
        unless=("", "pretrain_gpt.py", "pretrain_bert.py", "finetune_gpt.py", "train.py"),
    ),
    # first weights, and formulas of as many operations
    "use-mup": Ignored("it scales the first weights and the learning rates"),
    "mup-*": Ignored("a part of --use-mup"),
    "init-method-*": Ignored("it makes the first weights"),
    "embedding-init-method-std": Ignored("it makes the first weights"),
    "init-model-with-meta-device": Ignored("it makes the first weights"),
    "no-initialization": Ignored("it makes the first weights"),
    "use-cpu-initialization": Ignored("it makes the first weights"),
    "calculate-per-token-loss": Ignored("the loss is divided by another number"),
    "cross-entropy-loss-fusion": Nearest(
        "the loss as torch computes it, of logits in float32", f"{SLOW}, {LESS} at the last stage"
    ),
    "cross-entropy-fusion-impl": Ignored("a part of --cross-entropy-loss-fusion"),
    "output-logit-dtype": Nearest("logits as torch computes them", "as fast within a cast"),
    "*-clone-scatter-output-in-embedding": Ignored("it lets a buffer go early, once a step"),
    "mlp-chunks-for-*": Ignored("a part of inference, or as many operations in pieces"),
}  # fmt: skip
