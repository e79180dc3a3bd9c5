"""Protect that published zero-bubble runs have the orders of their software, within its memory limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest

import piper
from piper import models
from piper.published.zero_bubble_order import DeviceOrders, zero_bubble_order
from piper_simulator import load_cluster, software_buffers

P = 8
MEMORY = (261, 96)
"""The units that a microbatch holds in a stage of three layers of the 1.5B model, from F to I and from I to W."""


def most_held(orders: DeviceOrders, memory: tuple[int, int] = MEMORY) -> list[float]:
    """Return how many microbatches each device holds at its fullest."""
    whole, kept = memory
    change = {"F": whole, "I": kept - whole, "W": -kept}
    return [
        max(accumulate(change[action.phase] for (action,) in order)) / whole for order in orders
    ]


@pytest.mark.parametrize("microbatches", [24, 64])
@pytest.mark.parametrize("pending", [P, 2 * P])
def test_a_stage_holds_fewer_microbatches_than_the_one_before(
    pending: int, microbatches: int
) -> None:
    times = ((6.0,) * P, (11.0,) * P, (7.0,) * P)
    held = most_held(zero_bubble_order(times, 0.5, microbatches, MEMORY, pending))
    assert held[0] == pending
    assert all(a > b for a, b in pairwise(held))


def test_each_operation_runs_once_and_weight_gradients_come_last() -> None:
    draw = Random(5)
    for _ in range(20):
        p, m = draw.randint(2, 6), draw.randint(1, 20)
        times = tuple((draw.choice((0.5, 1.0, 2.0)),) * p for _ in "FIW")
        whole = draw.randint(1, 9)
        memory = (whole, draw.randint(0, whole))
        orders = zero_bubble_order(times, draw.choice((0.0, 0.3)), m, memory, 2 * p)  # type: ignore[arg-type]  # three
        for stage, order in enumerate(orders):
            at = {(action.phase, action.mb): n for n, (action,) in enumerate(order)}
            assert Counter(phase for phase, _ in at) == dict.fromkeys("FIW", m)
            assert {action.stage for (action,) in order} == {stage}
            assert all(at["F", k] < at["I", k] < at["W", k] for k in range(m))


def test_the_scores_of_one_layer_are_held_beside_the_tensors_of_a_plan() -> None:
    config = models.GPTConfig(layers=2, width=64, heads=4, vocab=512, length=32, attention="math")
    strategy = piper.Strategy(piper.Mesh(dp=1), piper.recipes.data_parallel())
    plan = piper.compile(models.job(config, global_batch=2), strategy).plan
    stack = load_cluster("a100x1@ampere-zero-bubble").device.stack
    assert stack is not None
    (role,) = plan.roles
    held = [software_buffers(plan, role, replace(stack, holds=h)) for h in ((), ("scores",))]
    assert held[1] - held[0] == 2 * 4 * 32 * 32 * 2  # rows, heads, tokens, bfloat16
