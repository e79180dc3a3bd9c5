"""Describe a job and its strategy in the words that other systems share, for an export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from piper.models.jobs import OPTIMIZERS, muon
from piper.planning.foreign import model_sizes
from piper_compiler import Strategy, describe, offload, partition, recipes, recompute
from piper_compiler.directives import (
    order,
    overlap,
    place,
    replicate,
    shard,
    split,
    split_backward,
    tile_loss,
)
from piper_compiler.directives.offload import OPTIM
from piper_compiler.directives.offload import STATES as OFFLOADED_STATES
from piper_interop import (
    DeviceLayout,
    Float8Layers,
    JobDescription,
    ModelSizes,
    OffloadedTensors,
    Recomputation,
    loss_scale,
)
from piper_ir.ground.errors import DirectiveError, JobError
from piper_ir.ground.select import ANY, where
from piper_ir.program.ops import BESIDE, KEEP_ALL, WITHIN

if TYPE_CHECKING:
    from piper_runtime import Job, LossScale

PIPELINE = (partition, split, place, order, overlap, split_backward)
"""The directives that recipes of pipelines are made of."""
SCHEDULES = (
    "one_f_one_b", "gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zb_h1", "zb_h2", "zbv", "dualpipe_v", "dualpipe"
)  # fmt: skip
"""The recipes that a strategy's pipeline is compared with."""
STATES = ("optim", "grads", "params")
"""The states that ranks share, in the order of ZeRO's levels."""
USUAL_RATE = JobDescription.lr
"""The learning rate of a job whose optimizer is its own."""


def description(job: Job, strategy: Strategy, name: str) -> JobDescription:
    """Return the description of a job under a strategy.

    Raises JobError for a strategy that has no such words: several `replicate`, a schedule of its own, parts of a model.
    """
    rest = [d for d in strategy.directives if isinstance(d, PIPELINE)]
    layout = _shares(strategy, DeviceLayout(order=strategy.mesh.order))
    layout = _replicas(strategy, _pipeline(rest, strategy, layout))
    microbatches = next((d.microbatches for d in rest if isinstance(d, split)), 1)
    parts = layout.replicas * microbatches
    if job.global_batch % parts:
        raise JobError(
            f"{job.global_batch} rows do not divide into {parts} microbatches of replicas"
        )
    precision = job.precision
    return JobDescription(
        name=name,
        sizes=_sizes(job),
        length=job.tokens_per_row or 0,
        global_batch=job.global_batch,
        rows=job.global_batch // parts,
        layout=layout,
        recompute=tuple(
            _recomputation(d)
            for d in strategy.directives
            if isinstance(d, recompute) and d.keep != KEEP_ALL
        ),
        offload=_offload(
            [d for d in _offloads(strategy) if d.tensors not in (OPTIM, OFFLOADED_STATES)]
        ),
        optim_on_host=_optim_on_host(job, _offloads(strategy, OPTIM, OFFLOADED_STATES)),
        params_on_host=_params_on_host(_offloads(strategy, OFFLOADED_STATES)),
        params=precision.params or "float32",
        compute=precision.compute or precision.params or "float32",
        reduce=precision.reduce or precision.params or "float32",
        accumulate=precision.accumulate or "",
        loss_scale=_scale(precision.scaling),
        float8=None if precision.quantised is None else Float8Layers(**asdict(precision.quantised)),
        clip_norm=job.clip_norm,
        lr=getattr(job.optimizer, "keywords", {}).get("lr", USUAL_RATE)
        if _is_ours(job)
        else USUAL_RATE,
        optimizer="muon" if getattr(job.optimizer, "func", None) is muon else "adamw",
        loss_tiles=next((d.tiles for d in strategy.directives if isinstance(d, tile_loss)), 1),
    )


def _is_ours(job: Job) -> bool:
    """Return whether the optimizer is one of `piper.models`."""
    return getattr(job.optimizer, "func", None) in OPTIMIZERS.values()


def optimizer_note(job: Job) -> str:
    """Return the note that an export leaves out the optimizer's betas and weight decay, or all numbers of one's own."""
    if _is_ours(job):
        return "AdamW has betas 0.9 and 0.95 and decays matrices by 0.1: write them into the system's options"
    return (
        "the optimizer is the job's own: write its learning rate and other numbers into the system's options, which "
        f"have AdamW and lr={USUAL_RATE}"
    )


