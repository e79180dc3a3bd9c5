"""List the options of a file of `accelerate config`, each with its kind and its row of the table."""

from __future__ import annotations

from piper_interop.accelerate.fsdp import FSDP, MESH, MESHES, SECTIONS
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.kinds import (
    ANY,
    BOOL,
    COUNT,
    INT,
    NUMBER,
    SIZE,
    TEXT,
    OptionKind,
    OptionSpec,
    one_of,
)
from piper_interop.neutral.options import SAYS_NOTHING, Ignored, Mapped, Nearest, Unsupported

TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
HOSTS = Ignored("concerns how processes are started")


def float8_recipe(foreign: Foreign) -> str:
    """Return the recipe of fp8, of torchao or of Transformer Engine; "" for another, or none.

    The file names the backend, torchao or Transformer Engine; without a name Accelerate takes an installed one.
    """
    if foreign.get("mixed_precision") != "fp8" or foreign.get("distributed_type") == "DEEPSPEED":
        return ""
    backend = str(foreign.get("fp8_config.backend", "")).upper()
    if backend == "AO":
        return "tensorwise"
    if backend != "TE":
        return ""
    return "mxfp8" if foreign.get("fp8_config.use_mxfp8_block_scaling") else "delayed"


FP8 = Unsupported(
    "fp8 beside DeepSpeed, or of other backends than AO and TE,",
    "take bf16 in the file",
    unless=("no", "bf16", "fp16", None),
    stand_in="bf16",
    how="taken as bf16, and so predicted too slow",
    when=lambda foreign: not float8_recipe(foreign),
)
GATHERED = Nearest(
    "parameters gathered in bfloat16",
    "predicted too slow",
    when=lambda foreign: bool(float8_recipe(foreign)),
)
PART_OF_FP8 = Ignored("a part of fp8, which mixed_precision decides")
GRAPH = Ignored("a choice inside of the compiler, whose graph is not modelled")
DEEPSPEED = Mapped("DeepSpeed's options")
CORES = Ignored("concerns cores of the host")
TPU = Unsupported("TPUs", "leave the option out", unless=(*SAYS_NOTHING, "no"))
"""The options of TPUs; `accelerate config` writes `tpu_env: []` and `downcast_bf16: 'no'` into every file."""

