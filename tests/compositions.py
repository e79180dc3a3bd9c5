"""Compositions of a model, a mesh and directives, and how each is compiled, run in one process and judged against one device.

A Composition says everything in plain fields, so that a failing one can be pasted into a test. Models are those of
tests/models.py, each captured once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from itertools import product as product_of
from random import Random
from typing import Any, Literal

import torch

import piper
from piper import frontdoor
from piper.frontdoor import Compiled
from piper_compiler import Options, Strategy, order, place, recipes, replicate, split, stream
from piper_compiler.capture import Captured
from piper_compiler.directives.partition import chunk_layers, layers_of, stage_of_layers
from piper_ir.mesh import Mesh
from piper_ir.plan import Plan
from piper_ir.program import Chunk, Program
from piper_ir.select import where
from piper_runtime.job import Job, Precision
from piper_runtime.run import Run, execute
from tests import models, parity

frontdoor.MOST_CAPTURES = 100  # this suite has more models than a user's session

Named = list[tuple[str, torch.nn.Parameter]]
Phase = Literal["F", "B"]
Schedule = Literal["gpipe", "1f1b", "default", "random"]
Task = tuple[int, Phase, int]
"""Group of chunks, phase, microbatch."""


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.01)


def adamw(named: Named) -> torch.optim.Optimizer:
    """Decay for matrices only: groups that depend on names and full shapes."""
    plain = [p for n, p in named if p.ndim < 2 or n.startswith("embed")]
    decayed = [p for n, p in named if not (p.ndim < 2 or n.startswith("embed"))]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}], lr=0.01)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


OPTIMIZERS: Mapping[str, Callable[[Named], torch.optim.Optimizer]] = {"sgd": sgd, "adam": adam, "adamw": adamw}


@dataclass(frozen=True)
class Composition:
    """One model under one strategy.

    schedule: "gpipe", "1f1b", "default" (no order), or "random" (any legal order, drawn by `seed`). placement: "recipe" (stages
    of the recipes where the model has them), "chunks" (contiguous chunks per device), "v" (two groups per device, there and
    back), "shared" (the last group's microbatches alternate between two devices) or "random" (each group and microbatch
    anywhere). rows: per microbatch and replica. bucket_mb: of gradients. shared_streams: all sends of a device on one stream,
    all receives on another."""

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
    seed: int = 0

    def __str__(self) -> str:
        shown = [f"pp={self.pp}", f"dp={self.dp}", f"m={self.microbatches}", self.schedule, self.optimizer]
        return "-".join([self.model, *shown, *([self.placement] if self.placement != "recipe" else [])])


def job_of(c: Composition) -> Job:
    """The job that a composition trains."""
    case = models.CASES[c.model]
    return Job(
        model=case.model, batch=case.batch, loss=case.loss, optimizer=OPTIMIZERS[c.optimizer],
        global_batch=c.rows * c.microbatches * c.dp, scheduler=decay if c.scheduler else None, clip_norm=c.clip,
        precision=Precision(params=c.precision),
    )  # fmt: skip


@functools.cache
def captured(model: str, precision: str = "float64") -> Captured:
    """A model's capture, once for the whole suite: the front door gets the one that the compiler's own tests use."""
    job = job_of(Composition(model, precision=precision))
    # functools.cache tells captured(name) from captured(name, float64), and the others say the first.
    shared = models.captured(model) if precision == "float64" else models.captured(model, job.precision.dtype)
    frontdoor._CAPTURES[id(job.model), id(job.batch), id(job.loss), precision] = job, shared
    assert frontdoor.captured_job(job) is shared, "the front door's key is another one now"
    return shared


@functools.lru_cache(maxsize=64)
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
    return _expected(c.model, (c.rows, c.microbatches, c.dp, c.optimizer, c.clip, c.scheduler, c.precision), steps)


def strategy_of(c: Composition) -> Strategy:
    """The mesh and directives of a composition."""
    program = captured(c.model, c.precision).program
    data_parallel = (replicate(where(), bucket_mb=c.bucket_mb),) if c.dp > 1 else ()
    return Strategy(Mesh(pp=c.pp, dp=c.dp), (_pipeline(c, program), data_parallel))


def compiled(c: Composition) -> Compiled:
    """The composition through the front door."""
    return piper.compile(job_of(c), strategy_of(c), options=Options(fuse=c.fuse, recv_ahead=c.recv_ahead))


def code_of(c: Composition, plan: Plan) -> Any:
    """The code of the plan's chunks, for its number of rows."""
    return captured(c.model, c.precision).code.export([chunk.code for chunk in plan.chunks], plan.rows)


