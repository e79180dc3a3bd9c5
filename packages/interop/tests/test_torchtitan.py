"""A configuration of torchtitan becomes the same job: devices' shares, stages, batch and model, or an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_interop import (
    Asked,
    Float8Layers,
    JobDescription,
    ModelSizes,
    Recomputation,
    export_job,
    import_job,
    python,
)
from piper_interop.neutral.units import layer_parameters, megabytes
from piper_ir.ground.errors import JobError
from tests.helpers.titan_answers import answer, attention, gpt_oss, model


def imported(tmp_path: Path, devices: int = 8, *stand_ins: str, **answered: Any) -> JobDescription:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer(**answered)))
    asked = Asked(devices=devices, stand_ins=frozenset(stand_ins))
    return import_job("torchtitan", str(file), asked).described


def unlike() -> dict[str, Any]:
    """Return a model whose second layer has other heads."""
    tree = model(2)
    tree["layers"][1]["attention"] = attention(heads=8)
    return tree


def test_fsdp_is_zero_3_over_the_devices_that_are_left(tmp_path):
    described = imported(tmp_path, 16, parallelism__tensor_parallel_degree=4)
    layout = described.layout
    assert (layout.dp, layout.tp, layout.sequence, layout.zero) == (4, 4, True, 3)
    assert layout.reshard
    assert (described.rows, described.global_batch, described.microbatches) == (2, 8, 1)
    assert (described.compute, described.params, described.lr) == ("bfloat16", "float32", 1e-3)
    assert described.stack == "eager"


def test_fsdp_has_a_bucket_for_each_layer(tmp_path):
    wide = {"tree": model(2, width=4096), "parallelism__tensor_parallel_degree": 4}
    described = imported(tmp_path, 16, **wide)
    parameters = layer_parameters(described.sizes)
    assert described.layout.bucket_mb == megabytes(parameters // 4, 4)
    assert "bucket_mb" in python(described, "x")
    assert not [n for n in export_job("torchtitan", described).notes if "layer by layer" in n]
    other = replace(described, layout=replace(described.layout, bucket_mb=None))
    [note] = [n for n in export_job("torchtitan", other).notes if "layer by layer" in n]
    assert "not in buckets of 25 MiB" in note


def test_devices_of_tensor_parallelism_divide_the_heads(tmp_path):
    with pytest.raises(JobError, match="3 tensor-parallel devices do not divide 4 attention heads"):
        imported(tmp_path, 3, parallelism__tensor_parallel_degree=3)


def test_asynchronous_tensor_parallelism_is_in_as_many_pieces_as_devices(tmp_path):
    asked = {
        "parallelism__tensor_parallel_degree": 4,
        "compile__enable_async_tensor_parallel": True,
    }
    described = imported(tmp_path, 16, **asked)
    assert described.layout.pieces == 4 and "sequence=True, pieces=4" in python(described, "x")
    written = "".join(export_job("torchtitan", described).files.values())
    assert "enable_async_tensor_parallel" in written
    whole = imported(tmp_path, 16, **asked, parallelism__enable_sequence_parallel=False)
    assert whole.layout.pieces == 1 and "not hidden" in " ".join(whole.notes)


def test_replicas_of_shards_are_hybrid_sharding(tmp_path):
    described = imported(tmp_path, parallelism__data_parallel_replicate_degree=2)
    assert (described.layout.dp, described.layout.dp_replicate) == (4, 2)
    assert 'shard={"optim": ("dp",), "grads": ("dp",), "params": ("dp",)}' in python(described, "x")


@pytest.mark.parametrize("tp, rep", [(1, 8), (2, 4), (4, 2)])
def test_a_mesh_of_one_shard_is_one_of_fsdp(tmp_path, tp, rep):
    """FSDP casts and offloads there, too (torchtitan 0.3.0, models/llama3/parallelize.py)."""
    degrees = {"data_parallel_replicate": rep, "data_parallel_shard": 1, "tensor_parallel": tp}
    changes = {f"parallelism__{name}_degree": size for name, size in degrees.items()}
    described = imported(tmp_path, **changes)
    dtypes = described.params, described.compute, described.reduce
    assert described.layout.zero == 0 and dtypes == ("float32", "bfloat16", "float32")
    assert any("held beside those in float32" in note for note in described.notes)
    on_host = imported(tmp_path, **changes, training__enable_cpu_offload=True)
    assert on_host.params_on_host and on_host.optim_on_host == 1


def test_shards_are_summed_in_the_dtype_of_parameters(tmp_path):
    """FSDP adds to them what is reduced in float32; with stages it reduces once in a step."""
    narrow = {"training__dtype": "bfloat16"}
    described = imported(tmp_path, **narrow)
    assert (described.reduce, described.accumulate) == ("float32", "bfloat16")
    assert 'accumulate="bfloat16"' in python(described, "x")
    assert imported(tmp_path).accumulate == ""
    stages = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 4}
    assert imported(tmp_path, **narrow, **stages).accumulate == ""


def test_stages_have_fewer_layers_first_and_last(tmp_path):
    """Six layers and two units for embedding and head are eight units: three stages of 3, 3 and 2."""
    described = imported(
        tmp_path, 6, parallelism__pipeline_parallel_degree=3, training__local_batch_size=6
    )
    layout = described.layout
    assert (layout.schedule, layout.at, layout.units) == ("one_f_one_b", (3, 6), "all")
    assert not layout.reshard  # by default parameters stay gathered beside a pipeline
    assert layout.reduce_once and 'reduced_mb="step"' in python(described, "x")
    assert (described.rows, described.microbatches) == (1, 6)


def test_stages_by_names_are_those_stages(tmp_path):
    parts = [
        ["tok_embeddings", "layers.0"],
        [f"layers.{k}" for k in range(1, 6)] + ["norm", "lm_head"],
    ]
    changes = {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__module_fqns_per_model_part": parts,
    }
    assert imported(tmp_path, 2, **changes).layout.at == (2,)
    changes["parallelism__pipeline_parallel_degree"] = 3
    changes["parallelism__module_fqns_per_model_part"] = [parts[0], [], parts[1]]
    assert imported(tmp_path, 3, **changes).layout.at == (2, 2)
    changes["parallelism__module_fqns_per_model_part"] = [[], *parts]
    with pytest.raises(JobError, match="embedding on the first stage"):
        imported(tmp_path, 3, **changes)


def test_an_interleaved_schedule_has_two_stages_on_each_device(tmp_path):
    changes = {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
    }
    layout = imported(tmp_path, 2, training__local_batch_size=4, **changes).layout
    assert (layout.schedule, layout.chunks, layout.at) == ("interleaved", 2, (2, 4, 6))


def test_tokens_of_newer_versions_are_rows(tmp_path):
    config = answer()
    training = config["config"]["training"]
    for name in ("local_batch_size", "global_batch_size", "seq_len"):
        del training[name]
    training |= {
        "num_tokens_per_microbatch_per_dp_rank": 512,
        "num_tokens_per_train_step": 512 * 16,
        "max_context_length": 256,
    }
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(config))
    described = import_job("torchtitan", str(file), Asked(devices=8)).described
    assert (described.rows, described.length, described.global_batch) == (2, 256, 32)


def test_a_mixture_behind_dense_layers(tmp_path):
    described = imported(tmp_path, tree=model(6, mixed=4), parallelism__expert_parallel_degree=4)
    fields = described.sizes.fields
    assert (fields["dense_layers"], fields["hidden"], described.layout.ep) == (2, 96, 4)
    experts = {
        "number": 8,
        "top_k": 2,
        "hidden": 32,
        "shared_hidden": 64,
        "score": "sigmoid",
        "normalized": False,
    }
    assert fields["experts"] == ModelSizes(experts, "Experts")
    assert "piper.Mesh(dp=2, ep=4)" in python(described, "x")
    assert '"*.router.*": "float32"' in python(described, "x")


def test_recomputation_is_said_as_near_as_it_goes(tmp_path):
    full, selective = (
        {"__class__": f"torchtitan.ac.{kind}.Config"} for kind in ("FullAC", "SelectiveAC")
    )
    described = imported(tmp_path, activation_checkpoint=full)
    assert (described.recompute, described.notes) == ((Recomputation("inputs"),), ())
    described = imported(tmp_path, activation_checkpoint=selective)
    assert (described.recompute, described.notes) == ((Recomputation("products/2"),), ())
    mixed = imported(tmp_path, tree=model(6, mixed=4), activation_checkpoint=selective)
    assert "keeps no products of experts" in mixed.notes[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallelism__tensor_parallel_degree": 3}, "give --gpus 6, or a multiple"),
        ({"parallelism__data_parallel_shard_degree": 2}, "give --gpus 2, or another degree of shards"),
        ({"parallelism__pipeline_parallel_degree": 8}, "give fewer"),
        ({"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "Mine"}, "'Mine'"),
        ({"training__local_batch_size": "two"}, "training.local_batch_size='two'; an integer"),
        ({"training__global_batch_size": 20}, "20 rows of a step do not divide into 8 replicas"),
        ({"loss": {"__class__": "torchtitan.loss.MSELoss.Config"}}, "this loss"),
        ({"training__new_option": 3}, "training.new_option=3"),
        ({"optimizer__param_groups": [{"optimizer_name": "Muon"}]}, "Muon"),
        ({"activation_checkpoint": {"__class__": "torchtitan.x.OtherAC.Config"}}, "OtherAC"),
        ({"tree": unlike()}, "attention differs"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_named(tmp_path, changes, told):
    with pytest.raises(JobError) as refusal:
        imported(tmp_path, **changes)
    assert told in str(refusal.value)


def test_states_on_the_host(tmp_path):
    found = imported(tmp_path, training__enable_cpu_offload=True)
    assert found.params_on_host and found.optim_on_host == 1
    assert any("shards of gradients" in note for note in found.notes)
    command = next(iter(export_job("torchtitan", found).files.values()))
    assert "training.enable_cpu_offload" in command


def test_experts_lie_along_tp_then_cp_then_the_shards(tmp_path):
    tree, tp = model(6, mixed=6), {"parallelism__tensor_parallel_degree": 2}
    layout = imported(tmp_path, tree=tree, parallelism__expert_parallel_degree=4, **tp).layout
    assert (layout.ep, layout.folded, layout.sharing_replicas) == (4, ("tp",), 2)
    assert layout.sequence
    both = {**tp, "parallelism__context_parallel_degree": 2}
    assert imported(
        tmp_path, tree=tree, parallelism__expert_parallel_degree=4, **both
    ).layout.folded == ("tp", "cp")
    for more, told in (
        (
            {**tp, "parallelism__tensor_parallel_degree": 4},
            "takes a part of tensor_parallel_degree=4",
        ),
        ({**tp, "parallelism__enable_sequence_parallel": False}, "would send the same tokens"),
    ):
        with pytest.raises(JobError, match=told):
            imported(tmp_path, tree=tree, parallelism__expert_parallel_degree=2, **more)


def test_products_in_eight_bits_need_a_stand_in(tmp_path):
    tree = model()
    tree["lm_head"]["__class__"] = "torchtitan.components.quantization.float8.Float8Linear.Config"
    with pytest.raises(JobError, match="--as bf16"):
        imported(tmp_path, tree=tree)
    described = imported(tmp_path, 8, "bf16", tree=tree)
    assert "predicted too slow" in described.notes[0]
    assert "warnings.warn(" in python(described, "x")
    with pytest.raises(JobError, match="no such stand-in"):
        imported(tmp_path, 8, "magic", tree=tree)


def test_the_first_layers_in_four_bits_are_like_the_others_in_bfloat16(tmp_path):
    tree = model()
    for part in tree["layers"][:4]:
        part["attention"]["wo"]["__class__"] = "torchtitan.quantization.nvfp4.NVFP4Linear.Config"
    assert imported(tmp_path, 8, "bf16", tree=tree).sizes == imported(tmp_path).sizes


def test_windows_sinks_and_biases_are_those_of_gpt_oss(tmp_path):
    described = imported(tmp_path, tree=gpt_oss(("w", None, "w", None)))
    fields = described.sizes.fields
    assert (fields["window"], fields["window_every"], fields["sinks"]) == (32, 2, True)
    assert (fields["attention_bias"], fields["activation"]) == ("all", "quick_gelu")
    experts = {"number": 8, "top_k": 2, "hidden": 32, "bias": True, "clamp": 7.0}
    assert experts.items() <= fields["experts"].fields.items()
    assert "attention" not in fields
    three = imported(tmp_path, tree=gpt_oss(("w", "w", None, "w"))).sizes.fields
    assert three["window_every"] == 3 and "window" not in imported(tmp_path).sizes.fields
    with pytest.raises(JobError, match="attention differs"):
        imported(tmp_path, tree=gpt_oss((None, "w", "w", None)))
    odd = gpt_oss(("w",))
    odd["layers"][0]["attention"]["wq"] = odd["lm_head"]
    with pytest.raises(JobError, match="biases of some products"):
        imported(tmp_path, tree=odd)


def test_blocks_of_further_tokens_have_a_loss_of_their_own(tmp_path):
    tree = model(6, mixed=4)
    tree["mtp_layers"] = [tree["layers"][-1]]
    loss = {"__class__": "torchtitan.models.deepseek_v3.mtp.MTPLoss.Config", "mtp_scale": 0.1}
    fields = imported(tmp_path, tree=tree, loss=loss).sizes.fields
    assert (fields["layers"], fields["mtp"], fields["mtp_weight"]) == (6, 1, 0.1)


def quantised(tree, head=False, wide=False):
    """Return a tree whose linear layers torchao's rowwise converter has replaced."""
    cast = {"__class__": "torchao.float8.config.CastConfig"}
    how = {
        "__class__": "torchao.float8.config.Float8LinearConfig",
        "cast_config_input": {**cast, "scaling_granularity": "axiswise"},
        "cast_config_input_for_grad_weight": {
            **cast,
            "scaling_type": "disabled" if wide else "dynamic",
        },
    }
    if isinstance(tree, list):
        return [quantised(part, head, wide) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("__class__", "").endswith("linear.Linear.Config"):
        kind = "torchtitan.components.quantization.float8.Float8Linear.Config"
        return {**tree, "__class__": kind, "_torchao_config": how}
    keep = () if head else ("lm_head",)
    return {k: v if k in keep else quantised(v, head, wide) for k, v in tree.items()}


def test_float8_is_that_of_torchao(tmp_path):
    for head, wide in ((False, False), (True, True)):
        found = imported(tmp_path, tree=quantised(model(), head, wide))
        recipe = "rowwise_with_gw_hp" if wide else "rowwise"
        assert found.float8 == Float8Layers(recipe, ("*",) if head else ("layers.*",))
        assert not found.notes
        if head:
            chunks = {
                "__class__": "torchtitan.loss.ChunkedLossWrapper.Config",
                "num_chunks": 8,
                "loss_fn": {"__class__": "torchtitan.loss.CrossEntropyLoss.Config"},
            }
            tiled = imported(tmp_path, tree=quantised(model(), head, wide), loss=chunks)
            assert (tiled.float8, tiled.loss_tiles) == (Float8Layers(recipe, ("layers.*",)), 8)
            assert "the head, whose loss is in tiles" in tiled.notes[0]
        notes = export_job("torchtitan", found).notes
        assert any(f'Float8LinearConverter.Config(recipe_name="{recipe}")' in n for n in notes)
    with pytest.raises(JobError, match="float8 by the recipe blockwise; the nearest is rowwise"):
        export_job("torchtitan", replace(found, float8=Float8Layers("blockwise")))
    tree = quantised(model())
    tree["layers"][1] = model()["layers"][1]  # no part of the layers can be said
    with pytest.raises(JobError, match="--as bf16"):
        imported(tmp_path, tree=tree)


def test_every_option_has_a_row_or_is_unknown(tmp_path):
    """Rename each option in turn: none is passed over."""
    sections = ("training", "parallelism", "compile", "optimizer")
    config = answer()["config"]
    for section in sections:
        for name in config[section]:
            if name == "__class__":
                continue
            changed = answer()
            part = changed["config"][section]
            part[f"{name}_renamed"] = part.pop(name)
            file = tmp_path / "answer.json"
            file.write_text(json.dumps(changed))
            with pytest.raises(JobError, match=f"{section}.{name}_renamed"):
                import_job("torchtitan", str(file), Asked(devices=8))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1}'])
def test_a_file_that_is_no_answer(tmp_path, text):
    file = tmp_path / "answer.json"
    file.write_text(text)
    with pytest.raises(JobError, match=r"answer\.json"):
        import_job("torchtitan", str(file), Asked(devices=8))


def test_an_interpreter_without_torchtitan_is_named():
    with pytest.raises(JobError, match="has no torchtitan"):
        import_job("torchtitan", "llama3:llama3_8b", Asked(devices=8))
    with pytest.raises(JobError, match="--python /nowhere"):
        import_job("torchtitan", "llama3:llama3_8b", Asked(devices=8, python="/nowhere"))