LAUNCH: dict[str, OptionSpec] = {
    "compute_environment": (
        TEXT,
        Unsupported("SageMaker", "give LOCAL_MACHINE", unless=("LOCAL_MACHINE",)),
    ),
    "distributed_type": (
        TEXT,
        (
            Unsupported(
                "Megatron-LM behind Accelerate",
                "give Megatron's own options to `piper import megatron`",
                unless=("MULTI_GPU", "NO", "FSDP", "DEEPSPEED"),
                when=lambda f: f["distributed_type"] == "MEGATRON_LM",
            ),
            Unsupported("devices other than CUDA's", "take MULTI_GPU or FSDP in the file", unless=TYPES),
            Mapped("DDP, FSDP or DeepSpeed"),
        ),
    ),
    "mixed_precision": (one_of("no", "fp16", "bf16", "fp8").or_none, (FP8, Mapped("precision"))),
    "num_processes": (INT, Mapped("devices")),
    "num_machines": (COUNT, Mapped("devices of a node")),
    "use_cpu": (BOOL, Unsupported("training on CPUs", "give false")),
    "debug": (BOOL, Ignored("checks shapes of messages; a debugged run is slower")),
    "fp16": (BOOL, Unsupported("fp16 (an old option)", "give mixed_precision: fp16", unless=(False, None))),
    "main_training_function": (TEXT, HOSTS),
    "machine_rank": (SIZE, HOSTS),
    "gpu_ids": (ANY, HOSTS),
    "main_process_ip": (TEXT.or_none, HOSTS),
    "main_process_port": (INT.or_none, HOSTS),
    "rdzv_backend": (TEXT.or_none, HOSTS),
    "same_network": (BOOL.or_none, HOSTS),
    "enable_cpu_affinity": (BOOL, CORES),
    "dynamo_backend": (TEXT, Mapped("the kernel stack")),
    "dynamo_config.dynamo_backend": (TEXT, Mapped("the kernel stack")),
    "dynamo_config.dynamo_mode": (TEXT, GRAPH),
    "dynamo_config.dynamo_use_fullgraph": (BOOL, GRAPH),
    "dynamo_config.dynamo_use_dynamic": (BOOL, GRAPH),
    "dynamo_config.dynamo_use_regional_compilation": (BOOL, GRAPH),
    "mpirun_config.mpirun_hostfile": (TEXT, HOSTS),
    "mpirun_config.mpirun_ccl": (ANY, HOSTS),
    "megatron_lm_config.*": (
        ANY,
        Unsupported("Megatron-LM behind Accelerate", "give Megatron's own options to `piper import megatron`", unless=()),
    ),
    **{
        name: (ANY, TPU)
        for name in (
            "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands",
            "tpu_vm", "tpu_env",
        )
    },
    **{
        name: (OptionKind("an object", (dict,), empty=True), Ignored("asks for nothing"))
        for name in (
            "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config",
            "mpirun_config", "dynamo_config",
        )
    },
    "deepspeed_config.deepspeed_config_file": (TEXT, DEEPSPEED),
    "deepspeed_config.zero_stage": (SIZE, DEEPSPEED),
    "deepspeed_config.gradient_accumulation_steps": (COUNT, DEEPSPEED),
    "deepspeed_config.gradient_clipping": (NUMBER, DEEPSPEED),
    "deepspeed_config.offload_optimizer_device": (one_of("none", "cpu", "nvme"), DEEPSPEED),
    "deepspeed_config.offload_param_device": (one_of("none", "cpu", "nvme"), DEEPSPEED),
    "deepspeed_config.offload_optimizer_nvme_path": (TEXT, HOSTS),
    "deepspeed_config.offload_param_nvme_path": (TEXT, HOSTS),
    "deepspeed_config.zero3_init_flag": (BOOL, Ignored("concerns the loading of weights")),
    "deepspeed_config.zero3_save_16bit_model": (BOOL, Ignored("concerns checkpoints")),
    "deepspeed_config.deepspeed_moe_layer_cls_names": (TEXT, Ignored("gathers experts as one unit")),
    "deepspeed_config.transformer_moe_cls_names": (TEXT, Ignored("gathers experts as one unit")),
    "deepspeed_config.hf_ds_config": (TEXT, DEEPSPEED),
    "deepspeed_config.seq_parallel_communication_data_type": (
        TEXT,
        Ignored("gradients over sequence-parallel ranks are summed with those over replicas here"),
    ),
    "deepspeed_config.is_train_batch_min": (BOOL, HOSTS),
    "deepspeed_config.deepspeed_hostfile": (TEXT, HOSTS),
    "deepspeed_config.deepspeed_exclusion_filter": (TEXT, HOSTS),
    "deepspeed_config.deepspeed_inclusion_filter": (TEXT, HOSTS),
    "deepspeed_config.deepspeed_multinode_launcher": (TEXT, HOSTS),
    "deepspeed_config.enable_msamp": (BOOL, Unsupported("fp8 by MS-AMP", "leave the option out")),
    "deepspeed_config.msamp_opt_level": (TEXT, PART_OF_FP8),
    **{
        f"fp8_config.{name}": (kind, PART_OF_FP8)
        for name, kind in {
            "backend": TEXT, "use_autocast_during_eval": BOOL, "margin": INT, "interval": INT, "fp8_format": TEXT,
            "amax_history_length": INT, "amax_history_len": INT, "amax_compute_algorithm": TEXT,
            "amax_compute_algo": TEXT, "override_linear_precision": ANY, "optimization_level": TEXT,
            "opt_level": TEXT, "pad_inner_dim": BOOL,
            "use_mxfp8_block_scaling": BOOL, "config": ANY, "module_filter_func": ANY,
        }.items()
    },
    "fp8_config.enable_fsdp_float8_all_gather": (BOOL, GATHERED),
    **{f"{SECTIONS[0]}{name}": option for name, option in FSDP.items()},
    **{f"{MESHES[0]}{name}": option for name, option in MESH.items()},
}  # fmt: skip
"""The options of a file of `accelerate config`; test_accelerate_parser.py compares them with the installed version."""
