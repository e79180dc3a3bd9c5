"""List the options of DeepSpeed, each with its kind and its row of the table."""

from __future__ import annotations

from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.kinds import (
    ANY,
    BOOL,
    COUNT,
    FROM_ZERO,
    INT,
    LIST,
    NUMBER,
    OBJECT,
    SIZE,
    TEXT,
    TEXTS,
    OptionKind,
    OptionSpec,
    one_of,
)
from piper_interop.neutral.options import Ignored, Mapped, Nearest, Unsupported

STAND_INS = {
    "bf16": "8-bit numbers, or fp16 under torch_autocast, are taken as bf16; quantising is not counted",
    "adamw": "another optimizer is taken as AdamW, with two states of four bytes per parameter",
}

LOGS = Ignored("writes logs, and changes no step")
CHECKPOINTS = Ignored("concerns checkpoints, and no step")
DATA = Ignored("concerns the loading of data, which is not predicted")
NUMERICS = Ignored("changes numbers, and neither time nor memory")
LEARNING = Ignored("a factor of the optimizer's update, which changes neither time nor memory")
SEARCH = Ignored("DeepSpeed's own search, which `piper plan` replaces")
PRECISION = Mapped("precision")
SCALING = Mapped("precision: loss_scale")
POWER = OptionKind("a whole number from -126 to 127", (int,), least=-126, most=127)
OLD = "leave it out: DeepSpeed has removed it"

PIPELINE = Unsupported(
    "a pipeline whose stages are in the script (PipelineModule)",
    'leave the section "pipeline" out, and write stages into the FILE.py: `pp=` of its mesh and a schedule',
    unless=(),
)
SAMPLED = Unsupported(
    "a data-dependent length or batch",
    "leave it out, and predict one length and batch at a time (--length, train_batch_size)",
    unless=(None, False, {}),
    when=lambda f: f.get("data_efficiency.enabled", False),
)
QUANTISED = Unsupported("quantised weights", "leave the section out", unless=(None, {}))
COMPILER_OFFLOAD = Unsupported("offload by the compiler", "leave the option out")
OLD_COMPILER = Unsupported(
    "an option that DeepSpeed has removed",
    "leave it out, and predict compiled kernels by the cluster's stack: --cluster h100x8@inductor",
    unless=(None, False, {}),
)
COMPILER = Ignored("a choice inside of DeepCompile, whose graph is not modelled")
EXPERTS = Ignored("finds the experts in the model, which its sizes say here")
ROUTER = Ignored("of the router, which the model's sizes say here")
KERNELS = Ignored("a choice between kernels of the same work")
REMOVED = Unsupported("an option that DeepSpeed has removed", OLD, unless=(None, False, {}))
HYBRID = Unsupported(
    "generation between training steps (the hybrid engine)",
    "leave the section out",
    when=lambda f: f.get("hybrid_engine.enabled", False),
)


def _adam(foreign: Foreign) -> bool:
    return str(foreign.get("optimizer.type", "adamw")).lower() in ("adam", "adamw")


def _mixture(foreign: Foreign) -> bool:
    return bool(foreign.get("expert_parallel.enabled", False))


BATCH: dict[str, OptionSpec] = {
    "train_batch_size": (COUNT, Mapped("global_batch")),
    "train_micro_batch_size_per_gpu": (COUNT, Mapped("rows of a microbatch")),
    "gradient_accumulation_steps": (COUNT, Mapped("microbatches")),
    "managed_gradient_accumulation": (
        BOOL,
        Unsupported(
            "accumulation of gradients by the script",
            "give true; the script's own count is gradient_accumulation_steps",
            unless=(True,),
        ),
    ),
    "steps_per_print": (INT.or_none, LOGS),
    "dump_state": (BOOL, LOGS),
    "wall_clock_breakdown": (
        BOOL,
        Nearest("no timers are counted", "predicted too fast: DeepSpeed waits at each timer"),
    ),
    "memory_breakdown": (BOOL, LOGS),
    "log_level": (TEXT.or_none, LOGS),
    "disable_python_gc": (BOOL, Ignored("concerns pauses of Python, which are not predicted")),
    "dataloader_drop_last": (BOOL, DATA),
    "vocabulary_size": (INT.or_none, Ignored("DeepSpeed only warns by it; the model has its own")),
    "disable_allgather": (
        BOOL,
        Nearest("parameters are gathered by all-gathers", "predicted too fast"),
    ),
    "use_data_before_expert_parallelism": (
        BOOL,
        Nearest(
            "experts are over neighbouring ranks, as without it",
            "predicted too fast where they are on several nodes",
            when=_mixture,
        ),
    ),
    "zero_allow_untested_optimizer": (BOOL, Ignored("allows an optimizer, and changes none")),
    "zero_force_ds_cpu_optimizer": (
        BOOL,
        Ignored("which of two implementations updates on the host"),
    ),
}

