"""List Accelerate's options of FSDP and of its mesh, each with its kind and its row of the table."""

from __future__ import annotations

from typing import Any

from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.kinds import (
    ANY,
    BOOL,
    COUNT,
    OBJECT,
    SIZE,
    TEXT,
    TEXTS,
    OptionKind,
    OptionSpec,
    one_of,
)
from piper_interop.neutral.options import Ignored, Mapped, Nearest, Unsupported

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""The strategies of FSDP 1, in the order of torch's numbers from 1."""

SECTIONS = (
    "fsdp_config.fsdp_",
    "TrainingArguments.fsdp_config.",
    "TrainingArguments.fsdp_config.fsdp_",
)
"""The prefixes of FSDP's options: in a launch file, and in TrainingArguments."""

MESHES = ("parallelism_config.parallelism_config_", "TrainingArguments.parallelism_config.")
"""The prefixes of the sizes of the mesh, likewise."""


def is_fsdp(foreign: Foreign) -> bool:
    """Return whether states are sharded by FSDP, of either version."""
    return bool(foreign.get("distributed_type") == "FSDP" or foreign.get("TrainingArguments.fsdp"))


def fsdp(foreign: Foreign, name: str, otherwise: Any = None) -> Any:
    """Return an option of FSDP in whichever file it stands; None and `otherwise` if in none."""
    value = foreign.first(*(f"{section}{name}" for section in SECTIONS))
    return otherwise if value is None else value


STRATEGY = OptionKind(
    f"one of {', '.join(STRATEGIES)}, a number from 1 to {len(STRATEGIES)}, or a truth value (FSDP 2)",
    (str, int, bool),
)
CHECKPOINTS = Ignored("concerns checkpoints, and no step")
LOADING = Ignored("concerns the loading of weights, and no step")
OFFLOAD = Nearest(
    "all states on the host; gradients are copied there when a step ends",
    "too much memory by the shards of gradients, which FSDP copies during backward, and predicted too slow by that copy",
    unless=(False, None),
)
ZERO = Mapped("zero, dp, dp_replicate")

FSDP: dict[str, OptionSpec] = {
    "version": (OptionKind("1 or 2", (int,), (1, 2)), Mapped("FSDP's version")),
    "sharding_strategy": (STRATEGY, ZERO),
    "reshard_after_forward": (STRATEGY, ZERO),
    "backward_prefetch": (
        one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH").or_none,
        (
            Nearest(
                "gathered when it is used (prefetch=0)",
                "predicted too slow: BACKWARD_POST gathers beside reductions",
                unless=("BACKWARD_PRE", "NO_PREFETCH", None),
            ),
            Mapped("prefetch"),
        ),
    ),
    "forward_prefetch": (BOOL, Mapped("prefetch; the next unit is always gathered ahead")),
    "limit_all_gathers": (
        BOOL,
        Nearest(
            "gathers are limited to the prefetch",
            "too little memory: without a limit FSDP gathers ahead as far as the host runs",
            unless=(True,),
        ),
    ),
    "auto_wrap_policy": (
        one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP").or_none,
        Mapped("bucket_mb: a layer, a size, or all parameters"),
    ),
    "transformer_layer_cls_to_wrap": (
        TEXTS,
        Nearest(
            "a unit is a layer of the model",
            "predicted messages are of other sizes if another class is named",
            unless=(None,),
            when=lambda f: not _is_layer(fsdp(f, "transformer_layer_cls_to_wrap")),
        ),
    ),
    "transformer_cls_names_to_wrap": (
        TEXTS,
        Ignored("the plugin's name of transformer_layer_cls_to_wrap"),
    ),
    "min_num_params": (
        SIZE,
        Nearest(
            "a unit is a bucket of that many parameters",
            "FSDP cuts at modules: messages are of other sizes",
            when=lambda f: fsdp(f, "auto_wrap_policy") == "SIZE_BASED_WRAP",
        ),
    ),
    "offload_params": (BOOL, OFFLOAD),
    "cpu_offload": (BOOL, OFFLOAD),
    "activation_checkpointing": (BOOL, Mapped("recompute")),
    "activation_checkpointing_offload": (
        BOOL,
        Mapped("offload, of inputs of recomputed layers"),
    ),
    "mixed_precision_policy": (
        ANY,
        Unsupported("a policy by hand", "give mixed_precision in its place", unless=(None,)),
    ),
    "ignored_modules": (
        ANY,
        Nearest("all modules are sharded", "too little memory by the ignored ones", unless=(None,)),
    ),
    "state_dict_type": (TEXT, CHECKPOINTS),
    "state_dict_config": (ANY, CHECKPOINTS),
    "optim_state_dict_config": (ANY, CHECKPOINTS),
    "use_orig_params": (BOOL.or_none, Ignored("chooses between views of the same parameters")),
    "param_init_fn": (ANY, LOADING),
    "sync_module_states": (BOOL.or_none, LOADING),
    "cpu_ram_efficient_loading": (BOOL.or_none, LOADING),
}
"""The options of FSDP by their names without a prefix."""

XLA = Unsupported("FSDP of PyTorch/XLA", "leave the option out")
TRAINER_FSDP: dict[str, OptionSpec] = {
    **FSDP,
    "xla": (BOOL, XLA),
    "xla_fsdp_v2": (BOOL, XLA),
    "xla_fsdp_grad_ckpt": (BOOL, XLA),
    "xla_fsdp_settings": (OBJECT, XLA),
}

TOKENS = Nearest(
    "each device has neighbouring tokens",
    "predicted too slow in attention, which torch balances between the first and the last tokens",
    unless=(1, None),
)
MESH: dict[str, OptionSpec] = {
    "dp_replicate_size": (COUNT, Mapped("dp_replicate")),
    "dp_shard_size": (COUNT, Mapped("dp")),
    "tp_size": (
        COUNT,
        Nearest(
            "tp, with sharded logits",
            "too little memory by the logits, which transformers' plan gathers",
            unless=(1, None),
        ),
    ),
    "cp_size": (COUNT, TOKENS),
    "cp_backend": (one_of("torch"), Ignored("the only one")),
    "cp_comm_strategy": (one_of("allgather", "alltoall"), Mapped('cp by "gather" or "ring"')),
    "sp_size": (COUNT, Mapped("cp by heads (Ulysses)")),
    "sp_backend": (one_of("deepspeed"), Ignored("the only one")),
    "sp_seq_length": (COUNT.or_none, Ignored("--length says the tokens of a row")),
    "sp_seq_length_is_variable": (BOOL, Ignored("rows of one length are predicted (--length)")),
    "sp_attn_implementation": (TEXT, Ignored("a choice between kernels of the same work")),
    "tp_handler": (ANY, Ignored("asks for nothing")),
    "tp_handler.enable_async_tp": (
        BOOL,
        Nearest("sums over tp are not hidden", "predicted too slow"),
    ),
    "cp_handler": (ANY, Ignored("asks for nothing")),
    "cp_handler.cp_comm_strategy": (one_of("allgather", "alltoall"), Mapped("cp")),
    "sp_handler": (ANY, Ignored("asks for nothing")),
    **{
        f"sp_handler.{name}": (ANY, Ignored("kernels and lengths, which --length says"))
        for name in ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
    },
}
"""The sizes of the mesh by their names without a prefix."""


def _is_layer(names: Any) -> bool:
    """Return whether the only class that is wrapped is called as layers and blocks are."""
    classes = names.split(",") if isinstance(names, str) else [str(name) for name in names or ()]
    return len(classes) == 1 and classes[0].strip().endswith(("Layer", "Block"))
