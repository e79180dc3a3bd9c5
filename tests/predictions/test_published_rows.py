"""Rows of published runs: columns and cells, the stack that a row names, and readings of open fields."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from piper.published.convert import row
from piper.published.plans import plan_of
from piper.published.run_cluster import UNNAMED, cluster_of, stack_for
from piper.published.run_model import is_megatron, model_of
from piper.published.scoring import by_model, predict
from piper.published.table import read_row, read_rows, write_rows
from piper_compiler import replicate
from piper_ir.ground.errors import JobError, PiperWarning
from piper_simulator import STACKS
from tests.helpers.cases import each_case
from tests.helpers.published_rows import TINY


@each_case(
    ("field", "value", "said"),
    [
        ("arch", "mamba", "arch is 'mamba'"),
        ("hidden", "4k", "hidden is '4k'"),
        ("hidden", "", "hidden is ''"),
        ("zero", "4", "zero is '4'"),
        ("step_s", "-1", "step_s is '-1'"),
        ("seq_parallel", "true", "seq_parallel is 'true'"),
        ("experts", "8", "experts and top_k are given together"),
        ("capacity", "2", "capacity is '2', and the row has no experts"),
        ("vocab", "n/a", "vocab is 'n/a'; an integer of at least 1 is needed, or nothing"),
    ],
)
def test_a_field_that_cannot_be_read_is_named(field: str, value: str, said: str) -> None:
    with pytest.raises(JobError, match=f"line 3: {said}"):
        read_row({**TINY, field: value}, "t.csv, line 3")


@each_case(
    ("changes", "said"),
    [
        ({"global_batch": "9"}, "no multiple of dp x micro_batch"),
        ({"gpus": "8"}, "dp x cp x tp x pp is 4"),
        ({"hw": "tpu-v5"}, "no device 'tpu-v5'"),
        ({"experts": "8", "top_k": "2", "ep": "4"}, "ep = 4 does not divide dp = 2"),
        ({"ffn": "1003"}, "tp = 2 does not divide ffn = 1003"),
        (
            {"experts": "8", "top_k": "2", "expert_ffn": "251"},
            "tp = 2 does not divide expert_ffn = 251",
        ),
        ({"pp": "2", "dp": "1"}, "pp = 2, and schedule is none: give 1f1b"),
        (
            {"pp": "4", "vpp": "2", "gpus": "16", "schedule": "interleaved", "layers": "4"},
            "pp x vpp is 8 stages, and 4 layers make at most 6",
        ),
    ],
)
def test_a_row_that_cannot_be_said_is_refused_with_the_reason(
    changes: dict[str, str], said: str
) -> None:
    refused = predict(read_row({**TINY, **changes}))
    assert said in refused.refused and isnan(refused.step_s) and refused.error is None


@each_case(
    ("hw", "source", "note", "stack"),
    [
        ("b200-sxm", "SimuMax", "", "blackwell-megatron"),
        ("h100-80g-sxm", "torchtitan", "FSDP + torch.compile", "hopper-torch-compile"),
        ("h100-80g-sxm", "torchtitan", "FSDP", "hopper-torch"),
        ("h100-80g-sxm", "dgxc", "NeMo, Megatron-Core", "hopper-nemo"),
        ("gb200-186g", "dgxc", "NeMo, Megatron-Core", "blackwell-nemo"),
        ("h100-80g-sxm", "llm-foundry", "FSDP", "hopper-llm-foundry"),
        ("h100-80g-sxm", "huggingface", "nanotron", "hopper-nanotron"),
        ("h100-80g-sxm", "NVIDIA-NeMo/Automodel", "", "hopper-nemo-automodel"),
        ("a100-80g-sxm", "Zero Bubble", "", "ampere-zero-bubble"),
        ("a100-80g-sxm", "nobody", "", "ampere-megatron"),  # tp 2, so like Megatron
    ],
)
def test_the_words_of_a_row_name_its_stack(hw: str, source: str, note: str, stack: str) -> None:
    one = read_row({**TINY, "hw": hw, "source": source, "note": note})
    assert stack_for(one, hw) == stack


@each_case(
    ("note", "stack", "megatron"),
    [
        ("Megatron-LM 0.12", "", True),
        ("megatron-core", "", True),
        ("", "hopper-megatron", True),
        ("", "hopper-nemo on b200-sxm", True),
        ("torchtitan", "hopper-megatron", True),
        ("torchtitan, compared with Megatron-LM", "", False),
        ("TorchTitan, not Megatron", "", False),
        ("Nemotron by eager FSDP", "", False),
    ],
)
def test_a_row_is_read_as_its_stack_does(note: str, stack: str, megatron: bool) -> None:
    """Facts follow the stack, whoever named it: words in any case, the column or `--stack`."""
    alone = {
        "tp": "1",
        "dp": "4",
        "hw": "h100",
        "zero": "2",
        "source": "",
        "recompute": "selective",
    }
    read = read_row({**TINY, **alone, "note": note, "stack": stack})
    assert is_megatron(read) == megatron
    told = row(replace(read, stack="", note=""), stack=stack or cluster_of(read).device.stack)
    assert is_megatron(told.row) == megatron
    assert told.strategy == row(read).strategy and told.job.clip_norm == row(read).job.clip_norm


def test_attention_of_a_float16_gpt_is_written_out_in_old_megatron_alone() -> None:
    half = {
        **TINY,
        "arch": "gpt",
        "dtype": "fp16",
        "hw": "a100",
        "tp": "1",
        "dp": "4",
        "source": "",
    }
    notes = (
        "Megatron-LM of 2021",
        "Megatron-LM, --use-flash-attn",
        "Megatron, no dropout",
        "eager FSDP",
    )
    read = [model_of(read_row({**half, "note": note}))[0] for note in notes]
    found = [(config.attention, config.dropout) for config in read]
    assert found == [("math", 0.1), ("fused", 0.1), ("math", 0.0), ("fused", 0.0)]


def test_heads_that_a_kernel_pads_are_predicted_with_the_kernel() -> None:
    odd, even = (predict(read_row({**TINY, "hidden": h, "seq": "4096"})) for h in ("480", "512"))
    assert "heads of 60 are taken as 64, as attention's kernel pads them" in odd.notes
    told = model_of(read_row({**TINY, "hidden": "480", "note": "heads of 128"}))
    assert told[0].head_dim == 128 and not told[1]
    assert 0.9 < odd.peak_gib / even.peak_gib < 1.0


@each_case(
    ("note", "mesh"),
    [
        ("FSDP", {"dp": 16}),
        ("FSDP; HSDP", {"dp": 8, "rep": 2}),
        ("HSDP over 4", {"dp": 4, "rep": 4}),
        ("HSDP over 6", "16 replicas of 1 devices, with ep = 1, make no groups of 6 devices"),
    ],
)
def test_states_may_be_shared_in_groups(note: str, mesh: dict[str, int] | str) -> None:
    wide = {"tp": "1", "dp": "16", "gpus": "16", "gpus_per_node": "8", "global_batch": "16"}
    one = read_row({**TINY, **wide, "hw": "h100", "zero": "3", "source": "", "note": note})
    if isinstance(mesh, str):
        assert mesh in predict(one, memory=False).refused
        return
    made = row(one)
    assert {a: n for a, n in made.strategy.mesh.sizes if n > 1} == mesh
    assert plan_of(one)[1].mesh == made.strategy.mesh


def test_bfloat16_parameters_have_buckets_of_as_many_parameters() -> None:
    """Gradients are reduced in the parameters' dtype where no other one is said."""
    alone = {"tp": "1", "dp": "4", "hw": "h100", "zero": "3", "hidden": "4096", "ffn": "14336"}
    sizes = [
        next(d.bucket_mb for d in row(read_row({**TINY, **alone, "note": note})).rest if isinstance(d, replicate))
        for note in ("FSDP", "FSDP, parameters in bf16", "FSDP, reduced in bf16")
    ]  # fmt: skip
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.01) and sizes[1] == sizes[2]


