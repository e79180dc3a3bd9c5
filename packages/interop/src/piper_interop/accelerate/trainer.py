"""List the fields of Hugging Face's TrainingArguments, each with its kind and its row of the table."""

from __future__ import annotations

from dataclasses import replace

from piper_interop.accelerate.fsdp import MESH, OFFLOAD, TRAINER_FSDP, is_fsdp
from piper_interop.neutral.kinds import (
    ANY,
    BOOL,
    COUNT,
    NUMBER,
    SIZE,
    TEXT,
    OptionKind,
    OptionSpec,
)
from piper_interop.neutral.options import Ignored, Mapped, Nearest, Unsupported

LEARNING = Ignored("a factor of the optimizer's update, which changes neither time nor memory")
LENGTH = Ignored("how long a run is, and not a step")
LOGS = Ignored("writes logs or checkpoints, and changes no step")
EVALUATION = Ignored("concerns evaluation, which is not predicted")
DATA = Ignored("concerns the loading of data, which is not predicted")
NUMERICS = Ignored("changes numbers, and neither time nor memory")
SCRIPT = Ignored("a flag of the script")
GRAPH = Ignored("a choice inside of the compiler, whose graph is not modelled")
DDP = Ignored("a choice of DDP that changes no message of a step")
HOSTS = Ignored("concerns how processes are started")
DEBUG = Ignored("a check; a debugged run is slower")
PLAIN = Ignored("asks for nothing")

ADAMW = (
    "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw_anyprecision",
    "adamw",
)  # fmt: skip
"""The names of AdamW with two states of each parameter."""

CHECKPOINTED = Mapped("recompute")
_SYNC = "gradient_accumulation_kwargs.sync_each_batch"
SYNC_EACH_BATCH = f"accelerator_config.{_SYNC}"
"""The field that asks for a reduction of the gradients of each microbatch."""

SAID: dict[str, OptionSpec] = {
    "per_device_train_batch_size": (COUNT, Mapped("rows of a microbatch")),
    "gradient_accumulation_steps": (COUNT, Mapped("microbatches")),
    "max_grad_norm": (NUMBER, Mapped("clip_norm")),
    "learning_rate": (NUMBER, Mapped("lr")),
    "bf16": (BOOL, Mapped("precision")),
    "fp16": (BOOL, Mapped("precision")),
    "optim": (
        TEXT,
        Unsupported(
            "an optimizer other than AdamW",
            "take adamw_torch in the file",
            unless=(*ADAMW, None),
            stand_in="adamw",
            how="taken as AdamW: two states of four bytes per parameter, and an update of a few operations per element",
        ),
    ),
    "gradient_checkpointing": (BOOL.or_none, CHECKPOINTED),
    "activation_checkpointing": (BOOL.or_none, CHECKPOINTED),
    "torch_compile": (BOOL, Mapped("the kernel stack inductor")),
    "torch_compile_backend": (TEXT.or_none, Mapped("the kernel stack")),
    "use_liger_kernel": (
        BOOL,
        Nearest(
            "loss and norms are not fused",
            "too much memory by the logits, and predicted too slow",
        ),
    ),
    "auto_find_batch_size": (
        BOOL,
        Unsupported(
            "a batch that is found by trial", "leave it out, and say per_device_train_batch_size"
        ),
    ),
    "torch_empty_cache_steps": (
        COUNT.or_none,
        Nearest("the allocator keeps its blocks", "predicted too fast"),
    ),
    "full_determinism": (BOOL, Nearest("kernels are the fastest", "predicted too fast")),
    "tf32": (
        BOOL.or_none,
        Nearest(
            "float32 products have float32's rate",
            "predicted too slow",
            when=lambda f: not f.get("TrainingArguments.bf16", False),
        ),
    ),
    "use_cpu": (BOOL, Unsupported("training on CPUs", "give false")),
    "no_cuda": (BOOL, Unsupported("training on CPUs", "give false")),
    "fsdp": (
        OptionKind("true, false or a text of options", (bool, str, list), empty=True),
        (
            replace(OFFLOAD, when=lambda f: "offload" in str(f.get("TrainingArguments.fsdp"))),
            Mapped("zero"),
        ),
    ),
    "fsdp_config": (OptionKind("an object", (dict,), empty=True), PLAIN),
    "deepspeed": (
        OptionKind("a path or an object", (str, dict), empty=True),
        Mapped("DeepSpeed's options"),
    ),
    "ddp_bucket_cap_mb": (COUNT.or_none, Mapped("bucket_mb")),
    "parallelism_config": (OptionKind("an object", (dict,), empty=True), PLAIN),
    "accelerator_config": (OptionKind("an object", (dict,), empty=True), PLAIN),
}
"""The fields that a job is made of, and the others that matter."""

