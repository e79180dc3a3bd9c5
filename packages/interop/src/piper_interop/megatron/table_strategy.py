"""Give the verdict on the options that spread the job over devices, or change how it runs."""

from __future__ import annotations

from collections.abc import Callable

from piper_interop.megatron.degrees import chunks, degrees
from piper_interop.megatron.table_model import (
    FAST,
    LESS,
    MORE,
    SLOW,
    WORDS_OF_PARTS,
    beside,
    exchanged,
    mixture,
    parts_again,
)
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.options import (
    Ignored,
    Mapped,
    Nearest,
    OptionRow,
    OptionTable,
    Unsupported,
)

ON_HOST = (
    "cpu-offloading-num-layers", "optimizer-cpu-offload", "fine-grained-activation-offloading",
)  # fmt: skip
"""The options that keep something in the memory of the host."""
_BF16 = "taken as bfloat16: predicted too slow, too much memory"


def sharded(foreign: Foreign) -> bool:
    """Return whether states are sharded by Megatron's or torch's FSDP."""
    return bool(foreign["use-megatron-fsdp"] or foreign["use-torch-fsdp2"])


def muon(foreign: Foreign) -> bool:
    """Return whether matrices are updated by Muon, and each is whole on its devices."""
    found = degrees(foreign)
    whole = found.tp == 1 and (found.etp == 1 or not mixture(foreign)) and not sharded(foreign)
    return foreign["optimizer"] in ("muon", "dist_muon") and whole


def whole_graph(foreign: Foreign) -> bool:
    """Return whether forward and backward of a step are one CUDA graph, which can be said here."""
    impl, scope = foreign.get("cuda-graph-impl", "none"), foreign.get("cuda-graph-scope") or ()
    scopes = [scope] if isinstance(scope, str) else scope
    whole = impl != "none" and "full_iteration" in (impl, *scopes)
    dropless = mixture(foreign) and foreign.get("moe-expert-capacity-factor") is None
    return whole and not dropless and not any(foreign.get(name) for name in ON_HOST)


def replicated(foreign: Foreign) -> bool:
    """Return whether gradients are reduced at all."""
    found = degrees(foreign)
    return found.dp * found.cp > 1 and not sharded(foreign)


def _waits_for_messages(foreign: Foreign) -> bool:
    """Return whether stages wait for their messages: without virtual stages always (megatron/training/arguments.py)."""
    stages = degrees(foreign).pp > 1
    return stages and (foreign["no-overlap-p2p-communication"] or chunks(foreign) == 1)


def _experts_differ(foreign: Foreign) -> bool:
    found = degrees(foreign)
    alike = found.etp != found.tp and bool(found.experts_cut_alike)
    return mixture(foreign) and not exchanged(foreign) and alike


def _experts_whole(foreign: Foreign) -> bool:
    """Return whether whole experts stand for ones that are cut."""
    found = degrees(foreign)
    return exchanged(foreign) and found.etp > 1 and not found.cut


def _experts_have_the_same_tokens(foreign: Foreign) -> bool:
    """Return whether experts would be spread over devices of tp that have the same tokens."""
    alike = degrees(foreign).tp > 1 and not foreign["sequence-parallel"]
    return mixture(foreign) and exchanged(foreign) and alike


def _experts_do_not_fit(foreign: Foreign) -> bool:
    """Return whether experts would be spread over a part of an axis."""
    found = degrees(foreign)
    if not mixture(foreign) or not found.devices:
        return False
    if exchanged(foreign):
        axes = found.exchanged
        return axes is None or foreign["num-experts"] % axes.ep != 0
    whole = found.experts_cut_alike if found.etp != found.tp else found.ep
    return whole < 1 or found.dp % whole != 0


def _levels(foreign: Foreign) -> bool:
    return foreign["context-parallel-size"] > 1 and "a2a+p2p" in foreign["cp-comm-type"]


def _mixed(foreign: Foreign) -> bool:
    return foreign["context-parallel-size"] > 1 and len(set(foreign["cp-comm-type"])) > 1


def _low(dtypes: str) -> OptionRow:
    return Unsupported(dtypes, "leave it out with --set", stand_in="bf16", how=_BF16)


def _recipe_is(*names: str) -> Callable[[Foreign], bool]:
    return lambda foreign: foreign["fp8-recipe"] in names


def narrow_latent(foreign: Foreign) -> bool:
    """Return whether the blocks of a recipe do not divide the width of the latent keys and values, 512 + 64."""
    width = foreign["kv-lora-rank"] + foreign["qk-pos-emb-head-dim"]
    block = {"blockwise": 128, "mxfp8": 32}.get(foreign["fp8-recipe"], 1)
    return bool(foreign["multi-latent-attention"]) and width % block != 0