def test_attention_may_be_written_out_in_any_row() -> None:
    named = model_of(read_row({**TINY, "note": "attention written out"}))[0]
    assert (named.attention, model_of(read_row(TINY))[0].attention) == ("math", "fused")


def test_tables_as_spreadsheets_write_them(tmp_path: Path) -> None:
    """A byte order mark and a line break in a cell are read; a row that cannot be predicted is refused alone."""
    file = tmp_path / "runs.csv"
    other = {**TINY, "case": "b[1]", "heads": "7", "note": "two\nlines, no CUDA graphs"}
    write_rows(file, [TINY, other])
    file.write_text("\ufeff" + file.read_text(encoding="utf-8"), encoding="utf-8")
    rows = read_rows(file)
    assert [row.note for row in rows][1:] == [other["note"]] and not rows[1].says("CUDA graphs")
    assert rows[1].says("two") and read_rows(file, "b[1]") == rows[1:]
    assert len(by_model(rows)) == 2 and predict(rows[1]).refused
    file.write_text(file.read_text(encoding="utf-8") + ",,\n" + "x," * 60, encoding="utf-8")
    long = read_rows(file)[2:]
    assert [row.unread for row in long] == ["line 6: more cells than the 28 columns of the table"]
    write_rows(file, [{**TINY, "mbs": "4", "predicted_step_s": "1"}])
    file.write_text(file.read_text(encoding="utf-8") + "b,c,d\n", encoding="utf-8")
    with pytest.warns(PiperWarning, match="columns mbs: not read"):
        short = read_rows(file)[1]
    assert short.unread == "line 3: fewer cells than the 29 columns of the table"


