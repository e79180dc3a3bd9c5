"""Write a described job as a launch file of Accelerate, with TrainingArguments beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from piper_interop.deepspeed.export import export as export_deepspeed
from piper_interop.neutral.described import DeviceLayout, JobDescription
from piper_interop.neutral.missing import lacks, shared_limits
from piper_interop.neutral.system import Exported
from piper_interop.neutral.units import by_layer, unit_mb

LAUNCH, ARGUMENTS, DEEPSPEED = "accelerate_config.yaml", "training_args.json", "ds_config.json"


def export(described: JobDescription) -> Exported:
    """Return a launch file, TrainingArguments, and a DeepSpeed file for strategies that only DeepSpeed has.

    DDP has whole states, FSDP 2 shards all of them, and DeepSpeed the rest: zero=1, zero=2, attention by heads, and
    shared states of an optimizer on the host, with parameters on the device.
    Raises JobError that names all that none of them can do.
    """
    layout = described.layout
    by_heads = layout.cp > 1 and layout.attention == "heads"
    if (
        layout.zero in (1, 2)
        or by_heads
        or (layout.zero and described.optim_on_host and not described.params_on_host)
    ):
        return _by_deepspeed(described)
    lacks("Accelerate", described, _impossible(described))
    sharded = layout.zero == 3
    options = _launch(described, "FSDP" if sharded else "MULTI_GPU")
    if sharded:
        options["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.reshard,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": described.params_on_host,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": bool(described.recompute),
        }
        if described.offload is not None:
            options["fsdp_config"]["fsdp_activation_checkpointing_offload"] = True
        options["parallelism_config"] = {
            f"parallelism_config_{name}": size for name, size in _mesh(described).items()
        }
    arguments = _arguments(described)
    if sharded and described.microbatches > 1 and not layout.reduce_once:
        arguments["accelerator_config"] = {
            "gradient_accumulation_kwargs": {"sync_each_batch": True}
        }
    if not sharded:
        arguments["gradient_checkpointing"] = bool(described.recompute)
        if layout.bucket_mb is not None:
            arguments["ddp_bucket_cap_mb"] = max(1, round(layout.bucket_mb))
    return Exported({LAUNCH: _yaml(options), ARGUMENTS: _json(arguments)}, _notes(described))


def _by_deepspeed(described: JobDescription) -> Exported:
    """Return a launch file with the DeepSpeed file that it names."""
    exported = export_deepspeed(described)
    options = _launch(described, "DEEPSPEED")
    options["deepspeed_config"] = {"deepspeed_config_file": DEEPSPEED, "zero3_init_flag": False}
    # The DeepSpeed file says the precision, and Accelerate wants it said once.
    del options["mixed_precision"]
    if described.layout.cp > 1:
        options["parallelism_config"] = {"parallelism_config_sp_size": described.layout.cp}
    return Exported({LAUNCH: _yaml(options), **exported.files}, exported.notes)


def _impossible(described: JobDescription) -> list[str]:
    layout = described.layout
    lines = shared_limits(described, "Accelerate has no pipeline for training", "tp without it")
    if layout.ep > 1:
        lines.append(
            f"ep={layout.ep}; nearest: ep=1, with experts sharded as all parameters (zero=3)"
        )
    if layout.tp * layout.cp > 1 and not layout.zero:
        lines.append("tp or cp with whole states; nearest: zero=3")
    if layout.zero and layout.dp * layout.cp == 1:
        lines.append("zero=3 over one device; nearest: zero=0")
    if described.float8 is not None and described.float8.recipe not in FP8:
        lines.append(f"float8 by the recipe {described.float8.recipe}; nearest: tensorwise")
    if described.optim_on_host and layout.zero != 3:
        lines.append("an optimizer on the host without zero; nearest: zero=1")
    if described.params != "float32":
        lines.append(f"params={described.params}: the script loads the weights; nearest: float32")
    return lines


FP8: Mapping[str, Mapping[str, Any]] = {
    "tensorwise": {"backend": "AO", "enable_fsdp_float8_all_gather": False},
    "delayed": {"backend": "TE"},
    "mxfp8": {"backend": "TE", "use_mxfp8_block_scaling": True, "fp8_format": "E4M3"},
}
"""The section of fp8 by the recipes that Accelerate can ask for."""


def _launch(described: JobDescription, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind if described.layout.devices > 1 else "NO",
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16"}.get(described.compute, "no"),
        "num_processes": described.layout.devices,
        "use_cpu": False,
        "debug": False,
    }
    if described.float8 is not None:
        options |= {"mixed_precision": "fp8", "fp8_config": FP8[described.float8.recipe]}
    if described.stack == "inductor":
        options["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return options


def _mesh(described: JobDescription) -> dict[str, Any]:
    layout = described.layout
    sizes: dict[str, Any] = {
        "dp_replicate_size": layout.dp_replicate,
        "dp_shard_size": layout.dp,
        "tp_size": layout.tp,
        "cp_size": layout.cp,
    }
    if layout.cp > 1:
        sizes["cp_comm_strategy"] = "alltoall" if layout.attention == "ring" else "allgather"
    return sizes


def _arguments(described: JobDescription) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": described.rows,
        "gradient_accumulation_steps": described.microbatches,
        "max_grad_norm": described.clip_norm or 0.0,
        "learning_rate": described.lr,
        "lr_scheduler_type": "constant",
        "bf16": described.compute == "bfloat16",
        **({"fp16": True} if described.compute == "float16" else {}),
        "optim": "adamw_torch_fused",
    }


def _notes(described: JobDescription) -> tuple[str, ...]:
    """Return the parts that are said in the nearest form."""
    layout = described.layout
    notes = ["the model and the tokens of a row are the script's; the files do not say them"]
    if described.float8 is not None:
        notes.append(
            "of linear layers torchao leaves out the first and the last, and Transformer Engine none"
        )
    if described.optimizer != "adamw":
        notes.append(
            f"the script must make its optimizer, {described.optimizer}; the file says AdamW"
        )
    if described.loss_tiles > 1:
        notes.append(f"the script must compute its loss in {described.loss_tiles} tiles of tokens")
    narrow = described.compute in ("bfloat16", "float16")
    reduce = described.compute if layout.zero and narrow else "float32"
    if described.loss_scale:
        notes.append("the loss is scaled by GradScaler's defaults, and not as the job says")
    if described.reduce != reduce:
        notes.append(f"gradients are reduced in {reduce}, not in {described.reduce}")
    if described.accumulate and (reduce == "float32" or layout.reduce_once):
        notes.append(f"gradients are summed in {reduce}, not in {described.accumulate}")
    summed = described.accumulate or described.reduce
    if layout.zero == 3 and narrow and not layout.reduce_once and summed != "float32":
        notes.append("FSDP keeps shards of gradients in float32")
    if layout.zero == 3:
        bytes_of_element = 2 if reduce == described.compute and narrow else 4
        notes += _fsdp_notes(layout, unit_mb(described.sizes, layout.tp, 1, bytes_of_element))
    if layout.dp_replicate > 1 and not layout.zero:
        notes.append(f"DDP has one group of {layout.replicas} replicas")
    return tuple(notes)


def _fsdp_notes(layout: DeviceLayout, unit: float) -> Iterator[str]:
    if layout.bucket_mb != unit:
        yield by_layer(layout.bucket_mb, unit)
    if layout.prefetch not in (None, 1):
        yield f"FSDP 2 gathers one unit ahead, not {layout.prefetch}"
    if not layout.overlap:
        yield "FSDP runs its messages beside compute"
    if layout.whole_mb:
        yield f"FSDP shards parameters below {layout.whole_mb:g} MiB, too"


def _yaml(options: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(options, sort_keys=True)
    return text


def _json(options: dict[str, Any]) -> str:
    return json.dumps(options, indent=2) + "\n"
