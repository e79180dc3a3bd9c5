"""Compare step times with torch.distributed, in interleaved pairs: pipelines, replicas, FSDP2, shared layers, experts.

Model, data, loss, optimizer and processes are the same on both sides, one thread each, with gloo over loopback. Two
processes (four, where FSDP2 is under a pipeline) hold both sides; timed runs of the two alternate, and which one goes
first alternates too. The result is the median of torch/ours over the pairs with its 95 % interval: above 1 a plan is
faster than torch. Beside it stands the same ratio of CPU time, which other processes hardly change.

step       torch's pipeline schedules (pp=2), DistributedDataParallel (dp=2); with kernels of Inductor beside compiled
           stages, compiled blocks (DDP and FSDP2) and the whole model under torch.compile, by CPU time
sharded    FSDP2 beside zero=3, and the peak of memory. FSDP2 drops parameters after every forward and gathers them
           again; after a backward under a pipeline it keeps them, and gradients whole, until the step ends. So ours
           has two settings: "step" keeps both for the step; with 0 a step holds least
tensor     `parallelize_module`, tp=2, without and with sequence parallelism; embedding and head are whole
experts    torch's pieces in torchtitan's way, ep=2, of a dropless mixture. Both sides take every token: torch's
           exchanges as many rows as there are, ours rounds of at most 1.25 x the mean, the default
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import piper
from benchmarks import compiled_time, expert_side, tensor_side
from benchmarks.expert_side import EXPERTS, MixtureRegime, expert_job
from benchmarks.fsdp2_side import SHARDED
from benchmarks.measure import Goal, Row, pairs_row
from benchmarks.step_model import LARGE, SMALL, Regime, job
from benchmarks.step_sides import DATA_PARALLEL, PIPELINES, PLAIN, WORLD, Setup, shipped_code
from benchmarks.step_worker import ALIVE, SILENCE_S, Measured, work
from benchmarks.tensor_side import TENSOR, tensor_job
from piper_ir.plan.plan_bytes import flat_bytes

COMPILED = ("GPipe", "1F1B", "interleaved 1F1B")
"""The schedules with compiled stages; torch cannot split the backward of a compiled stage."""
PAIRS = {"step": 40, "compiled": 20, "replicas": 160, "sharded": 30, "tensor": 60, "experts": 60}
"""A step of replicas is one microbatch, so that a run is soon over and any disturbance is a large part of it."""
QUICK_PAIRS = 2
GOAL, PEAK_GOAL = Goal("above", 0.98), Goal("below", 0.7)
DEEP = replace(
    SMALL, name="32 layers of 3 MiB", width=256, layers=32, context=16, rows=1, heads=4, steps=1
)
"""Parameters, and not activations, are most of what it holds."""
SHALLOW = replace(DEEP, name="16 layers of 3 MiB", layers=16)
"""The layers that are whole for a moment are more of what this one holds."""


def step_rows(quick: bool) -> Iterator[Row]:
    """Compare every schedule, and replicas, in both regimes; `quick`: one of each."""
    for regime in (SMALL,) if quick else (LARGE, SMALL):
        for kind in ("1F1B",) if quick else PIPELINES:
            yield from compared("step", pipeline(kind, regime), PAIRS["step"], quick)
        yield from compared("step", replicas(regime), PAIRS["replicas"], quick)
    for regime in (SMALL,) if quick else (LARGE, SMALL):
        yield from compiled_rows(regime, quick)
    yield from compiled_time.rows(quick)


def compiled_rows(regime: Regime, quick: bool) -> Iterator[Row]:
    """Compare plans with kernels of Inductor with torch's compiled sides; `quick`: with 1F1B."""
    kinds = ("1F1B",) if quick else COMPILED
    setups = [partial(pipeline, kind, regime) for kind in kinds]
    if not quick:
        setups += [partial(replicas, regime), partial(sharded, "FSDP2", regime, "step")]
        setups.append(partial(plain, regime))
    for make in setups:
        setup = make(compiled=True)
        measured = run(setup, QUICK_PAIRS if quick else PAIRS["compiled"])
        ours, theirs = (
            [sum(t.cpu_s for t in pair) for pair in zip(*side, strict=True)]
            for side in ([m.ours for m in measured], [m.theirs for m in measured])
        )
        note = f"least of each side; CPU ms/step ours {1e3 * min(ours):.2f}, torch {1e3 * min(theirs):.2f}"
        title = f"{name_of(setup)}, {regime.name}, compiled: CPU time, torch/ours"
        yield Row("step", title, min(theirs) / min(ours), "ratio", goal=GOAL, note=note)


