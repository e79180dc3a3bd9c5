"""Describe the job of a launch file of Accelerate, or of TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from piper_interop.accelerate.fsdp import MESHES, STRATEGIES, fsdp, is_fsdp
from piper_interop.accelerate.launch import float8_recipe
from piper_interop.accelerate.table import PREFIX, TABLE, deepspeed_of
from piper_interop.accelerate.trainer import SYNC_EACH_BATCH
from piper_interop.deepspeed.arguments import PREFIX as ARGUMENTS
from piper_interop.deepspeed.describe import describe as describe_deepspeed
from piper_interop.deepspeed.describe import offloaded, recomputes
from piper_interop.deepspeed.table import TABLE as DEEPSPEED
from piper_interop.neutral.described import (
    DeviceLayout,
    Float8Layers,
    JobDescription,
    ModelSizes,
    OffloadedTensors,
    Recomputation,
)
from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_interop.neutral.missing import asked_for
from piper_interop.neutral.options import forms
from piper_interop.neutral.system import Asked
from piper_interop.neutral.units import layer_parameters, megabytes, whole
from piper_ir.ground.errors import JobError

NODE = 8
"""The devices of a node where no file says them: hybrid sharding is within a node."""


@dataclass(frozen=True)
class FsdpSharding:
    """Say how FSDP or DDP shards.

    Attributes:
        zero: the level: 0 or 3.
        reshard: whether parameters are dropped after the forward.
        hybrid: whether states are shared within a node only.
        on_host: whether states, but for gradients, are in the memory of the host.
    """

    zero: int
    reshard: bool = True
    hybrid: bool = False
    on_host: bool = False


def describe(foreign: Foreign, asked: Asked) -> JobDescription:
    """Return the job of a file.

    Raises JobError if the model, its length, the rows or the number of devices is missing, or if these do not divide.
    """
    asked = replace(asked, devices=_devices(foreign, asked))
    sizes, length, devices = asked_for(foreign.system, asked)
    notes = forms(foreign, TABLE, asked.stand_ins)
    if any(name.startswith(PREFIX) for name in foreign.values):
        return _by_deepspeed(foreign, asked, notes)
    sharding = _sharding(foreign)
    layout = _layout(foreign, devices, sharding, sizes)
    rows, count = _rows(foreign, asked, layout.replicas)
    if sharding.zero and count > 1 and not foreign.get(f"{ARGUMENTS}{SYNC_EACH_BATCH}", False):
        layout = replace(layout, reduce_once=True)  # under no_sync, but for the last microbatch
    half = _half(foreign)
    clip = float(foreign.get(f"{ARGUMENTS}max_grad_norm", 0.0))
    return JobDescription(
        name=Path(foreign.source).stem,
        sizes=sizes,
        length=length,
        global_batch=rows * count * layout.replicas,
        rows=rows,
        layout=layout,
        recompute=(Recomputation("inputs"),) if _recomputes(foreign) else (),
        offload=_offloaded(foreign),
        compute=half or "float32",
        reduce=half if half and sharding.zero else "float32",
        accumulate="float32" if half and sharding.zero and not layout.reduce_once else "",
        optim_on_host=float(sharding.on_host),
        params_on_host=sharding.on_host,
        float8=_float8(foreign),
        clip_norm=clip or None,
        lr=float(foreign.get(f"{ARGUMENTS}learning_rate", 3e-4)),
        stack=_stack(foreign),
        notes=notes
        + _unsaid(foreign, sharding)
        + _kept(sharding, count)
        + _narrow_shards(layout, half)
        + _ddp_buckets(layout),
        origins=_origins(foreign),
    )


def _by_deepspeed(foreign: Foreign, asked: Asked, notes: tuple[str, ...]) -> JobDescription:
    """Return the job of a file whose DeepSpeed options say it, but for the sizes of Accelerate's mesh."""
    inner = deepspeed_of(foreign)
    sequence = _size(foreign, "sp_size")
    if sequence > 1:
        inner = replace(
            inner, values={**inner.values, "sequence_parallel_size": OptionValue(sequence)}
        )
    if _size(foreign, "tp_size") > 1:
        raise JobError(
            f"{foreign.source}: tp_size beside DeepSpeed; DeepSpeed's own is tensor_parallel.autotp_size"
        )
    described = describe_deepspeed(inner, asked)
    # The forms of DeepSpeed's options are among `notes`, under the prefix; its other notes are not.
    unsaid = tuple(
        note for note in described.notes if note not in forms(inner, DEEPSPEED, asked.stand_ins)
    )
    origins = {**described.origins, "mesh": _origins(foreign)["mesh"]}
    again = recomputes(inner) or _recomputes(foreign)
    return replace(
        described,
        stack="inductor" if _stack(foreign) == "inductor" else described.stack,
        recompute=(Recomputation("inputs"),) if again else (),
        offload=offloaded(inner) if again else None,
        notes=notes + unsaid,
        origins=origins,
    )


