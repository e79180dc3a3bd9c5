"""Small files of options of other systems, in own words, and the model that they are read with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from piper_interop import Asked, Described, Sizes, import_job

LLAMA = Sizes(
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
MIXTURE = Sizes(
    {
        **LLAMA.fields,
        "experts": Sizes({"number": 8, "top_k": 2, "hidden": 14336}, "Experts"),
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


def imported(system: str, folder: Path, options: dict[str, Any], **others: Any) -> Described:
    """Return the described job of options of a system."""
    return import_job(system, write(folder, options), asked(**others)).described