def sharded_rows(quick: bool) -> Iterator[Row]:
    """Compare step times in one regime and peaks in another; `quick`: replicas alone."""
    for kind in ("FSDP2",) if quick else SHARDED:
        for resident in (0, "step"):
            setup = sharded(kind, SMALL if quick else LARGE, resident)
            yield from compared("sharded", setup, PAIRS["sharded"], quick, f", {resident=}")
        if not quick:
            yield from (peak(kind, DEEP, resident) for resident in (0, "step"))
            if SHARDED[kind] > 1:
                yield from (peak(kind, SHALLOW, 0, buckets) for buckets in (1, 2))


def tensor_rows(quick: bool) -> Iterator[Row]:
    """Compare every model and kind of sharing in both regimes; `quick`: one."""
    for regime in tensor_side.REGIMES[1:] if quick else tensor_side.REGIMES:
        for kind in [*TENSOR][-1:] if quick else TENSOR:
            yield from compared("tensor", tensor(kind, regime), PAIRS["tensor"], quick)


def expert_rows(quick: bool) -> Iterator[Row]:
    """Compare the mixture in both regimes; `quick`: where messages dominate."""
    for regime in expert_side.REGIMES[1:] if quick else expert_side.REGIMES:
        yield from compared("experts", experts(regime), PAIRS["experts"], quick)


def compared(section: str, setup: Setup, pairs: int, quick: bool, more: str = "") -> list[Row]:
    """Return the ratio of step times of the slower rank, and that of the CPU time of all ranks."""
    measured = run(setup, QUICK_PAIRS if quick else pairs)
    sides = [
        list(zip(*timings, strict=True))
        for timings in ([m.ours for m in measured], [m.theirs for m in measured])
    ]
    wall = [[max(t.wall_s for t in pair) for pair in side] for side in sides]
    cpu = [[sum(t.cpu_s for t in pair) for pair in side] for side in sides]
    title = f"{name_of(setup)}, {setup.regime.name}{more}"
    rows = []
    for name, (ours, theirs), goal in ((title, wall, GOAL), (f"{title}: CPU time", cpu, None)):
        times = f"ours {1e3 * median(ours):.2f} ms/step, torch {1e3 * median(theirs):.2f}"
        note = f"runs of {setup.regime.steps} steps, {times}"
        rows.append(pairs_row(section, f"{name}: torch/ours", theirs, ours, goal, note))
    return rows


def name_of(setup: Setup) -> str:
    """Return a comparison's kind and mesh."""
    sizes = " x ".join(f"{axis}={size}" for axis, size in setup.plan.mesh.sizes if size > 1)
    return f"{setup.kind} {sizes}"


def peak(kind: str, regime: Regime, resident: float | str, buckets: int = 1) -> Row:
    """Return the peak of the fullest rank over torch's; memory needs no repetition."""
    setup = sharded(kind, regime, resident, buckets)
    measured = run(setup, 0)
    ours, torchs = max(m.peak_ours for m in measured), max(m.peak_theirs for m in measured)
    shards = max(
        sum(
            2 * sum(flat_bytes(bucket, setup.plan.mesh).values())
            for bucket in setup.plan.buckets
            if role.role in bucket.roles
        )
        for role in setup.plan.roles
    )
    mib = [nbytes / 2**20 for nbytes in (ours, torchs, shards)]
    note = f"ours {mib[0]:.1f} MiB, torch {mib[1]:.1f}; parts of states {mib[2]:.1f}"
    goal = PEAK_GOAL if resident == 0 and SHARDED[kind] > 1 else None
    cut = "" if buckets == 1 else f", {buckets} buckets to a layer"
    title = f"{name_of(setup)}, {regime.name}, {resident=}{cut}: peak, ours/torch"
    return Row("sharded", title, ours / torchs, "ratio", goal=goal, note=note)


def pipeline(kind: str, regime: Regime, compiled: bool = False) -> Setup:
    """Return the comparison with one of torch's schedules."""
    recipe = PIPELINES[kind].recipe(pp=WORLD, microbatches=regime.microbatches)
    trained = job(regime, regime.rows * regime.microbatches)
    return prepared(kind, regime, trained, piper.Mesh(pp=WORLD), recipe, compiled=compiled)


