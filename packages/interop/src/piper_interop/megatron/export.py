"""Write a described job as options of Megatron-LM, one a line."""

from __future__ import annotations

from math import prod

from piper_interop.megatron.describe import FSDP_DTYPES, PIECES, PP_FIRST, WHOLE_MB
from piper_interop.megatron.export_sizes import write_sizes
from piper_interop.megatron.exported import WrittenOptions
from piper_interop.megatron.sizes import parts_of, policy_of
from piper_interop.megatron.stages import counts_of, layout
from piper_interop.neutral.described import (
    USUAL_SCALE,
    DeviceLayout,
    ExpertAxes,
    JobDescription,
    Recomputation,
    axes_of_experts,
)
from piper_interop.neutral.system import Exported
from piper_interop.neutral.units import by_layer, unit_mb
from piper_interop.neutral.writer import check_batch
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.program.ops import BESIDE, WITHIN
from piper_ir.tools import count_text

FILE = "megatron.args"
_KINDS = {"ring": "p2p", "gather": "all_gather", "heads": "a2a"}
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_NEAREST = {
    "gpipe": "one_f_one_b",
    "zb_h1": "one_f_one_b",
    "zb_h2": "one_f_one_b",
    "zero_bubble": "one_f_one_b",
}
_TWICE = "interleaved with chunks=2"
_DEFAULT_MB = 25.0


def export(described: JobDescription) -> Exported:
    """Return the options of a job in one file; raise JobError that names all that Megatron cannot do."""
    check_batch(described)
    if "layers" not in described.sizes.fields:
        raise JobError(
            f"{described.name}: the model is none of piper.models, and Megatron makes its own of sizes, which are not "
            f"known; give a job of piper.models"
        )
    plan, options = described.layout, WrittenOptions()
    write_sizes(described.sizes, described.length, plan.tp, options)
    options.add("micro-batch-size", described.rows)
    options.add("global-batch-size", described.global_batch)
    _precision(described, options)
    _float8(described, options)
    _shared(described, options)
    _pipeline(described, options)
    _states(described, options)
    _recompute(described, options)
    _offload(described, options)
    options.add("clip-grad", described.clip_norm or 0.0)
    options.add("lr", described.lr)
    options.add("lr-decay-style", "constant")
    if described.optimizer == "muon":
        options.add("optimizer", "muon")
        options.add("muon-extra-scale-factor", 0.2)  # of piper.models.muon
    for name, value in (("train-iters", 100), ("eval-iters", 0)):
        options.add(name, value)
    if described.sizes.fields.get("causal", True):
        options.add("mock-data")
    else:
        options.near(
            "random tokens", "sentences of --data-path; pretrain_bert.py has no --mock-data"
        )
    text = options.text(described.name)
    return Exported({FILE: text}, (*options.notes, _start(described)))


def _start(described: JobDescription) -> str:
    """Return how the job is started."""
    plan = described.layout
    alone = plan.zero < 2 and plan.tp * plan.cp > 1
    connections = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if alone else ""
    program = (
        "pretrain_gpt.py" if described.sizes.fields.get("causal", True) else "pretrain_bert.py"
    )
    return f"start it on {count_text(plan.devices, 'device')}: {connections}torchrun ... {program} $(cat {FILE})"


def _precision(described: JobDescription, options: WrittenOptions) -> None:
    params, compute, reduce = described.params, described.compute, described.reduce
    if params != "float32" or compute not in ("float32", "bfloat16", "float16"):
        options.refuse(
            f"params={params!r} with compute={compute!r}", "params='float32', compute='bfloat16'"
        )
    options.add("bf16", compute == "bfloat16")
    options.add("fp16", compute == "float16")
    if described.accumulate:
        _sums(described, options)
        return
    if compute == "float16" and reduce in ("float16", "float32"):
        options.add("accumulate-allreduce-grads-in-fp32", reduce == "float32")
        _loss_scale(described, options)
        return
    if reduce == "bfloat16" and compute == "bfloat16":
        options.add("grad-reduce-in-bf16")
    elif reduce != "float32":
        options.refuse(f"reduce={reduce!r} with compute={compute!r}", "reduce='float32'")
    options.add("accumulate-allreduce-grads-in-fp32", reduce == "float32" and compute == "bfloat16")