_FLOAT8: tuple[OptionRow, ...] = (
    Unsupported(
        "fp8 by a quantizer of its own",
        "leave it out with --set",
        stand_in="bf16",
        how=_BF16,
        when=_recipe_is("custom"),
    ),
    Nearest(
        "experts' products in bfloat16",
        SLOW,
        when=mixture,
    ),
    Nearest(
        "the down-projection of keys and values in bfloat16, whose width whole blocks do not divide",
        SLOW,
        when=narrow_latent,
    ),
    Nearest(
        "weights are cast to fp8 where they are used",
        "too little memory by 1 to 2 bytes per parameter of a layer: Transformer Engine keeps the cast ones for the "
        "microbatches of a step",
        when=lambda foreign: not foreign.get("fp8-param-gather", False),
    ),
    Mapped("Precision(float8=)"),
)
_EXPERTS_ALIKE = Unsupported(
    "experts over devices of tp with the same tokens",
    "add --sequence-parallel, which Megatron asks for beside experts and tp",
    unless=(),
    when=_experts_have_the_same_tokens,
)
_EXPERTS_OVER_MORE = Unsupported(
    "experts over a part of tp, cp or the replicas",
    "give --gpus, a multiple of pp x ep x the devices that cut an expert, or an --expert-model-parallel-size of whole "
    "axes: tp, tp x cp, or tp x cp x some replicas",
    unless=(),
    when=_experts_do_not_fit,
)

