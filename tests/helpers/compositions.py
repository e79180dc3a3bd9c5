"""Compositions of a model, a mesh and directives, and how each is compiled, run in one process and judged against one
device.

A Composition says everything in plain fields, so that a failing one can be pasted into a test. Models are those of
tests/helpers/models.py, each captured once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

import torch

import piper
from piper.api.captures import capturing
from piper.api.compiling.compiling import Compiled
from piper_capture import Captured
from piper_compiler import (
    Options,
    Strategy,
    offload,
    order,
    recipes,
    recompute,
    replicate,
    shard,
    split,
    stream,
    tile_loss,
)
from piper_compiler.directives import chunk_layers, layers_of, stage_of_layers
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import NONE, where
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Program
from piper_ops import Float8
from piper_runtime.launch.ground.result import Run
from piper_runtime.launch.running.run import execute
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.job.loss_scale import LossScale
from piper_runtime.rank.job.precision import Precision
from tests.helpers import models, parity, transformers
from tests.helpers.written_out import blocks_of, has_backward, written_out_pipeline

capturing.MOST_CAPTURES = 100  # this suite has more models than a user's session

Named = list[tuple[str, torch.nn.Parameter]]
Schedule = str


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.01)


def adamw(named: Named) -> torch.optim.Optimizer:
    """Decay for matrices only: groups that depend on names and full shapes."""
    plain = [p for n, p in named if p.ndim < 2 or n.startswith("embed")]
    decayed = [p for n, p in named if not (p.ndim < 2 or n.startswith("embed"))]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}], lr=0.01
    )


def rmsprop(named: Named) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([p for _, p in named], lr=0.01)


def adafactor(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(
        [p for _, p in named], lr=0.01, eps=(1e-4, 1e-3)
    )  # true zeros make no steps of rounding


def muon(named: Named) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers and of experts, AdamW for the rest."""
    matrices = [p for n, p in named if p.ndim > 1 and "layers." in n and "bias" not in n]
    known = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in known]
    made: list[torch.optim.Optimizer] = [piper.BatchedMuon(matrices, lr=0.05)] if matrices else []
    return [*made, *([torch.optim.AdamW(rest, lr=0.01)] if rest else [])]


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


Maker = Callable[[Named], Any]
OPTIMIZERS: Mapping[str, Maker] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "rmsprop": rmsprop,
    "adafactor": adafactor,
    "muon": muon,
}


SCALE = LossScale(initial=1024.0, interval=1)
"""It grows in each step."""
MIXED = {
    "mixed": Precision(params="float64", compute="float32"),
    "bfloat16 mixed": Precision(params="float32", compute="bfloat16"),
    "narrow sums": Precision(params="float64", compute="float32", reduce="float32"),
    "narrow messages": Precision(params="float64", reduce="float32", accumulate="float64"),
    "float16": Precision(compute="float16", loss_scale=LossScale(2.0**10, 2.0**20, 2.0**-20, 1)),
}
"""Precisions of several dtypes, by the name that a composition gives them. The first has the casts of the second, where
they can be compared. The second step of float16 overflows."""
FLOAT8 = {
    f"{recipe}, {saved}": Precision("float64", float8=Float8(recipe, keep=("head",), saved=saved))
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
    for saved in ("input", "float8")
}
"""Precisions of products in float8: a recipe, and the dtype of the inputs that are saved for the backward."""


def precision_of(name: str) -> Precision:
    """Return the precision of a composition: one of `MIXED`, or one dtype for all."""
    return {**MIXED, **FLOAT8}.get(name) or Precision(params=name)


