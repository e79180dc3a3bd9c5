"""Describe the job of a DeepSpeed file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from piper_interop.deepspeed.arguments import PREFIX
from piper_interop.deepspeed.table import TABLE
from piper_interop.deepspeed.zero import (
    BUCKET,
    ahead,
    gathers,
    optim_on_host,
    params_on_host,
    persistent,
    ratio_on_host,
    stage,
)
from piper_interop.neutral.described import (
    DeviceLayout,
    JobDescription,
    OffloadedTensors,
    Recomputation,
    loss_scale,
)
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.missing import asked_for
from piper_interop.neutral.options import forms
from piper_interop.neutral.system import Asked
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes by DeepSpeed's names for them."""

CLIP = 1.0
"""The bound of gradients' norms without `gradient_clipping`, in DeepSpeed 0.19 (runtime/constants.py)."""


@dataclass(frozen=True)
class BatchSizes:
    """Hold DeepSpeed's three numbers of a batch.

    Attributes:
        step: rows of a step.
        rows: rows of a microbatch of one rank.
        microbatches: of a step.
    """

    step: int
    rows: int
    microbatches: int


def describe(foreign: Foreign, asked: Asked) -> JobDescription:
    """Return the job of a file.

    Raises JobError if the model, its length or the number of devices is missing, or if these do not divide.
    """
    sizes, length, devices = asked_for(foreign.system, asked)
    layout = _layout(foreign, devices)
    if layout.ep > 1 and "experts" not in sizes.fields:
        raise JobError(f"{foreign.source}: expert_parallel is enabled, but --model has no experts")
    batch = batch_of(foreign, asked, layout.replicas)
    params, compute, reduce, accumulate = _precision(foreign)
    autocast = foreign.get("torch_autocast.enabled", False)
    if not layout.zero and accumulate != compute and not autocast:
        raise JobError(
            f"{foreign.source}: without ZeRO DeepSpeed refuses gradients in {accumulate} beside {compute}; give "
            f"zero_optimization.stage 1, or {compute} as data_types.grad_accum_dtype"
        )
    return JobDescription(
        name=Path(foreign.source).stem,
        sizes=sizes,
        length=length,
        global_batch=batch.step,
        rows=batch.rows,
        layout=layout,
        recompute=(Recomputation("inputs"),) if recomputes(foreign) else (),
        offload=offloaded(foreign) if recomputes(foreign) else None,
        optim_on_host=on_host(foreign),
        params_on_host=params_on_host(foreign),
        params=params,
        compute=compute,
        reduce=reduce,
        accumulate=accumulate if accumulate != reduce else "",
        loss_scale=_loss_scale(foreign),
        clip_norm=float(foreign.get("gradient_clipping", CLIP)) or None,
        lr=float(foreign.get("optimizer.params.lr", foreign.get(f"{PREFIX}learning_rate", 1e-3))),
        stack="inductor" if _compiled(foreign) else "eager",
        notes=forms(foreign, TABLE, asked.stand_ins) + _unsaid(foreign),
        origins=_origins(foreign),
    )


def batch_of(foreign: Foreign, asked: Asked, world: int) -> BatchSizes:
    """Return the batch by DeepSpeed's rules: any two of its numbers give the third, and one alone has the others.

    Args:
        foreign: the options.
        asked: has the rows of a step if no option says them.
        world: ranks with rows of their own.
    """
    step: int | None = foreign.get("train_batch_size", asked.rows)
    rows: int | None = foreign.get("train_micro_batch_size_per_gpu")
    count: int | None = foreign.get("gradient_accumulation_steps")
    if step is None and rows is None:
        raise JobError(
            f"{foreign.source}: neither train_batch_size nor train_micro_batch_size_per_gpu is there; give "
            "--global-batch, the rows of a step"
        )
    if step is not None and rows is not None and count is None:
        count = step // (rows * world)
    elif step is not None and rows is None:
        count = count or 1
        rows = step // (world * count)
        if not rows:
            raise JobError(
                f"{foreign.source}: {step} rows of a step are less than one for each of {world} ranks x {count} "
                "microbatches; give fewer --gpus, or a larger train_batch_size"
            )
    count = count or 1
    rows = rows or 0
    step = rows * count * world if step is None else step
    if step != rows * count * world or not step:
        raise JobError(
            f"{foreign.source}: {step} rows of a step are not {rows} rows x {count} microbatches x {world} ranks; mend "
            "train_batch_size, train_micro_batch_size_per_gpu or gradient_accumulation_steps, or --gpus"
        )
    if asked.rows not in (None, step):
        raise JobError(
            f"{foreign.source} says {step} rows of a step, and --global-batch {asked.rows}; leave --global-batch out"
        )
    return BatchSizes(step, rows, count)


