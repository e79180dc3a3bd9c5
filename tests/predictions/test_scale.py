"""Cost grows with roles and instructions, not with devices: work is counted here, seconds by `benchmarks/scale.py`."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import piper
from piper import models
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.codec import dumps
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Cost, Kernel, Program
from piper_ir.verify import verify
from piper_simulator import simulate


def program(layers: int) -> Program:
    """A chain of layers with costs that a cluster must compute, so that contention is simulated."""
    made = synthetic(stages=layers, F=1, I=1, W=1, params=1 << 20)
    cost = Cost((Kernel("matmul", (512, 512, 512), "bfloat16", 2 * 512**3, 3 * 2 * 512**2),))
    chunks = [
        replace(
            c,
            coords={"layer": k},
            steps={step: replace(sig, cost=cost) for step, sig in c.steps.items()},
        )
        for k, c in enumerate(made.chunks)
    ]
    return replace(made, chunks=tuple(chunks))


def strategy(pp: int, microbatches: int, dp: int) -> Strategy:
    directives = (
        *recipes.one_f_one_b(pp=pp, microbatches=microbatches),
        *recipes.data_parallel(over=("dp",)),
    )
    return Strategy(Mesh(pp=pp, dp=dp), directives)


def plan_of(layers: int = 8, pp: int = 4, microbatches: int = 8, dp: int = 2) -> Plan:
    found = compile_program(
        program(layers), strategy(pp, microbatches, dp), global_batch=microbatches * dp
    ).plan
    verify(found)
    return found


def calls(work: Callable[[], Any]) -> int:
    """How many functions are called."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]  # typeshed leaves it out


def test_a_plan_does_not_grow_with_replicas() -> None:
    few, many = plan_of(dp=2), plan_of(dp=256)
    assert many.mesh.world == 128 * few.mesh.world
    assert [len(r.program) for r in many.roles] == [len(r.program) for r in few.roles]
    assert (len(many.values), len(many.channels), len(many.buckets)) == (
        len(few.values),
        len(few.channels),
        len(few.buckets),
    )
    without = [
        dumps(replace(p, roles=tuple(replace(r, ranks=()) for r in p.roles))) for p in (few, many)
    ]
    # The loss gradient's scale is 1 / (microbatches x replicas), a number of more digits.
    assert len(without[1]) < 1.01 * len(without[0])


def test_compile_and_verify_do_little_per_rank() -> None:
    _, base, more = (
        calls(partial(plan_of, dp=dp)) for dp in (4, 4, 260)
    )  # the first one also fills caches
    assert more - base < 10 * 4 * 256, "calls per added rank"


def test_simulate_does_little_per_rank() -> None:
    plans = {dp: plan_of(dp=dp) for dp in (4, 36, 68)}
    done = {
        dp: calls(partial(simulate, plan, f"h100x8*{plan.mesh.world // 8 + 1}"))
        for dp, plan in plans.items()
    }
    assert done[68] - done[36] < 1.2 * (done[36] - done[4]) + 2000, "linear in the ranks"
    assert (done[68] - done[4]) / (4 * 64) < 1500, "calls per added rank"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", ["layers", "pp", "microbatches"])
def test_work_doubles_when_a_size_does(size: str) -> None:
    sizes = {"layers": (16, 32), "pp": (4, 8), "microbatches": (32, 64)}[size]
    kept = {"layers": 8, "pp": 4, "microbatches": 16}
    base, more = (calls(partial(plan_of, **{**kept, size: n})) for n in sizes)
    assert more < 2.2 * base


CELLS = [("gpt3-175b", 64, "h100x8*128"), ("llama3-405b", 1024, "h100x8*2048")]
"""With 16 stages and 128 microbatches."""


@pytest.mark.long
@pytest.mark.parametrize(("name", "dp", "cluster"), CELLS)
def test_the_large_presets(name: str, dp: int, cluster: str) -> None:
    p, m = 16, 128
    job = models.job(name, global_batch=m * dp)
    plan = piper.compile(job, strategy(p, m, dp)).plan
    verify(plan)
    assert (len(plan.roles), plan.mesh.world, plan.rows) == (p, p * dp, 1)
    sent = {"first": m, "last": m}
    for k, role in enumerate(plan.roles):
        ran = [
            part.op.step
            for instr in role.program
            for part in instr.parts
            if isinstance(part.op, Compute)
        ]
        layers = len(
            {
                part.op.chunk
                for instr in role.program
                for part in instr.parts
                if isinstance(part.op, Compute)
            }
        )
        assert ran.count("F") == layers * m, role.role
        p2p = sum(
            instr.comm and plan.channel(instr.parts[0].op.channel).kind == "p2p"
            for instr in role.program
        )
        assert p2p >= (sent["first"] if k in (0, p - 1) else 2 * sent["last"]) * 2
    held = sum(s.nbytes for role in plan.roles for s in role.states if s.category == "param")
    config = models.preset(name)
    twice = (
        config.vocab * config.width if config.tied else 0
    )  # a tied embedding is on the first and on the last stage
    assert held == pytest.approx(2 * (models.parameter_count(config) + twice), rel=1e-4)
    assert sum(bind(q.spec.numel, 1) for q in plan.params) == models.parameter_count(config)
    found = piper.simulate(plan, cluster)
    busy = [found.step_s - found.bubble_s[role.ranks[0]] for role in plan.roles]
    # 1F1B in which one stage is the slowest: all its microbatches, and one through each of the others (arXiv
    # 2104.04473).
    ideal = max(busy) + (sum(busy) - max(busy)) / m
    assert 0.99 * ideal < found.step_s < 1.1 * ideal
    assert max(found.peak_bytes) > 80 * 2**30, "without tensor parallelism or ZeRO it does not fit"