def left_out(strategy: Strategy) -> tuple[str, ...]:
    """Return notes on parts of a strategy that change its time or memory, and that no description has words for."""
    notes = []
    for item in strategy.directives:
        if isinstance(item, shard) and item.cut:
            notes.append(f"{describe(item)}: cut is left out, sums stay inside of the steps")
        if isinstance(item, shard) and item.keep:
            notes.append(f"{describe(item)}: keep is left out, the backward gathers again")
        if isinstance(item, shard) and item.order:
            notes.append(
                f"{describe(item)}: the order of tokens is left out, systems have one of their own"
            )
        if isinstance(item, order) and any("op" in dict(one.terms) for one in item.selections):
            notes.append(f"{describe(item)}: the order of messages is left out")
        if isinstance(item, recompute) and item.apart:
            notes.append(f"{describe(item)}: apart is left out, R begins the backward")
    return tuple(notes)


def _scale(scaling: LossScale | None) -> tuple[tuple[str, float], ...]:
    """Return how a loss is scaled as descriptions say it."""
    from piper_runtime import LossScale

    if scaling is None:
        return ()
    if scaling == LossScale.fixed(scaling.initial):
        return (("fixed", scaling.initial),)
    return loss_scale(**asdict(scaling))


def _sizes(job: Job) -> ModelSizes:
    """Return the sizes of a model of `piper.models`; without fields for any other."""
    config = getattr(job.model, "__self__", None)
    if config is None or not type(config).__module__.startswith("piper.models."):
        return ModelSizes({}, "")
    return model_sizes(config)


def _shares(strategy: Strategy, layout: DeviceLayout) -> DeviceLayout:
    """Return the layout with the axes along which devices share chunks."""
    for item in (d for d in strategy.directives if isinstance(d, shard)):
        size = strategy.mesh.degree(strategy.mesh.along(item.joined))
        if item.experts:
            layout = replace(
                layout, ep=size, folded=tuple(a for a in item.axes if a in ("tp", "cp")),
                hidden=item.hidden_axes, etp=strategy.mesh.size("etp"), beside=item.beside,
            )  # fmt: skip
        elif item.index == "tokens":
            layout = replace(layout, cp=size, attention=item.attention)
        elif item.selection == where() and not item.index:
            sequence = item.stream == "tokens"
            layout = replace(layout, tp=size, sequence=sequence, pieces=item.pieces)
        else:
            raise JobError(f"{describe(item)}: no other system has such a directive")
    return layout


def _replicas(strategy: Strategy, layout: DeviceLayout) -> DeviceLayout:
    """Return the layout with the replicas and the states that they share."""
    items = [d for d in strategy.directives if isinstance(d, replicate)]
    if not items:
        return layout
    if len(items) > 1 or items[0].selection != where():
        raise JobError(
            "several `replicate`, each for a part of the model: no other system has that"
        )
    (item,) = items
    shared = {"tp", "cp"} & set(item.over)
    size = strategy.mesh.size
    levels = [set(getattr(item.shards, state)) for state in STATES]
    zero = sum(bool(axes) for axes in levels)
    axes = levels[0] if zero else set(item.over) - {"rep"}
    if any(level != axes for level in levels[:zero]) or axes - {"dp", "ep", "etp", "cp"}:
        raise JobError(
            f"{describe(item)}: states along different axes; other systems share all states along the same"
        )
    return replace(
        layout,
        dp=size("dp") * size("ep") * size("etp"),
        dp_replicate=size("rep") if "rep" in item.over else 1,
        zero=zero,
        over_cp=bool(zero) and "cp" in shared,
        reshard=item.resident_mb != "step",
        reduce_once=zero >= 2 and item.reduced_mb == "step",
        bucket_mb=None if item.bucket_mb == replicate.bucket_mb else float(item.bucket_mb),
        prefetch=None if item.prefetch == replicate.prefetch else item.prefetch,
        whole_mb=float(item.whole_mb) if item.shards.params else 0,
        overlap=item.overlap,
    )


