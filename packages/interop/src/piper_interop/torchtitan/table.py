"""Hold the rows of all options of torchtitan: of version 0.3.0, and the main branch of August 2026."""

from __future__ import annotations

from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.options import (
    SAYS_NOTHING,
    Ignored,
    Mapped,
    Nearest,
    OptionTable,
    Unsupported,
)

STAND_INS = {
    "bf16": "products in 8 or 4 bits are computed in bfloat16: predicted too slow, and with more memory",
}
"""The stand-ins that `--as` accepts."""
_OUTSIDE = "outside of the step that is planned"
_FAILURES = "changes no step, but what happens when one fails"
_RATE = "changes the learning rate, not the step"


def _tp(foreign: Foreign) -> bool:
    return int(foreign.get("parallelism.tensor_parallel_degree", 1)) > 1


def _cp(foreign: Foreign) -> bool:
    return int(foreign.get("parallelism.context_parallel_degree", 1)) > 1


def _pp(foreign: Foreign) -> bool:
    return int(foreign.get("parallelism.pipeline_parallel_degree", 1)) > 1


# Patterns stand for the sections outside of a step. torchtitan's own parser has checked the names in them.
TABLE: OptionTable = {
    # the job
    "hf_assets_path": Ignored("the folder of the tokenizer and of published weights"),
    "dump_folder": Ignored(_OUTSIDE),
    "training": Mapped("the sizes of a step"),
    "training.local_batch_size": Mapped("rows per microbatch and replica"),
    "training.global_batch_size": Mapped("rows per step"),
    "training.seq_len": Mapped("tokens per row"),
    "training.num_tokens_per_microbatch_per_dp_rank": Mapped("rows per microbatch and replica"),
    "training.num_tokens_per_train_step": Mapped("rows per step"),
    "training.max_context_length": Mapped("tokens per row"),
    "training.max_norm": Mapped("Job(clip_norm=)"),
    "training.steps": Ignored("the length of the training"),
    "training.enable_cpu_offload": Nearest(
        "all states on the host; gradients are copied there when a step ends",
        "too much memory by the shards of gradients, which FSDP copies during backward, and predicted too slow by that "
        "copy",
    ),
    "training.disable_cuda_graphs": Ignored("CUDA graphs save launches; a kernel stack counts these"),
    "training.dtype": Mapped("Precision(params=)"),
    "training.mixed_precision_param": Mapped("Precision(compute=)"),
    "training.mixed_precision_reduce": Mapped("Precision(reduce=, accumulate=)"),
    "training.gc_freq": Ignored("the collector runs between steps"),
    "training.gc_debug": Ignored("for debugging"),
    "loss": (
        Unsupported(
            "this loss", "give a recipe with cross-entropy", ("ChunkedLossWrapper", "CrossEntropyLoss", "MTPLoss", None)
        ),
        Mapped("cross-entropy"),
    ),
    "loss.num_chunks": Mapped("loss: tiles of tokens"),
    "loss.loss_fn": Mapped("cross-entropy"),
    "loss.loss_fn.*": Ignored("facts of the vocabulary"),
    "loss.global_vocab_size": Ignored("facts of the vocabulary"),
    "loss.mtp_scale": Mapped("mtp_weight"),
    "optimizer": Mapped("AdamW"),
    "optimizer.param_groups": Mapped("AdamW and its learning rate"),
    "optimizer.implementation": Nearest(
        "the update is one fused pass over the states", "predicted too fast at the step's end", ("fused",)
    ),
    "optimizer.optimizer_factory_kwargs_by_name": Nearest(
        "further arguments of the optimizer are left out", "no difference in bytes unless they change its states"
    ),
    "lr_scheduler": Ignored(_RATE),
    "lr_scheduler.*": Ignored(_RATE),
    # the model
    "model.name": Mapped("piper.models.DecoderConfig"),
    "model.flavor": Mapped("piper.models.DecoderConfig"),
    "model.float8": Mapped("Precision(float8=)"),
    "model.quantized": Unsupported(
        "a product in 8 or 4 bits of this kind", "give a recipe without converters", stand_in="bf16", how=STAND_INS["bf16"]
    ),
    "model.adapters": Unsupported("LoRA", "give a recipe that trains all parameters"),
    "model.other": Unsupported(
        "a model with these parts", "write a FILE.py whose `job` builds torchtitan's own module, and plan that"
    ),
    "model.sinks": Mapped("sinks"),
    "model.dispatcher": (
        Nearest(
            "tokens go to experts by an all-to-all of rows",
            "predicted too slow where this dispatcher sends a token to a node once",
            (*SAYS_NOTHING, "AllToAllTokenDispatcher", "LocalTokenDispatcher"),
        ),
        Mapped("exchanges with experts"),
    ),
    "model.fused_messages": Nearest(
        "gathers of tensor parallelism are not hidden beside products", "predicted too slow", when=_tp
    ),
    # the devices' shares
    "parallelism": Mapped("the mesh"),
    "parallelism.data_parallel_replicate_degree": Mapped("rep, hybrid sharding"),
    "parallelism.data_parallel_shard_degree": Mapped("dp, zero=3"),
    "parallelism.fsdp_reshard_after_forward": Mapped("data_parallel(resident_mb=)"),
    "parallelism.enable_fsdp_symm_mem": Nearest("messages of FSDP as without symmetric memory", "predicted too slow"),
    "parallelism.tensor_parallel_degree": Mapped("tp"),
    "parallelism.enable_sequence_parallel": Mapped("tensor_parallel(sequence=)"),
    "parallelism.spmd_backend": Ignored("the form of the same messages"),
    "parallelism.pipeline_parallel_degree": Mapped("pp"),
    "parallelism.module_fqns_per_model_part": Mapped("stages"),
    "parallelism.pipeline_parallel_first_stage_less_layers": Mapped("stages"),
    "parallelism.pipeline_parallel_last_stage_less_layers": Mapped("stages"),
    "parallelism.pipeline_parallel_layers_per_stage": Mapped("stages"),
    "parallelism.pipeline_parallel_schedule": Mapped("the recipe of the pipeline"),
    "parallelism.pipeline_parallel_schedule_csv": Unsupported(
        "a schedule in a file of its own", "write recipes.from_csv(FILE) into the FILE.py of an import without it", when=_pp
    ),
    "parallelism.pipeline_parallel_microbatch_size": Mapped("rows per microbatch"),
    "parallelism.num_pp_microbatches": Mapped("microbatches"),
    "parallelism.context_parallel_degree": Mapped("cp"),
    "parallelism.context_parallel_load_balancer": Mapped("context_parallel(attention='gather')"),
    "parallelism.context_parallel_ptrr_mask_key": Nearest(
        "masks of documents are not balanced", "the same work on every device is assumed", when=_cp
    ),
    "parallelism.expert_parallel_degree": Mapped("ep"),
    "activation_checkpoint": Mapped("recompute"),
    "activation_checkpoint.preserve_rng_state": Ignored("what one device draws is what every plan draws"),
    "activation_checkpoint.determinism_check": Ignored("a check of torch's own recomputation"),
    "activation_checkpoint.debug": Ignored("for debugging"),
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": Nearest(
        "these small products are kept", "a little too much memory", (*SAYS_NOTHING, ["moe.router.gate"])
    ),
    "activation_checkpoint.memory_budget": Mapped("recompute"),
    "activation_checkpoint.visualize_memory_budget_pareto": Ignored("for debugging"),
    "compile": Mapped("the kernel stack"),
    "compile.enable": Mapped("the kernel stack"),
    "compile.components": Mapped("the kernel stack"),
    "compile.backend": Nearest("kernels as Inductor's", "another backend's times are not known", ("inductor",)),
    "compile.enable_async_tensor_parallel": (
        Nearest(
            "messages of tensor parallelism are not hidden beside products",
            "predicted too slow",
            when=lambda f: _tp(f) and not f["parallelism.enable_sequence_parallel"],
        ),
        Mapped("tensor_parallel(pieces=)"),
    ),
    "encoder*": Ignored("a part of FLUX"),
    "inference*": Ignored("a part of FLUX"),
    # what no step knows of
    "comm": Ignored(_FAILURES),
    "comm.*": Ignored(_FAILURES),
    "checkpoint": Ignored(_OUTSIDE),
    "checkpoint.*": Ignored("a checkpoint is written between steps"),
    "profiler": Ignored(_OUTSIDE),
    "profiler.*": Ignored("profiled steps are not the ones that are planned"),
    "metrics": Ignored(_OUTSIDE),
    "metrics.*": Ignored("figures are written between steps"),
    "tokenizer": Ignored(_OUTSIDE),
    "tokenizer.*": Ignored(_OUTSIDE),
    "dataloader": Ignored(_OUTSIDE),
    "dataloader.*": Ignored("rows are read beside the step"),
    "validator": Ignored(_OUTSIDE),
    "validator.*": Ignored("validation runs between steps"),
    "debug": Ignored("for debugging"),
    "debug.seed": Ignored("the start of random numbers"),
    "debug.spmd_typechecking": Ignored("a check before the first step"),
    "debug.deterministic": Nearest("kernels as without deterministic algorithms", "predicted too fast"),
    "debug.deterministic_warn_only": Ignored("what is said about operations without such an algorithm"),
    "debug.moe_force_load_balance": Mapped("experts with equal loads"),
    "debug.detect_anomaly": Nearest("backward as without checks for NaN", "predicted too fast"),
    "debug.batch_invariant": Nearest("kernels as without batch invariance", "predicted too fast"),
    "debug.print_config": Ignored("for debugging"),
    "debug.save_config_file": Ignored("for debugging"),
    "debug.enable_structured_logging": Ignored("lines of a log"),
    "override": Ignored("a list of modules to import"),
    "override.imports": Nearest("modules as torchtitan has them without the overrides", "fused kernels: predicted too slow"),
}  # fmt: skip
