"""Describe a job of torchtitan in the words that all systems share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf, prod
from typing import Any

from piper_interop.neutral.described import (
    DeviceLayout,
    JobDescription,
    ModelSizes,
    Recomputation,
    axes_of_experts,
)
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.options import judge
from piper_interop.neutral.system import Asked
from piper_interop.neutral.units import unit_mb
from piper_interop.torchtitan.table import TABLE
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES

SCHEDULES = {
    "gpipe": ("gpipe", False),
    "1f1b": ("one_f_one_b", False),
    "interleaved1f1b": ("interleaved", True),
    "loopedbfs": ("looped_bfs", True),
    "interleavedzerobubble": ("interleaved_zb", True),
    "zbvzerobubble": ("zbv", True),
    "dualpipev": ("dualpipe_v", True),
}
"""The recipes here by torch's names of schedules in small letters, and whether a device has several stages."""
TWO_STAGES = ("zbv", "dualpipe_v")
"""The recipes that have two stages on each device."""
KEEP = {"FullAC": "inputs", "SelectiveAC": "products/2", "MemoryBudgetAC": "products"}
"""The policies here by the kinds of activation checkpointing."""


USUAL_WEIGHT = 0.3
"""The weight of the loss of further tokens in `piper.models.DecoderConfig` and in torchtitan's loss."""


