"""Hold the options that a description reads, with their kinds, defaults and words, and turn words into values.

The names are as on the command line without the leading dashes, with dashes for underscores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

WHOLE: dict[str, int | None] = {
    "num-layers": None,
    "encoder-num-layers": None,
    "hidden-size": None,
    "ffn-hidden-size": None,
    "num-attention-heads": None,
    "num-query-groups": 1,
    "kv-channels": None,
    "seq-length": None,
    "encoder-seq-length": None,
    "max-position-embeddings": None,
    "rotary-base": 10000,
    "vocab-size": None,
    "padded-vocab-size": None,
    "make-vocab-size-divisible-by": 128,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "num-experts": None,
    "moe-ffn-hidden-size": None,
    "moe-router-topk": 2,
    "moe-router-num-groups": None,
    "moe-router-group-topk": None,
    "moe-shared-expert-intermediate-size": None,
    "mtp-num-layers": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "tensor-model-parallel-size": 1,
    "tensor-parallel-num-weight-shards": None,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "microbatch-group-size-per-virtual-pipeline-stage": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "num-distributed-optimizer-instances": 1,
    "ddp-bucket-size": None,
    "ddp-num-buckets": None,
    "recompute-num-layers": None,
    "cpu-offloading-num-layers": 0,
    "num-layers-at-start-in-bf16": 1,
    "num-layers-at-end-in-bf16": 1,
    "hysteresis": 2,
}
"""The options of whole numbers, with the default."""

FROM_0 = (
    "mtp-num-layers", "cpu-offloading-num-layers", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16",
    "recompute-num-layers", "moe-shared-expert-intermediate-size", "num-experts", "ddp-bucket-size", "q-lora-rank",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
)  # fmt: skip
"""The options of whole numbers that may be 0."""

REAL: dict[str, float | None] = {
    "norm-epsilon": 1e-5,
    "glu-linear-offset": 0.0,
    "activation-func-clamp-value": None,
    "rotary-percent": 1.0,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "moe-router-topk-scaling-factor": None,
    "moe-expert-capacity-factor": None,
    "mtp-loss-scaling-factor": 0.1,
    "clip-grad": 1.0,
    "lr": None,
    "loss-scale": None,
    "initial-loss-scale": 2.0**32,
    "min-loss-scale": 1.0,
    "loss-scale-window": 1000.0,
}
"""The options of numbers, with the default."""

TEXT: dict[str, str | None] = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "softmax-type": "vanilla",
    "window-size": None,
    "window-attn-skip-freq": None,
    "attention-backend": "auto",
    "transformer-impl": "transformer_engine",
    "tokenizer-type": None,
    "tokenizer-model": None,
    "vocab-file": None,
    "merge-file": None,
    "moe-layer-freq": "1",
    "moe-router-score-function": "softmax",
    "moe-token-dispatcher-type": "allgather",
    "moe-flex-dispatcher-backend": "deepep",
    "pipeline-model-parallel-layout": None,
    "recompute-granularity": None,
    "recompute-method": None,
    "data-parallel-sharding-strategy": "optim_grads_params",
    "outer-dp-sharding-strategy": "no_shard",
    "optimizer": "adam",
    "fp8-format": None,
    "fp8-recipe": "delayed",
    "fp4-format": None,
}
"""The options of texts, with the default."""

WORDS: dict[str, tuple[str, ...]] = {
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "softmax-type": ("vanilla", "off-by-one", "learnable"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "transformer-impl": ("local", "transformer_engine", "inference_optimized"),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer-dp-sharding-strategy": ("no_shard", "optim"),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "moe-router-load-balancing-type": (
        "aux_loss",
        "seq_aux_loss",
        "global_aux_loss",
        "sinkhorn",
        "quantile_balancing",
        "none",
    ),
}
"""The words that a text may be, where these are few."""

LISTS: dict[str, tuple[str, ...] | None] = {
    "cp-comm-type": ("p2p",),
    "moe-router-load-balancing-type": ("aux_loss",),
    "moe-aux-loss-coeff": ("0.0",),
    "recompute-modules": None,
    "offload-modules": None,
    "step-batch-size-schedule": None,
    "spec": None,
}
"""The options of one or more texts, with the default."""

SWITCHES = (
    "group-query-attention",
    "swiglu",
    "squared-relu",
    "openai-gelu",
    "quick-geglu",
    "disable-bias-linear",
    "add-qkv-bias",
    "untie-embeddings-and-output-weights",
    "qk-layernorm",
    "use-rotary-position-embeddings",
    "multi-latent-attention",
    "use-flash-attn",
    "no-pad-vocab-size",
    "moe-router-pre-softmax",
    "moe-shared-expert-gate",
    "moe-shared-expert-overlap",
    "sequence-parallel",
    "tp-comm-overlap",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "use-distributed-optimizer",
    "use-megatron-fsdp",
    "use-torch-fsdp2",
    "torch-fsdp2-no-reshard-after-forward",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32",
    "bf16",
    "first-last-layers-bf16",
    "fp16",
    "moe-layer-recompute",
    "recompute-activations",
    "decrease-batch-size-if-needed",
    "cross-entropy-loss-fusion",
    "bert-no-binary-head",
    "use-tp-pp-dp-mapping",
    "no-overlap-p2p-communication",
)
"""The options without a value; each is off unless it is given."""


FILES = ("tokenizer-model", "vocab-file", "merge-file")
"""The options that name files, which matter only if they are public tokenizers'."""