STRATEGY: OptionTable = {
    # devices
    "tensor-model-parallel-size": Mapped("tp"),
    "tensor-parallel-num-weight-shards": Unsupported(
        "weights in more shards than tp (GTP)",
        "leave it out with --set",
        when=lambda f: f["tensor-parallel-num-weight-shards"] != f["tensor-model-parallel-size"],
    ),
    "expert-tensor-parallel-num-weight-shards": Unsupported(
        "experts in more shards than their devices (GTP)", "leave it out with --set"
    ),
    "*gtp-*": Ignored("a part of --tensor-parallel-num-weight-shards"),
    "sequence-parallel": Mapped("tp: sequence"),
    "context-parallel-size": Mapped("cp"),
    "cp-comm-type": (
        Unsupported(
            "context parallelism of two levels (a2a+p2p)",
            "give --set --cp-comm-type=p2p",
            stand_in="ring",
            how=f"keys go round one ring of all devices: {SLOW}",
            when=_levels,
        ),
        Unsupported(
            "context parallelism of several kinds by layer", "give --set with one --cp-comm-type", when=_mixed
        ),
        Mapped("cp: attention"),
    ),
    "hierarchical-context-parallel-sizes": Ignored("a part of --cp-comm-type a2a+p2p"),
    "hybrid-context-parallel": Unsupported("context parallelism by the length of a row", "leave it out with --set"),
    "max-seqlen-per-dp-cp-rank": Ignored("a part of --hybrid-context-parallel"),
    "pipeline-model-parallel-size": Mapped("pp"),
    "num-layers-per-virtual-pipeline-stage": Mapped("pp: chunks"),
    "num-virtual-stages-per-pipeline-rank": Mapped("pp: chunks"),
    "microbatch-group-size-per-virtual-pipeline-stage": Mapped("pp: group"),
    "decoder-first-pipeline-num-layers": Mapped("pp: at"),
    "decoder-last-pipeline-num-layers": Mapped("pp: at"),
    "account-for-embedding-in-pipeline-split": Mapped("pp: at and units"),
    "account-for-loss-in-pipeline-split": Mapped("pp: at and units"),
    "pipeline-model-parallel-layout": Mapped("pp: at and units"),
    "no-overlap-p2p-communication": Nearest(
        "messages of the pipeline beside compute", FAST, unless=(), when=_waits_for_messages
    ),
    "overlap-p2p-communication-warmup-flush": Ignored("messages are beside compute in every phase here"),
    "use-ring-exchange-p2p": Ignored("the same messages, sent by another call"),
    "pipeline-model-parallel-comm-backend": Ignored("clusters say how fast messages are"),
    "expert-model-parallel-size": (_EXPERTS_ALIKE, _EXPERTS_OVER_MORE, Mapped("ep")),
    "expert-tensor-parallel-size": (
        Unsupported(
            "experts cut by another number than tp",
            "give --set with --expert-tensor-parallel-size equal to tp",
            stand_in="etp",
            how=f"experts are cut by tp, over ep x etp / tp devices, as many parameters on a device: {SLOW}",
            when=_experts_differ,
        ),
        Nearest(
            "whole experts over ep x etp devices, as many parameters on each",
            "another exchange, of the same rows",
            unless=(1,),
            when=_experts_whole,
        ),
        Mapped("ep: hidden"),
    ),
    "use-tp-pp-dp-mapping": Mapped("mesh: order"),
    # batch
    "micro-batch-size": Mapped("rows of a microbatch"),
    "global-batch-size": Mapped("rows of a step; without it one microbatch of each replica"),
    "decrease-batch-size-if-needed": Mapped("rows of a step"),
    "step-batch-size-schedule": Nearest("the last batch of the schedule", "earlier steps have fewer rows"),
    "rampup-batch-size": Nearest("the batch after the ramp", "earlier steps have fewer rows"),
    # states
    "use-distributed-optimizer": (
        Nearest("optimizer states that no rank shares, beside Muon", MORE, when=muon),
        Mapped("dp: zero=1, over cp, too"),
    ),
    "use-megatron-fsdp": Mapped("dp: zero"),
    "data-parallel-sharding-strategy": Mapped("dp: zero, with --use-megatron-fsdp"),
    "use-torch-fsdp2": Mapped("dp: zero=3"),
    "torch-fsdp2-no-reshard-after-forward": Mapped('dp: resident_mb="step"'),
    "num-distributed-optimizer-instances": (
        Unsupported(
            "copies of sharded states that do not divide the replicas",
            "give a number that divides them",
            unless=(1,),
            when=lambda f: degrees(f).dp % f["num-distributed-optimizer-instances"] != 0,
        ),
        Mapped("rep: groups that hold the same shards"),
    ),
    "outer-dp-sharding-strategy": Unsupported(
        "optimizer states sharded over the copies, too",
        "give --set --outer-dp-sharding-strategy=no_shard",
        unless=("no_shard",),
        when=lambda f: f["num-distributed-optimizer-instances"] > 1,
    ),
    "enable-full-sharding-in-hsdp": Unsupported(
        "states sharded over the copies, too", "leave it out with --set",
        when=lambda f: f["num-distributed-optimizer-instances"] > 1,
    ),
    "overlap-grad-reduce": (
        Nearest(
            "gradients scattered beside compute", FAST, unless=(True,), when=lambda f: f["use-megatron-fsdp"]
        ),
        Nearest(
            "buckets of gradients on every stage",
            f"{FAST}: Megatron has them in the first stage alone, and elsewhere one bucket",
            when=lambda f: replicated(f) and degrees(f).pp > 1,
        ),
        Mapped("dp: bucket_mb, overlap; without it all gradients are one bucket, reduced behind the backward"),
    ),
    "overlap-param-gather": (
        Nearest(
            "parameters gathered beside compute",
            FAST,
            unless=(True,),
            when=lambda f: replicated(f) and f["use-distributed-optimizer"] and f["overlap-grad-reduce"],
        ),
        Mapped("dp: overlap of gathers, with that of reductions"),
    ),
    "overlap-param-gather-with-optimizer-step": Nearest("gathers behind the whole update", SLOW),
    "ddp-bucket-size": Mapped("dp: bucket_mb"),
    "ddp-num-buckets": Nearest("buckets of Megatron's default size", "gradients are reduced earlier or later"),
    "ddp-pad-buckets-for-high-nccl-busbw": Ignored("it adds less than a page to a bucket"),
    "ddp-average-in-collective": Ignored("the same sums, divided elsewhere"),
    "ddp-reduce-scatter-with-fp32-accumulation": Nearest("a reduce-scatter", "as fast within its rounds"),
    "ddp-param-name-patterns-for-fp32-local-accumulation": Nearest(
        "sums of gradients in one dtype for all", LESS, unless=(None, [], ())
    ),
    "no-gradient-reduce-div-fusion": Ignored("the same sums, divided elsewhere"),
    "no-align-*": Ignored("when a device of the pipeline starts its own messages"),
    "disable-align-grad-reduce": Ignored("when a device of the pipeline starts its own messages"),
    "megatron-fsdp-version": Ignored("two versions of the same sharding"),
    "megatron-fsdp-main-params-dtype": Ignored("float32, or as the parameters"),
    "megatron-fsdp-main-grads-dtype": Mapped("precision: accumulate, beside --grad-reduce-in-bf16"),
    "megatron-fsdp-grad-comm-dtype": Mapped("precision: reduce, beside --grad-reduce-in-bf16"),
    "megatron-fsdp-enable-fine-grained-param-gather": Ignored("gathers are by bucket here"),
    "megatron-fsdp-max-pool-double-buffer": Ignored("how gathered parameters are stored"),
    "fsdp-*": Ignored("how buffers of messages are stored"),
    "suggested-communication-unit-size": Nearest(
        "gathers one use ahead", "gathered parameters take more or less memory"
    ),
    "create-all-gather-group": Ignored("gathers and reductions do not wait for each other here"),
    "keep-fp8-transpose-cache": Ignored("a part of fp8"),
    "use-nccl-ub": Nearest("messages that take processors from compute", SLOW),
    "disable-symmetric-registration": Ignored("a part of --use-nccl-ub"),
    # recomputation
    "recompute-granularity": Mapped("recompute"),
    "recompute-method": Mapped("recompute"),
    "recompute-num-layers": Mapped("recompute: layers, or group"),
    "recompute-activations": Mapped("recompute, as --recompute-granularity selective"),
    "recompute-modules": (
        Unsupported(
            "recomputation of a part that no layer here has",
            "take these with --set: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts",
            when=lambda f: not WORDS_OF_PARTS.issuperset(parts_again(f)),
        ),
        Mapped("recompute: modules"),
    ),
    "moe-layer-recompute": Mapped("recompute: modules"),
    "distribute-saved-activations": Nearest("kept inputs whole on each tp device", MORE),
    "checkpoint-activations": Unsupported("an option that Megatron itself refuses", "give --recompute-granularity"),
    # precision
    "bf16": Mapped("precision: compute in bfloat16, masters in float32"),
    "fp16": Mapped("precision: compute in float16, masters in float32, a scaled loss"),
    "fp8-format": _FLOAT8,
    "fp8-recipe": Mapped("Precision(float8=)"),
    "fp8-param-gather": Nearest("parameters in bfloat16, gathered so", f"{SLOW}, {MORE}"),
    "fp8-dot-product-attention": Nearest("attention in bfloat16", SLOW),
    "fp8-multi-head-attention": Nearest("attention in bfloat16", SLOW),
    "fp8-output-proj": Nearest("the head in bfloat16", SLOW),
    "fp4-format": _low("fp4"),
    "fp8-*": Ignored("a part of --fp8-format"),
    "fp4-*": Ignored("a part of --fp4-format"),
    "no-fp8-*": Nearest("gradients of weights in fp8", FAST),
    "disable-fp8-*": Nearest("gradients of weights in fp8", FAST),
    "fp16-lm-cross-entropy": Ignored("a part of --fp16"),
    "first-last-layers-bf16": Mapped("Float8(keep=)"),
    "num-layers-at-*-in-bf16": Mapped("Float8(keep=)"),
    "te-precision-config-file": _low("dtypes by module"),
    "use-kitchen-attention": _low("attention in fewer bits"),
    "kitchen-*": Ignored("a part of --use-kitchen-attention"),
    "reuse-grad-buf-for-mxfp8-param-ag": Ignored("a part of fp8"),
    "moe-dispatch-fwd-dtype": Nearest("tokens exchanged in bfloat16", SLOW, unless=("bf16", None)),
    "moe-combine-bwd-dtype": Nearest("tokens exchanged in bfloat16", SLOW, unless=("bf16", None)),
    "accumulate-allreduce-grads-in-fp32": Mapped("precision: reduce"),
    "grad-reduce-in-bf16": Mapped("precision: reduce"),
    "use-precision-aware-optimizer": Ignored("its dtypes are in options of their own"),
    "main-grads-dtype": Nearest("float32, also in messages", f"{MORE}, and {SLOW}", unless=("fp32",)),
    "main-params-dtype": Nearest("float32", MORE, unless=("fp32",)),
    "exp-avg-dtype": Nearest("float32", MORE, unless=("fp32",)),
    "exp-avg-sq-dtype": Nearest("float32", MORE, unless=("fp32",)),
    "disable-bf16-reduced-precision-matmul": Ignored("clusters say how fast products are"),
    "loss-scale": Mapped("precision: loss_scale"),
    "loss-scale-window": Mapped("precision: loss_scale"),
    "initial-loss-scale": Mapped("precision: loss_scale"),
    "min-loss-scale": Mapped("precision: loss_scale"),
    "hysteresis": Mapped("precision: loss_scale"),
    # optimizer
    "optimizer": (
        Nearest("AdamW", MORE, when=lambda f: f["optimizer"] == "sgd"),
        Nearest(
            "Muon whose states no rank shares", MORE, when=lambda f: f["optimizer"] == "dist_muon" and muon(f)
        ),
        Unsupported(
            "an optimizer with other states, or Muon of matrices that devices cut",
            "give --set --optimizer=adam",
            unless=("adam",),
            when=lambda f: not muon(f),
            stand_in="adam",
            how=f"as AdamW: {FAST}, {MORE}",
        ),
        Mapped("AdamW, or Muon for the matrices of layers and AdamW for all else"),
    ),
    "clip-grad": Mapped("clip_norm"),
    "lr": Mapped("lr"),
    "optimizer-cpu-offload": Mapped("offload of the optimizer"),
    "optimizer-offload-fraction": Nearest(
        "the optimizer of the first layers", SLOW, unless=(1.0,), when=lambda f: f["optimizer-cpu-offload"]
    ),
    "cpu-offloading-num-layers": Mapped("offload of the first layers"),
    "fine-grained-activation-offloading": (
        Unsupported(
            "activations of fused groups in the host's memory",
            "leave it out with --set",
            stand_in="no-offload",
            how=f"nothing is moved to the host: {MORE}, {FAST}",
            when=lambda f: bool({"fused_group_mlp", "gdp_qkv"} & {*(f.get("offload-modules") or ())}),
        ),
        Nearest("offload of all that the modules before these parts save, and of no residuals", MORE),
    ),
    # messages beside compute, and how steps are started
    "tp-comm-overlap": (
        Nearest("messages of tp before and behind products", SLOW, when=lambda f: not f["sequence-parallel"]),
        Mapped("tp: pieces"),
    ),
    "tp-comm-*": Ignored("a part of --tp-comm-overlap"),
    "*-tp-comm-*": Ignored("a part of --tp-comm-overlap"),
    "overlap-moe-expert-parallel-comm": Nearest("exchanges with experts that compute waits for", SLOW),
    "delay-wgrad-compute": Nearest("gradients of weights computed at once", SLOW),
    "overlap-dispatch-backward-with-experts-wgrad": Nearest("exchanges that compute waits for", SLOW),
    "ep-overlap-early-attn-memory-release": Ignored("a part of --overlap-moe-expert-parallel-comm"),
    "moe-shared-expert-overlap": (
        Nearest("shared experts before the exchange", SLOW, when=lambda f: not beside(f)),
        Mapped("expert_parallel(beside=True)"),
    ),
    "defer-embedding-wgrad-compute": Nearest(
        "the head's gradients computed at once", f"{SLOW}, {LESS} at the last stage"
    ),
    "wgrad-deferral-limit": Ignored("a part of --defer-embedding-wgrad-compute"),
    "moe-token-dispatcher-type": Nearest(
        "an all-to-all",
        FAST,
        unless=("alltoall", "flex"),
        when=lambda f: mixture(f) and degrees(f).ep > 1,
    ),
    "moe-enable-deepep": Nearest("an all-to-all of NCCL", SLOW),
    "moe-flex-dispatcher-backend": Nearest(
        "an all-to-all of NCCL", SLOW, unless=(),
        when=lambda f: mixture(f) and f["moe-token-dispatcher-type"] == "flex" and degrees(f).ep > 1,
    ),
    "moe-flex-*": Ignored("a part of --moe-token-dispatcher-type flex"),
    "moe-deepep-*": Ignored("a part of --moe-token-dispatcher-type flex"),
    "moe-hybridep-*": Ignored("a part of --moe-token-dispatcher-type flex"),
    "moe-ncclep-*": Ignored("a part of --moe-token-dispatcher-type flex"),
    "high-priority-*": Ignored("clusters say how messages and compute share a device"),
    "enable-cuda-graph": Nearest("kernels that the host starts one by one", SLOW),
    "external-cuda-graph": Nearest("kernels that the host starts one by one", SLOW),
    "cuda-graph-impl": (
        Nearest(
            "kernels that the host starts one by one",
            SLOW,
            unless=("none", None),
            when=lambda f: not whole_graph(f),
        ),
        Mapped("Options(cuda_graph=True)"),
    ),
    "cuda-graph-*": Ignored("a part of --cuda-graph-impl"),
    "optimizer-cuda-graph": Nearest("kernels that the host starts one by one", SLOW),
    "deterministic-mode": Nearest("kernels as without it, but for the stack hopper-megatron-deterministic", FAST),
    "batch-invariant-mode": Nearest("kernels that may depend on the batch", FAST),
    "batch-invariant-backend": Ignored("a part of --batch-invariant-mode"),
    "train-sync-interval": Nearest("steps without a wait for the device", FAST, unless=(None, 0)),
    "sft": Nearest("rows of full length", SLOW),
    "perform-rl-step": Unsupported("steps of reinforcement learning", "import the training step alone, without it"),
}  # fmt: skip