GRADIENTS: dict[str, OptionSpec] = {
    "gradient_clipping": (FROM_ZERO, Mapped("clip_norm")),
    "prescale_gradients": (BOOL, NUMERICS),
    "gradient_predivide_factor": (NUMBER, NUMERICS),
    "gradient_allreduce_op": (one_of("mean", "sum"), NUMERICS),
    "communication_data_type": (
        OptionKind(
            "one of fp16, bf16, fp32, or null", (str,), ("fp16", "bf16", "fp32"), empty=True
        ),
        Mapped("reduce"),
    ),
    "seq_parallel_communication_data_type": (
        OptionKind(
            "one of fp16, bf16, fp32, or null", (str,), ("fp16", "bf16", "fp32"), empty=True
        ),
        Mapped("reduce, with sequence_parallel_size above 1"),
    ),
    "data_types.grad_accum_dtype": (TEXT.or_none, Mapped("accumulate")),
    "data_types.param_dtype": (TEXT.or_none, PRECISION),
    "data_types.buffer_dtype": (TEXT.or_none, NUMERICS),
    "data_types.keep_in_fp32_modules": (TEXTS, NUMERICS),
}

BF16_SECTION: dict[str, OptionSpec] = {
    "enabled": (BOOL, PRECISION),
    "immediate_grad_update": (BOOL, NUMERICS),
    "check_grad_overflow": (BOOL, NUMERICS),
    "bf16_master_weights_and_grads": (
        BOOL,
        Nearest(
            "all states are bfloat16",
            "too little memory by 4 bytes per parameter, unless bf16_optimizer_states is true",
            when=lambda f: not f.get("bf16.bf16_optimizer_states", False),
        ),
    ),
    "bf16_optimizer_states": (BOOL, PRECISION),
}

PRECISIONS: dict[str, OptionSpec] = {
    **{f"bf16.{name}": option for name, option in BF16_SECTION.items()},
    **{f"bfloat16.{name}": option for name, option in BF16_SECTION.items()},
    "fp16.enabled": (BOOL, PRECISION),
    "fp16.auto_cast": (BOOL, NUMERICS),
    "fp16.loss_scale": (NUMBER, SCALING),
    "fp16.initial_scale_power": (POWER, SCALING),
    "fp16.loss_scale_window": (INT, SCALING),
    "fp16.hysteresis": (INT, SCALING),
    "fp16.consecutive_hysteresis": (BOOL, NUMERICS),
    "fp16.min_loss_scale": (NUMBER, SCALING),
    "fp16.fp16_master_weights_and_grads": (
        BOOL,
        Unsupported("masters in fp16", "leave the option out"),
    ),
    "torch_autocast.enabled": (
        BOOL,
        Nearest(
            "a rounded copy of all parameters in place of autocast",
            "too much memory by 2 bytes per parameter, with stages 1 and 2 too little by 2 bytes, and predicted too fast by "
            "autocast's own casts",
        ),
    ),
    "torch_autocast.dtype": (
        TEXT,
        Unsupported(
            "autocast in fp16",
            "take bfloat16",
            unless=("bfloat16", "bf16", "torch.bfloat16"),
            stand_in="bf16",
            how="fp16 is taken as bf16: of the same bytes and rates, without the loss's scale",
            when=lambda f: f.get("torch_autocast.enabled", False),
        ),
    ),
    "torch_autocast.lower_precision_safe_modules": (LIST, NUMERICS),
    "weight_quantization.enabled": (BOOL, QUANTISED),
    **{
        f"weight_quantization.{name}": (kind, QUANTISED)
        for name, kind in {
            "num_bits": INT, "q_type": TEXT, "q_groups": INT, "quantized_initialization": OBJECT,
            "quantized_initialization.*": ANY, "post_init_quant": OBJECT, "post_init_quant.*": ANY,
        }.items()
    },
}  # fmt: skip

