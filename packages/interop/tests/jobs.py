"""Small files of options of other systems, in own words, and the model that they are read with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from piper_interop import Asked, JobDescription, ModelSizes, import_job

LLAMA = ModelSizes(
    {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 14336,
        "vocab": 128256,
        "length": 8192,
    }
)
MIXTURE = ModelSizes(
    {
        **LLAMA.fields,
        "experts": ModelSizes({"number": 8, "top_k": 2, "hidden": 14336}, "Experts"),
    }
)

DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero3": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 4e7,
            "stage3_param_persistence_threshold": 1e5,
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
        "wall_clock_breakdown": False,
        "steps_per_print": 10,
    },
    "ulysses": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 26214400, "overlap_comm": True},
        "sequence_parallel_size": 4,
        "activation_checkpointing": {"number_checkpoints": 32, "profile": False},
        "tensorboard": {"enabled": True, "output_path": "logs"},
    },
    "tensor": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "allgather_bucket_size": 2e8,
        },
        "tensor_parallel": {"autotp_size": 4, "preset_model": "llama"},
        "compile": {"deepcompile": False, "double_buffer": True},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "checkpoint": {"tag_validation": "Warn", "writer": {"type": "fast", "decoupled": False}},
        "comms_logger": {"enabled": False, "prof_ops": []},
    },
}


def write(folder: Path, options: dict[str, Any], name: str = "job.json") -> str:
    """Write options as a JSON file; return its path."""
    path = folder / name
    path.write_text(json.dumps(options), encoding="utf-8")
    return str(path)


def asked(**others: Any) -> Asked:
    """Return what a user says beside a file: 16 devices, 4,096 tokens and a Llama, but for `others`."""
    return Asked(**{"devices": 16, "length": 4096, "sizes": LLAMA, **others})


def imported(system: str, folder: Path, options: dict[str, Any], **others: Any) -> JobDescription:
    """Return the described job of options of a system."""
    return import_job(system, write(folder, options), asked(**others)).described


def _launch(kind: str, **others: Any) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "bf16",
        "num_processes": 16,
        "num_machines": 2,
        **others,
    }


ACCELERATE: dict[str, dict[str, Any]] = {
    "hybrid": _launch(
        "FSDP",
        fsdp_config={
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_activation_checkpointing": True,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        parallelism_config={
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 4,
            "parallelism_config_tp_size": 2,
        },
    ),
    "fsdp1": _launch(
        "FSDP",
        fsdp_config={
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_backward_prefetch": "NO_PREFETCH",
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 100_000_000,
            "fsdp_forward_prefetch": False,
            "fsdp_use_orig_params": True,
            "fsdp_cpu_ram_efficient_loading": True,
        },
        dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
    ),
    "ddp": _launch("MULTI_GPU", main_training_function="main", rdzv_backend="static"),
}
TRAINER: dict[str, dict[str, Any]] = {
    "trainer": {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-5,
        "max_grad_norm": 0.5,
        "bf16": True,
        "gradient_checkpointing": True,
        "optim": "adamw_torch",
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": ["A Layer"],
        },
        "logging_steps": 10,
    },
    "trainer_deepspeed": {
        "output_dir": "out",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "deepspeed": {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        },
    },
}