def replicas(regime: Regime, compiled: bool = False) -> Setup:
    """Return the comparison with DistributedDataParallel."""
    recipe = piper.recipes.data_parallel(over=("dp",))
    trained, mesh = job(regime, WORLD * regime.rows), piper.Mesh(dp=WORLD)
    return prepared(DATA_PARALLEL, regime, trained, mesh, recipe, compiled=compiled)


def plain(regime: Regime, compiled: bool = True) -> Setup:
    """Return the comparison with torch.compile on one device."""
    recipe = (piper.split(piper.where(), microbatches=regime.microbatches),)
    trained = job(regime, regime.rows * regime.microbatches)
    return prepared(PLAIN, regime, trained, piper.Mesh(pp=1), recipe, compiled=compiled)


def sharded(
    kind: str, regime: Regime, resident: float | str, buckets: int = 1, compiled: bool = False
) -> Setup:
    """Return the comparison with FSDP2 of a plan that keeps so much, and has about so many buckets to a layer."""
    stages = SHARDED[kind]
    microbatches = regime.microbatches if stages > 1 else 1
    layer = 12 * regime.width**2 * 4 / 2**20
    recipe = piper.recipes.data_parallel(
        zero=3, bucket_mb=layer / buckets, resident_mb=resident, reduced_mb=resident
    )
    if stages > 1:
        recipe = (*piper.recipes.one_f_one_b(pp=stages, microbatches=microbatches), *recipe)
    trained, mesh = job(regime, regime.rows * microbatches * 2), piper.Mesh(pp=stages, dp=2)
    return prepared(kind, regime, trained, mesh, recipe, compiled=compiled)


def tensor(kind: str, regime: Regime) -> Setup:
    """Return the comparison with `parallelize_module`."""
    recipe = (piper.shard(piper.where(), stream=TENSOR[kind].stream, keep=True),)
    trained = tensor_job(kind, regime, regime.rows)
    return prepared(kind, regime, trained, piper.Mesh(tp=WORLD), recipe, 1e-5)


def experts(regime: MixtureRegime, tolerance: float = 1e-5) -> Setup:
    """Return the comparison of a dropless mixture."""
    recipe = (*piper.recipes.expert_parallel(), *piper.recipes.data_parallel(over=("dp", "ep")))
    trained = expert_job(regime, WORLD * regime.rows)
    return prepared(EXPERTS, regime, trained, piper.Mesh(ep=WORLD), recipe, tolerance)


def prepared(
    kind: str,
    regime: Regime,
    trained: piper.Job,
    mesh: piper.Mesh,
    recipe: Sequence[Any],
    tolerance: float = 1e-4,
    compiled: bool = False,
) -> Setup:
    """Return a comparison with its plan and code, compiled as a user would."""
    options = piper.Options(kernels="inductor" if compiled else "eager")
    made = piper.compile(trained, piper.Strategy(mesh, recipe), options=options)
    return Setup(kind, regime, trained, made.plan, shipped_code(made), tolerance, compiled)


def run(setup: Setup, pairs: int) -> list[Measured]:
    """Start the processes and collect what they measure; RuntimeError with the traceback of one that fails."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="piper-bench-") as folder:
        pipes: list[Connection[Any, Any]] = []
        processes = []
        try:
            for rank in range(setup.plan.mesh.world):
                ours, its = context.Pipe(duplex=False)
                process = context.Process(
                    target=work,
                    args=(setup, rank, str(Path(folder, "store")), pairs, its),
                    daemon=True,
                )
                process.start()
                its.close()
                pipes.append(ours)
                processes.append(process)
            return collected(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def collected(pipes: Sequence[Connection[Any, Any]]) -> list[Measured]:
    """Return what the processes send, by rank.

    RuntimeError for one that fails or ends, and when none gets further for too long.
    """
    answers: dict[int, Measured] = {}
    while missing := [rank for rank in range(len(pipes)) if rank not in answers]:
        ready = wait([pipes[rank] for rank in missing], SILENCE_S)
        if not ready:
            raise RuntimeError(
                f"no rank got further within {SILENCE_S:.0f} s; where they stand is above"
            )
        for rank in missing:
            if pipes[rank] in ready and (answer := _received(rank, pipes[rank])) is not None:
                answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _received(rank: int, pipe: Connection[Any, Any]) -> Measured | None:
    """Return what a process sends next; None for a sign of life."""
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError(
            f"the process of rank {rank} ended without an answer; its output is above"
        ) from None
    if answer == ALIVE:
        return None
    if not isinstance(answer, Measured):
        raise RuntimeError(f"rank {rank} failed:\n{answer}")
    return answer