def _devices(foreign: Foreign, asked: Asked) -> int | None:
    """Return the devices of a job; None if neither the file nor the command line says them."""
    stated = foreign.get("num_processes", -1)
    if foreign.get("distributed_type") == "NO" and stated < 1:
        stated = 1
    if stated < 1:
        return asked.devices
    if asked.devices not in (None, stated):
        raise JobError(
            f"{foreign.source}: num_processes={stated}{foreign.at('num_processes')}, and --gpus {asked.devices}; leave "
            "one of them out"
        )
    return int(stated)


def _size(foreign: Foreign, name: str) -> int:
    """Return a size of Accelerate's mesh."""
    return int(foreign.first(*(f"{section}{name}" for section in MESHES)) or 1)


def _sharding(foreign: Foreign) -> FsdpSharding:
    """Return how states are shared.

    SHARD_GRAD_OP keeps parameters from the forward to the end of the backward, and shares them outside of these, as
    FSDP 2 does without `reshard_after_forward`: it is zero=3 with parameters that stay for a step, and not zero=2,
    which has all parameters always.
    """
    if not is_fsdp(foreign):
        return FsdpSharding(0)
    words = [str(word).lower() for word in _words(foreign)]
    there = bool(fsdp(foreign, "offload_params") or fsdp(foreign, "cpu_offload"))
    return replace(_strategy(foreign), on_host=there or "offload" in words)


def _strategy(foreign: Foreign) -> FsdpSharding:
    """Return how states are shared by the name of FSDP's strategy."""
    strategy = fsdp(foreign, "reshard_after_forward")
    if strategy is None:
        strategy = fsdp(foreign, "sharding_strategy", _legacy(foreign))
    if str(strategy).lower() in ("true", "false"):
        return FsdpSharding(3, str(strategy).lower() == "true")
    if isinstance(strategy, int):
        strategy = STRATEGIES[strategy - 1] if 1 <= strategy <= len(STRATEGIES) else str(strategy)
    name = str(strategy).upper()
    if name.isdigit() and 1 <= int(name) <= len(STRATEGIES):
        name = STRATEGIES[int(name) - 1]
    if name not in STRATEGIES:
        raise JobError(
            f"{foreign.source}: FSDP's strategy {strategy!r} is none of {', '.join(STRATEGIES)}"
        )
    if name == "NO_SHARD":
        return FsdpSharding(0)
    return FsdpSharding(3, name in ("FULL_SHARD", "HYBRID_SHARD"), name.startswith("HYBRID"))


def _words(foreign: Foreign) -> list[Any]:
    """Return the words of TrainingArguments' field `fsdp`, such as "full_shard offload"."""
    words = foreign.get(f"{ARGUMENTS}fsdp", True)
    return words.split() if isinstance(words, str) else words if isinstance(words, list) else []


def _legacy(foreign: Foreign) -> str:
    """Return the strategy among the words of TrainingArguments' field `fsdp`."""
    texts = _words(foreign)
    unknown = [
        text
        for text in texts
        if str(text).upper() not in (*STRATEGIES, "AUTO_WRAP", "OFFLOAD", "TRUE")
    ]
    if unknown:
        written = f"fsdp={foreign[f'{ARGUMENTS}fsdp']!r}{foreign.at(f'{ARGUMENTS}fsdp')}"
        raise JobError(f"{foreign.source}: {written}: no such option: {unknown[0]}")
    return next((str(text) for text in texts if str(text).upper() in STRATEGIES), "FULL_SHARD")


def _layout(
    foreign: Foreign, devices: int, sharding: FsdpSharding, sizes: ModelSizes
) -> DeviceLayout:
    tp, cp, sequence = (_size(foreign, name) for name in ("tp_size", "cp_size", "sp_size"))
    if cp > 1 and sequence > 1:
        raise JobError(
            f"{foreign.source}: cp_size and sp_size are both above 1; Accelerate takes one of them"
        )
    if sequence > 1:
        raise JobError(
            f"{foreign.source}: sp_size={sequence} needs DeepSpeed (distributed_type: DEEPSPEED)"
        )
    replicate, shard = _replicas(foreign, devices, sharding, tp * cp)
    sharded = sharding.zero > 0
    return DeviceLayout(
        tp=tp,
        cp=cp,
        attention=_attention(foreign) if cp > 1 else "ring",
        dp=shard,
        dp_replicate=replicate,
        zero=sharding.zero,
        over_cp=sharded and cp > 1,
        reshard=sharding.reshard,
        bucket_mb=_bucket(foreign, sizes, sharded, tp),
        prefetch=_prefetch(foreign) if sharded else None,
    )