def _pipeline(directives: Sequence[Any], strategy: Strategy, layout: DeviceLayout) -> DeviceLayout:
    """Return the layout with the schedule: that of the recipe that makes the same directives."""
    pp = strategy.mesh.size("pp")
    layout = replace(layout, pp=pp)
    parts = [d for d in directives if isinstance(d, partition)]
    stages = recipes.stages_of(directives) or 1
    microbatches = next((d.microbatches for d in directives if isinstance(d, split)), 1)
    if parts and isinstance(parts[0].at, tuple):
        layout = replace(layout, at=parts[0].at, units=parts[0].units)
    elif parts and (parts[0].at != "even" or parts[0].units != "layers"):
        raise JobError(
            f"{describe(parts[0])}: other systems need the first layer of each stage; give at=(...), as `piper explain` "
            "prints it"
        )
    if stages == pp == 1:
        return layout
    mine = [d for d in directives if not isinstance(d, partition)]
    for name, how in _candidates(pp, microbatches, stages // pp):
        try:
            theirs = getattr(recipes, name)(**how)
        except DirectiveError:
            continue  # the recipe is not for these numbers
        if [d for d in theirs if not isinstance(d, partition)] == mine:
            return replace(layout, schedule=name, chunks=stages // pp, group=how.get("group"))
    raise JobError(
        f"the order of {stages} stages on {pp} devices is that of none of {', '.join(SCHEDULES)}; other systems have no "
        f"words for it"
    )


def _candidates(pp: int, microbatches: int, chunks: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the recipes, with arguments, that have so many stages on a device."""
    numbers = {"pp": pp, "microbatches": microbatches}
    for name in SCHEDULES:
        if name in ("interleaved", "looped_bfs", "interleaved_zb"):
            yield name, {**numbers, "chunks": chunks}
        else:
            yield name, numbers
    for group in range(pp + 1, microbatches + 1):
        yield "interleaved", {**numbers, "chunks": chunks, "group": group}


def _recomputation(item: Any) -> Recomputation:
    """Return a `recompute` as descriptions say it; one inside of modules needs no selection of layers beside these."""
    inside = all(WITHIN in policy for policy in item.keep.split(BESIDE))
    every = inside and item.selection == where()
    return Recomputation(item.keep, None if every else _layers(item), item.group)


def _offloads(strategy: Strategy, *tensors: str) -> list[Any]:
    items = [d for d in strategy.directives if isinstance(d, offload)]
    return [d for d in items if d.tensors in tensors or not tensors]


def _params_on_host(items: Sequence[Any]) -> bool:
    """Return whether parameters are on the host; raise JobError if only some layers have theirs there."""
    if any(item.selection != where() for item in items):
        raise JobError(
            'offload(tensors="states") of a part of the model: other systems move the parameters of all of it; give '
            "where() without terms"
        )
    return bool(items)


def _optim_on_host(job: Job, items: Sequence[Any]) -> float:
    """Return the fraction of the layers whose optimizer is on the host; 1 for the whole model."""
    if not items:
        return 0.0
    if len(items) > 1:
        raise JobError(
            "several `offload` of states, each for a part of the model: other systems have one part; "
            "select it with one where"
        )
    if items[0].selection == where():
        return 1.0
    count = _sizes(job).fields.get("layers")
    if count is None:
        raise JobError(
            "`offload` of some layers' states, of a model that is none of piper.models: other systems need the number of "
            "all its layers; give where()"
        )
    return (_first_layers(items[0]) or int(count)) / int(count)


def _offload(items: Sequence[Any]) -> OffloadedTensors | None:
    """Return the tensors that wait on the host; raise JobError for several directives about them."""
    if len(items) > 1:
        raise JobError("several `offload`, each for a part of the model: no other system has that")
    if any(d.modules for d in items):
        raise JobError(
            f"{describe(items[0])}: exports have no words for modules of an `offload`; leave them out"
        )
    return next((OffloadedTensors(d.tensors, _first_layers(d), d.prefetch) for d in items), None)


def _first_layers(item: Any) -> int | None:
    """Return the number of layers that a directive selects from the first on, None for all layers."""
    layers = _layers(item)
    if isinstance(layers, tuple):
        raise _without_words(item)
    return layers


def _layers(item: Any) -> int | tuple[int, ...] | None:
    """Return the number of layers that a directive selects from the first on, or their numbers; None for all."""
    if item.selection == where(layer=ANY):
        return None
    for name, wanted in item.selection.terms:
        if name == "layer" and len(item.selection.terms) == 1 and isinstance(wanted, tuple | range):
            layers = tuple(wanted)
            return len(layers) if layers == tuple(range(len(layers))) else layers
    raise _without_words(item)


def _without_words(item: Any) -> JobError:
    return JobError(
        f"{describe(item)}: other systems have words for all layers, or the first ones; give where(layer=ANY) or "
        f"where(layer=range(n))"
    )
