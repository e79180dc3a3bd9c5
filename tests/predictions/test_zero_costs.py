"""Ops on buckets that ranks share have bytes and durations: updates of a part, buffers of gradients, folds, casts."""

from __future__ import annotations

import pytest

import piper
from piper import models
from piper.models import GPTConfig
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import Fold, Fresh, Op, SquaredNorm, Update
from piper_simulator import load_cluster, simulate
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.durations.updates import Updated, updated
from tests.helpers.cases import each_case

SIZES = GPTConfig(layers=2, width=16, heads=2, vocab=32, length=8)
WIDE = piper.Precision(params="float64", compute="float32", reduce="float32")
RANKS = 4


def plan_of(zero: int, precision: piper.Precision | None = None) -> Plan:
    job = models.job(SIZES, global_batch=8, precision=precision, clip_norm=1.0)
    strategy = (piper.split(piper.where(), microbatches=2), *piper.recipes.data_parallel(zero=zero))
    return piper.compile(job, piper.Strategy(piper.Mesh(dp=RANKS), strategy)).plan


def parts(plan: Plan, kind: type[Op]) -> list[Part]:
    return [p for i in plan.roles[0].program for p in i.parts if isinstance(p.op, kind)]


def update(plan: Plan) -> Updated:
    (part,) = parts(plan, Update)
    assert isinstance(part.op, Update)
    return updated(plan, plan.roles[0], part.op)


def total(plan: Plan) -> int:
    return sum(b.numel for b in plan.buckets)


@each_case("zero", [0, 1, 2, 3])
def test_a_rank_updates_its_part_and_zeroes_what_it_keeps(zero: int) -> None:
    """float32 with bfloat16 copies: masters 4, gradients 4, two states 8 and copies 2 bytes per parameter of its
    own."""
    plan = plan_of(zero)
    n, own = total(plan), total(plan) // (RANKS if zero else 1)
    found = update(plan)
    assert (found.param, found.grad) == (4 * own, 4 * own)
    assert found.state - 8 * own == 4 * len(plan.buckets), "and the number of the step"
    assert sum(found.copies) == (4 + 2) * own, "masters are read, parameters are written"
    assert found.others == (4 * (n - own) if zero == 1 else 0), (
        "gradients that others update are only set to zero"
    )


@pytest.mark.long
def test_gradients_of_another_dtype_are_cast_where_they_are_updated() -> None:
    """float64 masters and float32 gradients: of its own part 4 bytes are read and 8 written, masters 8 read, 4
    written."""
    plan = plan_of(1, WIDE)
    own = total(plan) // RANKS
    assert sum(update(plan).copies) == (4 + 8 + 8 + 4) * own
    assert update(plan_of(0, WIDE)).copies != update(plan).copies, (
        "negative control: whole gradients take longer"
    )


@each_case("zero", [0, 1, 2, 3])
def test_the_bytes_by_which_measured_updates_are_known(zero: int) -> None:
    plan = plan_of(zero)
    n, own = total(plan), total(plan) // (RANKS if zero else 1)
    kept = n if zero < 2 else own
    (norm,), (step,) = parts(plan, SquaredNorm), parts(plan, Update)
    traffic, role = PlanBytes(plan), plan.roles[0]
    scalar = sum(traffic.nbytes(v) for v in step.reads)
    assert traffic.memory_bytes(role, norm) == 4 * own + sum(traffic.nbytes(v) for v in norm.writes)
    states = (
        2 * 4 * own + 2 * own + 2 * (8 * own + 4 * len(plan.buckets))
    )  # masters, copies, AdamW's
    assert traffic.memory_bytes(role, step) == states + 4 * own + 4 * kept + scalar


def test_every_op_on_buckets_names_the_source_of_its_duration() -> None:
    plan, cluster = plan_of(2), load_cluster("h100x8")
    assert set(simulate(plan, cluster).summary()["sources"]) <= {"formula", "table", "interpolated"}
    model = DeviceModel(plan, cluster, None)
    for kind in (Fresh, Fold, SquaredNorm, Update):
        for part in parts(plan, kind):
            work = model.work(plan.roles[0], Instr(COMPUTE, (part,)))
            least = (
                PlanBytes(plan).memory_bytes(plan.roles[0], part) / cluster.device.memory_bandwidth
            )
            assert work.source == "formula" and work.seconds >= least > 0
