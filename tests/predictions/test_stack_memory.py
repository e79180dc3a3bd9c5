"""The buffers of a software stack count wherever a plan is judged to fit: in simulations, verdicts and searches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import piper
from piper import ANY, models, where
from piper_autotune import NothingFoundError
from piper_compiler import Strategy
from piper_ir.program.ops import Compute
from piper_ir.tools import size_text
from piper_report.facts.summary import memory_table
from piper_simulator import load_cluster
from piper_simulator.memory.kept_tensors import kept_by

CLUSTER = load_cluster("h100x2@hopper-megatron")
SIZES = models.LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=512, length=64)


@pytest.fixture(scope="module")
def job() -> piper.Job:
    return models.job(SIZES, global_batch=8)


def strategy(trial: object) -> Strategy:
    return Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())


def test_a_plan_that_fits_but_for_the_buffers_of_its_software_does_not_fit(job: piper.Job) -> None:
    plan = piper.compile(job, strategy(None)).plan
    assert CLUSTER.device.stack is not None and CLUSTER.device.stack.holds
    none = {"holds": (), "workspaces": 0, "loss_keeps": 0}
    bare = CLUSTER.each_device(lambda d: replace(d, stack=replace(d.stack, **none)))
    needs, tensors = (max(piper.simulate(plan, c).device_bytes) for c in (CLUSTER, bare))
    assert tensors < needs
    short = CLUSTER.each_device(lambda d: replace(d, memory_bytes=needs - 1))
    simulation = piper.simulate(plan, CLUSTER)
    rows = {name: size for name, size, _ in memory_table(simulation).rows}
    assert rows["tensors of the plan"] == size_text(max(simulation.peak_bytes))
    assert rows["allocated"] == size_text(max(simulation.held_bytes)) != rows["tensors of the plan"]
    verdict = piper.simulate(plan, short).oom
    assert verdict is not None and (verdict.needs, verdict.over) == (needs, 1)
    assert piper.simulate(plan, bare.each_device(lambda d: replace(d, memory_bytes=tensors))).fits
    study = piper.tune(job, strategy, cluster=CLUSTER, trials=1, workers=0)
    assert study.best_row is not None and study.best_row.device_bytes == needs
    with pytest.raises(NothingFoundError, match="1 B more than the limit"):
        piper.tune(job, strategy, cluster=short, trials=1, workers=0)


def test_a_stack_holds_float32_logits_in_place_of_a_slice_and_workspaces() -> None:
    """The peak is at the loss of 512 tokens and 4,096 classes, fewer logits than a slice of the plan's kernel has."""
    sizes = replace(SIZES, layers=1, vocab=4096)
    plan = piper.compile(models.job(sizes, global_batch=8), Strategy(piper.Mesh(), ())).plan
    logits = 8 * 64 * 4096

    def held(**facts: Any) -> int:
        """Return the most bytes that are held under a stack with these facts."""
        none = {"holds": (), "workspaces": 0, "loss_keeps": 0, "remakes": ()}
        cluster = CLUSTER.each_device(
            lambda d: replace(d, stack=replace(d.stack, **(none | facts)))
        )
        return max(piper.simulate(plan, cluster).held_bytes)

    assert held(workspaces=100) == held() + 100
    assert held(grouped_workspaces=100) == held(grouped_workspaces=0), (
        "no experts, no grouped products"
    )
    assert held(loss_keeps=6) == held() + (6 - 4) * logits


@pytest.mark.parametrize("zero", [2, 3])
def test_a_stack_casts_shards_of_parameters_where_it_gathers_them(
    zero: int, job: piper.Job
) -> None:
    """FSDP has no shard of the compute dtype, of 2 bytes, beside that of its master."""
    shared = Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(zero=zero))
    plan = piper.compile(job, shared).plan

    def held(shards: str) -> int:
        facts = {"holds": (), "shards": shards}
        cluster = CLUSTER.each_device(lambda d: replace(d, stack=replace(d.stack, **facts)))
        return max(piper.simulate(plan, cluster).held_bytes)

    own = sum(bucket.numel for bucket in plan.buckets) // 2
    assert held("kept") - held("cast") == (2 * own if zero == 3 else 0)


MIXTURE = models.DecoderConfig(
    layers=2, width=64, heads=4, hidden=96, vocab=128, length=64, experts=models.Experts(number=4, top_k=2, hidden=48)
)  # fmt: skip


