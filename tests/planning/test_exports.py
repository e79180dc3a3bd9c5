"""A job and its strategy come back from another system's files as they went: import(export(x)) == x."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper import ANY, recipes, where
from piper.cli.loading import load_file
from piper.models import DecoderConfig, job, parameter_count
from piper.models.presets import PRESETS
from piper.planning.description import description, left_out, optimizer_note
from piper_compiler import describe
from piper_interop import DeviceLayout, JobDescription, export_job, python
from piper_interop.neutral.described import USUAL_SIZES
from piper_interop.neutral.units import whole
from piper_ir.ground.errors import JobError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = DecoderConfig(layers=6, width=64, heads=4, kv_heads=2, hidden=96, vocab=256, length=128)


def described(mesh: piper.Mesh, *directives: Any, rows: int = 32) -> JobDescription:
    return description(job(SIZES, global_batch=rows), piper.Strategy(mesh, directives), "small")


def written(text: JobDescription) -> JobDescription:
    """Return the description of the FILE.py that a description is written as."""
    names: dict[str, Any] = {}
    exec(python(text, "x"), names)
    return description(names["job"], names["strategy"], "small")


STRATEGIES = {
    "fsdp": (piper.Mesh(dp=8), recipes.one_f_one_b(pp=1, microbatches=2), recipes.data_parallel(zero=3)),
    "hybrid": (
        piper.Mesh(dp=4, rep=2), recipes.one_f_one_b(pp=1, microbatches=1),
        recipes.data_parallel(over=("dp", "rep"), shard={s: ("dp",) for s in ("optim", "grads", "params")}),
    ),
    "tp": (
        piper.Mesh(dp=2, tp=4), recipes.tensor_parallel(sequence=True), recipes.one_f_one_b(pp=1, microbatches=1),
        (piper.recompute(where(layer=ANY), keep="inputs"),), recipes.data_parallel(zero=3, resident_mb="step"),
    ),
    "cp": (
        piper.Mesh(dp=2, cp=2), recipes.context_parallel(attention="gather"), recipes.one_f_one_b(pp=1, microbatches=2),
        recipes.data_parallel(over=("dp", "cp"), zero=3),
    ),
    "pipeline": (
        piper.Mesh(pp=2, dp=2), recipes.interleaved(pp=2, microbatches=4, chunks=3), recipes.data_parallel(zero=3),
    ),
    "uneven": (piper.Mesh(pp=2, dp=1), recipes.zbv(pp=2, microbatches=4, at=(1, 3, 5))),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_file_for_people_says_the_same(name):
    mesh, *parts = STRATEGIES[name]
    before = described(mesh, *(d for part in parts for d in part))
    after = written(before)
    if before.layout.at == () and before.layout.pp > 1:
        assert after == before
    assert replace(after, layout=DeviceLayout()) == replace(before, layout=DeviceLayout())
    assert after.layout == before.layout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_torchtitan_takes_what_it_can_run(name):
    mesh, *parts = STRATEGIES[name]
    text = export_job("torchtitan", described(mesh, *(d for part in parts for d in part)))
    options = text.files["torchtitan.args"].split("\n")
    size = mesh.size
    assert f"--parallelism.tensor_parallel_degree={size('tp')}" in options
    assert options[-2].startswith("activation-checkpoint:")
    if size("pp") > 1:
        (stages,) = [o for o in options if "module_fqns" in o]
        assert stages.count(" ") == (6 if name == "pipeline" else 4)


def test_sizes_at_every_default_are_exported_and_imported_with_a_model():
    """A description leaves out sizes at their defaults, the vocabulary too; a file of another system has them."""
    config = DecoderConfig(layers=4, width=64, heads=4, hidden=96)
    assert {name: getattr(config, name) for name in USUAL_SIZES} == USUAL_SIZES
    strategy = piper.Strategy(
        piper.Mesh(dp=8),
        (*recipes.one_f_one_b(pp=1, microbatches=1), *recipes.data_parallel(zero=1)),
    )
    plain = description(job(config, global_batch=32), strategy, "small")
    assert set(plain.sizes.fields) == {"layers", "width", "heads", "hidden"}
    texts = {
        name: "\n".join(export_job(name, plain).files.values())
        for name in ("megatron", "deepspeed")
    }
    assert "--vocab-size 128256" in texts["megatron"] and "--seq-length 8192" in texts["megatron"]
    assert whole(plain.sizes) == parameter_count(config) - config.width, "but for the last norm"


def at_defaults() -> Iterator[tuple[str, piper.Job, piper.Strategy]]:
    """Yield the presets, the published jobs, and a model that is none of piper.models, which has no sizes."""
    whole = (
        piper.Mesh(dp=8),
        (*recipes.one_f_one_b(pp=1, microbatches=2), *recipes.data_parallel(zero=3)),
    )
    for name in PRESETS:
        yield name, job(name, global_batch=64), piper.Strategy(*whole)
        yield name, job(name, global_batch=64), piper.Strategy(piper.Mesh(), ())
    for path in sorted((EXAMPLES / "published").glob("*.py")):
        file = load_file(path)
        yield path.stem, file.job, file.strategy
    own = replace(load_file(EXAMPLES / "own_model.py").job, global_batch=64)
    for more in (
        (), (piper.recompute(where(layer=ANY)),), (piper.recompute(where(layer=range(2))),),
        (piper.offload(where(layer=range(2)), tensors="optim"),),
    ):  # fmt: skip
        yield "own", own, piper.Strategy(whole[0], (*whole[1], *more))


@pytest.mark.parametrize("system", ["torchtitan", "accelerate", "deepspeed", "megatron"])
def test_every_job_is_exported_or_refused_in_words(system):
    """Presets at their defaults are written by all but Megatron, whose models have not all the parts of theirs."""
    refused = []
    for name, one, strategy in at_defaults():
        try:
            files = export_job(system, description(one, strategy, name)).files
        except JobError as error:
            assert "cannot" in str(error) or "piper.models" in str(error), error
            refused.append(name)
        else:
            assert not re.search(r"(seq_len|seq-length)\W0\b", "".join(files.values())), name
    absent = set(PRESETS) & set(refused)
    assert absent == (
        {"gpt-neox-20b", "gemma2-27b", "bloom-176b"} if system == "megatron" else set()
    )


@pytest.mark.parametrize(
    ("directives", "told"),
    [
        (recipes.data_parallel(zero=1), "zero=1; the nearest is zero=3"),
        (
            (*recipes.one_f_one_b(pp=1, microbatches=1), piper.recompute(where(layer=range(2)))),
            "of some layers",
        ),
        ((piper.recompute(where(layer=ANY), keep="products"),), "nearest is keep='products/2'"),
        (
            (piper.recompute(where(), keep="outputs", modules="*.attention.core"),),
            "recompute(keep='outputs@*.attention.core'); the nearest is keep='inputs'",
        ),
    ],
)
def test_what_torchtitan_lacks_is_named(directives, told):
    with pytest.raises(JobError) as refusal:
        export_job("torchtitan", described(piper.Mesh(dp=8), *directives))
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("keep", "modules", "option"),
    [
        ("outputs", "*.attention.core", "--recompute-modules core_attn\n"),
        ("inputs@*.norm[12]&outputs@*.feed_forward", (), "--recompute-modules layernorm mlp\n"),
    ],
)
def test_modules_of_all_chunks_are_those_of_all_layers(keep, modules, option):
    texts = [
        export_job(
            "megatron", described(piper.Mesh(dp=8), piper.recompute(at, keep, modules=modules))
        ).files
        for at in (where(), where(layer=ANY))
    ]
    assert texts[0] == texts[1] and option in "".join(texts[0].values())
    with pytest.raises(
        JobError, match=r"recompute\(where\(stage=0\), keep='outputs@\*.mlp'\): other systems"
    ):
        described(piper.Mesh(), piper.recompute(where(stage=0), keep="outputs", modules="*.mlp"))


def test_parts_of_an_optimizer_on_the_host_have_no_words():
    parts = [piper.offload(where(layer=k), tensors="optim") for k in (0, 1)]
    with pytest.raises(JobError, match="several `offload` of states"):
        described(piper.Mesh(dp=8), *recipes.one_f_one_b(pp=1, microbatches=2), *parts)


def test_first_layers_of_each_stage_are_said_to_megatron_alone():
    chosen = piper.recompute(where(layer=(0, 1, 3, 4)), keep="inputs")
    text = described(piper.Mesh(pp=2), *recipes.one_f_one_b(pp=2, microbatches=4), chosen)
    assert "--recompute-method block\n--recompute-num-layers 2\n" in "".join(
        export_job("megatron", text).files.values()
    )
    with pytest.raises(JobError, match="of some layers"):
        export_job("torchtitan", text)
    other = piper.recompute(where(layer=(0, 3, 4)), keep="inputs")
    uneven = described(piper.Mesh(pp=2), *recipes.one_f_one_b(pp=2, microbatches=4), other)
    with pytest.raises(JobError, match="the first layers of each stage"):
        export_job("megatron", uneven)


def test_a_schedule_of_ones_own_has_no_words():
    orders = [[("F", 0), ("F", 1), ("B", 1), ("B", 0)], [("F", 0), ("F", 1), ("B", 1), ("B", 0)]]
    parts = (*recipes.pipeline(pp=2, microbatches=2), *recipes.stage_orders(orders))
    with pytest.raises(JobError, match="the order of 2 stages"):
        described(piper.Mesh(pp=2), *parts)


def test_the_learning_rate_is_written():
    rate = job(SIZES, global_batch=8, lr=1e-3)
    said = description(rate, piper.Strategy(piper.Mesh()), "small")
    for system, written_as in (
        ("deepspeed", '"lr": 0.001'), ("megatron", "--lr 0.001"), ("accelerate", '"learning_rate": 0.001')
    ):  # fmt: skip
        assert written_as in "".join(export_job(system, said).files.values())
    assert "the job has 0.001" in "".join(export_job("torchtitan", said).notes)
    assert "betas" in optimizer_note(rate)
    assert "the job's own" in optimizer_note(replace(rate, optimizer=torch.optim.Adam))


@pytest.mark.parametrize("system", ["torchtitan", "megatron", "deepspeed", "accelerate"])
def test_float64_is_refused_in_words(system):
    wide = job(SIZES, global_batch=8, precision="float64")
    shared = piper.Strategy(piper.Mesh(dp=2), recipes.data_parallel(zero=3))
    with pytest.raises(JobError, match="float64"):
        export_job(system, description(wide, shared, "small"))


def test_what_no_system_has_is_left_out_with_a_word():
    tokens = piper.shard(where(), over="cp", index="tokens", order="blocks")
    layers = [where(op="reduce", layer=k) for k in (1, 0)]
    sums, kept = piper.shard(where(), cut=True), piper.shard(where(), stream="tokens", keep=True)
    for item, told in (
        (sums, "cut is left out"), (kept, "keep is left out"), (tokens, "order of tokens is left out"),
        (piper.order(*layers), "order of messages is left out"),
        (piper.recompute(where(), apart=True), "apart is left out"),
    ):  # fmt: skip
        (note,) = left_out(piper.Strategy(piper.Mesh(dp=2), (item, *recipes.data_parallel())))
        assert told in note and note.startswith(describe(item)), note
    assert not left_out(piper.Strategy(piper.Mesh(tp=2), recipes.tensor_parallel(sequence=True)))
    with pytest.raises(JobError, match="no words for modules of an `offload`"):
        described(piper.Mesh(), piper.offload(where(layer=ANY), modules=("*.feed_forward",)))