def test_a_row_with_a_cell_that_cannot_be_read_is_refused_alone(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    written = {**TINY, "arch": "LLaMA", "dtype": "BF16", "zero": "1.0", "layers": "2.0"}
    wrong = {**TINY, "case": "wrong", "dtype": "fp8"}
    write_rows(file, [TINY, {**written, "case": "b"}, wrong])
    same, as_written, bad = read_rows(file)
    assert replace(as_written, case="a") == same
    assert predict(bad).refused == "line 4: dtype is 'fp8'; accepted are bf16, fp16"
    assert predict(bad).columns()["dtype"] == "fp8"
    with pytest.raises(JobError, match="line 4: dtype is 'fp8'"):
        read_rows(file, "wrong")
    write_rows(file, [TINY, {"case": ""}, {**TINY, "case": ""}])
    assert [row.unread for row in read_rows(file)] == [
        "",
        "line 4: case is empty; give each row a name of its own",
    ]
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(JobError, match="the table is empty"):
        read_rows(file)


def test_readings_that_no_device_holds_are_left_out_and_what_was_filled_in_is_said() -> None:
    open_ = {**TINY, "micro_batch": "", "vocab": "", "vpp": "2", "seq": "16384", "layers": "8"}
    open_ |= {"recompute": "", "block": "Measured"}
    found = predict(read_row({**open_, "global_batch": "64", "tp": "1", "gpus": "2"}))
    assert len(found.seconds) in range(1, 6) and found.peak_gib < 180
    assert found.row.block == "measured"
    assert found.notes == (
        "recompute is open, and taken as none",
        "vocab is open, and taken as 32,000",
        "vpp belongs to interleaved schedules, and is not used",
    )
    unnamed = predict(read_row({**TINY, "source": "nobody"}), memory=False)
    assert unnamed.notes == ("source and note name no software: taken as blackwell-megatron",)
    named = predict(read_row(TINY), memory=False)
    assert named.step_s == unnamed.step_s and named.high < unnamed.high
    stacks = [cluster_of(read_row({**TINY, "source": s})).device.stack for s in ("nobody", "NeMo")]
    assert [s.seen for s in stacks if s] == [UNNAMED, STACKS["blackwell-nemo"].seen]


def test_a_device_without_the_stack_of_a_row_takes_its_facts_and_own_constants() -> None:
    on = "hopper-torch on b200-sxm"
    one = read_row({**TINY, "source": "torchtitan", "tp": "1", "gpus": "2"})
    device = cluster_of(one).device
    assert device.stack is not None and (device.stack.name, device.stack.seen) == (on, 0)
    assert device.stack.shards == STACKS["hopper-torch"].shards == "cast"
    values = [STACKS[f"blackwell-{s}"].number["matmul"] for s in ("megatron", "nemo")]
    assert device.stack.number["matmul"] == pytest.approx(sum(values) / 2)
    assert device.stack.number["launch_s"] == STACKS["hopper-torch"].number["launch_s"]
    assert cluster_of(replace(one, stack=on)) == cluster_of(one)
    compiled = read_row({**TINY, "source": "", "hw": "a100", "note": "FSDP, torch.compile"})
    found = predict(compiled, memory=False)
    assert found.stack == "hopper-torch-compile on a100-80g-sxm" and not found.notes
    assert (
        stack_for(replace(one, note="no torchtitan", source=""), "h200-141g-sxm") == "hopper-torch"
    )
    assert stack_for(replace(one, note="FSDP, no Megatron"), "h200-141g-sxm") == "hopper-torch"


@each_case(
    ("written", "said"),
    [
        ((",", ";"), "separated by ';'"),
        (("case,", " Case,"), "the column ' Case' is called 'case'"),
        ((",zero,", ",Zero,"), "the column 'Zero' is called 'zero'"),
        (
            (",recompute,", ",recomputation,"),
            "'recomputation' is not known, and there is none called 'recompute'",
        ),
    ],
)
def test_columns_that_are_nearly_named(tmp_path: Path, written: tuple[str, str], said: str) -> None:
    file = tmp_path / "runs.csv"
    write_rows(file, [TINY])
    file.write_text(file.read_text(encoding="utf-8").replace(*written), encoding="utf-8")
    with pytest.raises(JobError, match=said):
        read_rows(file)