def run(c: Composition, plan: Plan | None = None, *, steps: int = parity.STEPS, **options: Any) -> Run:
    """Execute a composition, or another plan for it, inline unless told otherwise."""
    plan = plan or compiled(c).plan
    return execute(plan, code_of(c, plan), job_of(c), **{"steps": steps, "launcher": "inline", "gradients": True, **options})


def _pipeline(c: Composition, program: Program) -> tuple[Any, ...]:
    if c.pp == 1 and c.schedule != "random":
        return (split(where(), microbatches=c.microbatches),)
    if c.placement != "recipe" or c.schedule == "random" or not has_stages(program, c.pp):
        return _written_out(c, program)
    recipe = {"gpipe": recipes.gpipe, "1f1b": recipes.one_f_one_b}.get(c.schedule, recipes.pipeline)
    streams = (stream(where(op="send"), "sends"), stream(where(op="recv"), "receives")) if c.shared_streams else ()
    return (*recipe(pp=c.pp, microbatches=c.microbatches), *streams)


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
    return {stage[home[chunk.id]] for chunk in program.chunks if has_backward(chunk)} == set(range(pp))


def has_backward(chunk: Chunk) -> bool:
    """Whether any gradient is computed in a chunk: not if everything in it and before it is frozen."""
    return any(not signature.empty for step, signature in chunk.steps.items() if step != "F")


def blocks_of(program: Program) -> list[tuple[str, ...]]:
    """The chunks in program order, those together that must share a device: from the first to the last that uses a buffer which
    is updated."""
    updated = {o.ref for chunk in program.chunks for o in chunk.outputs if o.kind == "buffer"}
    blocks: list[tuple[str, ...]] = []
    last = {name: k for k, chunk in enumerate(program.chunks) for name in updated & _buffers(chunk)}
    until = -1
    for k, chunk in enumerate(program.chunks):
        blocks.append((*(blocks.pop() if k <= until else ()), chunk.id))
        until = max([until, *(last[name] for name in updated & _buffers(chunk))])
    return blocks


def _buffers(chunk: Chunk) -> set[str]:
    return {i.ref for i in chunk.inputs if i.kind == "buffer"} | {o.ref for o in chunk.outputs if o.kind == "buffer"}


def groups_of(program: Program, count: int) -> list[tuple[str, ...]]:
    """The chunks in `count` contiguous groups, as even as they go; fewer when the model has fewer."""
    blocks = blocks_of(program)
    count = min(count, len(blocks))
    edges = [round(k * len(blocks) / count) for k in range(count + 1)]
    return [tuple(id for block in blocks[a:b] for id in block) for a, b in pairwise(edges)]


def _group_count(c: Composition) -> int:
    return {"v": 2 * c.pp, "shared": c.pp - 1}.get(c.placement, c.pp)


def _written_out(c: Composition, program: Program) -> tuple[Any, ...]:
    """Directives without a recipe: split, place for every group, and an order per device."""
    groups = groups_of(program, _group_count(c))
    on = _devices(c, len(groups))
    streams = {"send": "sends", "recv": "receives"} if c.shared_streams else {}
    places = []
    for g, chunks in enumerate(groups):
        for device in sorted({on[g, i] for i in range(c.microbatches)}):
            mine = tuple(i for i in range(c.microbatches) if on[g, i] == device)
            places.append(place(where(chunk=chunks, mb=mine), on=dict(pp=device), **streams))
    trained = [any(has_backward(program.chunk(id)) for id in chunks) for chunks in groups]
    orders = []
    for device in range(c.pp) if c.schedule != "default" else ():
        tasks = [t for t in _sequence(c, len(groups)) if on[t[0], t[2]] == device and (t[1] == "F" or trained[t[0]])]
        if len(tasks) > 1:
            orders.append(order(*(where(chunk=groups[g], phase=phase, mb=i) for g, phase, i in tasks)))
    return (split(where(), microbatches=c.microbatches), *places, *orders)