def defaults() -> dict[str, Any]:
    """Return the value of every option that a description reads, as it is when nobody gives it."""
    lists = {name: None if value is None else list(value) for name, value in LISTS.items()}
    return {**WHOLE, **REAL, **TEXT, **lists, **dict.fromkeys(SWITCHES, False)}


class WrongValueError(ValueError):
    """Say which words an option needs in place of the given ones."""


def value_of(name: str, given: Sequence[str]) -> Any:
    """Return the value of an option; raise WrongValueError if it has a kind that the words are not of.

    Options without a kind here become True without words, a number or a text with one, and a list with more.
    """
    if name in SWITCHES:
        return _switch(given)
    if name in LISTS:
        return _list(name, given)
    if name in WHOLE or name in REAL or name in TEXT:
        return _one(name, given)
    if not given:
        return True
    values = [scalar(word) for word in given]
    return values[0] if len(values) == 1 else values


def scalar(word: str) -> int | float | str:
    """Return a word as a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _switch(given: Sequence[str]) -> bool:
    if given:
        raise WrongValueError("it takes no value")
    return True


def _list(name: str, given: Sequence[str]) -> list[str]:
    if not given:
        raise WrongValueError("at least one word is needed")
    for word in given:
        _check_word(name, word)
    return list(given)


def _one(name: str, given: Sequence[str]) -> int | float | str | None:
    if len(given) != 1:
        raise WrongValueError("one value is needed")
    (word,) = given
    kinds: tuple[tuple[Any, Any, str], ...] = (
        (WHOLE, int, "a whole number is needed"),
        (REAL, float, "a number is needed"),
    )
    for table, kind, needed in kinds:
        if name in table:
            try:
                number: int | float = kind(word)
            except ValueError:
                raise WrongValueError(needed) from None
            if name in WHOLE and number < (0 if name in FROM_0 else 1):
                raise WrongValueError(f"a number from {0 if name in FROM_0 else 1} on is needed")
            if not isfinite(number):
                raise WrongValueError(needed)
            return None if name == "moe-expert-capacity-factor" and number < 0 else number
    _check_word(name, word)
    return word


def _check_word(name: str, word: str) -> None:
    choices = WORDS.get(name, (word,))
    if word not in choices:
        raise WrongValueError(f"{', '.join(choices[:-1])} or {choices[-1]} is needed")