ADAM = ("adam", "adamw")
OPTIMIZERS: dict[str, OptionSpec] = {
    "optimizer.type": (
        TEXT,
        Unsupported(
            "an optimizer other than Adam and AdamW",
            "take AdamW in the file",
            unless=("Adam", "AdamW", *ADAM, None),
            stand_in="adamw",
            how="taken as AdamW: two states of four bytes per parameter, and an update of a few operations per element",
            when=lambda f: not _adam(f),
        ),
    ),
    "optimizer.legacy_fusion": (BOOL, NUMERICS),
    "optimizer.params": (OBJECT, LEARNING),
    "optimizer.params.lr": (NUMBER, Mapped("lr")),
    **{
        f"optimizer.params.{name}": (kind, LEARNING)
        for name, kind in {
            "betas": LIST, "eps": NUMBER, "weight_decay": NUMBER, "momentum": NUMBER, "bias_correction": BOOL,
            "adam_w_mode": BOOL, "torch_adam": BOOL, "fused": BOOL, "foreach": BOOL.or_none, "amsgrad": BOOL,
            "set_grad_none": BOOL, "fp32_optimizer_states": BOOL, "max_coeff": NUMBER, "min_coeff": NUMBER,
            "nesterov": BOOL, "ns_steps": INT, "muon_lr": NUMBER, "adam_lr": NUMBER, "dampening": NUMBER,
            "freeze_step": INT, "cuda_aware": BOOL, "comm_backend_name": TEXT, "lr_decay": NUMBER,
            "maximize": BOOL, "capturable": BOOL, "differentiable": BOOL,
        }.items()
    },
    "scheduler.type": (TEXT, LEARNING),
    "scheduler.params": (OBJECT, LEARNING),
    **{
        f"scheduler.params.{name}": (ANY, LEARNING)
        for name in (
            "lr_range_test_min_lr", "lr_range_test_step_rate", "lr_range_test_step_size", "lr_range_test_staircase",
            "cycle_first_step_size", "cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count",
            "decay_step_size", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_min_mom", "cycle_max_mom",
            "decay_mom_rate", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "warmup_min_ratio",
            "cos_min_ratio", "total_num_steps", "last_batch_iteration",
        )
    },
}  # fmt: skip

CHECKPOINTING: dict[str, OptionSpec] = {
    "activation_checkpointing.partition_activations": (
        BOOL,
        Unsupported(
            "checkpoints that are sharded over tensor-parallel ranks", "leave the option out"
        ),
    ),
    "activation_checkpointing.cpu_checkpointing": (
        BOOL,
        Nearest(
            "copies to the host beside compute, which DeepSpeed waits for", "predicted too fast"
        ),
    ),
    "activation_checkpointing.contiguous_memory_optimization": (BOOL, Mapped("recompute")),
    "activation_checkpointing.number_checkpoints": (COUNT.or_none, Mapped("recompute")),
    "activation_checkpointing.synchronize_checkpoint_boundary": (
        BOOL,
        Nearest("no rank waits at a checkpoint", "predicted too fast"),
    ),
    "activation_checkpointing.profile": (BOOL, LOGS),
}