def _devices(c: Composition, groups: int) -> dict[tuple[int, int], int]:
    """(group, microbatch) -> device; every device gets something."""
    cells = [(g, i) for g in range(groups) for i in range(c.microbatches)]
    match c.placement:
        case "v":
            return {(g, i): min(g, 2 * c.pp - 1 - g) for g, i in cells}
        case "shared":
            return {(g, i): c.pp - 1 if g == groups - 1 and i % 2 else g for g, i in cells}
        case "random":
            return _random_devices(c, cells)
        case _:
            return {(g, i): g for g, i in cells}


def _random_devices(c: Composition, cells: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    rng = Random(c.seed)
    if models.CASES[c.model].buffers:  # a chunk that updates a buffer runs on one device
        groups = list(dict.fromkeys(g for g, _ in cells))
        rng.shuffle(groups)
        home = {g: k if k < c.pp else rng.randrange(c.pp) for k, g in enumerate(groups)}
        return {(g, i): home[g] for g, i in cells}
    shuffled = rng.sample(cells, len(cells))
    return {cell: k if k < c.pp else rng.randrange(c.pp) for k, cell in enumerate(shuffled)}


def _sequence(c: Composition, groups: int) -> list[Task]:
    """A global order of all tasks that respects the data: F along the groups, B against them, F before B."""
    m = c.microbatches
    if c.schedule == "gpipe":
        forward: list[Task] = [(g, "F", i) for i in range(m) for g in range(groups)]
        return forward + [(g, "B", i) for i in range(m) for g in reversed(range(groups))]
    rng = Random(c.seed + 1)
    left: dict[int, list[Task]] = {
        i: [*((g, "F", i) for g in range(groups)), *((g, "B", i) for g in reversed(range(groups)))] for i in range(m)
    }
    out: list[Task] = []
    while left:
        i = rng.choice(sorted(left)) if c.schedule == "random" else _next_1f1b(left, groups)
        group, phase, _ = left[i][0]
        if phase == "F" and models.CASES[c.model].buffers:  # buffers are updated in the order of microbatches
            i = min(k for k, tasks in left.items() if k <= i and tasks[0][1] == "F" and tasks[0][0] <= group)
        out.append(left[i].pop(0))
        if not left[i]:
            del left[i]
    return out


def fitted(c: Composition) -> Composition:
    """The composition on as many devices as its model can fill."""
    blocks = len(blocks_of(captured(c.model, c.precision).program))
    updates_buffers = models.CASES[c.model].buffers
    if c.model == "buffers":  # its running mean would differ between replicas
        c = replace(c, dp=1)
    if c.placement == "shared" and (c.microbatches < 2 or c.pp < 2 or updates_buffers):
        c = replace(c, placement="chunks")
    cells = min(blocks, c.pp) * (1 if updates_buffers else c.microbatches)
    c = replace(c, pp=max(1, min(c.pp, {"v": blocks // 2, "shared": blocks + 1, "random": cells}.get(c.placement, blocks))))
    return replace(c, schedule="default") if c.pp == 1 and c.schedule in ("gpipe", "1f1b") else c


def _next_1f1b(left: Mapping[int, list[Task]], groups: int) -> int:
    """The microbatch to go on with: a forward that has begun; a new forward while fewer than `groups` are in flight; else the
    oldest backward."""
    begun = [i for i, tasks in left.items() if len(tasks) < 2 * groups]
    new = [i for i in left if i not in begun]
    forward = [i for i in begun if left[i][0][1] == "F"]
    if forward:
        return forward[0]
    return new[0] if new and len(begun) < groups else begun[0]


def product() -> list[Composition]:
    """Every model x (pp=2, dp=2, both, pp=4) x (GPipe, 1F1B) x m in (1, 4, 8). Without pipeline there is no schedule, with one
    microbatch the two are one; a model whose buffers follow the batch has no replicas; masked rows come one by one, so that
    some microbatches weigh nothing."""
    out = []
    for name, case in models.CASES.items():
        for (pp, dp), m in product_of(((2, 1), (1, 2), (2, 2), (4, 1)), (1, 4, 8)):
            if dp > 1 and name == "buffers":
                continue
            rows = 1 if case.loss is models.masked_cross_entropy and m > 1 else 2
            schedules: tuple[Schedule, ...] = ("default",) if pp == 1 else ("gpipe",) if m == 1 else ("gpipe", "1f1b")
            out += [Composition(name, pp, dp, m, schedule, rows=rows) for schedule in schedules]
    return out