def _layout(foreign: Foreign, devices: int) -> DeviceLayout:
    tp = _tp(foreign)
    cp = foreign.get("sequence_parallel_size", 1)
    if devices % (tp * cp):
        raise JobError(
            f"{foreign.source}: --gpus {devices} are not a multiple of tensor_parallel.autotp_size={tp} x "
            f"sequence_parallel_size={cp}"
        )
    replicas = devices // (tp * cp)
    stated = foreign.get("data_parallel_size", replicas)
    if stated != replicas:
        raise JobError(
            f"{foreign.source}: data_parallel_size={stated}, but --gpus {devices} give {replicas} replicas"
        )
    sharing = _mics(foreign, replicas)
    level, overlap = stage(foreign), foreign.get("zero_optimization.overlap_comm")
    return DeviceLayout(
        tp=tp,
        cp=cp,
        attention="heads" if cp > 1 else "ring",
        dp=sharing,
        dp_replicate=replicas // sharing,
        ep=_ep(foreign, sharing, tp * cp),
        zero=level,
        over_cp=cp > 1 and level > 0,
        bucket_mb=_bucket(foreign),
        prefetch=(1 if ahead(foreign) else 0) if gathers(foreign) else None,
        whole_mb=persistent(foreign) * ITEM_BYTES[_precision(foreign)[1]] / 2**20
        if gathers(foreign)
        else 0,
        overlap=level == 3 if overlap is None else bool(overlap) and level > 0,
    )


def _tp(foreign: Foreign) -> int:
    sizes = (
        foreign.get("tensor_parallel.autotp_size", 0),
        foreign.get("tensor_parallel.tp.tp_size", 1),
        foreign.get("tensor_parallel.tensor_parallel.tp_size", 1),
    )
    return max(1, *map(int, sizes))


def _mics(foreign: Foreign, replicas: int) -> int:
    """Return the replicas that share one copy of the states."""
    size = foreign.get("zero_optimization.mics_shard_size", -1)
    if not gathers(foreign) or size < 1:
        return replicas
    if replicas % size:
        raise JobError(
            f"{foreign.source}: {replicas} replicas are not a multiple of zero_optimization.mics_shard_size={size}"
        )
    return int(size)


def _ep(foreign: Foreign, replicas: int, folded: int) -> int:
    if not foreign.get("expert_parallel.enabled", False):
        return 1
    size = int(foreign.get("expert_parallel.autoep_size", 1))
    if size > 1 and folded > 1:
        raise JobError(
            f"{foreign.source}: expert_parallel over tensor- or sequence-parallel ranks cannot be said here; give 1 for "
            "these sizes, or for expert_parallel.autoep_size"
        )
    if replicas % size:
        raise JobError(
            f"{foreign.source}: {replicas} replicas are not a multiple of expert_parallel.autoep_size={size}"
        )
    return size


def _bucket(foreign: Foreign) -> float:
    """Return the MiB of a bucket in the gradients' dtype; parameters are gathered in buckets of the same elements.

    Without ZeRO DeepSpeed reduces all gradients behind the backward, in buffers of `BUCKET` elements
    (`buffered_allreduce_fallback` in runtime/engine.py).
    """
    elements = BUCKET
    if stage(foreign):
        elements = foreign.get("zero_optimization.reduce_bucket_size", BUCKET)
    if gathers(foreign):
        elements = ahead(foreign) or elements
    return float(elements * ITEM_BYTES[_precision(foreign)[2]] / 2**20)


def _precision(foreign: Foreign) -> tuple[str, str, str, str]:
    """Return the dtypes of parameters and states, of forward and backward, of messages and of sums of gradients."""
    halves = [name for name in _SECTIONS if foreign.get(f"{name}.enabled", False)]
    if len({_SECTIONS[name] for name in halves}) > 1:
        raise JobError(f"{foreign.source}: {' and '.join(halves)} are enabled; give one of them")
    half = _SECTIONS[halves[0]] if halves else ""
    autocast = foreign.get("torch_autocast.enabled", False)
    params = "bfloat16" if half == "bfloat16" and _narrow_states(foreign) else "float32"
    compute = half or ("bfloat16" if autocast else "float32")
    summed = _dtype(foreign, "data_types.grad_accum_dtype", half or "float32")
    ulysses = foreign.get("sequence_parallel_size", 1) > 1
    sent = (
        _dtype(foreign, "seq_parallel_communication_data_type", "float32")
        if ulysses  # with a default of its own (runtime/constants.py)
        else _dtype(foreign, "communication_data_type", half or "float32")
    )
    return params, compute, sent, summed


_SECTIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
"""The sections of precision with the dtype of each."""


def _loss_scale(foreign: Foreign) -> tuple[tuple[str, float], ...]:
    """Return the scale of the loss beside fp16, as `JobDescription.loss_scale` has it."""
    if not foreign.get("fp16.enabled", False):
        return ()
    if fixed := foreign.get("fp16.loss_scale", 0):
        return (("fixed", float(fixed)),)
    return loss_scale(
        initial=2.0 ** foreign.get("fp16.initial_scale_power", 16),
        interval=int(foreign.get("fp16.loss_scale_window", 1000)),
        hysteresis=int(foreign.get("fp16.hysteresis", 2)),
        least=float(foreign.get("fp16.min_loss_scale", 1)),
    )


