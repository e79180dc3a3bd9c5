"""DeepSpeed's files become jobs and strategies, and back; what cannot be said is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.interop.tests.jobs import DEEPSPEED, LLAMA, MIXTURE, asked, imported, write
from piper_interop import (
    DeviceLayout,
    JobDescription,
    OffloadedTensors,
    Recomputation,
    export_job,
    import_job,
    python,
)
from piper_interop.deepspeed.describe import batch_of
from piper_interop.deepspeed.table import OPTIONS
from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES
from tests.helpers.cases import each_case


def test_stage_3_with_buckets(tmp_path: Path) -> None:
    described = imported("deepspeed", tmp_path, DEEPSPEED["zero3"])
    assert described.layout == DeviceLayout(
        dp=16, zero=3, bucket_mb=4e7 * 2 / 2**20, prefetch=1, whole_mb=1e5 * 2 / 2**20
    )
    assert (described.global_batch, described.rows, described.microbatches) == (64, 2, 2)
    assert (described.params, described.compute, described.reduce) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    assert (described.clip_norm, described.lr, described.stack) == (1.0, 3e-4, "eager")
    assert "zero=3" in python(described, "A job")


def test_ulysses_is_context_parallelism_by_heads_with_states_over_it(tmp_path: Path) -> None:
    described = imported("deepspeed", tmp_path, DEEPSPEED["ulysses"])
    assert described.layout == DeviceLayout(
        dp=4, cp=4, attention="heads", zero=1, over_cp=True, bucket_mb=100
    )
    assert described.global_batch == 1 * 4 * 4, "ranks of a row count once"
    assert described.recompute == (Recomputation("inputs"),)
    assert described.reduce == "float32"
    [note] = described.notes
    assert "predicted too fast: DeepSpeed sends them to all by all-reduces" in note


def test_a_row_for_each_rank_is_needed(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match="4 rows of a step are less than one for each of 16 ranks x 1"
    ):
        imported("deepspeed", tmp_path, {"train_batch_size": 4})


def test_tensor_parallelism_divides_the_replicas(tmp_path: Path) -> None:
    described = imported("deepspeed", tmp_path, DEEPSPEED["tensor"])
    assert (described.layout.tp, described.layout.dp, described.layout.zero) == (4, 4, 2)
    assert (described.rows, described.global_batch) == (4, 32)
    notes = "\n".join(described.notes)
    assert not described.layout.overlap, "off is the default of stage 2"
    assert "embedding and head are sharded over tp" in notes
    assert "whether the script checkpoints" in notes


@each_case(
    ("options", "batch"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, (64, 2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (64, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, (48, 3, 2)),
        ({"train_batch_size": 64}, (64, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, (24, 3, 1)),
    ],
)
def test_any_two_numbers_give_the_third(options: dict[str, int], batch: tuple[int, ...]) -> None:
    foreign = Foreign("deepspeed", "", "x.json", {k: OptionValue(v) for k, v in options.items()})
    result = batch_of(foreign, asked(), 8)
    assert (result.step, result.rows, result.microbatches) == batch


@each_case(
    ("options", "rows", "words"),
    [
        ({"train_batch_size": 65, "train_micro_batch_size_per_gpu": 2}, None, "65 rows"),
        (
            {"train_batch_size": 4},
            None,
            "4 rows of a step are less than one for each of 8 ranks x 1",
        ),
        ({"gradient_accumulation_steps": 2}, None, "give --global-batch"),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 64, "64 rows"),
        ({"train_batch_size": 64}, 32, "leave --global-batch out"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(
    options: dict[str, int], rows: int | None, words: str
) -> None:
    foreign = Foreign("deepspeed", "", "x.json", {k: OptionValue(v) for k, v in options.items()})
    with pytest.raises(JobError, match=words):
        batch_of(foreign, asked(rows=rows), 8)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "to disks"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "a part of the optimizer below stage 3",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}},
        "a number from 0 to 1 is expected",
    ),
    ({"gradient_clipping": -1}, "gradient_clipping=-1.*a number from 0 is expected"),
    ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "ZenFlow"),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "hpZ"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantised"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "masters in fp16"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "--as bf16"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are enabled"),
    ({"optimizer": {"type": "Muon"}}, "--as adamw"),
    ({"optimizer": {"type": "OneBitAdam"}}, "--as adamw"),
    ({"pipeline": {"stages": 4}}, "PipelineModule"),
    ({"activation_checkpointing": {"partition_activations": True}}, "sharded over"),
    ({"elasticity": {"enabled": True, "max_train_batch_size": 8}}, "removed"),
    ({"curriculum_learning": {"enabled": True}}, "removed"),
    ({"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}}, "length or batch"),
    ({"compile": {"offload_activation": True}}, "offload by the compiler"),
    ({"managed_gradient_accumulation": False}, "accumulation of gradients by the script"),
    ({"surprise": 1}, "surprise=1"),
    ({"zero_optimization": {"stage": 1, "surprise": 1}}, "zero_optimization.surprise"),
]


RENAMED: list[tuple[dict[str, Any], str]] = [
    ({"elasticity": {"enabled": False, "max_train_batchsize": 8}}, "max_train_batch_size"),
    ({"eigenvalue": {"enabled": False, "max_iters": 8}}, "max_iter"),
    (
        {"data_efficiency": {"enabled": False, "data_sampling": {"num_epoch": 1}}},
        "data_efficiency.data_sampling.num_epochs",
    ),
    ({"autotp_size": 2}, "tensor_parallel.autotp_size"),
    ({"zero_optimization": {"stage": 1, "autotp_size": 2}}, "tensor_parallel.autotp_size"),
    ({"zero_optimisation": {"stage": 1}}, "zero_optimization.stage"),
]


@each_case(("options", "nearest"), RENAMED)
def test_a_key_that_is_renamed_or_stands_in_another_section(
    tmp_path: Path, options: dict[str, Any], nearest: str
) -> None:
    with pytest.raises(JobError, match=rf"no such option.*the nearest is \S*{nearest};"):
        imported("deepspeed", tmp_path, {"train_batch_size": 16, **options})


def test_a_section_that_is_off_asks_for_nothing(tmp_path: Path) -> None:
    off = {"enabled": False, "max_train_batch_size": 8}
    assert imported("deepspeed", tmp_path, {"train_batch_size": 16, "elasticity": off})


def test_keys_that_public_files_have_and_deepspeed_never_reads(tmp_path: Path) -> None:
    options = {"_comment": "stage 2", "monitor_config": {"csv_monitor": {"enabled": False}}}
    assert imported("deepspeed", tmp_path, {"train_batch_size": 16, **options})
    with pytest.raises(JobError, match=r"zero_optimization\._comment"):
        imported("deepspeed", tmp_path, {"zero_optimization": {"_comment": "stage 2"}})


def test_parameters_are_offloaded_in_stage_3_alone(tmp_path: Path) -> None:
    section: dict[str, Any] = {"stage": 2, "offload_param": {"device": "cpu"}}
    options = {"train_batch_size": 16, "zero_optimization": section}
    assert not imported("deepspeed", tmp_path, options).params_on_host
    section["stage"] = 3
    with pytest.raises(
        JobError, match=r"offload_param\.device='cpu'.* give offload_optimizer, too"
    ):
        imported("deepspeed", tmp_path, options)
    section["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
    found = imported("deepspeed", tmp_path, options)
    assert found.params_on_host and found.optim_on_host == 1
    assert any("optimizer of all parameters on the host" in note for note in found.notes)


@each_case(("options", "words"), REFUSED)
def test_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        imported("deepspeed", tmp_path, {"train_batch_size": 16, **options})


@each_case(
    ("section", "part"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 1.0),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}, 0.25),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0}}, 0.0),
        ({"stage": 1, "cpu_offload": True}, 1.0),
        ({"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "none"}}, 0.0),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, 0.0),
    ],
)
def test_an_optimizer_on_the_host_is_one_of_zero(
    tmp_path: Path, section: dict[str, Any], part: float
) -> None:
    found = imported("deepspeed", tmp_path, {"train_batch_size": 16, "zero_optimization": section})
    assert found.optim_on_host == part
    assert any("the optimizer on the host" in note for note in found.notes) == (part > 0)


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    options = {
        "train_batch_size": 16,
        "surprise": 1,
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
        "pipeline": {"stages": 2},
    }
    with pytest.raises(JobError) as error:
        imported("deepspeed", tmp_path, options)
    assert all(
        word in str(error.value) for word in ("surprise", "fp16.fp16_master", "pipeline.stages")
    )


def test_stand_ins_are_in_the_notes(tmp_path: Path) -> None:
    autocast = {"enabled": True, "dtype": "float16"}
    options = {"train_batch_size": 16, "torch_autocast": autocast, "optimizer": {"type": "Lion"}}
    described = imported("deepspeed", tmp_path, options, stand_ins=frozenset({"bf16", "adamw"}))
    assert described.compute == "bfloat16"
    assert sum("taken as" in note for note in described.notes) == 2


def test_fp16_has_a_scaled_loss(tmp_path: Path) -> None:
    """The defaults are DeepSpeed's, and the export says them all."""
    options = {"train_batch_size": 16, "fp16": {"enabled": True}}
    described = imported("deepspeed", tmp_path, options)
    assert (described.compute, described.reduce) == ("float16", "float16")
    assert described.loss_scale == (("interval", 1000), ("hysteresis", 2))
    fixed = imported(
        "deepspeed", tmp_path, {**options, "fp16": {"enabled": True, "loss_scale": 128}}
    )
    assert fixed.loss_scale == (("fixed", 128.0),)
    for job in (described, fixed):
        (text,) = export_job("deepspeed", job).files.values()
        again = imported("deepspeed", tmp_path, json.loads(text))
        assert (again.compute, again.loss_scale) == (job.compute, job.loss_scale)


