"""Imports and exports follow the sources of the other systems; each case names the file there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.interop.tests.megatron_jobs import DENSE, MIXTURE, described, job_with, of_file
from piper_interop import Asked, DeviceLayout, JobDescription, ModelSizes, export_job, import_job
from piper_interop.torchtitan.reader import _reason, _word
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case


def mixture(**experts: Any) -> JobDescription:
    """Return a job whose experts have these fields."""
    job = described(base=MIXTURE)
    own = ModelSizes({**job.sizes.fields["experts"].fields, **experts}, "Experts")
    return replace(job, sizes=ModelSizes({**job.sizes.fields, "experts": own}))


def exported(job: JobDescription) -> str:
    return export_job("megatron", job).files["megatron.args"]


@each_case(
    ("experts", "said"),
    [
        ({"top_k": 2, "groups": 4, "top_groups": 3}, "top_groups=3): Megatron cannot"),
        ({"top_k": 1, "normalized": True}, "normalized=False"),
    ],
)
def test_routers_that_choose_other_experts_are_refused(experts: dict[str, Any], said: str) -> None:
    """A group's score is the sum of its best topk // group_topk (core/transformer/moe/moe_utils.py)."""
    with pytest.raises(JobError, match="1 part cannot be exported") as refusal:
        exported(mixture(**experts))
    assert said in str(refusal.value)


@each_case(
    ("experts", "said"),
    [
        ({"top_k": 6, "groups": 4, "top_groups": 3}, "by their 1 best experts: by 2"),
        ({"top_k": 2, "groups": 4, "top_groups": 2, "score": "sigmoid"}, "by their 2 best experts: by 1"),
        ({"top_k": 4, "groups": 4, "top_groups": 2, "score": "sigmoid"}, ""),
    ],
)  # fmt: skip
def test_groups_that_are_scored_otherwise_are_noted(experts: dict[str, Any], said: str) -> None:
    """DeepSeek-V2 has the best expert of a group, and Megatron the best topk // group_topk."""
    notes = "\n".join(export_job("megatron", mixture(**experts)).notes)
    assert said in notes and ("best experts" in notes) == bool(said)


def test_groups_limit_nothing_alone() -> None:
    fields = described("--moe-router-num-groups 4", base=MIXTURE).sizes.fields["experts"].fields
    assert "groups" not in fields and "top_groups" not in fields
    limited = described(
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4", base=MIXTURE
    )
    assert limited.sizes.fields["experts"].fields["top_groups"] == 2
    assert any("topk / group-topk" in note for note in limited.notes)


def test_places_of_experts_are_those_of_a_row() -> None:
    """The policy "probs" of Megatron leaves out the least shares (core/transformer/transformer_config.py)."""
    text = exported(mixture(capacity_factor=1.0))
    assert "--moe-token-drop-policy position\n" in text
    assert any(
        "of a row" in note for note in export_job("megatron", mixture(capacity_factor=1.0)).notes
    )
    dropless = described("--moe-expert-capacity-factor -1", base=MIXTURE)
    assert dropless.sizes == described(base=MIXTURE).sizes


def test_latent_attention_turns_by_plain_angles() -> None:
    """The default of a model with latent attention is YaRN (core/transformer/transformer_config.py, MLATransformerConfig)."""
    latent = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
    job = described(latent, base=MIXTURE)
    assert "--rope-type rope\n" in exported(job) and "--rope-type" not in exported(described())
    assert any("norms of the latents" in note for note in job.notes)


@each_case(
    ("more", "complaint"),
    [
        ("--global-batch-size 24 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", "leave 2"),
        ("--global-batch-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", "at least pp=4"),
        ("--make-vocab-size-divisible-by 0", "a number from 1 on"),
        ("--num-distributed-optimizer-instances 0", "a number from 1 on"),
        ("--lr nan", "a number is needed"),
        ("--window-size 7,0 --window-attn-skip-freq 0", "a number from 1 on"),
    ],
)  # fmt: skip
def test_numbers_that_megatron_refuses(more: str, complaint: str) -> None:
    """Groups of microbatches: core/pipeline_parallel/schedules.py."""
    with pytest.raises(JobError) as refusal:
        described(more)
    assert complaint in str(refusal.value)


@each_case(
    ("more", "complaint"),
    [
        ("--moe-router-topk 1", "--moe-router-pre-softmax"),
        ("--moe-router-group-topk 2", "needs --moe-router-num-groups"),
        (
            "--expert-model-parallel-size 4 --tensor-model-parallel-size 2",
            "add --sequence-parallel",
        ),
    ],
)
def test_mixtures_that_megatron_refuses(more: str, complaint: str) -> None:
    with pytest.raises(JobError, match=complaint):
        described(more, base=MIXTURE)


