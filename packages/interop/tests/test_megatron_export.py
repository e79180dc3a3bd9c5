"""Exports for Megatron-LM read back as the same job; what it cannot do is refused with the nearest that it can."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.interop.tests.megatron_jobs import ALONE, LAYOUTS, MIXTURE, described, job_with
from piper_interop import (
    Asked,
    DeviceLayout,
    JobDescription,
    ModelSizes,
    OffloadedTensors,
    Recomputation,
    export_job,
    import_job,
)
from piper_interop.megatron import stages
from piper_interop.megatron.describe import PIECES, PP_FIRST
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case


def back(job: JobDescription) -> JobDescription:
    """Return a job that was written and read again."""
    text = export_job("megatron", job).files["megatron.args"]
    return import_job("megatron", text, Asked(devices=job.layout.devices)).described


@each_case("layout", LAYOUTS)
def test_layouts_come_back(layout: DeviceLayout) -> None:
    job = job_with(layout)
    assert replace(back(job), notes=()) == job


def test_muon_comes_back_or_is_named() -> None:
    job = replace(job_with(DeviceLayout(dp=2)), optimizer="muon")
    assert back(job).optimizer == "muon"
    for system in ("deepspeed", "accelerate"):
        assert any("its optimizer, muon" in note for note in export_job(system, job).notes)
    with pytest.raises(JobError, match="the optimizer muon; the nearest is adamw"):
        export_job("torchtitan", job)


@each_case(
    ("scale", "reduce"),
    [((("initial", 1024.0), ("hysteresis", 3)), "float16"), ((), "float32"), ((("fixed", 128.0),), "float32")],
)  # fmt: skip
def test_a_scaled_loss_comes_back(scale: tuple[tuple[str, float], ...], reduce: str) -> None:
    job = replace(job_with(DeviceLayout()), compute="float16", reduce=reduce, loss_scale=scale)
    assert replace(back(job), notes=()) == job


@each_case(
    ("zero", "reduce", "accumulate"), [(2, "bfloat16", "float32"), (3, "float32", "bfloat16")]
)
def test_sums_and_messages_of_gradients_apart_come_back_with_fsdp(
    zero: int, reduce: str, accumulate: str
) -> None:
    job = job_with(DeviceLayout(dp=2, zero=zero), reduce=reduce, accumulate=accumulate)
    assert replace(back(job), notes=()) == job


@st.composite
def layouts(draw: st.DrawFn) -> DeviceLayout:
    """Draw a layout that Megatron can say, for eight layers."""
    tp, cp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    pp = draw(st.sampled_from((1, 2, 3, 4)))
    chunks = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    number = pp * chunks
    counts = stages.evened(8, number)
    if number > 1 and draw(st.booleans()):
        ends = draw(st.lists(st.integers(0, 8), min_size=number - 1, max_size=number - 1))
        bounds = (0, *sorted(ends), 8)
        counts = tuple(b - a for a, b in pairwise(bounds))
    at, units = stages.boundaries(counts)
    zero, dp = draw(st.integers(0, 3)), draw(st.sampled_from((1, 2, 4)))
    copies = draw(st.sampled_from((1, 2))) if zero else 1
    reduces = zero < 2 and (dp * copies > 1 or (zero and cp > 1))
    buckets = ({"bucket_mb": 25.0}, {"bucket_mb": 152.587890625}, ALONE) if reduces else ({},)
    return DeviceLayout(
        tp=tp,
        sequence=(sequence := tp > 1 and draw(st.booleans())),
        pieces=draw(st.sampled_from((1, PIECES))) if sequence and cp == 1 else 1,
        cp=cp,
        attention=draw(st.sampled_from(("ring", "gather", "heads"))) if cp > 1 else "ring",
        pp=pp,
        schedule="interleaved" if chunks > 1 else "one_f_one_b",
        chunks=chunks,
        group=draw(st.sampled_from((None, 6, 8))) if chunks > 1 else None,
        at=at,
        units=units,
        dp=dp,
        dp_replicate=copies,
        zero=zero,
        over_cp=bool(zero) and cp > 1,
        order=draw(st.sampled_from(((), PP_FIRST))) if pp > 1 else (),
        **draw(st.sampled_from(buckets)),
    )


@settings(max_examples=150, deadline=None)
@given(
    layouts(),
    st.sampled_from(
        (
            {},
            {"recompute": (Recomputation("inputs", group=2),)},
            {"recompute": (Recomputation("outputs@*.attention.core+*.feed_forward"),)},
            {"reduce": "bfloat16", "clip_norm": None},
            {"offload": OffloadedTensors("all", 3)},
            {"optim_on_host": 1.0},
            {"optim_on_host": 0.25},
            {"compute": "float32", "lr": 3e-4},
        )
    ),
)
def test_what_megatron_can_say_comes_back(layout: DeviceLayout, changes: dict[str, Any]) -> None:
    job = job_with(layout, **(changes if layout.pp == 1 or "offload" not in changes else {}))
    assert replace(back(job), notes=()) == job


@each_case(
    "more",
    [
        "--group-query-attention --num-query-groups 2 --kv-channels 32 --qk-layernorm",
        "--squared-relu --normalization LayerNorm --rotary-percent 0.5",
        "--openai-gelu --position-embedding-type learned_absolute --max-position-embeddings 64",
        "--attention-backend unfused --hidden-dropout 0.1 --attention-dropout 0.1 --window-size 7,0 --window-attn-skip-freq 2",
        "--softmax-type learnable --add-qkv-bias --untie-embeddings-and-output-weights",
        "--tokenizer-type BertWordPieceLowerCase --position-embedding-type learned_absolute",
        "--tokenizer-type BertWordPieceLowerCase --position-embedding-type learned_absolute --bert-no-binary-head",
    ],
)  # fmt: skip
def test_sizes_come_back(more: str) -> None:
    base = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    shared = "--micro-batch-size 2 --vocab-size 1024 --hidden-dropout 0 --attention-dropout 0"
    job = described(base=f"{base} --position-embedding-type rope {shared} {more}")
    assert replace(back(job), notes=job.notes) == job


@each_case(
    "more",
    [
        "--expert-model-parallel-size 4",
        "--moe-layer-freq ([0]*3+[1]*5) --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-aux-loss-coeff 1e-2 --moe-router-topk-scaling-factor 2.5",
        "--moe-router-pre-softmax --moe-expert-capacity-factor 1.0 --tensor-model-parallel-size 2 --sequence-parallel",
        "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
        "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable",
    ],
)
def test_mixtures_come_back(more: str) -> None:
    base = MIXTURE
    if "quick-geglu" in more:
        base = base.replace("--swiglu --disable-bias-linear ", "")
    job = described(more, base=base)
    assert replace(back(job), notes=job.notes) == job


@each_case(
    "parts",
    [
        "",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*3|t*4||tmmL",
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|m|m|L",
    ],
)
def test_layers_for_further_tokens_come_back(parts: str) -> None:
    job = described(f"{parts} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.2 --vocab-size 1024")
    assert replace(back(job), notes=job.notes) == job
    assert job.sizes.fields["mtp"] == 2


@each_case(
    ("layout", "changes", "complaint"),
    [
        (DeviceLayout(pp=2, schedule="zbv", chunks=2), {}, "'zbv': Megatron cannot do that; the nearest is interleaved"),
        (DeviceLayout(pp=2, schedule="dualpipe"), {}, "nearest is interleaved with chunks=2"),
        (DeviceLayout(pp=2, schedule="gpipe"), {}, "nearest is one_f_one_b"),
        (DeviceLayout(pp=2, schedule="interleaved", chunks=2, group=13), {}, "group=13"),
        (DeviceLayout(cp=3), {}, "a multiple of 6 tokens"),
        (DeviceLayout(dp=2), {"params": "bfloat16"}, "nearest is params='float32'"),
        (DeviceLayout(dp=2), {"compute": "float32", "reduce": "bfloat16"}, "nearest is reduce='float32'"),
        (DeviceLayout(dp=2), {"reduce": "bfloat16", "accumulate": "float32"}, "the nearest is one dtype for both"),
        (DeviceLayout(dp=2), {"recompute": (Recomputation("products"),)}, 'one recompute with keep="inputs"'),
        (DeviceLayout(dp=2), {"recompute": (Recomputation("inputs@*.attention.core"),)}, "modules of --recompute-modules"),
        (DeviceLayout(dp=2), {"recompute": (Recomputation("inputs", layers=(3, 4)),)}, "the first layers of each stage"),
        (DeviceLayout(pp=2, zero=3, reshard=False, dp=2), {}, "nearest is reshard=True"),
        (DeviceLayout(pp=2), {"offload": OffloadedTensors()}, 'nearest is tensors="all" of the first layers'),
    ],
)  # fmt: skip
def test_what_megatron_cannot_do(
    layout: DeviceLayout, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(JobError) as refusal:
        export_job("megatron", job_with(layout, **changes))
    assert complaint in str(refusal.value)


@each_case(
    ("field", "value"),
    [
        ("norms", "sandwich"),
        ("parallel", True),
        ("positions", "alibi"),
        ("head_bias", True),
        ("activation", "relu"),
        ("attention_bias", "all"),
        ("theta", 10_000.5),
    ],
)
def test_sizes_that_megatron_cannot_do(field: str, value: Any) -> None:
    job = job_with(DeviceLayout(dp=2))
    sizes = ModelSizes(dict(job.sizes.fields) | {field: value})
    with pytest.raises(JobError, match="1 part cannot be exported"):
        export_job("megatron", replace(job, sizes=sizes))


def test_all_refusals_come_at_once_and_nearest_forms_are_notes() -> None:
    layout = DeviceLayout(pp=2, schedule="zbv", chunks=2, dp=2)
    with pytest.raises(JobError, match="2 parts cannot be exported"):
        export_job("megatron", job_with(layout, params="bfloat16"))
    notes = export_job("megatron", job_with(DeviceLayout(cp=2, dp=2, zero=1, prefetch=3))).notes
    assert any("over dp alone" in note for note in notes) and any(
        "prefetch=3" in note for note in notes
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" in notes[-1]


def test_recomputation_of_first_layers_comes_back() -> None:
    for rule, layout in (
        (Recomputation("inputs", layers=3), DeviceLayout(dp=2, **ALONE)),
        (Recomputation("inputs", layers=(0, 4)), DeviceLayout(pp=2, dp=2, **ALONE)),
    ):
        job = job_with(layout, recompute=(rule,))
        assert replace(back(job), notes=()) == job
