"""Accelerate's launch files and TrainingArguments become jobs and strategies, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.interop.tests.jobs import ACCELERATE, LLAMA, MIXTURE, TRAINER, asked, imported, write
from piper_interop import (
    DeviceLayout,
    Float8Layers,
    JobDescription,
    ModelSizes,
    OffloadedTensors,
    Recomputation,
    export_job,
    import_job,
    python,
)
from piper_interop.accelerate.trainer import SYNC_EACH_BATCH
from piper_interop.neutral.units import layer_parameters, megabytes, unit_mb, whole
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case

LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
"""The parameters of a layer of Llama 3 8B."""


def launched(folder: Path, options: dict[str, Any], **others: Any) -> JobDescription:
    """Return the job of a launch file, with 2 rows per device and 4 microbatches unless said otherwise."""
    sets = ("per_device_train_batch_size=2", "gradient_accumulation_steps=4")
    return imported("accelerate", folder, options, **{"sets": sets, "devices": None, **others})


def test_a_unit_of_fsdp_is_a_layer() -> None:
    assert layer_parameters(LLAMA) == LAYER
    assert whole(LLAMA) == 32 * LAYER + 2 * 128256 * 4096
    experts = layer_parameters(MIXTURE)
    assert experts == LAYER + 7 * 3 * 4096 * 14336 + 8 * 4096
    assert unit_mb(MIXTURE, 4, 1, 2) == megabytes(experts // 4, 2)
    assert unit_mb(MIXTURE, 1, 8, 4) == megabytes(LAYER - 3 * 4096 * 14336 + 8 * 4096, 4)
    latent = ModelSizes(
        {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "Latent",
    )
    deep = ModelSizes({"width": 7168, "heads": 128, "hidden": 18432, "latent": latent})
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert layer_parameters(deep) == attention + 3 * 7168 * 18432 + 2 * 7168


def test_a_mesh_of_two_kinds_of_replicas_and_tp(tmp_path: Path) -> None:
    described = launched(tmp_path, ACCELERATE["hybrid"])
    assert described.layout == DeviceLayout(
        tp=2,
        dp=4,
        dp_replicate=2,
        zero=3,
        reduce_once=True,
        bucket_mb=megabytes(LAYER // 2, 2),
        prefetch=1,
    )
    assert (described.rows, described.microbatches, described.global_batch) == (2, 4, 64)
    assert described.recompute == (Recomputation("inputs"),)
    assert (described.params, described.compute, described.reduce) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    assert "rep=2" in python(described, "A job")


def test_lines_that_accelerate_writes_into_every_file(tmp_path: Path) -> None:
    lines = {"tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "downcast_bf16": "no"}
    assert launched(tmp_path, {**ACCELERATE["hybrid"], **lines}).layout.tp == 2
    with pytest.raises(JobError, match=r"tpu_env=\['A=1'\]"):
        launched(tmp_path, {**ACCELERATE["hybrid"], "tpu_env": ["A=1"]})


def test_fsdp_on_the_host(tmp_path: Path) -> None:
    words = {"output_dir": "x", "fsdp": "full_shard offload", "per_device_train_batch_size": 2}
    files = (_fsdp(fsdp_offload_params=True), {}), (words, {"devices": 8, "sets": ()})
    for options, others in files:
        described = launched(tmp_path, options, **others)
        assert described.params_on_host and described.optim_on_host == 1
        assert 'piper.offload(where(), tensors="states")' in python(described, "A job")
        assert any("shards of gradients" in note for note in described.notes)


def test_shard_grad_op_keeps_parameters_for_a_step(tmp_path: Path) -> None:
    described = launched(tmp_path, ACCELERATE["fsdp1"])
    layout = described.layout
    assert (layout.zero, layout.reshard, layout.dp, layout.prefetch) == (3, False, 16, 0)
    assert layout.bucket_mb == megabytes(100_000_000, 2)
    assert described.stack == "inductor"
    notes = "\n".join(described.notes)
    assert "for each of 4 microbatches" in notes
    assert "a bucket of that many parameters" in notes


def test_ddp_has_whole_states_and_reduces_in_float32(tmp_path: Path) -> None:
    described = launched(tmp_path, ACCELERATE["ddp"])
    assert described.layout == DeviceLayout(dp=16)
    assert (described.compute, described.reduce) == ("bfloat16", "float32")


@each_case(
    ("fsdp", "layout"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, (16, 1, 3, True)),
        ({"fsdp_sharding_strategy": 1}, (16, 1, 3, True)),
        ({"fsdp_sharding_strategy": "2"}, (16, 1, 3, False)),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, (16, 1, 0, True)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, (8, 2, 3, True)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, (8, 2, 3, False)),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, (16, 1, 3, False)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, (16, 1, 3, False)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": "true"}, (16, 1, 3, True)),
        ({"fsdp_version": 2}, (16, 1, 3, True)),
        (
            {"fsdp_sharding_strategy": "full_shard", "fsdp_backward_prefetch": "backward_pre"},
            (16, 1, 3, True),
        ),
    ],
)
def test_strategies_of_fsdp(
    tmp_path: Path, fsdp: dict[str, Any], layout: tuple[int, int, int, bool]
) -> None:
    options = {**ACCELERATE["ddp"], "distributed_type": "FSDP", "fsdp_config": fsdp}
    result = launched(tmp_path, options).layout
    assert (result.dp, result.dp_replicate, result.zero, result.reshard) == layout


@each_case(("how", "attention"), [("allgather", "gather"), ("alltoall", "ring"), (None, "gather")])
def test_context_parallelism(tmp_path: Path, how: str | None, attention: str) -> None:
    sizes = {"parallelism_config_cp_size": 8, "parallelism_config_dp_shard_size": 2}
    if how:
        sizes["parallelism_config_cp_comm_strategy"] = how  # type: ignore[assignment]  # a JSON value
    options = {
        **ACCELERATE["ddp"],
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": sizes,
    }
    layout = launched(tmp_path, options).layout
    assert (layout.cp, layout.dp, layout.attention, layout.over_cp) == (8, 2, attention, True)


def test_training_arguments(tmp_path: Path) -> None:
    described = imported("accelerate", tmp_path, TRAINER["trainer"])
    assert described.layout == DeviceLayout(
        dp=16, zero=3, reduce_once=True, bucket_mb=megabytes(LAYER, 2), prefetch=1
    )
    assert (described.rows, described.microbatches, described.clip_norm) == (2, 4, 0.5)
    assert (described.lr, described.recompute) == (1e-5, (Recomputation("inputs"),))


def test_gradients_are_reduced_once_or_for_each_microbatch(tmp_path: Path) -> None:
    once = imported("accelerate", tmp_path, TRAINER["trainer"])
    assert 'reduced_mb="step"' in python(once, "x")
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    options = {**TRAINER["trainer"], "accelerator_config": each}
    described = imported("accelerate", tmp_path, options)
    assert not described.layout.reduce_once and described.accumulate == "float32"
    assert [n for n in once.notes if n not in described.notes] == [
        note for note in once.notes if note.startswith("shards of gradients are in bfloat16")
    ]
    assert not [n for n in described.notes if n not in once.notes]


def test_defaults_of_training_arguments(tmp_path: Path) -> None:
    described = imported("accelerate", tmp_path, {"output_dir": "out", "bf16": True})
    assert (described.rows, described.microbatches, described.clip_norm, described.lr) == (
        8,
        1,
        1.0,
        5e-5,
    )
    assert described.layout == DeviceLayout(dp=16)


def test_training_arguments_fill_in_deepspeed(tmp_path: Path) -> None:
    options = TRAINER["trainer_deepspeed"]
    described = imported("accelerate", tmp_path, options)
    assert (described.global_batch, described.rows, described.microbatches) == (32, 1, 2)
    assert described.layout == DeviceLayout(dp=16, zero=2, bucket_mb=4096 * 4096 * 2 / 2**20)
    write(tmp_path, options["deepspeed"], "ds.json")
    assert imported("accelerate", tmp_path, {**options, "deepspeed": "ds.json"}) == described


def test_a_launch_file_with_deepspeed_fields(tmp_path: Path) -> None:
    fields = {
        "zero_stage": 3,
        "gradient_clipping": 1.0,
        "zero3_init_flag": True,
        "offload_optimizer_device": "none",
    }
    options = {**ACCELERATE["ddp"], "distributed_type": "DEEPSPEED", "deepspeed_config": fields}
    described = launched(tmp_path, options, sets=("per_device_train_batch_size=2",))
    assert (described.layout.zero, described.layout.dp, described.compute) == (3, 16, "bfloat16")
    assert (described.global_batch, described.clip_norm) == (32, 1.0)
    fields["offload_optimizer_device"] = "nvme"
    with pytest.raises(JobError, match="offload of states to disks"):
        launched(tmp_path, options)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"backend": "AO"}, Float8Layers("tensorwise", ("layers.*",), ("layers.0.attention.q*",))),
        ({"backend": "TE"}, Float8Layers("delayed", saved="float8")),
        ({"backend": "TE", "use_mxfp8_block_scaling": True}, Float8Layers("mxfp8", saved="float8")),
    ],
)
def test_fp8_of_a_launch_file(tmp_path: Path, config: dict[str, Any], found: Float8Layers) -> None:
    options = {**ACCELERATE["ddp"], "mixed_precision": "fp8", "fp8_config": config}
    described = launched(tmp_path, options, sets=("per_device_train_batch_size=2",))
    assert (described.float8, described.compute) == (found, "bfloat16")
    text = export_job("accelerate", described).files["accelerate_config.yaml"]
    assert f"backend: {config['backend']}\n" in text and "mixed_precision: fp8" in text
    with pytest.raises(JobError, match="linear layers in float8; nearest: bfloat16"):
        export_job("deepspeed", described)


def test_fp8_beside_deepspeed_is_bf16_where_asked(tmp_path: Path) -> None:
    """Accelerate tells DeepSpeed of bf16 then, and the backend has no part in the refusal."""
    options = {
        **ACCELERATE["ddp"],
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3},
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "TE"},
    }
    more = ("per_device_train_batch_size=2",)
    with pytest.raises(JobError, match="fp8 beside DeepSpeed"):
        launched(tmp_path, options, sets=more)
    found = launched(tmp_path, options, sets=more, stand_ins=("bf16",))
    assert (found.float8, found.compute, found.params) == (None, "bfloat16", "float32")


def _fsdp(**options: Any) -> dict[str, Any]:
    return {**ACCELERATE["ddp"], "distributed_type": "FSDP", "fsdp_config": options}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (_fsdp(fsdp_sharding_strategy="SURPRISE"), "none of FULL_SHARD"),
    (_fsdp(fsdp_surprise=1), "fsdp_config.fsdp_surprise"),
    ({**ACCELERATE["ddp"], "mixed_precision": "fp8"}, "--as bf16"),
    ({**ACCELERATE["ddp"], "distributed_type": "XLA"}, "devices other than CUDA"),
    ({**ACCELERATE["ddp"], "distributed_type": "MEGATRON_LM"}, "piper import megatron"),
    (
        {**ACCELERATE["ddp"], "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
        "piper import megatron",
    ),
    ({**ACCELERATE["ddp"], "compute_environment": "AMAZON_SAGEMAKER"}, "SageMaker"),
    ({**ACCELERATE["ddp"], "use_cpu": True}, "CPUs"),
    ({"output_dir": "x", "optim": "adamw_8bit"}, "--as adamw"),
    ({"output_dir": "x", "auto_find_batch_size": True}, "found by trial"),
    ({"output_dir": "x", "fsdp": "full_sharp"}, "no such option: full_sharp"),
    ({"output_dir": "x", "per_device_batch": 2}, "per_device_batch=2"),
    ({"output_dir": "x", "accelerator_config": {"split_batches": True}}, "split among ranks"),
]


@each_case(("options", "words"), REFUSED)
def test_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        launched(tmp_path, options, devices=None if "num_processes" in options else 16)


@each_case(
    ("sizes", "words"),
    [
        ({"parallelism_config_dp_shard_size": 3}, "not 16 devices"),
        ({"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2}, "one of them"),
        ({"parallelism_config_sp_size": 16}, "needs DeepSpeed"),
    ],
)
def test_meshes_that_do_not_fit(tmp_path: Path, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(JobError, match=words):
        launched(tmp_path, {**_fsdp(fsdp_version=2), "parallelism_config": sizes})


@each_case(
    ("others", "words"),
    [
        ({"sizes": None}, "--model"),
        ({"length": None}, "--length"),
        ({"sets": ()}, "--global-batch N"),
        ({"devices": 8}, "num_processes=16"),
        ({"rows": 17}, "--global-batch 17"),
    ],
)
def test_what_the_file_does_not_say(tmp_path: Path, others: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        launched(tmp_path, ACCELERATE["ddp"], **others)


def test_ddp_has_buckets_beside_gradients(tmp_path: Path) -> None:
    notes = launched(tmp_path, ACCELERATE["ddp"]).notes
    assert [note for note in notes if "gradient_as_bucket_view" in note]
    assert not [n for n in launched(tmp_path, ACCELERATE["hybrid"]).notes if "bucket_view" in n]


def test_rows_of_a_step_are_enough(tmp_path: Path) -> None:
    described = launched(tmp_path, ACCELERATE["ddp"], sets=(), rows=64)
    assert (described.rows, described.microbatches) == (4, 1)
    described = launched(
        tmp_path, ACCELERATE["ddp"], sets=("per_device_train_batch_size=2",), rows=64
    )
    assert (described.rows, described.microbatches) == (2, 2)


@st.composite
def jobs(draw: st.DrawFn) -> JobDescription:
    """Return jobs that Accelerate can say: DDP, FSDP 2, and DeepSpeed's stages."""
    zero = draw(st.integers(0, 3))
    cp = draw(st.sampled_from([1, 2])) if zero == 3 else 1
    tp = draw(st.sampled_from([1, 4])) if zero == 3 else 1
    half = draw(st.booleans())
    reduce = "bfloat16" if half and zero else "float32"
    layout = DeviceLayout(
        tp=tp,
        cp=cp,
        attention=draw(st.sampled_from(["ring", "gather"])) if cp > 1 else "ring",
        dp=draw(st.sampled_from([2, 3, 16])),
        dp_replicate=draw(st.sampled_from([1, 2])) if zero == 3 else 1,
        zero=zero,
        over_cp=cp > 1,
        reshard=draw(st.booleans()) if zero == 3 else True,
        bucket_mb=megabytes(-(-LAYER // tp), 2 if half else 4)
        if zero
        else draw(st.sampled_from([None, 50.0])),
        prefetch=1 if zero == 3 else None,
    )
    rows, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if zero == 3 and count > 1:
        layout = replace(layout, reduce_once=draw(st.booleans()))
    again = draw(st.sampled_from([(), (Recomputation("inputs"),)]))
    waits = OffloadedTensors("inputs", prefetch=0)
    there = zero == 3 and draw(st.booleans())
    return JobDescription(
        name="accelerate_config",
        sizes=LLAMA,
        length=4096,
        global_batch=rows * layout.replicas * count,
        rows=rows,
        layout=layout,
        recompute=again,
        offload=draw(st.sampled_from([None, waits])) if again and zero == 3 else None,
        optim_on_host=float(there),
        params_on_host=there,
        compute="bfloat16" if half else "float32",
        reduce=reduce,
        accumulate="float32" if half and zero == 3 and not layout.reduce_once else "",
        clip_norm=draw(st.sampled_from([None, 1.0])),
        lr=draw(st.sampled_from([3e-4, 1e-5])),
        stack=draw(st.sampled_from(["eager", "inductor"])),
    )


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(jobs())
def test_an_exported_job_is_read_back(tmp_path: Path, described: JobDescription) -> None:
    files = export_job("accelerate", described).files
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = json.loads(files.get("training_args.json", "{}"))
    if arguments.pop("accelerator_config", None):
        arguments[SYNC_EACH_BATCH] = True
    sets = tuple(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    again = import_job(
        "accelerate", str(tmp_path / "accelerate_config.yaml"), asked(devices=None, sets=sets)
    )
    assert replace(again.described, notes=()) == described


def test_what_accelerate_cannot_do_is_named_at_once() -> None:
    layout = DeviceLayout(tp=2, sequence=True, pp=4, dp=4, ep=2)
    described = JobDescription(
        "x", MIXTURE, 4096, 16, 1, layout, (Recomputation("products"),), params="bfloat16"
    )
    with pytest.raises(JobError) as error:
        export_job("accelerate", described)
    words = ("pp=4", "sequence", "ep=2", "whole states", "products", "params=bfloat16")
    assert all(word in str(error.value) for word in words)
    assert str(error.value).count("nearest") == len(words)


def test_nearest_forms_of_an_export_are_notes() -> None:
    layout = DeviceLayout(dp=8, zero=3, bucket_mb=100, prefetch=2)
    notes = "\n".join(
        export_job("accelerate", JobDescription("x", LLAMA, 4096, 8, 1, layout)).notes
    )
    assert all(
        word in notes for word in ("bfloat16, not in float32", "417 MiB", "one unit ahead, not 2")
    )
