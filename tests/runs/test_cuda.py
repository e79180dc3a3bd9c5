"""Whole models on CUDA: numbers of one device and memory of the plan. Skipped where there is no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import piper
from benchmarks.gpu import joined_pool
from benchmarks.step_model import Regime, job
from piper import models
from piper_ir.fold.memory import on_device, peak
from piper_ir.ground.errors import ExecutionError
from piper_ir.program.collectives import COLLECTIVES
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.rank.values.device import NO_CUDA, using
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition, fitted
from tests.helpers.memory_judge import lies
from tests.predictions.test_memory_truth import asked_for, measure

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.usefixtures("on_cuda"),
]

PARITY = [
    Composition("gpt", 2, 1, 4, "1f1b", clip=0.05),
    Composition(
        "gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.003, clip=0.05, scheduler=True
    ),
    Composition("gpt_untied", 4, 1, 4, "1f1b"),
    Composition("llama", 1, 2, 2, "gpipe", optimizer="adamw"),
    Composition("skip", 4, 1, 4, "random", "random", shared_streams=True, seed=2),
    Composition("keywords", 2, 2, 4, "1f1b", rows=1),
]
SIZES = Regime("tests", width=512, heads=8, layers=2, context=256, rows=4, microbatches=4, steps=1)
"""Of a GPT whose values are large beside what kernels allocate inside."""


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    with using("cuda"):
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with joined_pool(4, "gloo") as workers:
        yield workers


@pytest.fixture(scope="module")
def nccl_pool() -> Iterator[Pool]:
    """Joined by NCCL, if need be as hosts of their own on one device."""
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    with joined_pool(4, "nccl") as workers:
        yield workers


@pytest.mark.parametrize("c", PARITY, ids=str)
def test_parity_in_float64(c: Composition, pool: Pool) -> None:
    assert_parity(c, launcher="processes", pool=pool)
    assert_parity(c, launcher="inline")


@pytest.mark.parametrize("c", PARITY, ids=str)
def test_parity_in_float64_over_nccl(c: Composition, nccl_pool: Pool) -> None:
    assert_parity(c, launcher="processes", pool=nccl_pool)


@pytest.mark.parametrize("launcher", ["inline", "processes"])
def test_tensors_that_wait_on_the_host(launcher: str, pool: Pool) -> None:
    """Pinned buffers and streams of their own: numbers of one device, and bytes on the host as planned."""
    c = Composition("deep", 2, 1, 4, "1f1b")
    strategy = compositions.strategy_of(c)
    moves = piper.offload(piper.where(), least_mb=0)
    compiled = piper.compile(
        compositions.job_of(c), piper.Strategy(strategy.mesh, (*strategy.directives, moves))
    )
    options: dict[str, Any] = {"pool": pool} if launcher == "processes" else {}
    run = compositions.run(c, compiled, launcher=launcher, **options)
    parity.assert_parity(run, compositions.expected(c))
    memory = compositions.run(c, compiled, launcher=launcher, memory=True, **options).memory
    for role in compiled.plan.roles:
        assert memory[role.ranks[0]].host == role.host_peak_bytes > 0


def assert_parity(c: Composition, **options: Any) -> None:
    c = fitted(c)
    run = compositions.run(c, compositions.compiled(c).plan, **options)
    parity.assert_parity(run, compositions.expected(c), label=repr(c))


@pytest.mark.parametrize(
    "c", [Composition("gpt", 2, 1, 8, "1f1b"), Composition("skip", 1, 2, 2)], ids=str
)
def test_memory_is_what_the_plan_says(c: Composition) -> None:
    """Storages as the dispatcher shows them, in one process, those inside the kernels of piper's ops too. In float64
    attention is written out. What an operator of torch's allocates inside is not seen, so nothing is allowed for it."""
    plan, records = measure(c)
    found = lies(on_device(plan, "cuda"), records)
    assert not found, "\n".join(found[:6])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_allocator_is_asked_for_the_peak_of_the_plan(precision: str, pool: Pool) -> None:
    """In a process of its own, where all that kernels allocate inside counts."""
    planned, asked = planned_and_asked(SIZES, precision, pool)
    assert not (wrong := asked_for(planned, asked)), wrong