def _sums(described: JobDescription, options: WrittenOptions) -> None:
    """Write the dtypes of gradients in messages and in sums, which Megatron-FSDP alone has apart."""
    names = {dtype: name for name, dtype in FSDP_DTYPES.items()}
    said, plan = (described.accumulate, described.reduce), described.layout
    fsdp = plan.zero == 2 or (plan.zero == 3 and plan.reshard)
    if not fsdp or described.compute != "bfloat16" or not names.keys() >= {*said}:
        text = f"reduce={described.reduce!r} with accumulate={described.accumulate!r}"
        options.refuse(text, "one dtype for both")
        return
    options.add("grad-reduce-in-bf16")
    for what, dtype in zip(("main-grads", "grad-comm"), said, strict=True):
        options.add(f"megatron-fsdp-{what}-dtype", names[dtype])


def _float8(described: JobDescription, options: WrittenOptions) -> None:
    """Write the recipe of Transformer Engine, which quantises all blocks but some first and last ones."""
    float8 = described.float8
    if float8 is None:
        return
    if float8.recipe not in FORMATS:
        options.refuse(f"float8={float8.recipe!r}", f"one of {', '.join(FORMATS)}")
        return
    options.add("fp8-format", FORMATS[float8.recipe])
    options.add("fp8-recipe", float8.recipe)
    layers = int(described.sizes.fields["layers"])
    inside = tuple(p for p in float8.keep if p != "head")
    first = next((k for k in range(layers) if f"layers.{k}.*" not in inside), layers)
    last = next((k for k in range(layers) if f"layers.{layers - 1 - k}.*" not in inside), layers)
    if len(inside) == first + last and inside:
        options.add("first-last-layers-bf16")
        options.add("num-layers-at-start-in-bf16", first)
        options.add("num-layers-at-end-in-bf16", last)
    elif inside:
        options.near(f"float8 without {', '.join(inside)}", "all layers of the blocks")
    if "head" not in float8.keep and float8.modules != ("layers.*",):
        options.near("float8 in the head, or in other layers", "all layers of the blocks")
    if float8.saved == "input":
        options.near("inputs saved as they are", "Transformer Engine saves them in float8")


FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""The formats of fp8 by the recipes that Transformer Engine has."""


def _loss_scale(described: JobDescription, options: WrittenOptions) -> None:
    scale = {**USUAL_SCALE, **dict(described.loss_scale)}
    if "fixed" in scale:
        options.add("loss-scale", scale["fixed"])
        return
    for name in ("growth", "backoff"):
        if scale[name] != USUAL_SCALE[name]:
            options.near(f"LossScale({name}={scale[name]})", str(USUAL_SCALE[name]))
    for option, name in SCALES.items():
        options.add(option, scale[name])


SCALES = {
    "initial-loss-scale": "initial",
    "min-loss-scale": "least",
    "loss-scale-window": "interval",
    "hysteresis": "hysteresis",
}
"""The options of a scale of the loss, with the fields of `piper.LossScale`."""


def _shared(described: JobDescription, options: WrittenOptions) -> None:
    plan, fields = described.layout, described.sizes.fields
    options.add("tensor-model-parallel-size", plan.tp if plan.tp > 1 else None)
    if plan.order == PP_FIRST:
        options.add("use-tp-pp-dp-mapping")
    elif plan.order:
        options.near(f"order={plan.order!r}", f"{PP_FIRST}, or the usual order")
    options.add("sequence-parallel", plan.sequence and plan.tp > 1)
    options.add("tp-comm-overlap", plan.pieces > 1)
    if plan.pieces not in (1, PIECES):
        options.near(f"pieces={plan.pieces}", f"{PIECES} pieces, or the devices of a ring")
    if plan.tp > 1 and "experts" in fields and not plan.sequence:
        options.refuse(
            "experts with tp and whole tokens", "sequence=True with a capacity_factor, or tp=1"
        )
    if plan.cp > 1:
        options.add("context-parallel-size", plan.cp)
        options.add("cp-comm-type", _KINDS[plan.attention])
        if described.length % (2 * plan.cp):
            options.refuse(
                f"{described.length} tokens over cp={plan.cp}",
                f"a multiple of {2 * plan.cp} tokens",
            )
    if plan.ep > 1:
        options.add("expert-model-parallel-size", plan.ep)
        options.add("moe-shared-expert-overlap", plan.beside)
        _expert_axes(described, options)


def _expert_axes(described: JobDescription, options: WrittenOptions) -> None:
    """Say how many devices cut each expert; they lie along tp, cp and the replicas, followed by the other experts."""
    plan, experts = described.layout, described.sizes.fields.get("experts")
    if experts is None:
        options.refuse(f"ep={plan.ep} of a model without experts", "ep=1")
        return
    dropless = experts.fields.get("capacity_factor") is None
    if not dropless or (plan.tp * plan.cp == 1 and not plan.hidden):
        return
    sizes = {"tp": plan.tp, "cp": plan.cp, "etp": plan.etp}
    cut_by = prod(sizes[axis] for axis in plan.hidden)
    asked = ExpertAxes(plan.ep, plan.folded, plan.hidden, plan.etp)
    if axes_of_experts(plan.ep, plan.tp, plan.cp, plan.replicas, cut_by) != asked:
        axes = [axis for axis in ("tp", "cp") if sizes[axis] > 1]
        hidden = f", cut over {', '.join(plan.hidden)}" if plan.hidden else ""
        options.refuse(
            f"experts over {', '.join((*plan.folded, 'ep'))}{hidden} beside {' and '.join(axes)}",
            f"expert_parallel(over={(*axes, 'ep')!r})",
        )
    options.add("expert-tensor-parallel-size", cut_by if cut_by != plan.tp else None)


def _pipeline(described: JobDescription, options: WrittenOptions) -> None:
    plan = described.layout
    options.add("pipeline-model-parallel-size", plan.pp if plan.pp > 1 else None)
    if plan.pp == 1:
        return
    if plan.schedule not in ("one_f_one_b", "interleaved"):
        options.refuse(f"schedule={plan.schedule!r}", _NEAREST.get(plan.schedule, _TWICE))
        return
    chunks = plan.chunks if plan.schedule == "interleaved" else 1
    if chunks > 1:
        group = plan.pp if plan.group is None else plan.group
        rest = described.microbatches % group
        if not plan.pp <= group <= described.microbatches or 0 < rest < plan.pp:
            options.refuse(
                f"group={group} of {described.microbatches} microbatches",
                f"a group of at least pp={plan.pp} that divides the microbatches, or leaves pp or more of them",
            )
        options.add("microbatch-group-size-per-virtual-pipeline-stage", plan.group)
    _stages(described, chunks, options)


def _stages(described: JobDescription, chunks: int, options: WrittenOptions) -> None:
    plan, further = described.layout, int(described.sizes.fields.get("mtp", 0))
    layers = int(described.sizes.fields["layers"]) + further
    number = plan.pp * chunks
    if (plan.at and len(plan.at) + 1 != number) or layers < number - 2 * (plan.units == "all"):
        options.refuse(
            f"{len(plan.at) + 1} stages of {layers} layers", f"{number} stages, pp x chunks"
        )
        return
    counts = counts_of(plan.at, plan.units, layers, number)
    *others, last = counts
    if len({*others, last - further}) == 1 and last > further:
        options.add("num-virtual-stages-per-pipeline-rank", chunks if chunks > 1 else None)
    else:
        options.add("pipeline-model-parallel-layout", layout(counts, further))


def _states(described: JobDescription, options: WrittenOptions) -> None:
    plan = described.layout
    if plan.zero and plan.cp > 1 and not plan.over_cp:
        options.near(
            "states sharded over dp alone", "Megatron shards them over cp, too: less memory"
        )
    if plan.zero and plan.dp_replicate > 1:
        options.add("num-distributed-optimizer-instances", plan.dp_replicate)
    if plan.prefetch not in (None, 1):
        options.near(f"prefetch={plan.prefetch}", "Megatron gathers one use ahead")
    if described.loss_tiles > 1:
        options.near(f"tile_loss({described.loss_tiles})", "Megatron computes all logits at once")
    if plan.whole_mb:
        options.near(f"whole_mb={plan.whole_mb}", "Megatron shards small parameters, too")
    if plan.zero == 3 and not plan.reshard:
        _torch_fsdp(described, options)
    elif plan.zero >= 2:
        options.add("use-megatron-fsdp")
        options.add("data-parallel-sharding-strategy", _SHARDED[plan.zero])
        options.add("use-distributed-optimizer")
        options.add("overlap-grad-reduce")
        options.add("overlap-param-gather")
        options.add("ckpt-format", "fsdp_dtensor")
    else:
        options.add("use-distributed-optimizer", plan.zero == 1)
        _buckets(described, options)
    if plan.reduce_once and described.microbatches > 1:
        options.near('reduced_mb="step"', "Megatron's FSDP scatters gradients of each microbatch")
    unit = unit_mb(described.sizes, plan.tp, plan.ep, ITEM_BYTES[described.reduce])
    if plan.zero >= 2 and plan.bucket_mb != unit:
        options.near(f"bucket_mb={plan.bucket_mb or 25:g}", by_layer(plan.bucket_mb, unit))


def _torch_fsdp(described: JobDescription, options: WrittenOptions) -> None:
    plan = described.layout
    if plan.pp > 1 or plan.ep > 1 or plan.dp_replicate > 1 or described.sizes.fields.get("tied"):
        options.refuse(
            "parameters that are gathered once a step, beside a pipeline, experts, copies or tied weights",
            "reshard=True",
        )
    if described.reduce != "bfloat16":
        options.near(
            f"gradients in {described.reduce}", "torch's FSDP2 in Megatron has bfloat16 ones"
        )
    options.add("use-torch-fsdp2")
    options.add("torch-fsdp2-no-reshard-after-forward")
    options.add("no-gradient-accumulation-fusion")
    options.add("ckpt-format", "torch_dist")


def _buckets(described: JobDescription, options: WrittenOptions) -> None:
    """Add the sizes of buckets, where gradients are reduced at all."""
    plan = described.layout
    if plan.replicas == 1 and not (plan.zero and plan.cp > 1):
        return
    size = _DEFAULT_MB if plan.bucket_mb is None else plan.bucket_mb
    if not plan.overlap:
        if size < WHOLE_MB:
            options.near(f"bucket_mb={size:g} without overlap", "Megatron has one bucket then")
        return
    if size >= WHOLE_MB:
        options.near("one bucket beside compute", "Megatron's default size")
        size = _DEFAULT_MB
    options.add("overlap-grad-reduce")
    options.add("overlap-param-gather", plan.zero == 1)
    options.add(
        "ddp-bucket-size",
        round(size * 2**20 / (2 if described.reduce in ("bfloat16", "float16") else 4)),
    )


def _recompute(described: JobDescription, options: WrittenOptions) -> None:
    rules = [rule for rule in described.recompute if rule.keep != "all"]
    if not rules:
        return
    rule, fields = rules[0], described.sizes.fields
    layers = int(fields["layers"]) + int(fields.get("mtp", 0))
    patterns = {p for one in rule.keep.split(BESIDE) for p in one.partition(WITHIN)[2].split("+")}
    parts = [name for name, all in parts_of(described.sizes).items() if all and patterns >= {*all}]
    if len(rules) == 1 and rule == Recomputation(policy_of(parts, described.sizes)):
        options.add("recompute-granularity", "selective")
        options.add("recompute-modules", " ".join(parts))
        return
    if len(rules) > 1 or rule.keep != "inputs":
        kept = ", ".join(f"keep={rule.keep!r}" for rule in rules)
        options.refuse(
            f"recompute with {kept}",
            'one recompute with keep="inputs" for all or the first layers, or of the modules of '
            "--recompute-modules",
        )
        return
    options.add("recompute-granularity", "full")
    if rule.layers is None:
        options.add("recompute-method", "uniform")
        options.add("recompute-num-layers", rule.group)
        return
    first = _first_of_stages(rule, described.layout, layers)
    if first is None or rule.group != 1:
        options.refuse(
            f"recompute of layers {rule.layers} in groups of {rule.group}",
            "the first layers of each stage, one by one",
        )
        return
    options.add("recompute-method", "block")
    options.add("recompute-num-layers", first)


def _offload(described: JobDescription, options: WrittenOptions) -> None:
    """Write the layers whose tensors wait on the host, all but the last at most: without stages and recomputation."""
    offload, layers = described.offload, int(described.sizes.fields["layers"])
    if described.params_on_host:
        options.refuse("parameters on the host", 'offload(tensors="optim")')
    if described.optim_on_host:
        options.add("optimizer-cpu-offload")
        options.add("use-precision-aware-optimizer")
        options.add("optimizer-offload-fraction", described.optim_on_host)
    if offload is None:
        return
    if offload.tensors != "all" or described.recompute or described.layout.pp > 1:
        options.refuse(
            f'offload of tensors="{offload.tensors}" beside recompute or stages',
            'tensors="all" of the first layers, without recompute, pp=1',
        )
        return
    options.add("cpu-offloading-num-layers", min(offload.layers or layers, layers - 1))


def _first_of_stages(rule: Recomputation, plan: DeviceLayout, layers: int) -> int | None:
    """Return the number n for which a rule is about the first n layers of each stage; None for other rules."""
    chosen = set(range(rule.layers)) if isinstance(rule.layers, int) else set(rule.layers or ())
    chunks = plan.chunks if plan.schedule == "interleaved" and plan.pp > 1 else 1
    counts = counts_of(plan.at, plan.units, layers, plan.pp * chunks)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    for number in range(1, max(counts) + 1):
        first = {s + k for s, n in zip(starts, counts, strict=True) for k in range(min(number, n))}
        if first == chosen:
            return number
    return None