@dataclass(frozen=True)
class Composition:
    """One model under one strategy.

    schedule: "gpipe", "1f1b", "default" (no order), "random" (any legal order, drawn by `seed`), or the name of a
    recipe, with `chunks` per device where it takes them. placement: "recipe" (stages of the recipes where the model has
    them), "chunks" (contiguous chunks per device), "v" (two groups per device, there and back), "shared" (the last
    group's microbatches alternate between two devices) or "random" (each group and microbatch anywhere). backward:
    "split" into I and W for all microbatches, "mixed": for a part of the groups and microbatches; where there is an
    order, W stands anywhere after its I ("random") or two tasks later. overlap: of three neighbours in an order two may
    be interleaved. rows: per microbatch and replica. bucket_mb: of gradients. shared_streams: all sends of a device on
    one stream, all receives on another. keep: the policy of recomputation of everything, of `group` layers at once,
    by nodes of its own if it is `apart`. rep: of `dp` replicas so many keep the same each, where the others share
    states. whole_mb: parameters of up to this size stay whole. tp: devices
    that share the work of each chunk; along its tokens too with `stream`, where `gathered` keeps what the forward
    gathers, and products are computed in `pieces`. cp: devices that share the tokens, with this `attention` in this
    `order`. ep: of `dp` replicas so many share experts; hidden: the axes along which devices cut each of these, where
    "etp" is of two of the replicas. over_cp: whether states are shared over cp, too. tiles: of tokens, in which the
    loss is computed. overlap_states: whether messages of buckets run beside compute. scaled: whether the loss is
    scaled, by another number in each step.
    waits: the tensors that wait on the host for their backward, "" for none, and `ahead`, how early they come back.
    hosted: the states on the host: "optim", "states" or none. axes: the order of the mesh's axes. folded: an axis whose
    devices share tokens, and have experts of their own beside ep. beside: whether rows travel beside the other
    operations of a mixture. sized: whether recipes take rows in place of microbatches, and the stages of the mesh.
    messages: "gather" or "reduce", of layers in an order drawn by `seed`, or "send", of each stage's microbatches."""

    model: str
    pp: int = 1
    dp: int = 1
    microbatches: int = 1
    schedule: Schedule = "default"
    placement: Literal["recipe", "chunks", "v", "shared", "random"] = "recipe"
    rows: int = 2
    optimizer: str = "sgd"
    clip: float | None = None
    scheduler: bool = False
    bucket_mb: float = 25
    shared_streams: bool = False
    fuse: bool = True
    recv_ahead: int = 2
    precision: str = "float64"
    backward: Literal["whole", "split", "mixed"] = "whole"
    overlap: bool = False
    seed: int = 0
    chunks: int = 0
    zero: int = 0
    resident_mb: float | str = 0
    reduced_mb: float | str = 0
    prefetch: int = 1
    whole_mb: float = 0
    overlap_states: bool = True
    keep: str = "all"
    rep: int = 1
    tp: int = 1
    stream: str = ""
    gathered: bool = False
    pieces: int = 1
    cp: int = 1
    attention: Literal["heads", "ring", "gather"] = "heads"
    order: Literal["", "zigzag", "blocks"] = ""
    ep: int = 1
    cut: bool = False
    tiles: int = 1
    scaled: bool = False
    waits: str = ""
    ahead: int = 1
    at: tuple[int, ...] = ()
    kernels: Literal["eager", "inductor"] = "eager"
    hosted: str = ""
    hidden: Literal["", "tp", "cp", "etp", "tp+cp", "tp+etp", "cp+etp"] = ""
    over_cp: bool = False
    axes: tuple[str, ...] = ()
    folded: Literal["", "tp", "cp"] = ""
    beside: bool = False
    sized: bool = False
    messages: Literal["", "gather", "reduce", "send"] = ""
    group: int = 1
    apart: bool = False

    def __str__(self) -> str:
        shown = [
            f"pp={self.pp}",
            f"dp={self.dp}",
            f"m={self.microbatches}",
            self.schedule,
            self.optimizer,
        ]
        shown += [
            x for x, usual in ((self.placement, "recipe"), (self.backward, "whole")) if x != usual
        ]
        if self.zero:
            shown += [f"rep={self.rep}"] * (self.rep > 1)
            shown += [
                f"zero={self.zero}",
                f"{self.resident_mb}/{self.reduced_mb}",
                f"prefetch={self.prefetch}",
                *[f"whole={self.whole_mb}"] * (self.whole_mb > 0),
            ]
        if self.tp > 1:
            shown += [
                f"tp={self.tp}",
                *[self.stream] * bool(self.stream),
                *["gathered"] * self.gathered,
                *[f"pieces={self.pieces}"] * (self.pieces > 1),
                *["cut"] * self.cut,
            ]
        if self.cp > 1:
            shown += [f"cp={self.cp}", self.attention, *[self.order] * bool(self.order)]
        shown += ["no overlap of states"] * (not self.overlap_states)
        shown += [f"ep={self.ep}"] * (self.ep > 1) + [f"hidden={self.hidden}"] * bool(self.hidden)
        shown += [f"folded={self.folded}"] * bool(self.folded) + ["beside"] * self.beside
        shown += ["states over cp"] * self.over_cp + ["rows"] * self.sized
        shown += [f"axes={'+'.join(self.axes)}"] * bool(self.axes)
        shown += [f"order of {self.messages}"] * bool(self.messages) + ["apart"] * self.apart
        shown += [f"group={self.group}"] * (self.group > 1) + [self.precision] * (
            self.precision != "float64"
        )
        shown += [f"tiles={self.tiles}"] * (self.tiles > 1) + ["scaled"] * self.scaled
        shown += [self.kernels] * (self.kernels != "eager")
        shown += [f"hosted={self.hosted}"] * bool(self.hosted)
        shown += [f"waits={self.waits}", f"ahead={self.ahead}"] * bool(self.waits)
        return "-".join(
            [self.model, *shown, *["overlap"] * self.overlap, *[self.keep] * (self.keep != "all")]
        )