def describe(foreign: Foreign, asked: Asked) -> JobDescription:
    """Return the job of a configuration whose options are judged.

    Raises JobError, with the options' names, for numbers that do not go together.
    """
    if asked.devices is None:
        raise JobError(f"{foreign.source}: the configuration does not say its devices; give --gpus")
    sizes: ModelSizes = foreign.facts["sizes"]
    layout = _layout(foreign, asked.devices)
    params, compute = foreign["training.dtype"], foreign["training.mixed_precision_param"]
    reduce = foreign.get("training.mixed_precision_reduce", "float32")
    if layout.zero or layout.dp_replicate > 1:  # FSDP gathers and reduces a layer at once
        layout = replace(layout, bucket_mb=unit_mb(sizes, layout.tp, layout.ep, ITEM_BYTES[reduce]))
    length = _integer(foreign, "training.max_context_length", "training.seq_len")
    if foreign.get("compile.enable_async_tensor_parallel"):
        layout = layout.in_pieces(layout.tp, length)
    rows, global_batch, notes = _batch(foreign, layout, length)
    judgement = judge(foreign, TABLE, asked.stand_ins, asked.skip_unknown)
    recompute, how = _recompute(foreign)
    notes += [line.text for line in (*judgement.stand_ins, *judgement.nearest)]
    tiles, float8 = _tiles(foreign, length // layout.cp), foreign.facts.get("float8")
    if float8 is not None and tiles > 1 and "*" in float8.modules:
        float8 = replace(float8, modules=("layers.*",))
        notes.append(
            "the head, whose loss is in tiles, is in bfloat16, not float8: predicted too slow"
        )
    parameters = foreign.facts["parameters"]
    # torchtitan applies FSDP, which casts layer by layer, also where one device holds whole parameters.
    on_host = bool(foreign.get("training.enable_cpu_offload", False))
    if not layout.zero and not on_host and compute != params:
        notes.append(
            f"parameters in {compute} are held beside those in {params}: too much memory by "
            f"{ITEM_BYTES[compute]} bytes per parameter; FSDP casts a layer when it runs"
        )
    # FSDP adds what is reduced to shards in the dtype of parameters; stages of a pipeline reduce once.
    accumulate = params if layout.pp == 1 and reduce != params else ""
    norm = float(foreign.get("training.max_norm") or inf)
    return JobDescription(
        name=foreign.source.partition(":")[2] or foreign.source,
        sizes=ModelSizes({**sizes.fields, "length": length, **_further(foreign)}),
        length=length,
        global_batch=global_batch,
        rows=rows,
        layout=layout,
        recompute=recompute,
        params=params,
        compute=compute,
        reduce=reduce,
        accumulate=accumulate,
        optim_on_host=float(on_host),
        params_on_host=on_host,
        float8=float8,
        clip_norm=norm if norm < inf else None,
        lr=_rate(foreign),
        parameters=parameters if isinstance(parameters, int) else None,
        stack=_stack(foreign),
        notes=(*notes, *how),
        loss_tiles=tiles,
        origins=_origins(foreign),
    )


def _layout(foreign: Foreign, devices: int) -> DeviceLayout:
    """Return the devices' shares; raise JobError if the degrees do not divide the devices."""
    degree = {
        name: _integer(foreign, f"parallelism.{name}_degree")
        for name in (
            "tensor_parallel",
            "context_parallel",
            "pipeline_parallel",
            "data_parallel_replicate",
        )
    }
    used = prod(degree.values())
    shard = int(foreign["parallelism.data_parallel_shard_degree"])
    more = ", or another degree of shards"
    if shard == -1:
        shard, more = devices // used, ", or a multiple"
    if devices != used * shard or not shard:
        names = ", ".join(f"{name}_degree={size}" for name, size in degree.items())
        raise JobError(
            f"{foreign.source}: {devices} devices are not the product of {names} and data_parallel_shard_degree="
            f"{foreign['parallelism.data_parallel_shard_degree']}; give --gpus {used * max(shard, 1)}{more}"
        )
    tp, cp, pp, rep = degree.values()
    shared = shard * cp > 1
    ep, folded = _experts(foreign, shard, cp, tp)
    pipeline = _pipeline(foreign, pp)
    never = foreign["parallelism.fsdp_reshard_after_forward"] == "never"
    keeps = never or (foreign["parallelism.fsdp_reshard_after_forward"] == "default" and pp > 1)
    return DeviceLayout(
        tp=tp,
        sequence=tp > 1 and bool(foreign["parallelism.enable_sequence_parallel"]),
        cp=cp,
        attention="gather" if cp > 1 else DeviceLayout.attention,
        pp=pp,
        dp=shard,
        dp_replicate=rep,
        ep=ep,
        folded=folded,
        zero=3 if shared else 0,
        over_cp=cp > 1,
        reshard=not (shared and keeps),
        reduce_once=shared and pp > 1,  # torch's stages, with the backward of the last microbatch
        **pipeline,
    )


def _tiles(foreign: Foreign, tokens: int) -> int:
    """Return the tiles of the loss: as many as its chunks, or the next fewer that divide the tokens of a row."""
    chunks = int(foreign.get("loss.num_chunks") or 1)
    return next(n for n in range(chunks, 0, -1) if tokens % n == 0)


def _experts(foreign: Foreign, shard: int, cp: int, tp: int) -> tuple[int, tuple[str, ...]]:
    """Return the devices that share experts, and the axes that they lie along beside the replicas.

    The devices along dp_shard, cp and tp together are those of efsdp x ep (torchtitan, distributed/parallel_dims.py).
    Raises JobError where they take a part of an axis, or have the same tokens along tp.
    """
    ep = _integer(foreign, "parallelism.expert_parallel_degree")
    sizes = foreign.facts["sizes"]
    if ep == 1 or "experts" not in sizes.fields:
        return 1, ()
    axes = axes_of_experts(ep, tp, cp, shard)
    if axes is None:
        raise JobError(
            f"{foreign.source}: parallelism.expert_parallel_degree={ep} takes a part of tensor_parallel_degree={tp}, "
            f"context_parallel_degree={cp} or of the {shard} devices along data_parallel_shard; whole ones can be said "
            f"here: tp, tp x cp, or tp x cp x some of data_parallel_shard; give another degree, or other --gpus"
        )
    if tp > 1 and not foreign["parallelism.enable_sequence_parallel"]:
        raise JobError(
            f"{foreign.source}: parallelism.expert_parallel_degree={ep} beside tensor_parallel_degree={tp} without "
            f"enable_sequence_parallel: devices along tp would send the same tokens; give --set "
            f"parallelism.enable_sequence_parallel=true"
        )
    return ep, axes.folded


def _pipeline(foreign: Foreign, pp: int) -> dict[str, Any]:
    """Return the fields of a layout that say the schedule and its stages."""
    if pp == 1:
        return {}
    name = str(foreign["parallelism.pipeline_parallel_schedule"])
    if name.lower() not in SCHEDULES:
        raise JobError(
            f"{foreign.source}: parallelism.pipeline_parallel_schedule={name!r} cannot be said here; accepted are "
            f"{', '.join(SCHEDULES)}, in large or small letters"
        )
    recipe, several = SCHEDULES[name.lower()]
    layers = foreign.facts["layers"]
    given = foreign.get("parallelism.module_fqns_per_model_part")
    if given:
        counts = [sum(name.startswith("layers.") for name in part) for part in given]
        counts[0] += _is_first(given[0])
        counts[-1] += _is_last(given[-1])
    else:
        first = _integer(foreign, "parallelism.pipeline_parallel_first_stage_less_layers", least=0)
        last = _integer(foreign, "parallelism.pipeline_parallel_last_stage_less_layers", least=0)
        counts = _layers_of_stages(foreign, pp, several, layers, first, last)
        counts[0], counts[-1] = counts[0] - first + 1, counts[-1] - last + 1
    stages = len(counts)
    if stages % pp or (several and stages // pp < 2) or (not several and stages != pp):
        raise JobError(
            f"{foreign.source}: {stages} stages do not fit {pp} devices under the schedule {name}"
        )
    if recipe in TWO_STAGES and stages != 2 * pp:
        raise JobError(
            f"{foreign.source}: {name} has two stages on each of {pp} devices, and {stages} are given"
        )
    if min(counts[0], counts[-1], min(counts) + 1) < 1 or sum(counts) != layers + 2:
        raise JobError(
            f"{foreign.source}: the stages hold {counts} of {layers} layers, the embedding and the head; each stands "
            f"once, the embedding on the first stage and the head on the last"
        )
    # Embedding and head are units of the first and the last stage; at counts units.
    return {
        "schedule": recipe,
        "chunks": stages // pp,
        "at": tuple(accumulate(counts))[:-1],
        "units": "all",
    }


def _is_first(part: Sequence[str]) -> int:
    return int("tok_embeddings" in part)


def _is_last(part: Sequence[str]) -> int:
    return int("lm_head" in part or "output" in part)


def _layers_of_stages(
    foreign: Foreign, pp: int, several: bool, layers: int, first: int, last: int
) -> list[int]:
    """Return the layers of each stage, in which embedding counts as `first` layers, norm and head as `last`."""
    per_stage = foreign.get("parallelism.pipeline_parallel_layers_per_stage")
    effective = layers + first + last
    stages = -(-effective // per_stage) if per_stage else pp * (2 if several else 1)
    counts = [effective // stages + (k < effective % stages) for k in range(stages)]
    if counts[0] <= first or counts[-1] <= last:
        raise JobError(f"{foreign.source}: {layers} layers do not fill {stages} stages; give fewer")
    return counts


def _batch(foreign: Foreign, layout: DeviceLayout, length: int) -> tuple[int, int, list[str]]:
    """Return the rows of a microbatch and of a step, and the notes on nearest forms."""
    notes: list[str] = []
    if "training.num_tokens_per_microbatch_per_dp_rank" in foreign.values:
        tokens = _integer(foreign, "training.num_tokens_per_microbatch_per_dp_rank")
        if tokens % length:
            raise JobError(
                f"{foreign.source}: {tokens} tokens per microbatch are no rows of {length} tokens; give another "
                f"training.max_context_length"
            )
        rows = tokens // length
        passes = _integer(foreign, "parallelism.num_pp_microbatches") if layout.pp > 1 else 1
        whole = int(foreign["training.num_tokens_per_train_step"])
        total = layout.replicas * rows * passes if whole == -1 else whole // length
    else:
        local = _integer(foreign, "training.local_batch_size")
        rows = local
        if layout.pp > 1:
            rows = _integer(foreign, "parallelism.pipeline_parallel_microbatch_size")
        passes = local // rows
        whole = int(foreign["training.global_batch_size"])
        total = local * layout.replicas if whole == -1 else whole
    each = layout.replicas * rows * passes
    if not passes or total % each:
        raise JobError(
            f"{foreign.source}: {total} rows of a step do not divide into {layout.replicas} replicas of {passes} "
            f"microbatches of {rows} rows; give other --gpus, or another batch"
        )
    if layout.pp > 1 and total > each:
        notes.append(
            f"the pipeline runs {total // each} times a step and empties between; here it runs once: predicted too fast"
        )
    return rows, total, notes


def _further(foreign: Foreign) -> dict[str, Any]:
    """Return the weight of the loss of further tokens, if it is not the usual one."""
    weight = foreign.get("loss.mtp_scale")
    return {} if weight in (None, USUAL_WEIGHT) else {"mtp_weight": weight}


def _recompute(foreign: Foreign) -> tuple[tuple[Recomputation, ...], tuple[str, ...]]:
    kind = foreign.get("activation_checkpoint")
    if kind is None:
        return (), ()
    if kind not in KEEP:
        raise JobError(
            f"{foreign.source}: activation_checkpoint={kind} cannot be said here; accepted are {', '.join(KEEP)}"
        )
    experts = "experts" in foreign.facts["sizes"].fields
    mixed = "selective checkpointing keeps no products of experts; here it keeps every second one: predicted too fast, "
    notes = {
        **({"SelectiveAC": f"{mixed}with too much memory"} if experts else {}),
        "MemoryBudgetAC": "a budget of memory decides what is kept; here all products are kept: memory may differ in "
        "both directions",
    }
    return (Recomputation(KEEP[kind]),), (notes[kind],) if kind in notes else ()


def _rate(foreign: Foreign) -> float:
    groups = foreign.get("optimizer.param_groups") or [{}]
    names = {group.get("optimizer_name", "AdamW") for group in groups}
    if names - {"AdamW", "Adam"}:
        raise JobError(
            f"{foreign.source}: optimizer.param_groups: {', '.join(sorted(names))} cannot be said here; AdamW is accepted"
        )
    return float(groups[0].get("optimizer_kwargs", {}).get("lr", 3e-4))


def _stack(foreign: Foreign) -> str:
    compiled = foreign["compile.enable"] and "model" in foreign["compile.components"]
    return "inductor" if compiled else "eager"


def _origins(foreign: Foreign) -> dict[str, str]:
    parallel = "parallelism."
    return {
        "sizes": f"model_spec: {foreign['model.name']} {foreign['model.flavor']}",
        "tp": f"{parallel}tensor_parallel_degree, enable_sequence_parallel; compile.enable_async_tensor_parallel",
        "cp": f"{parallel}context_parallel_degree",
        "ep": f"{parallel}expert_parallel_degree",
        "pp": f"{parallel}pipeline_parallel_degree, _schedule and stages; training.*: microbatches",
        "batch": "training.*: rows of a microbatch and of a step",
        "recompute": f"activation_checkpoint {foreign.get('activation_checkpoint')}",
        "dp": f"{parallel}data_parallel_shard_degree, data_parallel_replicate_degree, fsdp_reshard_after_forward",
    }


def _integer(foreign: Foreign, *names: str, least: int = 1) -> int:
    """Return the first of these options; raise JobError if it is no integer of at least `least`."""
    value = foreign.first(*names)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        name = next((name for name in names if name in foreign.values), names[0])
        raise JobError(
            f"{foreign.source}: {name}={value!r}; an integer of at least {least} is needed"
        )
    return value