PARALLEL: dict[str, OptionSpec] = {
    "sequence_parallel_size": (COUNT, Mapped("cp, by heads (Ulysses)")),
    "data_parallel_size": (COUNT, Mapped("dp")),
    "tensor_parallel.autotp_size": (SIZE, Mapped("tp")),
    "tensor_parallel.tp_overlap_comm": (
        BOOL,
        Nearest("sums over tp are not hidden", "predicted too slow"),
    ),
    "tensor_parallel.vocab_parallel_lm_head": (
        BOOL.or_none,
        Nearest(
            "embedding and head are sharded over tp, too",
            "too little memory, and predicted too fast by the head's work",
            unless=(True,),
            when=lambda f: f.get("tensor_parallel.autotp_size", 0) > 1,
        ),
    ),
    "tensor_parallel.vocab_parallel_ce_backend": (one_of("torch", "liger"), KERNELS),
    "tensor_parallel.dtype": (TEXT, NUMERICS),
    "tensor_parallel.injection_policy_tuple": (LIST.or_none, KERNELS),
    "tensor_parallel.preset_model": (TEXT.or_none, Ignored("names the model, which its sizes say")),
    "tensor_parallel.keep_module_on_host": (BOOL, Ignored("concerns the loading of weights")),
    "tensor_parallel.partition_config": (OBJECT.or_none, Ignored("asks for nothing")),
    "tensor_parallel.partition_config.*": (
        ANY,
        Unsupported("rules by hand for the sharding of parameters", "leave the section out"),
    ),
    **{
        f"tensor_parallel.{section}.{name}": (kind, row)
        for section in ("tp", "tensor_parallel")
        for name, kind, row in (
            ("tp_size", COUNT, Mapped("tp")),
            ("tp_grain_size", INT, KERNELS),
            ("mpu", ANY, KERNELS),
            ("tp_group", ANY, KERNELS),
        )
    },
    **{
        f"tensor_parallel.{name}": (BOOL, Unsupported("kernels for inference", "leave the option out"))
        for name in ("replace_with_kernel_inject", "kernel_inject")
    },
    **{
        f"pipeline.{name}": (ANY, PIPELINE)
        for name in (
            "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned",
            "grad_partitioned", "use_reentrant",
        )
    },
}  # fmt: skip

EXPERT: dict[str, OptionSpec] = {
    "expert_parallel.enabled": (BOOL, Mapped("ep")),
    "expert_parallel.autoep_size": (COUNT, Mapped("ep")),
    "expert_parallel.expert_tensor_parallel_size": (
        COUNT,
        Unsupported("tensor parallelism of experts", "give 1", unless=(1,), when=_mixture),
    ),
    **{
        f"expert_parallel.{name}": (ANY, KERNELS)
        for name in (
            "validate_folding_routing", "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm",
            "combine_impl", "row_weighting_impl", "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin",
            "comm_max_tokens_per_rank",
        )
    },
    **{
        f"expert_parallel.{name}": (ANY, ROUTER)
        for name in (
            "route_norm", "route_scale", "score_apply", "num_expert_groups", "num_limited_groups", "score_func",
            "top_k", "load_balance_coeff", "routed_scaling_factor",
        )
    },
    **{
        f"expert_parallel.{name}": (ANY, EXPERTS)
        for name in (
            "preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2",
            "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern",
            "shared_experts_gate_pattern", "expert_activation",
        )
    },
}  # fmt: skip

COMPILE: dict[str, OptionSpec] = {
    **{f"compile.{name}": (ANY, OLD_COMPILER) for name in ("enabled", "disable", "backend", "kwargs")},
    "compile.deepcompile": (BOOL, Mapped("the kernel stack inductor")),
    "compile.offload_activation": (BOOL, COMPILER_OFFLOAD),
    "compile.offload_opt_states": (BOOL, COMPILER_OFFLOAD),
    "compile.offload_parameters": (BOOL, COMPILER_OFFLOAD),
    "compile.passes": (LIST.or_none, COMPILER),
    "compile.free_activation_threshold": (INT, COMPILER),
    **{
        f"compile.{name}": (BOOL, COMPILER)
        for name in (
            "autoep_non_moe", "free_activation", "offload_activation_pin_memory", "double_buffer", "symmetric_memory",
            "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather",
            "keep_int_input_tensors", "keep_all_input_tensors",
        )
    },
}  # fmt: skip