def _narrow_states(foreign: Foreign) -> bool:
    return any(
        foreign.get(f"{section}.bf16_master_weights_and_grads", False)
        for section in ("bf16", "bfloat16")
    )


def _dtype(foreign: Foreign, option: str, otherwise: str) -> str:
    name = foreign.get(option)
    if name is None:
        return otherwise
    plain = str(name).removeprefix("torch.")
    if plain not in (*DTYPES, *DTYPES.values(), "float16", "half", "float"):
        raise JobError(
            f"{foreign.source}: {option}={name!r}{foreign.at(option)} is no dtype that is known here"
        )
    return DTYPES.get(plain, {"float": "float32", "half": "float16"}.get(plain, plain))


def recomputes(foreign: Foreign) -> bool:
    """Return whether layers are computed again: the arguments say it, or the section has a buffer for checkpoints."""
    section = "activation_checkpointing."
    return bool(
        foreign.get(f"{PREFIX}gradient_checkpointing", False)
        or foreign.get(f"{section}number_checkpoints")
        or foreign.get(f"{section}contiguous_memory_optimization", False)
    )


def offloaded(foreign: Foreign) -> OffloadedTensors | None:
    """Return the inputs of checkpointed layers, if these wait on the host; they are brought back when asked for."""
    waits = foreign.get("activation_checkpointing.cpu_checkpointing", False)
    return OffloadedTensors("inputs", prefetch=0) if waits else None


def on_host(foreign: Foreign) -> float:
    """Return the fraction of the optimizer that runs on the host: all of it, if parameters are there."""
    if not stage(foreign) or not optim_on_host(foreign):
        return 0.0
    if not gathers(foreign) or params_on_host(foreign):
        return 1.0
    return ratio_on_host(foreign)


def _compiled(foreign: Foreign) -> bool:
    return bool(
        foreign.get("compile.deepcompile", False) or foreign.get(f"{PREFIX}torch_compile", False)
    )


def _unsaid(foreign: Foreign) -> tuple[str, ...]:
    """Return notes on the script's own decisions."""
    notes = []
    said = ("activation_checkpointing.number_checkpoints", f"{PREFIX}gradient_checkpointing")
    if not recomputes(foreign) and not any(name in foreign.values for name in said):
        notes.append(
            "the file does not say whether the script checkpoints activations: none are computed again here, too much "
            "memory if it does (--set gradient_checkpointing=true)"
        )
    return (*notes, *_state_notes(foreign))


def _state_notes(foreign: Foreign) -> Iterator[str]:
    """Yield notes on the defaults of DeepSpeed for states that ranks share."""
    section, level = "zero_optimization.", stage(foreign)
    scatters = foreign.get(f"{section}reduce_scatter", True)
    whole = foreign.get(f"{section}use_multi_rank_bucket_allreduce", True)
    if level in (1, 2) and scatters and whole:
        yield (
            "gradients are reduced by reduce-scatters; predicted too fast: DeepSpeed sends them to all by all-reduces, "
            "unless use_multi_rank_bucket_allreduce is false"
        )
    params, compute, _, _ = _precision(foreign)
    if level in (1, 2) and params == compute:
        yield (
            f"ranks update their parts of the parameters; too little memory by {ITEM_BYTES[params]} bytes of each part: "
            "DeepSpeed copies it"
        )
    if level == 3 and foreign.get(f"{section}contiguous_gradients", True):
        elements = foreign.get(f"{section}reduce_bucket_size", BUCKET)
        size = elements * ITEM_BYTES[_precision(foreign)[2]] / 2**20 - _bucket(foreign)
        if size > 0:
            yield (
                f"gradients are reduced in the buckets of gathered parameters; too little memory by {size:,.0f} MiB: "
                "stage 3 has a buffer of reduce_bucket_size elements"
            )


def _origins(foreign: Foreign) -> dict[str, str]:
    """Return the options that lines of the FILE.py come from."""
    level = stage(foreign)
    parts = {
        "sizes": "--model",
        "job": ", ".join(
            f"{name}={foreign[name]}"
            for name in (
                "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"
            )
            if name in foreign.values
        )
        or "--global-batch",
        "mesh": "--gpus, tensor_parallel.autotp_size, sequence_parallel_size",
        "tp": "tensor_parallel.autotp_size",
        "cp": "sequence_parallel_size",
        "ep": "expert_parallel.autoep_size",
        "dp": f"zero_optimization.stage={level}",
    }  # fmt: skip
    if recomputes(foreign):
        parts["recompute"] = "activation_checkpointing, gradient_checkpointing"
        parts["offload"] = "activation_checkpointing.cpu_checkpointing"
    if on_host(foreign):
        parts["offload"] = "zero_optimization.offload_optimizer"
    return {part: origin for part, origin in parts.items() if origin}
