"""Options of Megatron-LM become the job that they make there; each number here was worked out by hand from its rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packages.interop.tests.megatron_jobs import ALONE, DENSE, MIXTURE, described, imported
from piper_interop import (
    DeviceLayout,
    Float8Layers,
    JobDescription,
    OffloadedTensors,
    Recomputation,
    export_job,
    python,
)
from piper_interop.megatron import words
from piper_interop.megatron.table import TABLE
from piper_interop.neutral.options import row_of
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case

GPT = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "hidden": 256,
    "vocab": 50_304,  # GPT-2's 50,257
    "length": 40,
    "activation": "gelu",
    "gated": False,
    "norm": "layernorm",
    "attention_bias": "all",
    "mlp_bias": True,
    "positions": "learned",
    "tied": True,
}
"""The sizes of a job whose options say no more than its dimensions."""


def test_a_dense_job() -> None:
    job = described(
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    )
    assert dict(job.sizes.fields) == {
        "layers": 8,
        "width": 64,
        "heads": 4,
        "hidden": 128,  # 4 x 64 x 2 / 3 = 170, and the next multiple of 64 below
        "vocab": 1024,  # 1,000 filled up to a multiple of 128 x 2
        "length": 32,
        "theta": 10_000.0,
        "tied": True,
    }
    assert (job.length, job.global_batch, job.rows, job.microbatches) == (32, 64, 2, 8)
    assert (job.params, job.compute, job.reduce) == ("float32", "bfloat16", "float32")
    assert (job.clip_norm, job.lr, job.stack) == (1.0, 1e-4, "megatron")
    assert job.layout == DeviceLayout(tp=2, sequence=True, dp=4, zero=1, **ALONE)
    assert job.origins["tp"] == "--tensor-model-parallel-size 2 --sequence-parallel"
    compile(python(job, "A job"), "FILE.py", "exec")


def test_a_graph_of_a_whole_step_can_be_said() -> None:
    for words_of_it in ("full_iteration", "local --cuda-graph-scope full_iteration"):
        job = described(f"--cuda-graph-impl {words_of_it}")
        assert job.cuda_graph and not job.notes and "NAME --cuda-graph predicts" in python(job, "x")
    layers = described("--cuda-graph-impl local --cuda-graph-scope attn mlp")
    assert not layers.cuda_graph and "starts one by one" in " ".join(layers.notes)
    hosted = described("--cuda-graph-impl full_iteration --optimizer-cpu-offload")
    assert not hosted.cuda_graph and "starts one by one" in " ".join(hosted.notes)


def test_defaults_are_those_of_megatron() -> None:
    plain = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 40 "
    job = described(base=f"{plain} --micro-batch-size 3 --merge-file merges.txt", devices=4)
    assert dict(job.sizes.fields) == GPT | {"dropout": 0.1, "attention_dropout": 0.0}
    assert (job.global_batch, job.rows, job.compute, job.layout.zero) == (12, 3, "float32", 0)
    assert any("no dropout of attention" in note for note in job.notes)


@each_case(
    ("more", "fields"),
    [
        ("--group-query-attention --num-query-groups 2", {"kv_heads": 2}),
        ("--group-query-attention --num-query-groups 4", {"kv_heads": None}),
        ("--num-query-groups 2", {"kv_heads": None}),
        ("--kv-channels 32", {"head_dim": 32}),
        ("--kv-channels 16", {"head_dim": None}),
        ("--ffn-hidden-size 200", {"hidden": 200}),
        ("--rotary-percent 0.5 --rotary-base 500000", {"rotary_part": 0.5, "theta": None}),
        ("--add-qkv-bias", {"attention_bias": "qkv"}),
        ("--qk-layernorm --norm-epsilon 1e-6", {"qk_norm": True, "eps": 1e-6}),
        ("--untie-embeddings-and-output-weights", {"tied": None}),
        ("--window-size 15,0 --window-attn-skip-freq 4", {"window": 16, "window_every": 4}),
        ("--window-size (15,0) --window-attn-skip-freq ([1]*3+[0])*2", {"window": 16, "window_every": 4}),
        ("--attention-backend unfused", {"attention": "math", "dropout": None}),
        ("--attention-backend unfused --hidden-dropout 0.1", {"dropout": 0.1, "attention_dropout": 0.0}),
        ("--attention-backend unfused --recompute-granularity selective", {"attention": "math"}),
        ("--softmax-type learnable", {"attention": None, "sinks": True}),
        ("--padded-vocab-size 1111", {"vocab": 1111}),
        ("--make-vocab-size-divisible-by 7 --tensor-model-parallel-size 2", {"vocab": 1008}),
    ],
)  # fmt: skip
def test_sizes(more: str, fields: dict[str, Any]) -> None:
    sizes = described(more).sizes.fields
    assert {name: sizes.get(name) for name in fields} == fields


def test_an_encoder() -> None:
    """Options of pretrain_bert.py; by them a file without a program is known by its word pieces."""
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 40 "
    base += "--micro-batch-size 3 --attention-backend unfused --tensor-model-parallel-size 2"
    encoder = {"causal": False, "head_transform": True, "head_bias": True}
    fields = described("--vocab-file bert/vocab.txt", base=base).sizes.fields
    assert dict(fields) == encoder | {
        **GPT,
        "vocab": 30_720,  # 30,522 filled up to a multiple of 256
        "dropout": 0.1,
        "attention": "math",
        "token_types": 2,
        "pooled_classes": 2,
    }
    one_head = described("--tokenizer-type BertWordPieceCase --bert-no-binary-head", base=base)
    assert one_head.sizes.fields["vocab"] == 29_184  # of 28,996
    assert not {"token_types", "pooled_classes"} & {*one_head.sizes.fields}
    assert "causal=False" in python(one_head, "A job")


def test_latent_attention_and_mixtures() -> None:
    job = described(
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 8 --qk-layernorm --moe-layer-freq ([0]*3+[1]*5) --moe-router-topk 3 --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
        "--moe-shared-expert-intermediate-size 40 --expert-model-parallel-size 4 --use-distributed-optimizer",
        base=MIXTURE,
    )
    fields = job.sizes.fields
    ranks = {"q_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    assert fields["latent"].fields == ranks and fields["latent"].kind == "Latent"
    assert "qk_norm" not in fields
    assert fields["dense_layers"] == 3
    assert fields["experts"].fields == {
        "number": 8,
        "top_k": 3,
        "hidden": 48,
        "shared_hidden": 40,
        "score": "sigmoid",
        "scale": 2.5,
        "groups": 4,
        "top_groups": 2,
        "balance": 1e-4,
    }
    assert (job.layout.dp, job.layout.ep) == (8, 4)
    softmax = described("--moe-router-pre-softmax", base=MIXTURE).sizes.fields["experts"].fields
    assert softmax == {"number": 8, "top_k": 2, "hidden": 48, "normalized": False}


def test_shared_experts_beside_the_exchange() -> None:
    """Where tp cuts them, in Megatron, they are taken before the exchange: in the region of experts they are whole."""
    asked = "--expert-model-parallel-size 4 --moe-shared-expert-intermediate-size 48 --moe-shared-expert-overlap"
    job = described(asked, base=MIXTURE)
    assert job.layout.beside and job.sizes.fields["experts"].fields["shared_within"]
    assert "expert_parallel(beside=True)" in python(job, "x")
    cut = described(f"{asked} --tensor-model-parallel-size 2 --sequence-parallel", base=MIXTURE)
    assert not cut.layout.beside and "before the exchange" in " ".join(cut.notes)


@each_case(
    ("more", "layout"),
    [
        ("--pipeline-model-parallel-size 4", DeviceLayout(pp=4, dp=2, **ALONE)),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
         DeviceLayout(pp=4, dp=2, schedule="interleaved", chunks=2, **ALONE)),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-virtual-pipeline-stage 6",
         DeviceLayout(pp=4, dp=2, schedule="interleaved", chunks=2, group=6, **ALONE)),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1", DeviceLayout(pp=4, dp=2, **ALONE)),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
         DeviceLayout(pp=4, dp=2, at=(1, 3, 5), **ALONE)),
        ("--num-layers 10 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 "
         "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         DeviceLayout(pp=4, dp=2, schedule="interleaved", chunks=3, at=tuple(range(1, 12)), units="all", **ALONE)),
        ("--num-layers 14 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
         "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         DeviceLayout(pp=4, dp=2, schedule="interleaved", chunks=2, at=(1, 3, 5, 7, 9, 11, 13), **ALONE)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*2|(t|)*2,t*3|,t|L",
         DeviceLayout(pp=2, dp=4, schedule="interleaved", chunks=3, at=(3, 4, 5, 8, 9), units="all", **ALONE)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*5|t*2|tL",
         DeviceLayout(pp=2, dp=4, schedule="interleaved", chunks=2, at=(1, 6, 8), units="all", **ALONE)),
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad",
         DeviceLayout(tp=2, sequence=True, pieces=4, dp=4, **ALONE)),
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", DeviceLayout(tp=2, dp=4, **ALONE)),
        ("--context-parallel-size 2 --use-distributed-optimizer",
         DeviceLayout(cp=2, dp=4, zero=1, over_cp=True, **ALONE)),
        ("--context-parallel-size 2 --cp-comm-type a2a", DeviceLayout(cp=2, attention="heads", dp=4, **ALONE)),
        ("--context-parallel-size 2 --cp-comm-type all_gather", DeviceLayout(cp=2, attention="gather", dp=4, **ALONE)),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
         DeviceLayout(dp=8, zero=1, bucket_mb=152.587890625)),
        ("--overlap-grad-reduce --grad-reduce-in-bf16 --ddp-bucket-size 1048576", DeviceLayout(dp=8, bucket_mb=2.0)),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2",
         DeviceLayout(dp=4, dp_replicate=2, zero=1, **ALONE)),
        ("--use-megatron-fsdp", DeviceLayout(dp=8, zero=3, bucket_mb=1.0)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", DeviceLayout(dp=8, zero=2, bucket_mb=1.0)),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", DeviceLayout(dp=8, zero=3, reshard=False, bucket_mb=1.0)),
    ],
)  # fmt: skip
def test_layouts(more: str, layout: DeviceLayout) -> None:
    assert described(more).layout == layout


def test_torch_fsdp_has_gradients_in_the_dtype_of_its_parameters() -> None:
    assert described("--bf16 --use-megatron-fsdp").reduce == "float32"
    assert described("--bf16 --use-torch-fsdp2").reduce == "bfloat16"


@each_case(
    ("more", "rules"),
    [
        ("", ()),
        ("--recompute-granularity selective", (Recomputation("outputs@*.attention.core"),)),
        ("--recompute-activations", (Recomputation("outputs@*.attention.core"),)),
        ("--recompute-granularity selective --recompute-modules mlp", (Recomputation("outputs@*.feed_forward"),)),
        ("--recompute-granularity selective --recompute-modules layernorm mlp",
         (Recomputation("inputs@*.norm[12]&outputs@*.feed_forward"),)),
        ("--recompute-granularity selective --recompute-modules moe", ()),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", (Recomputation("inputs", group=2),)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", (Recomputation("inputs", layers=3),)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 9", (Recomputation("inputs"),)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
         "--pipeline-model-parallel-size 2", (Recomputation("inputs", layers=(0, 4)),)),
    ],
)  # fmt: skip
def test_recomputation(more: str, rules: tuple[Recomputation, ...]) -> None:
    job = described(more)
    assert job.recompute == rules
    compile(python(job, "A job"), "FILE.py", "exec")


MIXED = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--moe-layer-freq ([0]*3+[1]*5) --moe-shared-expert-intermediate-size 40 --swiglu "
)
"""A mixture with latent attention, dense first layers and shared experts."""


@each_case(
    ("parts", "policy"),
    [
        ("mlp", "outputs@layers.0-2.feed_forward"),
        ("moe", "outputs@layers.3-7.feed_forward"),
        ("shared_experts", "outputs@*.feed_forward.shared"),
        ("moe_act", "inputs@layers.3-7.feed_forward.activation+layers.3-7.feed_forward.times"),
        ("mla_up_proj", "inputs@*.attention.kv_up+*.attention.q_up+*.attention.turn"),
        ("core_attn layernorm", "inputs@*.norm[12]&outputs@*.attention.core"),
    ],
)
def test_parts_of_a_mixtures_layers_are_computed_again(parts: str, policy: str) -> None:
    """The parts come back from an export; tests/parity/test_recompute_parts.py compiles the patterns."""
    more = f"{MIXED} --recompute-granularity selective --recompute-modules {parts}"
    job = described(more, base=MIXTURE)
    assert job.recompute == (Recomputation(policy),)
    text = export_job("megatron", job).files["megatron.args"]
    assert f"--recompute-modules {parts}\n" in text
    if parts == "moe":
        given = f"{MIXED} --moe-layer-recompute"
        assert described(given, base=MIXTURE).recompute == job.recompute


def test_a_part_that_no_layer_has_is_refused() -> None:
    with pytest.raises(JobError, match=r"recompute-modules.*core_attn, layernorm, mla_up_proj"):
        described("--recompute-granularity selective --recompute-modules gdn_norm_out")


def test_float8_is_that_of_transformer_engine() -> None:
    """It comes back from an export, but for the head, which Megatron never quantises."""
    job = described("--fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16")
    layers = int(job.sizes.fields["layers"])
    kept = ("layers.0.*", f"layers.{layers - 1}.*")
    assert job.float8 == Float8Layers("blockwise", ("layers.*",), kept, "float8")
    assert 'saved="float8")' in python(job, "A job")
    text = export_job("megatron", job).files["megatron.args"]
    assert (
        "--fp8-recipe blockwise\n--first-last-layers-bf16\n--num-layers-at-start-in-bf16 1\n"
        in text
    )
    assert "--fp8-format hybrid\n" in export_job("megatron", current()).files["megatron.args"]
    with pytest.raises(JobError, match="float8='rowwise': Megatron cannot do that"):
        export_job("megatron", replace(job, float8=Float8Layers("rowwise")))
    assert described("", 8).float8 is None
    usual = described("--fp8-format hybrid").float8
    assert usual == Float8Layers("delayed", ("layers.*",), saved="float8")


def test_a_latent_that_blocks_do_not_divide_stays_in_bfloat16() -> None:
    latent = "--multi-latent-attention --kv-lora-rank 64 --qk-pos-emb-head-dim 32 --fp8-format e4m3"
    for recipe, kept in (("blockwise", ("layers.*.attention.kv_down",)), ("mxfp8", ())):
        job = imported(f"{DENSE} {latent} --fp8-recipe {recipe}")
        assert job.described.float8 is not None and job.described.float8.keep == kept
        assert any("down-projection" in line.text for line in job.judgement.nearest) == bool(kept)


def test_fewer_groups_of_keys_than_tp_are_said() -> None:
    grouped = f"{DENSE} --group-query-attention --num-query-groups 2 --tensor-model-parallel-size"
    for tp, said in ((2, False), (4, True)):
        notes = imported(f"{grouped} {tp}").described.notes
        assert any("keys and values by messages of their own" in note for note in notes) == said


def current() -> JobDescription:
    return described("--fp8-format hybrid --fp8-recipe tensorwise")


def test_layers_whose_tensors_wait_on_the_host() -> None:
    job = described("--cpu-offloading-num-layers 3")
    assert job.offload == OffloadedTensors("all", 3) and described("").offload is None
    assert 'piper.offload(where(layer=range(3)), tensors="all")' in python(job, "A job")


def test_an_optimizer_on_the_host() -> None:
    job = described("--optimizer-cpu-offload --use-precision-aware-optimizer")
    assert job.optim_on_host == 1 and described("").optim_on_host == 0
    assert 'piper.offload(where(), tensors="optim")' in python(job, "A job")
    half = described("--optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert f'layer=range({half.layers_on_host})), tensors="optim")' in python(half, "A job")
    assert half.layers_on_host * 2 == half.sizes.fields["layers"]
    assert any("the optimizer of the first layers" in note for note in half.notes)


def test_inputs_of_parts_wait_on_the_host() -> None:
    parts = "--fine-grained-activation-offloading --offload-modules"
    job = described(f"{parts} attn_norm core_attn expert_fc1 moe_act", base=MIXTURE)
    assert job.offload == OffloadedTensors("saved", modules=("*.attention", "*.feed_forward"))
    assert 'tensors="saved", modules=("*.attention", "*.feed_forward")' in python(job, "A job")
    assert any("no residuals" in note for note in job.notes)
    assert described(f"{parts} mlp_norm").offload is None


@each_case(
    ("more", "stand_in", "words_of_it"),
    [
        ("--fp8-format hybrid --fp8-recipe custom", "bf16", "too slow"),
        ("--optimizer muon --tensor-model-parallel-size 2", "adam", "as AdamW"),
        ("--fine-grained-activation-offloading --offload-modules fused_group_mlp", "no-offload", "nothing is moved"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "ring", "one ring"),
    ],
)  # fmt: skip
def test_stand_ins_are_asked_for_and_noted(more: str, stand_in: str, words_of_it: str) -> None:
    with pytest.raises(JobError, match=f"--as {stand_in} .*{words_of_it}"):
        described(more)
    assert any(words_of_it in note for note in described(more, 8, stand_in).notes)


def test_muon_has_whole_matrices_whose_states_no_rank_shares() -> None:
    job = described(
        "--optimizer muon --use-distributed-optimizer --expert-model-parallel-size 4", base=MIXTURE
    )
    assert (job.optimizer, job.layout.ep, job.layout.zero) == ("muon", 4, 0)
    assert 'optimizer="muon"' in python(job, "A job")
    assert any("beside Muon" in note for note in job.notes)
    assert described("--use-distributed-optimizer").optimizer == "adamw"
    assert described("--optimizer dist_muon").optimizer == "muon"
    with pytest.raises(JobError, match="Muon of matrices that devices cut"):
        described("--optimizer muon --use-torch-fsdp2", base=MIXTURE)


def test_gradients_of_tied_embeddings_are_added_up_in_shards() -> None:
    """The devices of both stages scatter them together; Megatron adds up all of them once more."""
    told = "Megatron adds them up whole"
    for more, is_said in (
        ("2", True),
        ("2 --untie-embeddings-and-output-weights", False),
        ("1", False),
    ):
        more = f"--use-distributed-optimizer --pipeline-model-parallel-size {more}"
        assert any(told in note for note in described(more, 8).notes) == is_said


def test_layers_for_further_tokens_are_the_last_ones() -> None:
    parts = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*3m*2L --mtp-num-layers 2"
    job = described(f"{parts} --mtp-loss-scaling-factor 0.2")
    assert (job.sizes.fields["mtp"], job.sizes.fields["mtp_weight"], job.layout.at) == (
        2,
        0.2,
        (),  # five each
    )
    job = described(parts.replace("size 2", "size 4").replace("t*3m*2L", "t*3|m*2|L"))
    assert (job.layout.at, job.layout.units) == ((6, 9, 11), "all")
    plain = described("--pipeline-model-parallel-size 2 --mtp-num-layers 1")
    assert (plain.layout.at, plain.sizes.fields["mtp_weight"]) == ((4,), 0.1)  # on the last stage


def test_stages_without_layers_are_said() -> None:
    parts = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout"
    layout = described(f"{parts} Et*4||t*3|tL").layout
    assert (layout.at, layout.units) == ((4, 4, 7), "layers")
    assert described(f"{parts} E||t*8|L").layout.at == (1, 1, 9)


def test_experts_lie_along_tp_then_cp_then_the_replicas() -> None:
    parts = "--tensor-model-parallel-size 2 --sequence-parallel"
    for more, folded, replicas, hidden in (
        ("--expert-model-parallel-size 8 --expert-tensor-parallel-size 1", ("tp",), 4, ()),
        ("--expert-model-parallel-size 4", (), 4, ("tp",)),
        ("--expert-model-parallel-size 2 --expert-tensor-parallel-size 4", (), 2, ("tp", "etp")),
        (
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 4 --context-parallel-size 2",
            (),
            2,
            ("tp", "cp"),
        ),
        (
            "--expert-model-parallel-size 2 --context-parallel-size 2",
            ("cp",),
            1,
            ("tp",),
        ),
        (
            "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --context-parallel-size 2",
            ("tp", "cp"),
            1,
            (),
        ),
        (
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --context-parallel-size 2",
            ("tp",),
            1,
            (),
        ),
    ):
        job = described(f"{parts} {more}", base=MIXTURE)
        layout = job.layout
        assert (layout.folded, layout.sharing_replicas, layout.hidden) == (folded, replicas, hidden)
        assert layout.sequence and not job.notes
        assert ("expert_parallel(over=" in python(job, "")) == (folded != ())
        assert ("hidden=(" in python(job, "")) == (hidden != ())
    assert described(parts, base=MIXTURE).layout.ep == 1


def test_experts_with_a_capacity_are_cut_by_tp() -> None:
    parts = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
    parts += " --moe-expert-capacity-factor 1.0"
    with pytest.raises(JobError, match="--as etp"):
        described(parts, base=MIXTURE)
    layout = described(parts, 8, "etp", base=MIXTURE).layout
    assert (layout.sequence, layout.ep, layout.folded) == (True, 4, ())


@each_case(
    ("more", "devices", "complaint"),
    [
        ("", None, "give --gpus N, a multiple of tp 1 x cp 1 x pp 1 = 1"),
        ("--tensor-model-parallel-size 3", 8, "8 devices are no multiple of tp 3"),
        ("--pipeline-model-parallel-size 3", 3, "8 layers do not divide into 3 devices of 1 stages"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 8, "do not divide over 2 devices"),
        ("--num-virtual-stages-per-pipeline-rank 2", 8, "2 stages on a device need"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tttttx", 8, "'x' in stage 1"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tttL", 8, "it has 6 layers"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout ttttE|ttttL", 8, "one E first"),
        ("--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout |Ett|t*6L", 3, "one E first"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t*4L --mtp-num-layers 1", 8,
         "it has 0 layers for further tokens, and the model has 1"),
        ("--global-batch-size 60", 8, "60 rows of a step do not divide into 8 replicas"),
        ("--step-batch-size-schedule 0:16 many", 8, "pairs such as"),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-virtual-pipeline-stage 3", 8, "group"),
        ("--window-size 15", 8, "a pair such as"),
        ("--window-size 15,0 --window-attn-skip-freq [1,0,0,1,1,1,1,1]", 8, "one layer of n"),
        ("--recompute-granularity full", 8, "needs --recompute-method"),
        ("--swiglu --squared-relu", 8, "exclude each other"),
        ("--num-layers twelve --hidden-size 1.5", 8, "2 options cannot be read"),
        ("--swiglu yes", 8, "it takes no value"),
        ("--normalization BatchNorm", 8, "LayerNorm or RMSNorm is needed"),
        ("--clip-grad", 8, "one value is needed"),
        ("--numlayers 3 --tensor-parallel 8", 8, "2 options of this job"),
        ("--spec some.module layers", 8, "a Python file builds"),
        ("--tokenizer-type BertWordPieceCase --vocab-extra-ids 100", 8, "T5"),
        ("--vocab-file my/vocab.txt --num-experts 8", 8, "a part of decoders in an encoder (BERT)"),
        ("--hybrid-layer-pattern M*M*", 8, "Mamba"),
        ("--decoder-num-layers 4", 8, "T5"),
        ("--expert-model-parallel-size 2 --num-experts 4 --moe-layer-freq 2", 8, "all layers but some first ones"),
        ("--expert-model-parallel-size 8 --num-experts 8 --context-parallel-size 2 --moe-expert-capacity-factor 1.0", 8,
         "a part of tp, cp or the replicas"),
        ("--context-parallel-size 2 --seq-length 30", 8, "give a multiple of 4"),
        ("--num-experts 8 --moe-aux-loss-coeff much", 8, "numbers are needed"),
        ("--bf16 --fp16", 8, "exclude each other"),
        ("--seq-length 4096 --max-position-embeddings 2048", 8, "at least as many positions"),
        ("--num-distributed-optimizer-instances 3", 8, "do not divide the replicas"),
    ],
)  # fmt: skip
def test_refusals(more: str, devices: int | None, complaint: str) -> None:
    with pytest.raises(JobError) as refusal:
        described(more, devices)
    assert complaint in str(refusal.value)


def test_every_renamed_option_is_named() -> None:
    options = [f"--{option}" for option in DENSE.split("--") if option.strip()]
    for number, option in enumerate(options):
        name = option.split()[0]
        renamed = [
            *options[:number],
            option.replace(name, f"--new{name[1:]}"),
            *options[number + 1 :],
        ]
        with pytest.raises(JobError, match=f"new{name[1:]}"):
            imported(" ".join(renamed))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("log-intervall", "log-interval"),
        ("adam-betas", "adam-beta2"),
        ("save-intervals", "save-interval"),
    ],
)
def test_a_pattern_takes_no_option_that_megatron_does_not_have(wrong: str, right: str) -> None:
    with pytest.raises(
        JobError, match=f"--?{wrong}.*the nearest is {right};|{wrong}=.*nearest is {right};"
    ):
        imported(f"{DENSE} --{wrong} 5")


def test_every_option_with_a_kind_has_a_row() -> None:
    assert [name for name in words.defaults() if not row_of(TABLE, name)] == []
    assert set(words.WORDS) <= set(words.defaults())


def test_a_batch_that_decreases_or_grows() -> None:
    assert described("--global-batch-size 60 --decrease-batch-size-if-needed").global_batch == 48
    job = described("--step-batch-size-schedule 0:16 200B:32 400B:64")
    assert job.global_batch == 64
    assert any("earlier steps have fewer rows" in note for note in job.notes)


@each_case(
    ("more", "reduce", "scale"),
    [
        ("--fp16", "float16", (("initial", 2.0**32), ("interval", 1000), ("hysteresis", 2))),
        (
            "--fp16 --accumulate-allreduce-grads-in-fp32 --loss-scale 4096",
            "float32",
            (("fixed", 4096.0),),
        ),
        (
            "--fp16 --initial-loss-scale 65536 --loss-scale-window 2000 --hysteresis 1 --min-loss-scale 4",
            "float16",
            (("least", 4.0),),
        ),
    ],
)
def test_fp16_has_a_scaled_loss(
    more: str, reduce: str, scale: tuple[tuple[str, float], ...]
) -> None:
    job = described(more, base=DENSE.replace("--bf16 ", ""))
    assert (job.compute, job.reduce, job.loss_scale) == ("float16", reduce, scale)
    written = python(job, "A job")
    assert "loss_scale=" in written
    compile(written, "FILE.py", "exec")
