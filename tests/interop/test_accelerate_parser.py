"""Accelerate and transformers know each option of the table, take the exported files, and derive the same sizes.

PIPER_ACCELERATE_PYTHON names an interpreter that has accelerate 1.15 and transformers 5; without it the tests are
skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages.interop.tests.jobs import ACCELERATE, LLAMA, imported
from piper_interop import DeviceLayout, JobDescription, Recomputation, export_job
from piper_interop.accelerate.table import TABLE
from piper_interop.neutral.options import row_of
from tests.interop.real_parsers import answer

PYTHON = "PIPER_ACCELERATE_PYTHON"
pytestmark = pytest.mark.long

FIELDS = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import dataclasses as plugins
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

def fields(record):
    return [f.name for f in dataclasses.fields(record)]

flags = [option[2:] for action in launch_command_parser()._actions for option in action.option_strings
         if option.startswith("--")]
print(json.dumps({
    "launch": fields(ClusterConfig),
    "fsdp": fields(plugins.FullyShardedDataParallelPlugin),
    "fsdp flags": [f for f in flags if f.startswith("fsdp_")],
    "mesh": fields(ParallelismConfig),
    "mesh flags": [f for f in flags if f.startswith("parallelism_config_")],
    "dynamo flags": [f for f in flags if f.startswith("dynamo_")],
    "deepspeed": fields(plugins.DeepSpeedPlugin),
    "fp8": fields(plugins.AORecipeKwargs) + fields(plugins.TERecipeKwargs) + fields(plugins.MSAMPRecipeKwargs),
    "trainer": fields(TrainingArguments),
    "accelerator": fields(AcceleratorConfig),
}))
"""

PARSED = """
import json, os, sys, tempfile, warnings
warnings.simplefilter("ignore")
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import dataclasses as plugins
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from transformers import TrainingArguments
import torch
# The plugin asks for the number of a device that parameters are made on, also where nothing is made.
plugins.is_cuda_available, torch.cuda.current_device = lambda: True, lambda: 0
results = []
for text, arguments in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        open(path, "w").write(text)
        config = load_config_from_file(path)
    for name in [n for n in os.environ if n.startswith(("FSDP_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]
    for name, value in {**config.fsdp_config, **config.parallelism_config}.items():
        os.environ[name.upper()] = str(value)
    result = {"devices": config.num_processes, "kind": config.distributed_type.value}
    if config.fsdp_config:
        plugin = FullyShardedDataParallelPlugin()
        result["reshard"] = getattr(plugin.reshard_after_forward, "name", plugin.reshard_after_forward)
        result["strategy"] = getattr(plugin.sharding_strategy, "name", None)
        result["recompute"] = plugin.activation_checkpointing
    mesh = ParallelismConfig()
    result["mesh"] = [mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size, mesh.cp_size]
    result["total"] = mesh.total_size
    if mesh.cp_size > 1:
        result["exchange"] = mesh.cp_handler.cp_comm_strategy
    if arguments is not None:
        trainer = TrainingArguments(output_dir="out", use_cpu=True, **{k: v for k, v in arguments.items() if k != "bf16"})
        result["rows"] = [trainer.per_device_train_batch_size, trainer.gradient_accumulation_steps]
        result["clip"] = trainer.max_grad_norm
    results.append(result)
print(json.dumps(results))
"""


def missing(names: list[str], prefix: str) -> list[str]:
    """Return the names that have no row under a prefix."""
    return [name for name in names if not row_of(TABLE, f"{prefix}{name}")]


