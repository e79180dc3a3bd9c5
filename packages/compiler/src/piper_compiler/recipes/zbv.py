"""Make ZBV: two chunks per device in V placement, with split backward."""

from __future__ import annotations

from piper_compiler.actions import ActionPhase, Orders, Slot
from piper_compiler.directives import Boundaries, Directive
from piper_compiler.recipes.registry import recipe
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.recipes.stages import check_numbers, first_microbatches, slot, v_stage


@recipe(
    source="Qi et al. 2024, arXiv 2405.15362 and 2401.10241",
    formula="F = I = W: span bubble 0, global (p - 1) F; I >= F, I >= W: global (p - 1) max(I, 2(I "
    "- W)); m >= 2p - 1",
    peak="2p",
    use="no bubble in steady state where F = I = W, for the memory of 1F1B's first device; loss and first stage on "
    "one device",
    rule="any pp, microbatches >= 1; 2 chunks per device",
)
def zbv(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Leave no bubble in V placement: device r has the stages r and 2p - 1 - r.

    Source: Qi et al. 2024, arXiv 2405.15362.

    If m >= 2p - 1: with F = I = W the span bubble is 0 and the global bubble (p - 1)F; with I >= max(F, W) the global
    bubble is (p - 1)I if 2W >= I, otherwise 2(p - 1)(I - W): there are too few weight gradients to fill the end; and
    the peak on every device is 2p activations of a chunk, each half as large as an activation of a stage of 1F1B. Any
    pp and microbatches; fewer than 2p - 1 are the first ones of 2p - 1.
    """
    check_numbers("zbv", pp=pp, microbatches=microbatches)
    return scheduled(zbv_orders(pp, microbatches), microbatches=microbatches, at=at)


def zbv_orders(pp: int, microbatches: int) -> Orders:
    """Return the orders of ZBV; too few microbatches for the start are the first ones of as many as it needs."""
    whole = max(microbatches, 2 * pp - 1)
    return first_microbatches([_device(pp, r, whole) for r in range(pp)], microbatches)


def _device(pp: int, r: int, microbatches: int) -> list[Slot]:
    slots: list[Slot] = []
    count: dict[tuple[int, ActionPhase], int] = {}

    def run(chunk: int, phases: tuple[ActionPhase, ...]) -> None:
        """Append the next microbatch of the chunk in each of the phases, unless all are through."""
        for phase in phases:
            mb = count.get((chunk, phase), 0)
            if mb < microbatches:
                count[chunk, phase] = mb + 1
                slots.append(slot(v_stage(pp, r, chunk), phase, mb))

    for _ in range(
        2 * (pp - r) - 1
    ):  # until the first microbatch is back from the far end of the V
        run(0, ("F",))
    for _ in range(r):
        run(1, ("F",))
        run(0, ("F",))
    for _ in range(pp - r):  # until its gradient is back
        run(1, ("F", "I", "W"))
    while count[1, "F"] < microbatches:
        run(0, ("F", "I", "W"))
        run(1, ("F", "I", "W"))
    for _ in range(r):  # nothing to do but input gradients that other devices wait for
        run(0, ("I",))
        run(1, ("I",))
    for _ in range(pp - r):
        run(0, ("I", "W"))
    for chunk in (1, 0):
        for _ in range(r):
            run(chunk, ("W",))
    return slots
