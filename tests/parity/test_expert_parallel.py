"""Protect devices that share the experts of a mixture beside other axes, groups and levels, and what they exchange.

Under any schedule they are in test_compositions.py (ep)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import piper
from piper import ANY, Mesh, recipes, where
from piper_compiler import Strategy
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Collective
from piper_runtime import Job
from tests.helpers import compositions, parity, shared_jobs
from tests.helpers.cover import Product
from tests.helpers.memory_judge import lies

EXPERTS = piper.shard(
    where(experts=ANY), over="ep", index="experts", stream="rows", channel="ep", sms=0
)
HEADS = piper.shard(where(), over="tp")
TOKENS = piper.shard(where(), over="tp", stream="tokens")
INPUTS = piper.recompute(where(), keep="inputs")


def rows(zero: int = 0) -> tuple[Any, ...]:
    return recipes.data_parallel(over=("dp", "ep"), zero=zero)


CASES: dict[str, tuple[Mesh, list[Any]]] = {
    "four, zero 3": (Mesh(ep=4), [rows(zero=3)]),
    "heads": (Mesh(ep=2, tp=2), [HEADS, rows()]),
    "tokens over cp": (Mesh(ep=2, cp=2), [piper.shard(where(), over="cp", index="tokens"), rows()]),
    "groups of layers made again": (
        Mesh(ep=2, pp=2),
        [
            recipes.one_f_one_b(pp=2, microbatches=2),
            rows(),
            piper.recompute(where(layer=ANY), keep="inputs", group=2),
        ],
    ),
    "states shared along dp": (
        Mesh(dp=2, ep=2),
        [piper.replicate(where(), ("dp", "ep"), shard=dict(optim=("dp",)))],
    ),
    "heads and tokens, 1f1b": (
        Mesh(ep=2, tp=2, pp=2),
        [TOKENS, recipes.one_f_one_b(pp=2, microbatches=2), rows(zero=3)],
    ),
}


def compiled(mesh: Mesh, directives: list[Any]) -> Any:
    return piper.compile(shared_jobs.job("experts"), Strategy(mesh, [EXPERTS, *directives]))


def assert_right(made: Any, **more: Any) -> None:
    found = shared_jobs.run(made, **more)
    shared_jobs.assert_equal("experts", made, found)
    assert not lies(made.plan, found.memory)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_shared_experts_are_one_device(case: str) -> None:
    assert_right(compiled(*CASES[case]))


@cache
def job(optimizer: str) -> Job:
    """A job with rows for eight replicas and four microbatches."""
    made = replace(shared_jobs.job("experts"), global_batch=32)
    return (
        made if optimizer == "adamw" else replace(made, optimizer=compositions.sgd, clip_norm=None)
    )


@cache
def expected(optimizer: str, replicas: int) -> parity.Reference:
    return parity.reference(job(optimizer), replicas=replicas, microbatches=4)


SCHEDULES: dict[str, tuple[Any, ...]] = {
    "one stage": (piper.split(where(), microbatches=4),),
    "1f1b": recipes.one_f_one_b(pp=2, microbatches=4),
    "zbv": recipes.zbv(pp=2, microbatches=4),
    "dualpipe": recipes.dualpipe(pp=2, microbatches=4),
    "dualpipe_v": recipes.dualpipe_v(pp=2, microbatches=4),
}


FACTORS: dict[str, tuple[Any, ...]] = {
    "devices": ((2, 1), (2, 2), (4, 1), (4, 2)),
    "schedule": tuple(SCHEDULES),
    "zero": (0, 1, 3),
    "again": (False, True),
    "tp": (1, 2),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "schedule", "zero", "again", "tp"),
    [tuple(row.values()) for row in Product(FACTORS, ()).pairwise()],
)
def test_every_two_of_these_are_one_device(
    devices: tuple[int, int], schedule: str, zero: int, again: bool, tp: int
) -> None:
    ep, dp = devices
    mesh = Mesh(pp=1 if schedule == "one stage" else 2, dp=dp, ep=ep, tp=tp)
    directives = [
        EXPERTS,
        *[TOKENS] * (tp > 1),
        *SCHEDULES[schedule],
        rows(zero),
        *[INPUTS] * again,
    ]
    optimizer = "sgd" if again and tp == 1 else "adamw"
    made = piper.compile(job(optimizer), Strategy(mesh, directives))
    found = shared_jobs.run(made)
    parity.assert_parity(found, expected(optimizer, ep * dp))
    assert not lies(made.plan, found.memory)


def exchanges(plan: Plan) -> list[tuple[str, int]]:
    """The chunk of each value that is exchanged in the program of the first role, with the microbatch."""
    parts = (part for instr in plan.roles[0].program for part in instr.parts)
    moved = (p for p in parts if isinstance(p.op, Collective) and p.op.kind == "all_to_all")
    return [(p.reads[0].split(":")[0], p.mb) for p in moved]


def test_a_layer_exchanges_twice_in_each_direction() -> None:
    plan = compiled(Mesh(ep=2), [rows()]).plan
    found = [chunk for chunk, _ in exchanges(plan) if chunk.startswith("layer1")]
    assert found == ["layer1", "layer1_experts0", "layer1.1", "layer1_experts0"]
    (channel,) = (c for c in plan.channels if c.purpose == "expert")
    assert (channel.over, channel.streams, channel.sms) == (("ep",), ("ep",), (0,))


def test_gradients_of_experts_are_summed_over_dp_alone() -> None:
    plan = compiled(Mesh(dp=2, ep=2), [rows()]).plan
    for bucket in plan.buckets:
        experts = any(name.endswith((".gate", ".up", ".down")) for name in bucket.params)
        assert (bucket.over, bucket.parts) == (
            (("dp",), ("ep",)) if experts else (("ep", "dp"), ())
        )


def test_a_program_without_shared_experts_is_not_cut() -> None:
    made = piper.compile(shared_jobs.job("experts"), Strategy(Mesh(dp=2), recipes.data_parallel()))
    assert [c.id for c in made.plan.chunks] == [
        "root",
        "layer0",
        "layer1",
        "layer2",
        "layer3",
        "root.1",
    ]


def test_what_crosses_is_not_repeated() -> None:
    """The place of a choice is needed once for each element of its token; it crosses once."""
    plan = compiled(Mesh(ep=2), [rows()]).plan
    home = next(c for c in plan.chunks if c.id == "layer1")
    assert [
        o.spec.shape for o in home.outputs if o.kind == "value" and o.spec.dtype == "int64"
    ] == [(4, 16)]


def test_the_recipe_is_the_directive() -> None:
    (made,) = recipes.expert_parallel(channel="ep", sms=0)
    assert made == EXPERTS
