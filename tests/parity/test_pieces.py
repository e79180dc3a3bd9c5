"""Protect products in pieces beside their messages: which are, that they train one model, and how long they take."""

from __future__ import annotations

import pytest

import piper
from piper import Mesh, Strategy, recipes
from piper.api.compiling.compiling import Compiled
from piper.views.explained.layouts import layouts
from piper_compiler.durations import collective_seconds, inside_seconds, nominal
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.sizes import bind
from piper_ir.program.ops import Compute
from piper_ir.program.program import Signature
from piper_simulator import DeviceModel, load_cluster
from piper_simulator.contention import loads
from piper_simulator.contention.rates import Flow
from piper_simulator.durations.communication import duration, rank_group
from piper_simulator.durations.cost_model import StepMessages, Work
from piper_simulator.durations.kernels import step_seconds
from tests.helpers import shared_jobs
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies


def in_pieces(pieces: int = 2) -> Compiled:
    return piper.compile(
        shared_jobs.job("llama"),
        Strategy(Mesh(tp=2), recipes.tensor_parallel(sequence=True, pieces=pieces)),
    )


def layer(made: Compiled) -> dict[str, Signature]:
    return dict(next(c for c in made.plan.chunks if c.id == "layer1").steps)


def test_messages_are_beside_the_products_of_other_pieces() -> None:
    """The second piece of each gather, and the first of each reduce-scatter, are under way during products.

    Gathers for the weights' gradients are whole, and begin earlier.
    """
    made = in_pieces()
    steps = layer(made)
    halves = 2 * [*2 * ["all_gather"], *2 * ["reduce_scatter"]]
    for name in ("F", "I"):
        assert [c.kind for c in steps[name].collectives] == halves
        hidden = [
            o.number
            for o in steps[name].overlaps
            if any(k.kind == "matmul" for k in o.beside.kernels)
        ]
        assert hidden == [1, 2, 5, 6]
    assert [o.number for o in steps["W"].overlaps] == [0, 1]
    whole = layer(shared_jobs.compiled("llama", Mesh(tp=2), [], stream="tokens"))
    assert not any(sig.overlaps for sig in whole.values())
    for name, sig in whole.items():
        sent = [sum(bind(c.nbytes, 0) for c in s[name].collectives) for s in (whole, steps)]
        assert sent[0] == sent[1] and sig.cost.flops <= steps[name].cost.flops
    text = layouts(made)
    assert "all_gather       2x 8 KiB over tp before mm" in text and "2 beside mm" in text


@pytest.mark.parametrize("launcher", ["inline", pytest.param("processes", marks=pytest.mark.long)])
def test_one_device_trains_the_same(launcher: str) -> None:
    made = in_pieces()
    found = shared_jobs.run(made, launcher=launcher)
    shared_jobs.assert_equal("llama", made, found)
    assert not lies(made.plan, found.memory)


def test_pieces_that_do_not_divide_tokens_are_refused() -> None:
    with pytest.raises(
        DirectiveError, match=r"pieces=3: a device has 4 tokens along tp.* 2 would be"
    ):
        in_pieces(3)


def test_a_step_waits_for_what_the_kernels_beside_a_message_leave() -> None:
    """The time of each step is its kernels' and, of each message, its own without that of the kernels beside it."""
    plan, cluster = in_pieces().plan, load_cluster("h100x8")
    model, device = DeviceModel(plan, cluster, None), cluster.kinds[0].device
    (role,) = plan.roles
    parts = {p.op: p for instr in role.program for p in instr.parts if isinstance(p.op, Compute)}
    hidden = 0.0
    for op, part in parts.items():
        sig = plan.chunk(op.variant).steps[op.step]
        beside = {o.number: step_seconds(device, o.beside, op.step) for o in sig.overlaps}
        left = 0.0
        for k, one in enumerate(sig.collectives):
            alone = duration(cluster, one.kind, bind(one.nbytes, 0), rank_group(cluster, (0, 1)))
            left += max(0.0, alone.seconds - beside.get(k, 0.0))
            hidden += min(alone.seconds, beside.get(k, 0.0))
        kernels = step_seconds(device, sig.cost, op.step)
        assert model._part(role, part, 0).seconds == pytest.approx(kernels + left, rel=1e-9)
    assert hidden > 0


@each_case(
    ("message_s", "hidden_s", "expected_s"),
    [
        (2.0, 0.0, 10 + 2),  # nothing is beside it
        (2.0, 2.0, 10 + 0.2 * 2),  # compute at 0.8 of its rate during all of it
        (
            4.0,
            3.0,
            10 - 3 + 4,
        ),  # the message takes longer than the 3 seconds of kernels, at 0.8: 3.75
        (
            4.0,
            3.5,
            10 - 3.5 + 3.5 + 0.2 * 4,
        ),  # kernels that take longer at that rate: 4.375 with what follows it
    ],
)
def test_kernels_beside_messages_are_slower(
    message_s: float, hidden_s: float, expected_s: float
) -> None:
    """The message takes 0.15 of the SMs and 0.05 of the memory's bandwidth, of a step with 10 seconds of kernels."""
    message = StepMessages("tp", "all_gather", 1, 100, message_s, hidden_s)
    work = Work(10 + message.exposed_s, "formula", 100, inside=(message,))
    flow = Flow(0, message_s, {0: 1.0}, 1.0, {0: (0.15, 0.05)})
    pieces = loads._pieces(work, [flow])
    assert sum(seconds for seconds, _ in pieces) == pytest.approx(expected_s)
    assert all(flow is None or flow.seconds == seconds for seconds, flow in pieces)


def test_the_order_of_a_plan_counts_what_is_left() -> None:
    sig = layer(in_pieces())["F"]
    alone = [collective_seconds(bind(c.nbytes, 0)) for c in sig.collectives]
    beside = {o.number: nominal(o.beside) for o in sig.overlaps}
    left = [max(0.0, s - beside.get(k, 0.0)) for k, s in enumerate(alone)]
    assert inside_seconds(sig) == pytest.approx(sum(left)) and sum(left) < sum(alone)
