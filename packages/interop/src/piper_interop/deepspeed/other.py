"""List the sections of DeepSpeed's file that concern no training step, or that newer versions have removed."""

from __future__ import annotations

from piper_interop.deepspeed.options import (
    CHECKPOINTS,
    DATA,
    HYBRID,
    KERNELS,
    LOGS,
    REMOVED,
    SAMPLED,
    SEARCH,
)
from piper_interop.deepspeed.zero import PART_OF_OFFLOAD
from piper_interop.neutral.kinds import (
    ANY,
    BOOL,
    COUNT,
    INT,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    OptionKind,
    OptionSpec,
)
from piper_interop.neutral.options import Ignored, Nearest, OptionRow

PROFILED = Nearest("a step is not profiled", "predicted too fast for that step")


def _section(name: str, kinds: dict[str, OptionKind], row: OptionRow) -> dict[str, OptionSpec]:
    """Return the options of a section of which all have the same row."""
    return {f"{name}.{option}": (kind, row) for option, kind in kinds.items()}


MONITORS: dict[str, OptionSpec] = {
    **_section("tensorboard", {"enabled": BOOL, "output_path": TEXT, "job_name": TEXT}, LOGS),
    **_section("csv_monitor", {"enabled": BOOL, "output_path": TEXT, "job_name": TEXT}, LOGS),
    **_section(
        "wandb",
        {"enabled": BOOL, "group": TEXT.or_none, "team": TEXT.or_none, "project": TEXT},
        LOGS,
    ),
    **_section(
        "comet",
        {
            "enabled": BOOL, "samples_log_interval": INT, "project": TEXT.or_none, "workspace": TEXT.or_none,
            "api_key": TEXT.or_none, "experiment_name": TEXT.or_none, "experiment_key": TEXT.or_none,
            "online": BOOL.or_none, "mode": TEXT.or_none,
        },
        LOGS,
    ),
    **_section(
        "comms_logger",
        {"enabled": BOOL, "prof_all": BOOL, "prof_ops": LIST, "verbose": BOOL, "debug": BOOL},
        LOGS,
    ),
    "timers.throughput.enabled": (BOOL, LOGS),
    "timers.throughput.synchronized": (BOOL, LOGS),
    "flops_profiler.enabled": (BOOL, PROFILED),
    **_section(
        "flops_profiler",
        {
            "recompute_fwd_factor": NUMBER, "profile_step": INT, "module_depth": INT, "top_modules": INT,
            "detailed": BOOL, "output_file": TEXT.or_none,
        },
        LOGS,
    ),
}  # fmt: skip

CHECKPOINTED: dict[str, OptionSpec] = {
    **_section(
        "checkpoint",
        {
            "tag_validation": TEXT, "load_universal": BOOL, "use_node_local_storage": BOOL,
            "parallel_write.pipeline_stage": BOOL, "checkpoint_serialization": BOOL, "writer": OBJECT.or_none,
            "writer.type": TEXT.or_none, "writer.io_buffer_size": COUNT, "writer.io_buffer_double": BOOL,
            "writer.show_statistics": BOOL, "writer.data_parallel": TEXT.or_none, "writer.decoupled": BOOL,
            "writer.io_multiplier": COUNT,
        },
        CHECKPOINTS,
    ),
    "datastates_ckpt": (ANY, CHECKPOINTS),
    "datastates_ckpt.*": (ANY, CHECKPOINTS),
    **_section(
        "aio",
        {
            "block_size": COUNT, "queue_depth": COUNT, "intra_op_parallelism": COUNT, "thread_count": COUNT,
            "single_submit": BOOL, "overlap_events": BOOL, "use_gds": BOOL,
        },
        PART_OF_OFFLOAD,
    ),
}  # fmt: skip

SEARCHED: dict[str, OptionSpec] = _section(
    "autotuning",
    {
        "enabled": BOOL, "fast": BOOL, "results_dir": TEXT, "exps_dir": TEXT, "overwrite": BOOL,
        "start_profile_step": INT, "end_profile_step": INT, "metric": TEXT, "metric_path": TEXT.or_none,
        "tuner_type": TEXT, "tuner_early_stopping": INT, "tuner_num_trials": INT, "arg_mappings": OBJECT.or_none,
        "arg_mappings.*": ANY, "max_train_batch_size": INT.or_none, "min_train_batch_size": INT,
        "max_train_micro_batch_size_per_gpu": INT, "min_train_micro_batch_size_per_gpu": INT,
        "num_tuning_micro_batch_sizes": INT, "mp_size": INT, "model_info_path": TEXT.or_none,
        "model_info": OBJECT.or_none, "model_info.profile": BOOL, "model_info.num_params": INT.or_none,
        "model_info.hidden_size": INT.or_none, "model_info.num_layers": INT.or_none,
    },
    SEARCH,
)  # fmt: skip

SAMPLING: dict[str, OptionSpec] = {
    "data_efficiency.enabled": (BOOL, SAMPLED),
    "data_efficiency.seed": (INT, DATA),
    "data_efficiency.data_sampling": (OBJECT, DATA),
    "data_efficiency.data_sampling.*": (ANY, SAMPLED),
    "data_efficiency.data_routing": (OBJECT, DATA),
    "data_efficiency.data_routing.*": (ANY, SAMPLED),
}

GENERATION: dict[str, OptionSpec] = {
    "hybrid_engine.enabled": (BOOL, HYBRID),
    **_section(
        "hybrid_engine",
        {
            "max_out_tokens": COUNT, "inference_tp_size": COUNT, "release_inference_cache": BOOL,
            "pin_parameters": BOOL, "tp_gather_partition_size": COUNT, "enable_cuda_graph": BOOL,
        },
        Ignored("a part of the hybrid engine, which `enabled` decides"),
    ),
    "replace_method": (TEXT, KERNELS),
}  # fmt: skip

REMOVED_SECTIONS = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
)  # fmt: skip
"""The sections that DeepSpeed 0.19 refuses, too; a section that is off asks for nothing."""


def _on(section: str) -> OptionRow:
    """Return the row of the options in a removed section, which count only where the section is on."""
    return type(REMOVED)(
        REMOVED.missing,
        REMOVED.instead,
        unless=(),
        when=lambda f: f.get(f"{section}.enabled", True) is not False,
    )


GONE: dict[str, OptionSpec] = {
    **{section: (ANY, REMOVED) for section in REMOVED_SECTIONS},
    **{f"{section}.*": (ANY, _on(section)) for section in REMOVED_SECTIONS},
}

OTHER = {**MONITORS, **CHECKPOINTED, **SEARCHED, **SAMPLING, **GENERATION, **GONE}