@pytest.mark.parametrize("ep", [1, 2])
def test_a_stack_keeps_the_tensors_of_experts_in_its_own_sizes(ep: int) -> None:
    """Megatron keeps no results of the 64 x 2 choices of a row, and no spare places of the experts' tensors.

    If no kernel multiplies shares while it makes the activation, as for GELU, the activation is kept in their place.
    """
    shared = piper.recipes.expert_parallel(bound=1.5) if ep > 1 else ()
    rows = piper.recipes.data_parallel(over=("dp", "ep"))
    plan = piper.compile(
        models.job(MIXTURE, global_batch=4, precision="float32"),
        Strategy(piper.Mesh(ep=ep), (*shared, *rows)),
    ).plan
    assert CLUSTER.device.stack is not None
    choices, (role,) = 4 // ep * 64 * 2, plan.roles

    def kept(**facts: Any) -> tuple[int, int]:
        """Return the bytes of all values, and the most that are held, of a device under a stack."""
        none = {"holds": (), "workspaces": 0, "loss_keeps": 0, "remakes": ()}
        stack = replace(CLUSTER.device.stack, **(none | facts))
        cluster = load_cluster(f"h100x{ep}").each_device(lambda d: replace(d, stack=stack))
        values = kept_by(stack, plan, role).table.values.nbytes
        return sum(values), max(piper.simulate(plan, cluster).held_bytes)

    usual, peak = kept(shares="results", places="bound")
    less, lower = kept(shares="activation", places="bound")
    assert kept_by(None, plan, role) is role
    least, lowest = kept(shares="activation", places="rows")
    results = 2 * choices * (64 - 48) * 4
    assert usual - less == results and 0 < peak - lower <= results
    saved, between = 64 + 4 * 48, 64 + 2 * 48  # of a row: by F, and from I to W
    assert usual - least - results == (ep - 1) * 2 * (choices // 2) * (saved + between) * 4
    assert (lower > lowest) == (ep > 1)
    _, beside = kept(shares="activation", places="rows", grouped_workspaces=0)
    assert kept(shares="activation", places="rows", grouped_workspaces=100)[1] == beside + 100
    remade, bare = kept(shares="activation", places="rows", remakes=("silu",))
    assert least - remade == 2 * choices * 2 * 48 * 4 and bare < lowest


def test_results_are_told_from_the_other_tensors_that_experts_keep() -> None:
    """Experts as wide as tokens, a shared one as wide, too, and activations and rows that the plan makes again: one
    tensor of the size of the results is left out in each layer, of those of F, and no activation."""
    sizes = replace(MIXTURE, experts=replace(MIXTURE.experts, hidden=64, shared_hidden=64))
    again = piper.recompute(where(layer=ANY), modules=("*.activation", "*.sort"))
    plan = piper.compile(
        models.job(sizes, global_batch=4, precision="float32"), Strategy(piper.Mesh(), (again,))
    ).plan
    stack = replace(CLUSTER.device.stack, shares="activation", places="rows")
    (role,) = plan.roles
    kept = kept_by(stack, plan, role).table.values
    resized = zip(role.table.values.nbytes, kept.nbytes, strict=True)
    left = [kept.names[v * kept.count] for v, (a, b) in enumerate(resized) if a != b]
    assert sum(role.table.values.nbytes) - sum(kept.nbytes) == 2 * 4 * 64 * 2 * 64 * 4
    parts = [p for instr in role.program for p in instr.parts if isinstance(p.op, Compute)]
    made = {v: p.op.step for p in parts for v in p.writes}
    assert [made[name] for name in left] == ["F", "F"]


def test_each_operator_of_a_clamped_gate_is_made_again() -> None:
    """GPT-OSS clamps the gate and the other factor, and takes a sigmoid: a stack can keep none of the three results."""
    experts = replace(MIXTURE.experts, bias=True, clamp=7.0)
    sizes = replace(MIXTURE, experts=experts, activation="quick_gelu")
    plan = piper.compile(
        models.job(sizes, global_batch=4, precision="float32"), Strategy(piper.Mesh())
    ).plan
    stack = replace(CLUSTER.device.stack, shares="results", places="bound")
    (role,) = plan.roles
    found = [
        sum(kept_by(replace(stack, remakes=remakes), plan, role).table.values.nbytes)
        for remakes in ((), ("sigmoid",), ("sigmoid", "clamp"))
    ]
    of_layers = 2 * 4 * 64 * 2 * 48 * 4
    assert [found[0] - n for n in found[1:]] == [of_layers, 3 * of_layers]
