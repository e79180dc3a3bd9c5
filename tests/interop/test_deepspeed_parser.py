"""DeepSpeed's own parser knows each option of the table, takes what is exported, and derives the same numbers.

PIPER_DEEPSPEED_PYTHON names an interpreter that has deepspeed 0.19; without it the tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packages.interop.tests.jobs import DEEPSPEED, LLAMA, MIXTURE, imported
from piper_interop import DeviceLayout, JobDescription, Recomputation, export_job
from piper_interop.deepspeed.table import KINDS, TABLE
from piper_interop.neutral.options import row_of
from tests.interop.real_parsers import answer

PYTHON = "PIPER_DEEPSPEED_PYTHON"
pytestmark = pytest.mark.long

FIELDS = """
import dataclasses, json, logging, re, sys, typing
logging.disable(50)
from pydantic import BaseModel
from deepspeed.autotuning import constants as autotuning
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling import constants as profiling
from deepspeed.runtime import config, constants, lr_schedules
from deepspeed.runtime.activation_checkpointing import config as recomputing
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor import constants as swapping
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

def models(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models(part)

def fields(model, above):
    for name, field in model.model_fields.items():
        for called in {name, field.alias or name}:
            inner = list(models(field.annotation))
            if not inner:
                yield above + called
            for other in inner:
                yield from fields(other, above + called + ".")

def named(module, prefix):
    for name, value in vars(module).items():
        if re.match(prefix, name) and not re.search("_DEFAULT|_FORMAT|_DICT", name) and isinstance(value, str):
            yield value

names = [n for above, model in {
    "zero_optimization.": DeepSpeedZeroConfig, "hybrid_engine.": config.HybridEngineConfig,
    "bf16.": DeepSpeedBF16Config, "fp16.": DeepSpeedFP16Config, "tensor_parallel.": TPTrainingConfig,
    "compile.": CompileConfig, "weight_quantization.": WeightQuantConfig, "comms_logger.": CommsLoggerConfig,
    "": DeepSpeedMonitorConfig, "timers.throughput.": DeepSpeedThroughputTimerConfig,
}.items() for n in fields(model, above)]
names += ["expert_parallel." + f.name for f in dataclasses.fields(AutoEPConfig) if not f.name.startswith("_")]
names += ["activation_checkpointing." + n for n in recomputing.ACT_CHKPT_DEFAULT]
names += ["aio." + n for n in named(swapping, "AIO_")]
names += ["flops_profiler." + n for n in named(profiling, "FLOPS_PROFILER_")]
names += ["scheduler.params." + n for n in named(lr_schedules, "LR_RANGE_TEST_|CYCLE_|DECAY_|WARMUP_M|WARMUP_N|COS|TOTAL")]
names += ["autotuning." + v for n, v in vars(autotuning).items()
          if n + "_DEFAULT" in vars(autotuning) and n.startswith("AUTOTUNING_")]
names += ["pipeline." + n for n in config.get_pipeline_config({})]
names += [v for n, v in vars(constants).items() if n + "_DEFAULT" in vars(constants) and isinstance(v, str)
          and not re.match("FP16_|BFLOAT16_|TORCH_AUTOCAST_|CHECKPOINT_|OPTIMIZER_|SCHEDULER_|ROUTE", n)]
names += list(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
names += ["zero_optimization." + n for n in config._REMOVED_ZERO_CONFIG_KEYS]
print(json.dumps(sorted(set(names))))
"""

PARSED = """
import json, logging, sys
logging.disable(50)
from deepspeed.runtime.config import DeepSpeedConfig
class Ranks:
    def __init__(self, replicas):
        self.get_data_parallel_world_size = lambda: replicas
results = []
import deepspeed.comm as dist
dist.get_rank = lambda group=None: 0
for options, replicas in json.load(sys.stdin):
    parsed = DeepSpeedConfig(options, mpu=Ranks(replicas))
    zero = parsed.zero_config
    results.append({
        "batch": [parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps],
        "stage": int(zero.stage), "clip": parsed.gradient_clipping, "tp": parsed.tensor_parallel_config.autotp_size,
        "bf16": parsed.bfloat16_config.enabled, "reduce": str(parsed.communication_data_type),
        "buckets": [zero.reduce_bucket_size, zero.allgather_bucket_size, zero.prefetch_bucket_size],
        "overlap": zero.overlap_comm, "ep": parsed.expert_parallel_config.autoep_size,
    })
print(json.dumps(results))
"""


def test_the_table_has_every_field_of_the_installed_version() -> None:
    names = answer(PYTHON, FIELDS, None)
    assert len(names) > 200
    # Some constants are names within a section that they do not say.
    known = {name.rpartition(".")[2] for name in KINDS}
    assert [name for name in names if not row_of(TABLE, name) and name not in known] == []


def test_defaults_are_those_of_the_installed_version() -> None:
    (parsed,) = answer(PYTHON, PARSED, [[{"train_batch_size": 8}, 8]])
    assert parsed["clip"] == 1.0
    assert parsed["buckets"] == [5 * 10**8, 5 * 10**8, 5 * 10**7]
    staged = answer(
        PYTHON,
        PARSED,
        [[{"train_batch_size": 8, "zero_optimization": {"stage": n}}, 8] for n in (1, 2, 3)],
    )
    assert [p["overlap"] for p in staged] == [False, False, True]


def test_files_have_the_same_numbers_as_by_deepspeed_itself(tmp_path: Path) -> None:
    described = [imported("deepspeed", tmp_path, options) for options in DEEPSPEED.values()]
    questions = [[o, d.layout.replicas] for o, d in zip(DEEPSPEED.values(), described, strict=True)]
    for job, parsed in zip(described, answer(PYTHON, PARSED, questions), strict=True):
        assert parsed["batch"] == [job.global_batch, job.rows, job.microbatches]
        assert parsed["stage"] == job.layout.zero
        assert parsed["clip"] == job.clip_norm
        assert max(1, parsed["tp"]) == job.layout.tp


EXPORTED = [
    JobDescription("a", LLAMA, 4096, 64, 2, DeviceLayout(dp=8, zero=3, bucket_mb=100, prefetch=1)),
    JobDescription(
        "b", LLAMA, 4096, 32, 1, DeviceLayout(tp=4, dp=4, zero=2), (Recomputation("inputs"),)
    ),
    JobDescription(
        "c",
        LLAMA,
        4096,
        8,
        1,
        DeviceLayout(dp=2, cp=4, attention="heads", zero=1, over_cp=True),
        reduce="bfloat16",
    ),
    JobDescription("d", MIXTURE, 4096, 16, 1, DeviceLayout(dp=16, ep=8, zero=1), params="bfloat16"),
]


def test_exports_are_taken_by_deepspeed() -> None:
    files = [json.loads(export_job("deepspeed", d).files["ds_config.json"]) for d in EXPORTED]
    questions = [[f, d.layout.replicas] for f, d in zip(files, EXPORTED, strict=True)]
    for job, parsed in zip(EXPORTED, answer(PYTHON, PARSED, questions), strict=True):
        assert parsed["batch"] == [job.global_batch, job.rows, job.microbatches]
        assert (parsed["stage"], parsed["overlap"]) == (job.layout.zero, True)
        assert parsed["reduce"] == f"torch.{job.reduce}"
        assert (max(1, parsed["tp"]), parsed["ep"]) == (job.layout.tp, job.layout.ep)


@pytest.mark.parametrize("name", ["zero_optimization.stage3_surprise", "train_batch"])
def test_negative_control_an_option_without_a_row_is_found(name: str) -> None:
    assert not row_of(TABLE, name)
    assert name not in KINDS