def test_the_allocator_is_asked_for_a_slice_of_the_loss(pool: Pool) -> None:
    """At 32,768 classes the peak is within the gradient of the loss, which holds 64 MiB of logits in float32: planned,
    and as many bytes are asked for, on an H200 to the byte (benchmarks/measured/gpu-check-h200-last.txt)."""
    config = models.GPTConfig(layers=1, width=256, heads=4, vocab=32_768, length=1024)
    work = models.job(config, global_batch=4, precision="bfloat16")
    compiled = piper.compile(
        work, piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=2),))
    )
    tensors, role = (
        peak(compiled.plan, compiled.plan.roles[0]).total,
        on_device(compiled.plan, "cuda").roles[0],
    )
    assert 64 << 20 <= role.peak_bytes - tensors < 65 << 20
    run = piper.execute(compiled, steps=2, launcher="processes", pool=pool)
    assert not (wrong := asked_for(role.peak_bytes, run.peak_bytes[0])), wrong


def planned_and_asked(sizes: Regime, precision: str, pool: Pool) -> tuple[int, int]:
    """Bytes at the peak of a plan for CUDA, and those that the allocator of the device was asked for."""
    work = replace(job(sizes, 16), precision=piper.Precision(params=precision))
    strategy = piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=4),))
    compiled = piper.compile(work, strategy)
    run = piper.execute(compiled, steps=2, launcher="processes", pool=pool)
    return on_device(compiled.plan, "cuda").roles[0].peak_bytes, run.peak_bytes[0]


def test_a_profile_is_of_the_device(pool: Pool) -> None:
    """A simulation on the cluster of this device finds all that it needs."""
    from piper_simulator import product_cluster

    work = job(SIZES, 16)
    strategy = piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=4),))
    costs = piper.profile(work, strategy, rows=[2], repeats=3, pool=pool)
    assert costs.origin is not None and costs.origin.device == torch.cuda.get_device_name(0)
    assert {s.rows for s in costs.steps} == {2, 4} and all(
        s.duration.seconds > 0 for s in costs.steps
    )
    assert costs.host is not None and costs.host.issue_s > 0 and costs.allocator is not None
    assert costs.allocator.context_bytes > 100 << 20, "a context takes hundreds of MiB"
    cluster = product_cluster(costs.origin.device, torch.cuda.device_count())
    simulation = piper.simulate(piper.compile(work, strategy).plan, cluster, costs=costs)
    assert set(simulation.summary()["sources"]) == {"measured"} and not simulation.notes


def test_messages_over_nccl_are_measured(nccl_pool: Pool) -> None:
    """A simulation of two ranks takes them."""
    from piper_simulator import product_cluster

    work, strategy = (
        job(SIZES, 16),
        piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(bucket_mb=1)),
    )
    costs = piper.profile(work, strategy, rows=[4], repeats=2, pool=nccl_pool)
    assert (
        costs.origin is not None
        and costs.origin.backend == "nccl by sockets"
        and costs.origin.ranks == 2
    )
    assert {(c.op, c.group) for c in costs.comm} == {(op, 2) for op in ("p2p", *COLLECTIVES)}
    for op in ("p2p", "all_reduce", "all_gather", "reduce_scatter"):
        taken = {c.bytes: c.duration.seconds for c in costs.comm if c.op == op}
        assert all(s > 0 for s in taken.values()) and taken[max(taken)] > 2 * taken[min(taken)]
    cluster = product_cluster(costs.origin.device, 2)
    compiled = piper.compile(work, strategy)
    simulation = piper.simulate(compiled.plan, cluster, costs=costs)
    assert set(simulation.summary()["sources"]) == {"measured"}
    run = piper.execute(compiled, steps=4, launcher="processes", pool=nccl_pool)
    print(f"predicted {simulation.step_s * 1e3:.2f} ms, measured {min(run.step_s) * 1e3:.2f} ms")
    assert 0.5 < simulation.step_s / min(run.step_s) < 2


def test_ranks_that_share_a_device_are_not_profiled(pool: Pool) -> None:
    world = torch.cuda.device_count() + 1
    if world > pool.world:
        pytest.skip("more devices than workers")
    with pytest.raises(ExecutionError, match=f"profile: {world} ranks of a node share"):
        piper.profile(
            job(SIZES, 2 * world),
            piper.Strategy(piper.Mesh(dp=world), piper.recipes.data_parallel()),
            pool=pool,
        )