def test_auto_needs_training_arguments(tmp_path: Path) -> None:
    options = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
    }
    with pytest.raises(JobError, match="train_batch_size, train_micro_batch_size_per_gpu") as error:
        imported("deepspeed", tmp_path, options)
    assert "stage3_prefetch_bucket_size" in str(error.value)
    sets = (
        "per_device_train_batch_size=2",
        "--gradient_accumulation_steps=4",
        "--TrainingArguments.bf16=true",
    )
    described = imported("deepspeed", tmp_path, options, sets=sets)
    assert (described.rows, described.microbatches, described.global_batch) == (2, 4, 128)
    assert described.compute == "bfloat16"
    assert described.layout.bucket_mb == int(0.9 * 4096 * 4096) * 2 / 2**20


def test_arguments_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"per_gpu=1, but .*=4"):
        imported(
            "deepspeed",
            tmp_path,
            {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
            sets=("per_device_train_batch_size=4",),
        )


def test_what_the_file_never_says_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--model .*--length N .*--gpus N"):
        imported("deepspeed", tmp_path, DEEPSPEED["zero3"], devices=None, length=None, sizes=None)


def test_experts_are_over_a_factor_of_the_replicas(tmp_path: Path) -> None:
    options = {
        "train_batch_size": 16,
        "bf16": {"enabled": True},
        "expert_parallel": {"enabled": True, "autoep_size": 8},
    }
    assert imported("deepspeed", tmp_path, options, sizes=MIXTURE).layout.ep == 8
    with pytest.raises(JobError, match="no experts"):
        imported("deepspeed", tmp_path, options)
    with pytest.raises(JobError, match="not a multiple"):
        imported("deepspeed", tmp_path, options, sizes=MIXTURE, devices=12)


def test_mics_is_hybrid_sharding(tmp_path: Path) -> None:
    options = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 3, "mics_shard_size": 8},
    }
    layout = imported("deepspeed", tmp_path, options).layout
    assert (layout.dp, layout.dp_replicate, layout.zero) == (8, 2, 3)