@each_case(
    ("more", "waits"),
    [
        ("--pipeline-model-parallel-size 4", True),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", False),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", True),
        ("", False),
    ],
)  # fmt: skip
def test_stages_wait_for_messages_where_megatrons_do(more: str, waits: bool) -> None:
    """Without virtual stages Megatron turns the overlap off (training/arguments.py)."""
    notes = described(f"{more} --global-batch-size 32 --overlap-grad-reduce").notes
    assert any("messages of the pipeline" in note for note in notes) == waits
    assert any("in the first stage alone" in note for note in notes) == ("--pipe" in more)


def test_false_in_yaml_is_no_unknown_option(tmp_path: Path) -> None:
    lines = "\n".join(
        f"{name.partition(' ')[0].replace('-', '_')}: {name.partition(' ')[2] or 'true'}"
        for name in described_options()
    )
    shared = of_file(
        tmp_path / "job.yaml", f"{lines}\nshare_embeddings_and_output_weights: false\n", devices=8
    )
    assert shared.described.sizes.fields.get("tied") is not True
    with pytest.raises(JobError, match="pad-vocab-size"):
        of_file(tmp_path / "job.yaml", f"{lines}\npad_vocab_size: false\n", devices=8)


def described_options() -> list[str]:
    """Return the options of the base job, without dashes."""
    return [option.strip() for option in DENSE.split("--") if option.strip()]


def test_learning_rates_stay_as_they_are() -> None:
    """Megatron's default decays to 0 in its iterations, transformers' Trainer likewise."""
    job = job_with(DeviceLayout(dp=2))
    assert "--lr-decay-style constant\n" in exported(job)
    [arguments] = [
        json.loads(text)
        for text in export_job("accelerate", job).files.values()
        if "learning_rate" in text
    ]
    assert arguments["lr_scheduler_type"] == "constant"


def test_stage_3_gathers_ahead_unless_nothing_may_be_live() -> None:
    """The bound holds gathers back (deepspeed/runtime/zero/partitioned_param_coordinator.py)."""
    job = job_with(DeviceLayout(dp=8, zero=3, prefetch=1, bucket_mb=2.0), compute="bfloat16")
    assert "max_live" not in "".join(export_job("deepspeed", job).files.values())


@each_case(("live", "prefetch", "noted"), [(0, 0, False), (10**7, 1, True), (10**9, 1, False)])
def test_a_bound_on_live_parameters(tmp_path: Path, live: int, prefetch: int, noted: bool) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_max_live_parameters": live}
    options: Mapping[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    file.write_text(json.dumps(options))
    sizes = described().sizes
    asked = Asked(devices=8, sizes=sizes, length=32, rows=8)
    found = import_job("deepspeed", str(file), asked).described
    assert found.layout.prefetch == prefetch
    assert any("predicted too fast where this bound" in note for note in found.notes) == noted


def test_torchtitan_clips_unless_the_bound_is_infinite() -> None:
    job = job_with(DeviceLayout(dp=8, zero=3), clip_norm=None)
    assert "--training.max_norm=inf" in "".join(export_job("torchtitan", job).files.values())


def test_torchtitan_shares_states_along_cp() -> None:
    layout = DeviceLayout(dp=2, cp=2, attention="gather")
    with pytest.raises(JobError, match="whole along cp"):
        export_job("torchtitan", job_with(layout))


def test_words_of_torchtitans_command_line() -> None:
    assert _word("training.enable_cpu_offload=true") == "--training.enable_cpu_offload"
    assert _word("--compile.enable=False") == "--compile.no-enable"
    assert _word("training.seq_len=8") == "--training.seq_len=8"
    assert _word("activation-checkpoint:full") == "activation-checkpoint:full"
    box = [
        "a warning",
        "╭─ Invalid ╮",
        "│ invalid x │",
        "│ of two.   │",
        "│ ───────── │",
        "│ more      │",
    ]
    assert _reason(box) == "invalid x of two." and _reason(["one", "two"]) == "two"


def test_exact_gelu_is_not_fused_with_its_bias() -> None:
    """The fused one is the tanh form (core/fusions/fused_bias_gelu.py)."""
    biased = DENSE.replace("--swiglu --disable-bias-linear ", "")
    assert "--no-bias-gelu-fusion\n" in exported(described(base=biased))
    assert "gelu" not in exported(described())