def job_of(c: Composition) -> Job:
    """The job that a composition trains."""
    case, precision = models.case(c.model), precision_of(c.precision)
    return Job(
        model=case.model, batch=case.batch, loss=case.loss, optimizer=OPTIMIZERS[c.optimizer],
        global_batch=c.rows * c.microbatches * c.dp, scheduler=decay if c.scheduler else None, clip_norm=c.clip,
        precision=replace(precision, loss_scale=SCALE if c.scaled else precision.loss_scale),
    )  # fmt: skip


@functools.cache
def captured(model: str, precision: str = "float64") -> Captured:
    """A model's capture, once for the whole suite: the front door gets the one that the compiler's own tests use."""
    of_losses = models.is_transformer(model)
    rows = transformers.ROWS if of_losses else 2
    job = job_of(Composition(model, precision=precision, rows=rows))
    if precision in {**MIXED, **FLOAT8} or of_losses:
        return capturing.captured_job(job)
    # functools.cache tells captured(name) from captured(name, float64), and the others say the first.
    shared = (
        models.captured(model)
        if precision == "float64"
        else models.captured(model, job.precision.dtype)
    )
    capturing._CAPTURES[capturing.capture_key(job)] = shared
    assert capturing.captured_job(job) is shared, "the front door's key is another one now"
    return shared


@functools.lru_cache(maxsize=256)
def _expected(model: str, numbers: tuple[Any, ...], steps: int) -> parity.Reference:
    rows, microbatches, dp, optimizer, clip, scheduler, precision = numbers
    c = Composition(
        model,
        dp=dp,
        microbatches=microbatches,
        rows=rows,
        optimizer=optimizer,
        clip=clip,
        scheduler=scheduler,
        precision=precision,
    )
    return parity.reference(job_of(c), replicas=dp, microbatches=microbatches, steps=steps)


def expected(c: Composition, steps: int = parity.STEPS) -> parity.Reference:
    """What one device computes; the same for all schedules and placements, and computed once."""
    return _expected(
        c.model,
        (c.rows, c.microbatches, c.dp, c.optimizer, c.clip, c.scheduler, c.precision),
        steps,
    )