def test_the_table_has_every_field_of_the_installed_versions() -> None:
    fields = answer(PYTHON, FIELDS, None)
    assert len(fields["trainer"]) > 80
    prefixes = {
        "launch": "",
        "fsdp": "fsdp_config.fsdp_",
        "fsdp flags": "fsdp_config.",
        "mesh": "parallelism_config.parallelism_config_",
        "mesh flags": "parallelism_config.",
        "dynamo flags": "dynamo_config.",
        "deepspeed": "deepspeed_config.",
        "fp8": "fp8_config.",
        "trainer": "TrainingArguments.",
        "accelerator": "TrainingArguments.accelerator_config.",
    }
    rest = {part: missing(fields[part], prefix) for part, prefix in prefixes.items()}
    # FSDP's version is written without a prefix of its own in the plugin.
    rest["fsdp"] = [name for name in rest["fsdp"] if name != "fsdp_version"]
    assert {part: names for part, names in rest.items() if names} == {}


def test_negative_control_a_field_without_a_row_is_found() -> None:
    assert missing(["bf16", "bf17"], "TrainingArguments.") == ["bf17"]


def test_files_have_the_same_sizes_as_by_accelerate_itself(tmp_path: Path) -> None:
    questions = [[yaml.safe_dump(options), None] for options in ACCELERATE.values()]
    parsed = dict(zip(ACCELERATE, answer(PYTHON, PARSED, questions), strict=True))
    sets = ("per_device_train_batch_size=2",)
    layouts = {
        name: imported("accelerate", tmp_path, options, devices=None, sets=sets).layout
        for name, options in ACCELERATE.items()
    }
    assert all(p["devices"] == layouts[name].devices for name, p in parsed.items())
    assert parsed["hybrid"]["mesh"] == [2, 4, 2, 1]
    assert parsed["hybrid"]["reshard"] == layouts["hybrid"].reshard
    assert (parsed["fsdp1"]["strategy"], layouts["fsdp1"].reshard) == ("SHARD_GRAD_OP", False)


EXPORTED = [
    JobDescription(
        "a",
        LLAMA,
        4096,
        64,
        2,
        DeviceLayout(dp=8, zero=3, dp_replicate=2, tp=2),
        (Recomputation("inputs"),),
    ),
    JobDescription(
        "b", LLAMA, 4096, 32, 1, DeviceLayout(dp=2, cp=4, attention="gather", zero=3, over_cp=True)
    ),
    JobDescription(
        "c",
        LLAMA,
        4096,
        32,
        1,
        DeviceLayout(dp=2, cp=4, attention="ring", zero=3, over_cp=True, reshard=False),
    ),
    JobDescription("d", LLAMA, 4096, 16, 1, DeviceLayout(dp=8), clip_norm=1.0),
]


def test_exports_are_taken_by_accelerate() -> None:
    files = [export_job("accelerate", described).files for described in EXPORTED]
    questions: list[list[Any]] = [
        [f["accelerate_config.yaml"], json.loads(f["training_args.json"])] for f in files
    ]
    for job, parsed in zip(EXPORTED, answer(PYTHON, PARSED, questions), strict=True):
        layout = job.layout
        assert parsed["devices"] == layout.devices
        assert parsed["rows"] == [job.rows, job.microbatches]
        assert parsed["clip"] == (job.clip_norm or 0)
        if layout.zero:
            assert parsed["total"] == layout.devices
            assert parsed["mesh"] == [layout.dp_replicate, layout.dp, layout.tp, layout.cp]
            assert (parsed["reshard"], parsed["recompute"]) == (layout.reshard, bool(job.recompute))
        if layout.cp > 1:
            assert (
                parsed["exchange"] == {"ring": "alltoall", "gather": "allgather"}[layout.attention]
            )


def test_deepspeed_files_that_are_exported_here_are_named_in_the_launch_file() -> None:
    files = export_job(
        "accelerate", JobDescription("e", LLAMA, 4096, 16, 1, DeviceLayout(dp=8, zero=2))
    ).files
    launch = yaml.safe_load(files["accelerate_config.yaml"])
    assert launch["deepspeed_config"]["deepspeed_config_file"] in files
    (parsed,) = answer(PYTHON, PARSED, [[files["accelerate_config.yaml"], None]])
    assert (parsed["kind"], parsed["devices"]) == ("DEEPSPEED", 8)
