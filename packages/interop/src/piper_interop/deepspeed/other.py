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

SAMPLED_SECTIONS = {
    "data_sampling": "enabled num_epochs num_workers pin_memory curriculum_learning",
    "data_sampling.curriculum_learning": "enabled data_cluster_path curriculum_metrics curriculum_metrics.*",
    "data_sampling.dynamic_batching": "enabled metrics_path lr_scaling_method min_batch_size max_batch_size "
    "sequence_picking_order max_tokens verbose",
    "data_routing": "enabled random_ltd",
    "data_routing.random_ltd": "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name "
    "model_type micro_batch_size global_batch_size hidden_state_order",
    "data_routing.random_ltd.random_ltd_schedule": "min_value max_value schedule_type schedule_config.seq_per_step "
    "schedule_config.require_steps",
    "data_routing.random_ltd.layer_token_lr_schedule": "enabled total_layer_tokens warmup_type warmup_layer_tokens",
}
"""The sections of `data_efficiency` with their options; the user names the metrics of a curriculum."""

SAMPLING: dict[str, OptionSpec] = {
    "data_efficiency.enabled": (BOOL, SAMPLED),
    "data_efficiency.seed": (INT, DATA),
    "data_efficiency.data_sampling": (OBJECT, DATA),
    "data_efficiency.data_routing": (OBJECT, DATA),
    **{
        f"data_efficiency.{section}.{name}": (ANY, SAMPLED)
        for section, names in SAMPLED_SECTIONS.items()
        for name in names.split()
    },
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

REMOVED_SECTIONS = {
    "nebula": "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load "
    "load_path",
    "amp": "enabled opt_level loss_scale cast_model_type cast_model_outputs patch_torch_functions "
    "keep_batchnorm_fp32 master_weights num_losses verbosity min_loss_scale max_loss_scale",
    "quantize_training": "enabled quantize_verbose quantizer_kernel quantize-algo quantize_type rounding quantize_bits "
    "start_bits target_bits quantize_schedule quantize_period schedule_offset quantize_groups fp16_mixed_quantize "
    "quantize_change_ratio quantize_eigenvalue",
    "eigenvalue": "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    "sparse_attention": "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
    "horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks "
    "global_block_indices global_block_end_indices num_sliding_window_blocks",
    "elasticity": "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version "
    "ignore_non_elastic_batch_info prefer_larger_batch num_gpus_per_node model_parallel_size",
    "curriculum_learning": "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config "
    "schedule_config.total_curriculum_step schedule_config.difficulty_step schedule_config.root_degree "
    "schedule_config.difficulty schedule_config.max_step",
    "progressive_layer_drop": "enabled theta gamma",
    "sparse_gradients": "",
    "graph_harvesting": "",
    "compression_training": "*",  # techniques, each with groups that the user names
}
"""The sections that DeepSpeed 0.19 refuses, too, with their options; a section that is off asks for nothing."""


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
    **{
        f"{section}.{name}": (ANY, _on(section))
        for section, names in REMOVED_SECTIONS.items()
        for name in names.split()
    },
}

UNREAD: dict[str, OptionSpec] = {
    "_*": (ANY, Ignored("a comment: no option of DeepSpeed begins with an underscore")),
    **{
        section: (ANY, Ignored("DeepSpeed reads no such section, and passes over it"))
        for section in ("monitor_config.*", "comms_config.*")
    },
}
"""The keys that public files have beside DeepSpeed's options: it accepts any key on the first level of a file."""

OTHER = {**UNREAD, **MONITORS, **CHECKPOINTED, **SEARCHED, **SAMPLING, **GENERATION, **GONE}
