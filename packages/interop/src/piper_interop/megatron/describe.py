"""Describe a job of Megatron-LM: the model, the batch, the devices' shares, precision and recomputation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from piper_interop.megatron.degrees import (
    Degrees,
    batch,
    check,
    chunks,
    layers_of_stages,
)
from piper_interop.megatron.sizes import length, makers_of, policy_of, sizes
from piper_interop.megatron.stages import boundaries
from piper_interop.megatron.table import TABLE
from piper_interop.megatron.table_model import beside, exchanged, mixture, parts_again
from piper_interop.megatron.table_strategy import muon, narrow_latent, sharded, whole_graph
from piper_interop.neutral.described import (
    DeviceLayout,
    ExpertAxes,
    Float8Layers,
    JobDescription,
    OffloadedTensors,
    Recomputation,
    loss_scale,
)
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.options import judge
from piper_interop.neutral.system import Asked
from piper_interop.neutral.units import unit_mb
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES

PP_FIRST = ("tp", "cp", "ep", "pp")
"""The order of axes under --use-tp-pp-dp-mapping: neighbouring stages before replicas."""
WHOLE_MB = 1_000_000.0
"""The MiB of a bucket that holds all gradients of a device, which are then reduced behind the backward at once."""

BUCKET, BUCKET_OF_REPLICA = 40_000_000, 1_000_000
"""The elements of a bucket of gradients: the first number, or the second for each replica if that is more."""

KINDS = {
    "p2p": "ring",
    "all_gather": "gather",
    "allgather": "gather",
    "a2a": "heads",
    "a2a+p2p": "ring",
}
ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

PARTS = {
    "sizes": (
        "num-layers", "encoder-num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
        "kv-channels", "max-position-embeddings", "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by",
        "untie-embeddings-and-output-weights", "swiglu", "squared-relu", "normalization", "disable-bias-linear",
        "position-embedding-type", "multi-latent-attention", "num-experts",
    ),
    "job": ("micro-batch-size", "global-batch-size", "step-batch-size-schedule", "seq-length", "bf16", "lr", "clip-grad"),
    "tp": ("tensor-model-parallel-size", "sequence-parallel", "tp-comm-overlap"),
    "cp": ("context-parallel-size", "cp-comm-type"),
    "ep": ("expert-model-parallel-size", "expert-tensor-parallel-size", "moe-shared-expert-overlap"),
    "pp": (
        "pipeline-model-parallel-size", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
        "microbatch-group-size-per-virtual-pipeline-stage", "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split", "pipeline-model-parallel-layout",
    ),
    "recompute": (
        "recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-activations", "recompute-modules",
    ),
    "offload": (
        "cpu-offloading-num-layers", "optimizer-cpu-offload", "optimizer-offload-fraction",
        "fine-grained-activation-offloading", "offload-modules",
    ),
    "dp": (
        "use-distributed-optimizer", "use-megatron-fsdp", "data-parallel-sharding-strategy", "use-torch-fsdp2",
        "num-distributed-optimizer-instances", "overlap-grad-reduce", "ddp-bucket-size",
    ),
}  # fmt: skip
"""The options that lines of a FILE.py come from."""


PIECES = 4
"""The pieces of a product under --tp-comm-overlap: `num_splits` of Transformer Engine's userbuffers is 4 unless set."""