ACCELERATOR: dict[str, OptionSpec] = {
    "split_batches": (
        BOOL,
        Unsupported("a batch that is split among ranks", "give false, and the rows of one rank"),
    ),
    "dispatch_batches": (BOOL.or_none, DATA),
    "even_batches": (BOOL, DATA),
    "use_seedable_sampler": (BOOL, DATA),
    "non_blocking": (BOOL, DATA),
    "data_seed": (ANY, DATA),
    "use_configured_state": (BOOL, HOSTS),
    "gradient_accumulation_kwargs": (ANY, NUMERICS),
    "gradient_accumulation_kwargs.num_steps": (
        COUNT.or_none,
        Unsupported("a second count of microbatches", "leave it out"),
    ),
    _SYNC: (
        BOOL,
        (
            Nearest(
                "gradients are reduced once per step",
                "predicted too fast",
                unless=(False, None),
                when=lambda foreign: not is_fsdp(foreign),
            ),
            Mapped("reduced_mb: without it FSDP sums whole gradients, and scatters them once"),
        ),
    ),
    "gradient_accumulation_kwargs.adjust_scheduler": (BOOL, LEARNING),
    "gradient_accumulation_kwargs.sync_with_dataloader": (BOOL, DATA),
}

OTHERS = {
    LEARNING: (
        "adam_beta1 adam_beta2 adam_epsilon weight_decay lr_scheduler_type lr_scheduler_kwargs warmup_steps "
        "warmup_ratio optim_args optim_target_modules label_smoothing_factor neftune_noise_alpha"
    ),
    LENGTH: "num_train_epochs max_steps seed data_seed resume_from_checkpoint ignore_data_skip",
    LOGS: (
        "output_dir overwrite_output_dir logging_strategy logging_steps logging_first_step logging_dir "
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica "
        "disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "save_only_model save_strategy save_steps save_on_each_node save_total_limit save_safetensors "
        "enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision restore_callback_states_from_checkpoint include_tokens_per_second skip_memory_metrics"
    ),
    EVALUATION: (
        "eval_strategy evaluation_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only "
        "eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
        "include_inputs_for_metrics batch_eval_metrics load_best_model_at_end metric_for_best_model greater_is_better "
        "bf16_full_eval fp16_full_eval do_eval do_predict jit_mode_eval"
    ),
    DATA: (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
        "label_names train_sampling_strategy group_by_length length_column_name dispatch_batches split_batches"
    ),
    NUMERICS: "average_tokens_across_devices use_cache past_index fp16_opt_level half_precision_backend fp16_backend",
    GRAPH: "torch_compile_mode torchdynamo gradient_checkpointing_kwargs activation_checkpointing_kwargs "
    "liger_kernel_config",
    DDP: "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout",
    HOSTS: "local_rank ray_scope use_mps_device use_ipex tpu_num_cores mp_parameters",
    DEBUG: "debug",
    SCRIPT: "do_train",
}
"""The fields that change no step, by the reason."""

NESTED = (
    "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "liger_kernel_config",
    "optim_args",
)  # fmt: skip
"""The fields that are objects with keys of any name."""

FLAGS = (
    "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "save_only_model", "save_on_each_node",
    "prediction_loss_only", "eval_on_start", "load_best_model_at_end", "dataloader_drop_last",
    "dataloader_pin_memory", "remove_unused_columns", "do_train", "do_eval", "do_predict", "push_to_hub",
    "skip_memory_metrics", "ignore_data_skip", "bf16_full_eval", "fp16_full_eval",
)  # fmt: skip
NUMBERS = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "warmup_steps", "warmup_ratio", "num_train_epochs",
    "max_steps", "seed", "logging_steps", "save_steps", "label_smoothing_factor",
)  # fmt: skip
COUNTS = ("per_device_eval_batch_size", "dataloader_num_workers", "ddp_timeout")


def _kind(name: str) -> OptionKind:
    if name in FLAGS:
        return BOOL
    if name in NUMBERS:
        return NUMBER
    return SIZE if name in COUNTS else ANY


TRAINER: dict[str, OptionSpec] = {
    f"TrainingArguments.{name}": option
    for name, option in {
        **SAID,
        **{name: (_kind(name), row) for row, names in OTHERS.items() for name in names.split()},
        **{f"{name}.*": (ANY, NUMERICS) for name in NESTED},
        **{f"fsdp_config.{name}": option for name, option in TRAINER_FSDP.items()},
        **{f"fsdp_config.fsdp_{name}": option for name, option in TRAINER_FSDP.items()},
        **{f"parallelism_config.{name}": option for name, option in MESH.items()},
        **{f"accelerator_config.{name}": option for name, option in ACCELERATOR.items()},
    }.items()
}
"""The fields by their full names."""

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "bf16": False,
    "fp16": False,
}
"""The defaults of transformers 5.24 that a job is made of (training_args.py)."""
