"""Write a described job as a DeepSpeed file."""

from __future__ import annotations

import json
from math import log2
from typing import Any

from piper_interop.neutral.described import USUAL_SCALE, DeviceLayout, JobDescription
from piper_interop.neutral.documents import nested
from piper_interop.neutral.missing import lacks, shared_limits
from piper_interop.neutral.system import Exported
from piper_ir.ground.sizes import ITEM_BYTES

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
BUCKET_MB = 25
"""The MiB of a bucket where nothing says them, as in `replicate`."""


def export(described: JobDescription) -> Exported:
    """Return ds_config.json; raise JobError that names all that DeepSpeed cannot do."""
    lacks("DeepSpeed", described, _impossible(described))
    return Exported(
        {"ds_config.json": json.dumps(nested(_options(described)), indent=2) + "\n"},
        _notes(described),
    )


def _impossible(described: JobDescription) -> list[str]:
    layout = described.layout
    lines = shared_limits(
        described,
        "stages are in the script (PipelineModule, 1F1B only)",
        "tp without it, or cp with attention by heads",
    )
    lines += _impossible_layout(layout)
    if described.optim_on_host and layout.zero < (1 if described.optim_on_host == 1 else 3):
        lines.append("the optimizer, or a part of it, on the host; nearest: with zero=3")
    if described.params_on_host and layout.zero != 3:
        lines.append("parameters on the host without zero=3; nearest: with zero=3")
    if layout.prefetch is not None and layout.prefetch > 1 and layout.zero == 3:
        lines.append(f"prefetch={layout.prefetch}; nearest: 1")
    if (described.params, described.compute) not in _PRECISIONS:
        lines.append(
            f"params={described.params} with compute={described.compute}; nearest: bf16 over float32"
        )
    if described.float8 is not None:
        lines.append("linear layers in float8; nearest: bfloat16")
    if described.recompute and "layers" not in described.sizes.fields:
        lines.append(
            "recomputation of a model that is none of piper.models, whose layers are not counted; nearest: none"
        )
    scale = {**USUAL_SCALE, **dict(described.loss_scale)}
    if "fixed" not in scale and (scale["growth"], scale["backoff"]) != (2.0, 0.5):
        lines.append(
            "a loss scale that grows or falls by other factors; nearest: growth=2, backoff=0.5"
        )
    if log2(scale["initial"]) % 1:
        lines.append(f"LossScale(initial={scale['initial']:g}); nearest: a power of 2")
    return lines


def _impossible_layout(layout: DeviceLayout) -> list[str]:
    lines = []
    if layout.cp > 1 and layout.attention != "heads":
        lines.append(f'attention="{layout.attention}" over cp; nearest: "heads" (Ulysses)')
    if layout.dp_replicate > 1 and layout.zero:
        lines.append(
            f"hybrid sharding (rep={layout.dp_replicate}); nearest: one group, dp={layout.replicas}"
        )
    if layout.hidden:
        lines.append("experts that devices cut; nearest: whole ones over more devices")
    elif layout.ep > 1 and layout.tp * layout.cp > 1:
        lines.append("experts beside tp or cp; nearest: tp=cp=1")
    if layout.zero == 3 and not layout.reshard:
        lines.append(
            "parameters that stay gathered through a step; nearest: zero=2, or zero=3 with reshard"
        )
    return lines


_PRECISIONS = {
    ("float32", "float32"): {},
    ("float32", "bfloat16"): {"bf16.enabled": True},
    ("float32", "float16"): {"fp16.enabled": True},
    ("bfloat16", "bfloat16"): {
        "bf16.enabled": True,
        "bf16.bf16_master_weights_and_grads": True,
        "bf16.bf16_optimizer_states": True,
    },
}