def strategy_of(c: Composition) -> Strategy:
    """The mesh and directives of a composition."""
    program = captured(c.model, c.precision).program
    sharing: dict[str, Any] = {}
    if c.zero:
        own = ("dp", *["cp"] * c.over_cp)
        shared = {state: own for state in ("optim", "grads", "params")[: c.zero]}
        level = dict(over=("dp", "rep"), shard=shared) if c.rep > 1 else dict(zero=c.zero)
        sharing = dict(
            resident_mb=c.resident_mb,
            reduced_mb=c.reduced_mb,
            prefetch=c.prefetch,
            whole_mb=c.whole_mb,
            **level,
        )
    etp = etp_of(c)
    if c.ep > 1:
        sharing["over"] = ("dp", "ep", *["etp"] * (etp > 1))
    if c.over_cp:
        sharing["over"] = (*sharing.get("over", ("dp",)), "cp")
    data_parallel: tuple[Any, ...] = ()
    if c.dp > 1:
        data_parallel = (
            replicate(where(), bucket_mb=c.bucket_mb, overlap=c.overlap_states, **sharing),
        )
    again = (
        (recompute(where(), keep=c.keep, group=c.group, apart=c.apart),) if c.keep != "all" else ()
    )
    waiting = (
        (offload(where(opaque=NONE), prefetch=c.ahead, tensors=c.waits, least_mb=0),)
        if c.waits
        else ()
    )
    tiles = (tile_loss(c.tiles),) if c.tiles > 1 else ()
    waiting += (offload(where(), tensors=c.hosted),) if c.hosted else ()
    axes = dict(dp=c.dp // c.rep, rep=c.rep) if c.rep > 1 else dict(dp=c.dp)
    axes = dict(dp=c.dp // c.ep // etp, ep=c.ep, etp=etp) if c.ep > 1 else axes
    experts: tuple[Any, ...] = ()
    if c.ep > 1:
        over = (c.folded, "ep") if c.folded else "ep"
        experts = recipes.expert_parallel(over=over, hidden=c.hidden, beside=c.beside)
    sharers = (
        *experts,
        *(
            (shard(where(), stream=c.stream, keep=c.gathered, cut=c.cut, pieces=c.pieces),)
            if c.tp > 1
            else ()
        ),
    )
    if c.cp > 1:
        sharers += (
            shard(where(), over="cp", index="tokens", attention=c.attention, order=c.order),
        )
    ordered = _ordered(c, program) if c.messages else ()
    return Strategy(
        Mesh(pp=c.pp, tp=c.tp, cp=c.cp, order=c.axes, **axes),
        (sharers, tiles, _pipeline(c, program), data_parallel, again, waiting, ordered),
        global_batch=job_of(c).global_batch,
    )


def etp_of(c: Composition) -> int:
    """How many replicas cut each expert."""
    return 2 if "etp" in c.hidden.split("+") else 1


def _ordered(c: Composition, program: Program) -> tuple[Any, ...]:
    if c.messages == "send":
        return tuple(_sends(c))
    layers = list(layers_of(program))
    Random(c.seed).shuffle(layers)
    return (order(*[where(op=c.messages, layer=layer) for layer in layers]),)


def _sends(c: Composition) -> Iterator[Any]:
    """Yield orders of sends in which some microbatches leave a stage behind the next one.

    Where all forwards of a stage stand before its backwards, their values leave in any order.
    """
    rng, phases = Random(c.seed), {"F": range(c.pp - 1), "B": range(1, c.pp)}
    for phase, stages in phases.items() if c.schedule == "gpipe" else [("F", phases["F"])]:
        for stage in stages:
            microbatches = list(range(c.microbatches))
            if c.schedule == "gpipe":
                rng.shuffle(microbatches)
                if microbatches == sorted(microbatches):
                    microbatches.reverse()
            else:
                for k in range(rng.randrange(min(2, c.microbatches - 1)), c.microbatches - 1, 2):
                    microbatches[k : k + 2] = reversed(microbatches[k : k + 2])
            of_stage = [where(op="send", phase=phase, stage=stage, mb=mb) for mb in microbatches]
            yield order(*of_stage, missing="skip")


def compiled(c: Composition) -> Compiled:
    """The composition through the front door."""
    options = Options(fuse=c.fuse, recv_ahead=c.recv_ahead, kernels=c.kernels)
    return piper.compile(job_of(c), strategy_of(c), options=options)


def code_of(c: Composition, plan: Plan) -> Any:
    """The code of the plan's chunks, for its number of rows, if its layers are the usual ones.

    A job whose loss is scaled has a capture of its own, since the scale multiplies a mean in it, not a sum.
    """
    made = capturing.captured_job(job_of(c)) if c.scaled else captured(c.model, c.precision)
    return made.code.export(plan.codes, plan.rows)


def run(
    c: Composition,
    of: Plan | Compiled | None = None,
    *,
    steps: int = parity.STEPS,
    **options: Any,
) -> Run:
    """Execute a composition, or another plan for it, inline unless told otherwise."""
    of = of or compiled(c)
    if isinstance(of, Compiled):
        assert of.code is not None
        plan, code = of.plan, of.code.export(of.plan.codes, of.plan.rows)
    else:
        plan, code = of, code_of(c, of)
    return execute(
        plan,
        code,
        job_of(c),
        **{"steps": steps, "launcher": "inline", "gradients": True, **options},
    )


def _pipeline(c: Composition, program: Program) -> tuple[Any, ...]:
    sizes: dict[str, Any] = dict(rows=c.rows) if c.sized else {}
    sizes = sizes or dict(pp=c.pp, microbatches=c.microbatches)
    if c.schedule in PIPELINES:
        more: dict[str, Any] = {"chunks": c.chunks} if c.chunks else {}
        more |= {"at": c.at} if c.at else {}
        return tuple(getattr(recipes, c.schedule)(**sizes, **more))
    if c.pp == 1 and c.schedule != "random" and c.backward == "whole":
        return (split(where(), microbatches=c.microbatches),)
    written_out = c.placement != "recipe" or c.schedule == "random" or c.backward != "whole"
    if written_out or not has_stages(program, c.pp):
        return written_out_pipeline(c, program)
    recipe = {"gpipe": recipes.gpipe, "1f1b": recipes.one_f_one_b}.get(c.schedule, recipes.pipeline)
    streams = (
        (stream(where(op="send"), "sends"), stream(where(op="recv"), "receives"))
        if c.shared_streams
        else ()
    )
    at: dict[str, Any] = {"at": c.at} if c.at else {}
    return (*recipe(**sizes, **at), *streams)


def has_stages(program: Program, pp: int) -> bool:
    """Whether a recipe can cut the model into pp stages that all have a backward."""
    if len(blocks_of(program)) < len(program.chunks):
        return False
    tagged = {chunk.coords.get("stage") for chunk in program.chunks}
    if tagged == set(range(pp)):
        return True
    layers = layers_of(program)
    if tagged != {None} or len(layers) < pp:
        return False
    stage, home = stage_of_layers(program, pp, "even"), chunk_layers(program)
    return {stage[home[chunk.id]] for chunk in program.chunks if has_backward(chunk)} == set(
        range(pp)
    )


def fitted(c: Composition) -> Composition:
    """The composition on as many devices as its model can fill."""
    program = captured(c.model, c.precision).program
    updates_buffers = models.case(c.model).buffers
    if (
        c.schedule == "dualpipe" and updates_buffers
    ):  # it runs each stage on two devices, whose copies would differ
        c = replace(c, schedule="random")
    if c.schedule in PIPELINES:
        stages = [
            pp
            for pp in (c.pp, 2)
            if not (c.schedule == "dualpipe" and pp % 2) and has_stages(program, pp * chunks_of(c))
        ]
        if stages:
            dp = 1 if c.model == "buffers" else c.dp
            return replace(
                c, pp=stages[0], dp=dp, placement="recipe", backward="whole", overlap=False
            )
        c = replace(c, schedule="random")
    blocks = len(blocks_of(program))
    if c.model == "buffers":  # its running mean would differ between replicas
        c = replace(c, dp=1)
    if c.placement == "shared" and (c.microbatches < 2 or c.pp < 2 or updates_buffers):
        c = replace(c, placement="chunks")
    cells = min(blocks, c.pp) * (1 if updates_buffers else c.microbatches)
    c = replace(
        c,
        pp=max(
            1,
            min(
                c.pp,
                {"v": blocks // 2, "shared": blocks + 1, "random": cells}.get(c.placement, blocks),
            ),
        ),
    )
    return replace(c, schedule="default") if c.pp == 1 and c.schedule in ("gpipe", "1f1b") else c


PIPELINES = {
    name: recipe
    for name, recipe in recipes.RECIPES.items()
    if name not in ("gpipe", "one_f_one_b") and recipe.make.__module__.startswith("piper")
}
"""Piper's recipes that a composition names by their own name; a test in this process may define one of its own."""


def chunks_of(c: Composition) -> int:
    """Chunks per device of a recipe."""
    default = (PIPELINES[c.schedule].make.__kwdefaults__ or {}).get("chunks")
    if default is not None:
        return c.chunks or int(default)
    return 2 if c.schedule in ("zbv", "dualpipe_v", "v_half", "v_min") else 1