def describe(foreign: Foreign, asked: Asked) -> JobDescription:
    """Return the job that the options describe; raise JobError for numbers that do not fit together."""
    found = check(foreign)
    if length(foreign) % (2 * found.cp) and found.cp > 1:
        raise JobError(
            f"{foreign.source}: --seq-length {length(foreign)} is no multiple of 2 x --context-parallel-size, which "
            f"Megatron asks for; give a multiple of {2 * found.cp}"
        )
    if foreign["fp16"] and foreign["bf16"]:
        raise JobError(f"{foreign.source}: --fp16 and --bf16 exclude each other; give one")
    positions = foreign.get("max-position-embeddings")
    if positions is not None and positions < length(foreign):
        raise JobError(
            f"{foreign.source}: --seq-length {length(foreign)} is more than --max-position-embeddings {positions}, which "
            f"Megatron refuses; give at least as many positions"
        )
    whole, rows = batch(foreign, found.dp)
    compute, reduce, accumulate = _precision(foreign)
    layout = _layout(foreign, found)
    if foreign["tp-comm-overlap"]:
        layout = layout.in_pieces(PIECES, length(foreign))
    _check_group(foreign, layout, whole // (rows * found.dp))
    return JobDescription(
        name=foreign.facts.get("name", "megatron"),
        sizes=sizes(foreign),
        length=length(foreign),
        global_batch=whole,
        rows=rows,
        layout=layout,
        recompute=_recompute(foreign),
        offload=_offload(foreign),
        optim_on_host=_optim_on_host(foreign),
        compute=compute,
        reduce=reduce,
        accumulate=accumulate if accumulate != reduce else "",
        loss_scale=_loss_scale(foreign),
        float8=_float8(foreign, asked),
        clip_norm=foreign["clip-grad"] or None,
        lr=foreign.get("lr", 3e-4),
        optimizer="muon" if muon(foreign) else "adamw",
        stack="megatron",
        cuda_graph=whole_graph(foreign),
        notes=notes(foreign, asked),
        origins={part: _origin(foreign, names) for part, names in PARTS.items()},
    )


def _precision(foreign: Foreign) -> tuple[str, str, str]:
    """Return the dtypes of forward and backward, of gradients in messages, and of their sums.

    Megatron keeps gradients in float32 beside bfloat16. Its FSDP has options for both, which count where
    --grad-reduce-in-bf16 says so: "auto" are sums as in forward and backward, and messages as the sums.
    """
    if foreign["fp16"]:
        wide = foreign["accumulate-allreduce-grads-in-fp32"]
        return "float16", *("float32" if wide else "float16",) * 2
    if not any(foreign[name] for name in ("bf16", "fp8-format", "fp4-format")):
        return "float32", "float32", "float32"
    if foreign["use-torch-fsdp2"]:  # it shards bfloat16 parameters, and has no policy of precision
        return "bfloat16", "bfloat16", "bfloat16"
    if not foreign["grad-reduce-in-bf16"]:
        return "bfloat16", "float32", "float32"
    if not foreign["use-megatron-fsdp"]:
        return "bfloat16", "bfloat16", "bfloat16"
    summed = FSDP_DTYPES.get(foreign.get("megatron-fsdp-main-grads-dtype"), "bfloat16")
    return "bfloat16", FSDP_DTYPES.get(foreign.get("megatron-fsdp-grad-comm-dtype"), summed), summed


FSDP_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that options of Megatron-FSDP name; "auto" is none of them."""


def _loss_scale(foreign: Foreign) -> tuple[tuple[str, float], ...]:
    """Return the scale of the loss beside float16, as `JobDescription.loss_scale` has it."""
    if not foreign["fp16"]:
        return ()
    if foreign["loss-scale"]:
        return (("fixed", float(foreign["loss-scale"])),)
    return loss_scale(
        initial=float(foreign["initial-loss-scale"]),
        interval=int(foreign["loss-scale-window"]),
        hysteresis=int(foreign["hysteresis"]),
        least=float(foreign["min-loss-scale"]),
    )


LATENT = ("layers.*.attention.kv_down",)
"""The linear layer of latent keys and values, of the model here."""


def _float8(foreign: Foreign, asked: Asked) -> Float8Layers | None:
    """Return the linear layers that multiply in float8: the ones of all blocks but some first and last ones."""
    recipe = foreign["fp8-recipe"]
    if foreign["fp8-format"] is None or (recipe == "custom" and "bf16" in asked.stand_ins):
        return None
    kept: tuple[int, ...] = ()
    if foreign["first-last-layers-bf16"]:
        layers = int(foreign.first("num-layers", "encoder-num-layers"))
        first, last = (foreign[f"num-layers-at-{end}-in-bf16"] for end in ("start", "end"))
        kept = tuple(k for k in range(layers) if k < first or k >= layers - last)
    return Float8Layers(
        recipe,
        modules=("layers.*",),
        keep=(*(f"layers.{k}.*" for k in kept), *LATENT * narrow_latent(foreign)),
        saved="float8",
    )


def notes(foreign: Foreign, asked: Asked) -> tuple[str, ...]:
    """Return a warning for each stand-in and one for the nearest forms in each direction of the error."""
    judgement = judge(foreign, TABLE, asked.stand_ins, skip_unknown=True)
    stand_ins = [f"--{line.option}: {_words(line.text)}" for line in judgement.stand_ins]
    nearest: dict[str, list[str]] = defaultdict(list)
    for line in judgement.nearest:
        how, _, direction = _words(line.text).rpartition("; ")
        nearest[direction].append(f"{how} (--{line.option})")
    return (*stand_ins, *(f"{direction}: {', '.join(hows)}" for direction, hows in nearest.items()))


def _words(text: str) -> str:
    """Return the words of a judgement's line, which stand behind the option and its value."""
    return text.partition(": ")[2]


def _origin(foreign: Foreign, names: Sequence[str]) -> str:
    """Return the options of these that somebody wrote, as a command line has them."""
    given = (name for name in names if name in foreign.values and not foreign.values[name].default)
    return " ".join(_written(name, foreign[name]) for name in given)


def _written(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name} {' '.join(value) if isinstance(value, list) else value}"


def _layout(foreign: Foreign, found: Degrees) -> DeviceLayout:
    number = chunks(foreign)
    at, units = boundaries(layers_of_stages(foreign))
    group = foreign.get("microbatch-group-size-per-virtual-pipeline-stage")
    zero, copies = _zero(foreign), foreign["num-distributed-optimizer-instances"]
    copies = copies if zero else 1
    experts = ExpertAxes(found.experts_cut_alike if found.etp != found.tp else found.ep)
    if exchanged(foreign) and found.exchanged is not None:
        experts = found.exchanged
    return DeviceLayout(
        tp=found.tp,
        sequence=foreign["sequence-parallel"] and found.tp > 1,
        cp=found.cp,
        attention=KINDS.get(foreign["cp-comm-type"][0], "ring") if found.cp > 1 else "ring",
        pp=found.pp,
        schedule="interleaved" if number > 1 else "one_f_one_b",
        chunks=number,
        group=None if number == 1 or group == found.pp else group,
        at=at,
        units=units,
        dp=found.dp // copies,
        dp_replicate=copies,
        ep=experts.ep if mixture(foreign) else 1,
        folded=experts.folded,
        hidden=experts.hidden,
        etp=experts.etp,
        beside=beside(foreign),
        zero=zero,
        over_cp=bool(zero) and found.cp > 1,
        reshard=not (
            foreign["use-torch-fsdp2"] and foreign["torch-fsdp2-no-reshard-after-forward"]
        ),
        bucket_mb=_bucket(foreign, found, experts.ep if mixture(foreign) else 1, zero),
        overlap=sharded(foreign) or foreign["overlap-grad-reduce"] or not _reduced(found, zero),
        order=PP_FIRST if foreign["use-tp-pp-dp-mapping"] and found.pp > 1 else (),
    )


def _check_group(foreign: Foreign, layout: DeviceLayout, microbatches: int) -> None:
    """Raise JobError for groups of microbatches that Megatron refuses (core/pipeline_parallel/schedules.py)."""
    if layout.chunks == 1:
        return
    group = layout.pp if layout.group is None else layout.group
    if not layout.pp <= group <= microbatches:
        raise JobError(
            f"{foreign.source}: --microbatch-group-size-per-virtual-pipeline-stage {group}: a group of at least "
            f"pp={layout.pp} and at most all {microbatches} microbatches is needed"
        )
    if 0 < microbatches % group < layout.pp:
        raise JobError(
            f"{foreign.source}: {microbatches} microbatches in groups of {group} leave {microbatches % group}, which "
            f"Megatron refuses: none, or at least pp={layout.pp}, are needed; give another batch, or "
            f"--microbatch-group-size-per-virtual-pipeline-stage"
        )


def _zero(foreign: Foreign) -> int:
    """Return how many kinds of states are sharded."""
    if foreign["use-torch-fsdp2"]:
        return 3
    if foreign["use-megatron-fsdp"]:
        return ZERO[foreign["data-parallel-sharding-strategy"]]
    return int(foreign["use-distributed-optimizer"] and not muon(foreign))


def _bucket(foreign: Foreign, found: Degrees, ep: int, zero: int) -> float | None:
    """Return the MiB of a bucket of gradients, which is a layer of FSDP; None where nothing is reduced."""
    replicas = found.dp * found.cp
    if not _reduced(found, zero):
        return None
    size = ITEM_BYTES[_precision(foreign)[1]]
    if sharded(foreign):
        return unit_mb(sizes(foreign), found.tp, ep, size)
    if not foreign["overlap-grad-reduce"]:
        return WHOLE_MB
    elements = foreign.get("ddp-bucket-size") or max(BUCKET, BUCKET_OF_REPLICA * replicas)
    return float(elements * size / 2**20)


def _reduced(found: Degrees, zero: int) -> bool:
    """Return whether replicas reduce gradients, or devices along cp scatter them."""
    return found.dp > 1 or bool(zero and found.cp > 1)


def _recompute(foreign: Foreign) -> tuple[Recomputation, ...]:
    """Return the layers that are computed again, or the parts of all layers."""
    granularity, method = foreign.get("recompute-granularity"), foreign.get("recompute-method")
    number = foreign.get("recompute-num-layers")
    if foreign["recompute-activations"] or granularity != "full":
        policy = policy_of(parts_again(foreign), sizes(foreign))
        return (Recomputation(policy),) if policy else ()
    if method is None or not number or number < 1:
        raise JobError(
            f"{foreign.source}: --recompute-granularity full needs --recompute-method and --recompute-num-layers"
        )
    if method == "uniform":
        return (Recomputation("inputs", group=number),)
    counts = layers_of_stages(foreign)
    if all(layers <= number for layers in counts):
        return (Recomputation("inputs"),)
    if len(counts) == 1:
        return (Recomputation("inputs", layers=number),)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    first = [range(start, start + min(number, n)) for start, n in zip(starts, counts, strict=True)]
    return (Recomputation("inputs", layers=tuple(layer for layers in first for layer in layers)),)


def _optim_on_host(foreign: Foreign) -> float:
    """Return the fraction of the optimizer that runs on the host."""
    if not foreign.get("optimizer-cpu-offload", False):
        return 0.0
    return float(foreign.get("optimizer-offload-fraction", 1.0))


def _offload(foreign: Foreign) -> OffloadedTensors | None:
    """Return the tensors of the first layers, or the inputs of parts of all layers, if these wait on the host."""
    if foreign.get("fine-grained-activation-offloading", False):
        modules = makers_of(foreign.get("offload-modules") or (), sizes(foreign))
        return OffloadedTensors("saved", modules=modules) if modules else None
    count = foreign["cpu-offloading-num-layers"]
    return OffloadedTensors("all", count) if count else None