def _options(described: JobDescription) -> dict[str, Any]:
    layout = described.layout
    options: dict[str, Any] = {
        "train_batch_size": described.global_batch,
        "train_micro_batch_size_per_gpu": described.rows,
        "gradient_accumulation_steps": described.microbatches,
        "gradient_clipping": described.clip_norm or 0.0,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": described.lr,
        **_PRECISIONS[described.params, described.compute],
        **_loss_scale(described),
        "communication_data_type": NAMES[described.reduce],
        "data_types.grad_accum_dtype": NAMES[_summed(described)],
        "zero_optimization.stage": layout.zero,
        # null says that the script checkpoints nothing, which a missing option leaves open.
        "activation_checkpointing.number_checkpoints": described.sizes.fields["layers"]
        if described.recompute
        else None,
        **_zero(described),
    }
    if described.optim_on_host:
        options["zero_optimization.offload_optimizer.device"] = "cpu"
        if described.params_on_host:
            options["zero_optimization.offload_param.device"] = "cpu"
        if described.optim_on_host < 1:
            options["zero_optimization.offload_optimizer.ratio"] = described.optim_on_host
    if described.offload is not None:
        options["activation_checkpointing.cpu_checkpointing"] = True
    if layout.tp > 1:
        options["tensor_parallel.autotp_size"] = layout.tp
        options["tensor_parallel.vocab_parallel_lm_head"] = True
    if layout.cp > 1:
        options["sequence_parallel_size"] = layout.cp
        options["seq_parallel_communication_data_type"] = NAMES[described.reduce]
        options["data_parallel_size"] = layout.replicas
    if layout.ep > 1:
        options["expert_parallel.enabled"] = True
        options["expert_parallel.autoep_size"] = layout.ep
    if described.stack == "inductor":
        options["compile.deepcompile"] = True
    return options


def _summed(described: JobDescription) -> str:
    """Return the dtype of sums of gradients: without ZeRO the dtype of the model, which DeepSpeed requires."""
    summed = described.accumulate or described.reduce
    return summed if described.layout.zero else described.compute


def _loss_scale(described: JobDescription) -> dict[str, Any]:
    """Return the options of the scale of the loss beside fp16, of which DeepSpeed knows no other factors than 2."""
    if described.compute != "float16":
        return {}
    scale = {**USUAL_SCALE, **dict(described.loss_scale)}
    if "fixed" in scale:
        return {"fp16.loss_scale": scale["fixed"]}
    return {
        "fp16.initial_scale_power": round(log2(scale["initial"])),
        "fp16.loss_scale_window": int(scale["interval"]),
        "fp16.hysteresis": int(scale["hysteresis"]),
        "fp16.min_loss_scale": scale["least"],
    }


def _zero(described: JobDescription) -> dict[str, Any]:
    """Return the options of the section beside the stage."""
    layout = described.layout
    if not layout.zero:
        return {}
    megabytes = BUCKET_MB if layout.bucket_mb is None else layout.bucket_mb
    elements = max(1, round(megabytes * 2**20 / ITEM_BYTES[described.reduce]))
    sizes = {
        "overlap_comm": layout.overlap,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    if layout.zero < 3:
        sizes["use_multi_rank_bucket_allreduce"] = False  # parts are reduced to their ranks
    else:
        sizes |= {
            "stage3_prefetch_bucket_size": 0 if layout.prefetch == 0 else elements,
            "stage3_param_persistence_threshold": round(
                layout.whole_mb * 2**20 / ITEM_BYTES[described.compute]
            ),
            "stage3_max_reuse_distance": 0,
        }
    return {f"zero_optimization.{name}": value for name, value in sizes.items()}


def _notes(described: JobDescription) -> tuple[str, ...]:
    notes = [
        "the model, the tokens of a row and the number of devices are the script's; the file does not say them"
    ]
    if described.optimizer != "adamw":
        notes.append(
            f"the script must make its optimizer, {described.optimizer}; the file says AdamW"
        )
    if not described.layout.zero and described.layout.overlap and described.layout.replicas > 1:
        notes.append("without ZeRO DeepSpeed reduces gradients behind the backward")
    if _summed(described) != (described.accumulate or described.reduce):
        notes.append(f"without ZeRO DeepSpeed sums gradients in {described.compute}")
    if described.layout.reduce_once and described.microbatches > 1:
        notes.append("DeepSpeed scatters gradients of each microbatch")
    if described.loss_tiles > 1:
        notes.append(f"the script must compute its loss in {described.loss_tiles} tiles of tokens")
    if described.recompute:
        notes.append(
            "the script must checkpoint each layer (deepspeed.checkpointing, or gradient_checkpointing_enable)"
        )
    if described.layout.cp > 1:
        notes.append("the script must use Ulysses attention (deepspeed.runtime.sequence_parallel)")
    if described.layout.zero == 3:
        notes.append("stage 3 gathers module by module; a bucket bounds what it gathers ahead")
    return tuple(notes)
