"""Protect that the order of a mesh's axes decides which messages stay inside of a node, and no number of a training."""

from __future__ import annotations

import piper
from piper import Mesh, Strategy, recipes
from piper_simulator import simulate
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition

CASE = Composition("gpt", 2, 2, 2, "1f1b", rows=2)


def made(order: tuple[str, ...]) -> piper.Compiled:
    directives = (*recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel())
    return piper.compile(
        compositions.job_of(CASE), Strategy(Mesh(pp=2, dp=2, order=order), directives)
    )


def seconds(order: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds of a message between stages and of a reduction, on two nodes of two devices."""
    spans = simulate(made(order).plan, "h100x2*2").trace.spans
    sends = [s.end - s.start for s in spans if s.name.startswith("send.")]
    reductions = [s.end - s.start for s in spans if s.name.startswith("reduce.bucket")]
    return min(sends), min(reductions)


def test_the_first_axes_lie_inside_of_a_node() -> None:
    usual, stages_first = seconds(()), seconds(("pp", "dp"))
    assert stages_first[0] < usual[0] and stages_first[1] > usual[1]


def test_any_order_trains_what_one_device_trains() -> None:
    compiled = made(("pp", "dp"))
    assert compiled.plan.mesh.axes == ("pp", "dp")
    run = compositions.run(CASE, compiled)
    parity.assert_parity(run, compositions.expected(CASE))
