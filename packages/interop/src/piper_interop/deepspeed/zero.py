"""List the options of DeepSpeed's section `zero_optimization`, each with its kind and its row of the table."""

from __future__ import annotations

from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.kinds import (
    ANY,
    BOOL,
    COUNT,
    FRACTION,
    INT,
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

MAX_REUSE = 10**9
"""The parameters between two uses of one that stage 3 leaves gathered, by DeepSpeed's default (runtime/zero/config.py).

The default of max_live_parameters is the same number: with more of them gathered, stage 3 gathers none ahead.
"""
BUCKET = 5 * 10**8
"""The elements of a bucket of gradients, likewise."""
PREFETCH = 5 * 10**7
"""The elements that stage 3 gathers ahead of their use, likewise."""
PERSISTENT = 10**5
"""The elements below which stage 3 leaves a parameter whole, likewise."""


def stage(foreign: Foreign) -> int:
    """Return the ZeRO stage; a truth value in place of the section is the old form of stage 1."""
    level = foreign.get("zero_optimization.stage", foreign.get("zero_optimization", 0))
    return int(level) if isinstance(level, int) else 0


def sharded(foreign: Foreign) -> bool:
    """Return whether any states are sharded."""
    return stage(foreign) > 0


def gathers(foreign: Foreign) -> bool:
    """Return whether parameters are sharded (stage 3)."""
    return stage(foreign) == 3


def gathers_not(foreign: Foreign) -> bool:
    """Return whether states, but not parameters, are sharded (stages 1 and 2)."""
    return stage(foreign) in (1, 2)


def ahead(foreign: Foreign) -> int:
    """Return the elements that stage 3 gathers ahead of their use: none if nothing may be live."""
    bound = _elements(foreign, "max_live_parameters", MAX_REUSE)
    return min(bound, _elements(foreign, "prefetch_bucket_size", PREFETCH))


def persistent(foreign: Foreign) -> int:
    """Return the elements of a parameter up to which stage 3 leaves it whole on each rank."""
    return _elements(foreign, "param_persistence_threshold", PERSISTENT)


def _elements(foreign: Foreign, name: str, default: int) -> int:
    elements = foreign.first(f"zero_optimization.stage3_{name}", f"zero_optimization.{name}")
    return default if elements is None else int(elements)


def ratio_on_host(foreign: Foreign) -> float:
    """Return the fraction of the optimizer that stage 3 runs on the host, where an optimizer is there."""
    return float(foreign.get("zero_optimization.offload_optimizer.ratio", 1.0))


def optim_on_host(foreign: Foreign) -> bool:
    """Return whether the optimizer, or a part of it, runs on the host; a truth value is the old form."""
    old = foreign.get("zero_optimization.cpu_offload", False)
    return bool(old) or foreign.get("zero_optimization.offload_optimizer.device", "none") == "cpu"


def params_on_host(foreign: Foreign) -> bool:
    """Return whether the parameters of stage 3 are on the host; a truth value is the old form."""
    old = foreign.get("zero_optimization.cpu_offload_param", False)
    named = foreign.get("zero_optimization.offload_param.device", "none")
    return gathers(foreign) and (bool(old) or named == "cpu")


STAGE = "leave the option out, or take a higher ZeRO stage in its place"
OFFLOAD = (
    Unsupported(
        "offload of parameters to disks",
        STAGE,
        unless=(None, False, True, "none", "cpu"),
        when=gathers,
    ),
    Unsupported(
        "parameters on the host with their optimizer on the device",
        "give offload_optimizer, too",
        unless=(None, False, "none"),
        when=lambda foreign: gathers(foreign) and not optim_on_host(foreign),
    ),
    Mapped("parameters on the host, which DeepSpeed moves in stage 3 alone"),
)
ON_HOST = (
    Nearest(
        "the optimizer on the host; gradients are copied there when a step ends",
        "too much memory by the gradients, which DeepSpeed copies during backward, and predicted too slow by that copy",
        unless=(None, False, "none", "nvme"),
        when=lambda foreign: sharded(foreign) and ratio_on_host(foreign) != 0,
    ),
    Unsupported("offload of states to disks", STAGE, unless=(None, False, True, "none", "cpu")),
    Ignored("asks for no offload, or ZeRO is off, without which DeepSpeed offloads nothing"),
)
ZENFLOW = Unsupported("ZenFlow (updates in the host)", STAGE, unless=(None,))
PART_OF_OFFLOAD = Ignored("a part of the offload, which `device` decides")
RATIO = (
    Nearest(
        "the optimizer of all parameters on the host, as they are",
        "too little memory of devices by the states that DeepSpeed keeps there, and predicted too slow",
        unless=(1, None),
        when=lambda foreign: gathers(foreign) and params_on_host(foreign),
    ),
    Unsupported(
        "offload of a part of the optimizer below stage 3",
        "leave the option out",
        unless=(1, None),
        when=lambda foreign: optim_on_host(foreign) and not gathers(foreign),
    ),
    Mapped("the first layers, as many of all, whose optimizer is on the host"),
)
WIRE = "leave the option out: messages are then of the model's dtype"
NUMERICS = Ignored("changes no time or memory that is counted")
CHECKPOINTS = Ignored("concerns checkpoints, and no step")
LEAVES = Ignored("modules whose parameters are gathered as one, which buckets decide here")
GATHERS = Mapped("bucket_mb and prefetch of gathered parameters (stage 3)")
REUSED = Nearest(
    "gathered parameters are dropped after each use",
    "too little memory by the parameters that DeepSpeed leaves gathered (2 bytes each), and predicted too slow by "
    "gathering them again",
    unless=(0, None),
    when=gathers,
)
LIVE = (
    Nearest(
        "gathered ahead, however much is gathered already",
        "predicted too fast where this bound holds gathers back",
        unless=(0, None, MAX_REUSE),
        when=lambda foreign: gathers(foreign) and ahead(foreign) > 0,
    ),
    Mapped("prefetch: nothing is gathered ahead at 0"),
)
FETCH = Nearest(
    "gathered in buckets by all-gathers",
    "predicted too fast",
    when=gathers,
)

SECTION: dict[str, OptionSpec] = {
    "stage": (OptionKind("0, 1, 2 or 3", (int,), (0, 1, 2, 3)), Mapped("zero")),
    "contiguous_gradients": (
        BOOL,
        Nearest(
            "gradients are copied into buckets",
            "too much memory by one bucket",
            unless=(True,),
            when=gathers_not,
        ),
    ),
    "reduce_scatter": (
        BOOL,
        Nearest(
            "gradients are reduced by reduce-scatters",
            "predicted too fast: DeepSpeed sends all of them to all by all-reduces",
            unless=(True,),
            when=sharded,
        ),
    ),
    "reduce_bucket_size": (
        COUNT,
        (
            Nearest(
                "gradients are reduced in the buckets in which parameters are gathered",
                "predicted too slow by the latency of more messages, if this is larger than the prefetch",
                unless=(None,),
                when=lambda f: (
                    gathers(f) and ahead(f) not in (0, f["zero_optimization.reduce_bucket_size"])
                ),
            ),
            Mapped("bucket_mb"),
        ),
    ),
    "use_multi_rank_bucket_allreduce": (
        BOOL,
        Ignored("chooses between forms of the same reduction"),
    ),
    "allgather_partitions": (
        BOOL,
        Nearest(
            "updated parameters are gathered by all-gathers",
            "predicted too fast",
            unless=(True,),
            when=gathers_not,
        ),
    ),
    "allgather_bucket_size": (
        SIZE,
        Nearest(
            "parameters are gathered in the buckets of their gradients",
            "predicted too slow, by the latency of more messages, if this is larger than reduce_bucket_size",
            unless=(None, BUCKET),
            when=lambda f: (
                gathers_not(f)
                and f.get("zero_optimization.allgather_bucket_size")
                != f.get("zero_optimization.reduce_bucket_size", BUCKET)
            ),
        ),
    ),
    "overlap_comm": (
        BOOL.or_none,
        Mapped("overlap"),
    ),
    "compute_grad_norm": (BOOL, Mapped("clip_norm")),
    "load_from_fp32_weights": (BOOL, CHECKPOINTS),
    "elastic_checkpoint": (BOOL, CHECKPOINTS),
    "offload_param": (OBJECT.or_none, PART_OF_OFFLOAD),
    "offload_param.device": (one_of("none", "cpu", "nvme"), OFFLOAD),
    "offload_param.nvme_path": (TEXT.or_none, PART_OF_OFFLOAD),
    "offload_param.buffer_count": (SIZE, PART_OF_OFFLOAD),
    "offload_param.buffer_size": (SIZE, PART_OF_OFFLOAD),
    "offload_param.max_in_cpu": (SIZE, PART_OF_OFFLOAD),
    "offload_param.pin_memory": (BOOL, PART_OF_OFFLOAD),
    "offload_optimizer": (OBJECT.or_none, PART_OF_OFFLOAD),
    "offload_optimizer.device": (one_of("none", "cpu", "nvme"), ON_HOST),
    "offload_optimizer.nvme_path": (TEXT.or_none, PART_OF_OFFLOAD),
    "offload_optimizer.buffer_count": (SIZE, PART_OF_OFFLOAD),
    "offload_optimizer.pin_memory": (BOOL, PART_OF_OFFLOAD),
    "offload_optimizer.pipeline_read": (BOOL, PART_OF_OFFLOAD),
    "offload_optimizer.pipeline_write": (BOOL, PART_OF_OFFLOAD),
    "offload_optimizer.fast_init": (BOOL, PART_OF_OFFLOAD),
    "offload_optimizer.ratio": (FRACTION, RATIO),
    "offload_optimizer.super_offload": (BOOL, Unsupported("SuperOffload", STAGE)),
    "offload_optimizer.cpuadam_cores_perc": (NUMBER, PART_OF_OFFLOAD),
    "zenflow": (
        OBJECT.or_none,
        Unsupported("ZenFlow (updates in the host)", STAGE, unless=(None,)),
    ),
    "zenflow.topk_ratio": (NUMBER, ZENFLOW),
    "zenflow.select_strategy": (one_of("auto", "step", "epoch"), ZENFLOW),
    "zenflow.select_interval": (ANY, ZENFLOW),
    "zenflow.update_interval": (ANY, ZENFLOW),
    "zenflow.overlap_step": (BOOL, ZENFLOW),
    "zenflow.offload": (BOOL, ZENFLOW),
    "zenflow.auto_ratio": (NUMBER, ZENFLOW),
    "zenflow.full_warm_up_rounds": (INT, ZENFLOW),
    "zenflow.pt_reserved_cores_perc": (NUMBER, ZENFLOW),
    "zenflow.steps_per_epoch": (INT.or_none, ZENFLOW),
    "sub_group_size": (
        SIZE,
        Ignored("splits the optimizer's update into groups, whose launches are not counted"),
    ),
    "cpu_offload": (BOOL.or_none, ON_HOST),
    "cpu_offload_param": (BOOL.or_none, OFFLOAD),
    "cpu_offload_use_pin_memory": (BOOL.or_none, PART_OF_OFFLOAD),
    "prefetch_bucket_size": (SIZE, GATHERS),
    "param_persistence_threshold": (SIZE, Mapped("whole_mb")),
    "model_persistence_threshold": (
        SIZE,
        Ignored("a bound on the parameters that stay whole by param_persistence_threshold"),
    ),
    "max_live_parameters": (SIZE, LIVE),
    "max_reuse_distance": (SIZE, REUSED),
    "gather_16bit_weights_on_model_save": (BOOL, CHECKPOINTS),
    "stage3_gather_fp16_weights_on_model_save": (BOOL, CHECKPOINTS),
    "module_granularity_threshold": (INT, LEAVES),
    "use_all_reduce_for_fetch_params": (BOOL, FETCH),
    "allgather_sequential": (BOOL, FETCH),
    "ignore_unused_parameters": (BOOL, NUMERICS),
    "legacy_stage1": (
        BOOL,
        Unsupported("the stage 1 of DeepSpeed before 0.5.9", "leave the option out"),
    ),
    "round_robin_gradients": (
        BOOL,
        Ignored("orders gradients for offload, of which there is none"),
    ),
    "parameter_alignment": (BOOL, Ignored("pads each parameter to 16 bytes")),
    "zero_hpz_partition_size": (
        SIZE,
        Unsupported(
            "a second copy of parameters in each node (hpZ)",
            "give 1, which gathers over all ranks, or hybrid sharding (Accelerate's HYBRID_SHARD)",
            unless=(0, 1),
        ),
    ),
    "zero_quantized_weights": (BOOL, Unsupported("gathers of quantised parameters", WIRE)),
    "zero_quantized_nontrainable_weights": (
        BOOL,
        Unsupported("parameters stored in fewer bits", "leave the option out"),
    ),
    "zero_quantized_gradients": (BOOL, Unsupported("reductions of quantised gradients", WIRE)),
    "zeropp_loco_param": (OBJECT.or_none, Unsupported("LoCo-Zero++", WIRE, unless=(None,))),
    "mics_shard_size": (INT, Mapped("dp and dp_replicate (MiCS)")),
    "mics_hierarchical_params_gather": (
        BOOL,
        Nearest("parameters are gathered in one step", "predicted too slow between nodes"),
    ),
    "memory_efficient_linear": (BOOL, NUMERICS),
    "pipeline_loading_checkpoint": (BOOL, CHECKPOINTS),
    "override_module_apply": (BOOL, NUMERICS),
    "log_trace_cache_warnings": (BOOL, NUMERICS),
    "enable_sanity_checks": (BOOL, NUMERICS),
    "save_muon_momentum_buffer_in_memory": (BOOL, PART_OF_OFFLOAD),
    "leaf_module": (OBJECT.or_none, LEAVES),
    "leaf_module.classes": (TEXTS, LEAVES),
    "leaf_module.names": (TEXTS, LEAVES),
    "leaf_module.name_suffixes": (TEXTS, LEAVES),
}
"""The options of the section without the prefix "stage3_"."""

STAGE_3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
"""The options that are written with "stage3_" before them as a rule; DeepSpeed takes them without it, too."""

ZERO: dict[str, OptionSpec] = {
    "zero_optimization": (BOOL.or_none, Mapped("zero")),
    **{f"zero_optimization.{name}": option for name, option in SECTION.items()},
    **{f"zero_optimization.stage3_{name}": SECTION[name] for name in STAGE_3},
}