def _replicas(
    foreign: Foreign, devices: int, sharding: FsdpSharding, others: int
) -> tuple[int, int]:
    """Return the groups that replicate, and the devices of each that shard."""
    stated = [_size(foreign, name) for name in ("dp_replicate_size", "dp_shard_size")]
    if others > 1 or max(stated) > 1:
        if stated[0] * stated[1] * others != devices:
            raise JobError(
                f"{foreign.source}: dp_replicate_size={stated[0]} x dp_shard_size={stated[1]} x tp and cp {others} are "
                f"not {devices} devices"
            )
        if not sharding.zero:
            return 1, stated[0] * stated[1]
        return stated[0], stated[1]
    if not sharding.hybrid:
        return 1, devices
    node = devices // foreign.get("num_machines", max(1, devices // NODE))
    if node < 1 or devices % node:
        raise JobError(
            f"{foreign.source}: {devices} devices are not a multiple of the {node} of a node"
        )
    return devices // node, node


def _attention(foreign: Foreign) -> str:
    names = ("cp_comm_strategy", "cp_handler.cp_comm_strategy")
    how = foreign.first(*(f"{section}{name}" for section in MESHES for name in names))
    return "ring" if how == "alltoall" else "gather"


def _bucket(foreign: Foreign, sizes: ModelSizes, sharded: bool, tp: int) -> float | None:
    """Return the MiB of a unit on a device in the gradients' dtype; None for DDP's own 25."""
    if not sharded:
        capacity = foreign.get(f"{ARGUMENTS}ddp_bucket_cap_mb")
        return None if capacity is None else float(capacity)
    width = 2 if _half(foreign) else 4
    policy = fsdp(
        foreign, "auto_wrap_policy", "" if _version(foreign) == 1 else "TRANSFORMER_BASED_WRAP"
    )
    parameters = layer_parameters(sizes)
    if policy in ("", "NO_WRAP"):
        parameters = whole(sizes)
    if policy == "SIZE_BASED_WRAP":
        parameters = fsdp(foreign, "min_num_params", 0) or whole(sizes)
    return megabytes(-(-parameters // tp), width)


def _version(foreign: Foreign) -> int:
    """Return FSDP's version: 1 by default in a launch file, and 2 in TrainingArguments."""
    trainer = f"{ARGUMENTS}fsdp" in foreign.values
    return int(fsdp(foreign, "version", 2 if trainer else 1))


def _prefetch(foreign: Foreign) -> int:
    """Return the uses ahead: FSDP 2 gathers the next unit always, and FSDP 1 in the backward if it is told to."""
    trainer = f"{ARGUMENTS}fsdp" in foreign.values
    before = fsdp(foreign, "backward_prefetch", "NO_PREFETCH" if trainer else "BACKWARD_PRE")
    return 1 if _version(foreign) == 2 or before == "BACKWARD_PRE" else 0


def _half(foreign: Foreign) -> str:
    """Return the dtype of forward and backward if it is a narrow one, or bfloat16 where it stands for fp8; else ""."""
    precision = foreign.get("mixed_precision", "no")
    if precision == "fp16" or foreign.get(f"{ARGUMENTS}fp16", False):
        return "float16"
    return "bfloat16" if precision != "no" or foreign.get(f"{ARGUMENTS}bf16", False) else ""


def _float8(foreign: Foreign) -> Float8Layers | None:
    """Return the layers that multiply in float8: with torchao all but the first and the last of the model."""
    recipe = float8_recipe(foreign)
    if not recipe:
        return None
    if recipe != "tensorwise":  # Transformer Engine's
        return Float8Layers(recipe, saved="float8")
    return Float8Layers(recipe, modules=("layers.*",), keep=("layers.0.attention.q*",))


def _recomputes(foreign: Foreign) -> bool:
    names = ("gradient_checkpointing", "activation_checkpointing")
    return bool(
        fsdp(foreign, "activation_checkpointing", False)
        or any(foreign.get(f"{ARGUMENTS}{name}", False) for name in names)
    )


def _offloaded(foreign: Foreign) -> OffloadedTensors | None:
    """Return the inputs of checkpointed layers, if torch's offload_wrapper keeps these on the host."""
    waits = fsdp(foreign, "activation_checkpointing_offload", False)
    return OffloadedTensors("inputs", prefetch=0) if waits and _recomputes(foreign) else None


def _rows(foreign: Foreign, asked: Asked, replicas: int) -> tuple[int, int]:
    """Return the rows of a microbatch, and the microbatches of a step."""
    rows: Any = foreign.get(f"{ARGUMENTS}per_device_train_batch_size")
    count: Any = foreign.get(f"{ARGUMENTS}gradient_accumulation_steps")
    if rows is None and asked.rows is None:
        raise JobError(
            f"{foreign.source} does not say the rows of a step; give --global-batch N, or --set per_device_train_batch_size=N"
        )
    if rows is None:
        count = count or 1
        rows = asked.rows // (replicas * count) if asked.rows else 0
    elif count is None:
        count = max(1, (asked.rows or 0) // (replicas * rows))
    if asked.rows not in (None, rows * count * replicas) or not rows:
        raise JobError(
            f"{foreign.source}: --global-batch {asked.rows} are not {rows} rows x {count} microbatches x {replicas} replicas"
        )
    return rows, count


def _stack(foreign: Foreign) -> str:
    """Return the kernels: eager ones, or the compiler's."""
    backend = foreign.first("dynamo_config.dynamo_backend", "dynamo_backend") or "NO"
    compiled = foreign.get(f"{ARGUMENTS}torch_compile", False) or foreign.get(
        f"{ARGUMENTS}torch_compile_backend"
    )
    return "inductor" if str(backend).upper() == "INDUCTOR" or compiled else "eager"


def _unsaid(foreign: Foreign, sharding: FsdpSharding) -> tuple[str, ...]:
    """Return notes on the script's own decisions, and on defaults that count."""
    notes = []
    if not _half(foreign):
        notes.append(
            "without mixed precision parameters have the dtype in which the script loads them: float32 is taken, too "
            "much memory and predicted too slow if that is bfloat16"
        )
    if (
        sharding.hybrid
        and "num_machines" not in foreign.values
        and _size(foreign, "dp_shard_size") == 1
    ):
        notes.append(
            f"hybrid sharding is within a node: {NODE} devices are taken; the file does not say them"
        )
    if (
        is_fsdp(foreign)
        and sharding.zero
        and _version(foreign) == 1
        and not fsdp(foreign, "auto_wrap_policy")
    ):
        notes.append(
            "without auto_wrap_policy FSDP gathers all parameters at once, as it is taken here"
        )
    if not any(
        name.endswith(("activation_checkpointing", "gradient_checkpointing"))
        for name in foreign.values
    ):
        notes.append(
            "the file does not say whether the script checkpoints activations: none are computed again here, too much "
            "memory if it does (--set gradient_checkpointing=true)"
        )
    return tuple(notes)


def _kept(sharding: FsdpSharding, microbatches: int) -> tuple[str, ...]:
    """Return a note for parameters that stay after the forward, if a step has several microbatches."""
    if sharding.reshard or microbatches == 1:
        return ()
    return (
        "parameters that stay gathered after the forward are gathered once per step; predicted too fast: FSDP gathers "
        f"them for each of {microbatches} microbatches",
    )


def _ddp_buckets(layout: DeviceLayout) -> tuple[str, ...]:
    """Return a note for the buckets that DDP has beside gradients."""
    if layout.zero or layout.replicas == 1:
        return ()
    return (
        "gradients are summed in their buckets; too little memory by 4 bytes per parameter: DDP copies gradients into "
        "them (gradient_as_bucket_view is false)",
    )


def _narrow_shards(layout: DeviceLayout, half: str) -> tuple[str, ...]:
    """Return a note for shards of gradients that FSDP has in the dtype of parameters, behind whole sums in another."""
    if not (half and layout.reduce_once):
        return ()
    return (
        f"shards of gradients are in {half}, as the sums of microbatches; too little memory: FSDP makes them float32 (2 "
        "bytes more of each sharded parameter)",
    )


def _origins(foreign: Foreign) -> dict[str, str]:
    """Return the options that lines of the FILE.py come from."""
    arguments = [
        f"{name}={foreign[f'{ARGUMENTS}{name}']}"
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm")
        if f"{ARGUMENTS}{name}" in foreign.values
    ]
    mesh = [
        f"{name}={_size(foreign, name)}"
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        if _size(foreign, name) > 1
    ]
    devices = "num_processes" if foreign.get("num_processes", -1) > 0 else "--gpus"
    return {
        "sizes": "--model",
        "job": ", ".join(arguments) or "--global-batch",
        "mesh": ", ".join([devices, *mesh]),
        "recompute": "activation or gradient checkpointing",
        "dp": f"{'FSDP' if is_fsdp(foreign) else 'DDP'}",
    }