def test_comments_tabs_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n\t// rows\n\t"train_batch_size": 16,\n\t"stepz": 1\n}', encoding="utf-8")
    with pytest.raises(JobError, match=r"stepz=1 \(ds.json:4\)"):
        import_job("deepspeed", str(path), asked())


@each_case(
    ("text", "words"),
    [
        ("", "holds no options"),
        ("[1, 2]", "holds no options"),
        ('{"a": ', "neither JSON nor YAML"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "already"),
        ('{"zero_optimization.stage": 1}', "without dots"),
        ("a: &a\n  b: *a\n", "levels"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError, match=words):
        import_job("deepspeed", str(path), asked())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read the file .*none\.json"):
        import_job("deepspeed", str(tmp_path / "none.json"), asked())


@st.composite
def layouts(draw: st.DrawFn) -> DeviceLayout:
    """Return layouts that DeepSpeed can say."""
    zero = draw(st.integers(0, 3))
    cp = draw(st.sampled_from([1, 2, 4]))
    return DeviceLayout(
        tp=draw(st.sampled_from([1, 2, 8])),
        cp=cp,
        attention="heads" if cp > 1 else "ring",
        dp=draw(st.sampled_from([1, 2, 3, 16])),
        zero=zero,
        over_cp=cp > 1 and zero > 0,
        bucket_mb=draw(st.integers(1, 2000)) / 4 if zero else None,
        prefetch=draw(st.integers(0, 1)) if zero == 3 else None,
        whole_mb=draw(st.integers(0, 8)) / 4 if zero == 3 else 0,
        overlap=draw(st.booleans()) if zero else False,
    )


WAITS = OffloadedTensors("inputs", prefetch=0)
"""Inputs of checkpointed layers on the host, which are brought back when they are asked for."""


def _fractions(layout: DeviceLayout) -> list[float]:
    """The parts of an optimizer that DeepSpeed can have on the host."""
    return [0.0, *[1.0] * (layout.zero > 0), *[0.5] * (layout.zero == 3)]


@st.composite
def jobs(draw: st.DrawFn) -> JobDescription:
    layout = draw(layouts())
    rows = draw(st.integers(1, 4))
    again = draw(st.sampled_from([(), (Recomputation("inputs"),)]))
    params, compute = draw(
        st.sampled_from([("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
    )
    part = draw(st.sampled_from(_fractions(layout)))
    reduce = draw(st.sampled_from(["float32", "bfloat16"]))
    if not layout.zero:
        layout = replace(layout, bucket_mb=5e8 * ITEM_BYTES[reduce] / 2**20)
    return JobDescription(
        name="ds_config",
        sizes=LLAMA,
        length=draw(st.sampled_from([512, 4096])),
        global_batch=rows * layout.replicas * draw(st.integers(1, 5)),
        rows=rows,
        layout=layout,
        recompute=again,
        offload=draw(st.sampled_from([None, WAITS])) if again else None,
        optim_on_host=part,
        params_on_host=layout.zero == 3 and part == 1 and draw(st.booleans()),
        params=params,
        compute=compute,
        reduce=reduce,
        accumulate=draw(st.sampled_from(["", "float16"]))
        if layout.zero
        else compute * (compute != reduce),
        clip_norm=draw(st.sampled_from([None, 1.0, 0.5])),
        lr=draw(st.sampled_from([3e-4, 1e-5])),
        stack=draw(st.sampled_from(["eager", "inductor"])),
    )


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(jobs())
def test_an_exported_job_is_read_back(tmp_path: Path, described: JobDescription) -> None:
    files = export_job("deepspeed", described).files
    path = tmp_path / "ds_config.json"
    path.write_text(files["ds_config.json"], encoding="utf-8")
    again = asked(devices=described.layout.devices, length=described.length)
    found = import_job("deepspeed", str(path), again).described
    nearest = [
        name
        for name in ("offload_optimizer", "cpu_checkpointing")
        for n in found.notes
        if name in n
    ]
    kept = bool(described.optim_on_host), bool(described.offload)
    assert nearest == ["offload_optimizer"] * kept[0] + ["cpu_checkpointing"] * kept[1]
    copied = described.layout.zero in (1, 2) and described.compute == described.params
    assert len(nearest) + copied == len(found.notes)
    assert replace(found, notes=()) == described


def test_what_deepspeed_cannot_do_is_named_at_once() -> None:
    layout = DeviceLayout(
        tp=2, sequence=True, pp=4, dp=2, dp_replicate=2, zero=3, reshard=False, prefetch=2
    )
    described = JobDescription(
        "x",
        LLAMA,
        4096,
        16,
        1,
        layout,
        (Recomputation("products"),),
        params="bfloat16",
        compute="float32",
    )
    with pytest.raises(JobError) as error:
        export_job("deepspeed", described)
    words = (
        "pp=4",
        "sequence",
        "hybrid",
        "stay gathered",
        "prefetch=2",
        "products",
        "compute=float32",
    )
    assert all(word in str(error.value) for word in words)
    assert str(error.value).count("nearest") == len(words)
    simple = replace(described, layout=DeviceLayout(dp=4), recompute=(), compute="bfloat16")
    assert (
        json.loads(export_job("deepspeed", simple).files["ds_config.json"])["train_batch_size"]
        == 16
    )


def test_every_option_says_what_it_takes(tmp_path: Path) -> None:
    assert all(kind.words for kind, _ in OPTIONS.values())
    with pytest.raises(
        JobError, match=r"train_batch_size='many'.*a whole number from 1 is expected"
    ):
        import_job("deepspeed", write(tmp_path, {"train_batch_size": "many"}), asked())
