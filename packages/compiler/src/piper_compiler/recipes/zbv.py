"""Make ZBV: two chunks per device in V placement, with split backward."""

from __future__ import annotations

from collections import Counter
from typing import cast

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
    """Return the order of device r, whose turns each take a chunk's next microbatch through some phases."""
    turns: list[tuple[int, str]] = [
        *[(0, "F")] * (2 * (pp - r) - 1),  # until the first microbatch is back from the far end
        *[(1, "F"), (0, "F")] * r,
        *[(1, "FIW")] * (pp - r),  # until its gradient is back; all forwards of pp microbatches
        *[(0, "FIW"), (1, "FIW")] * (microbatches - pp),
        *[(0, "I"), (1, "I")] * r,  # nothing to do but input gradients that other devices wait for
        *[(0, "IW")] * (pp - r),
        *[(1, "W")] * r,
        *[(0, "W")] * r,
    ]
    slots: list[Slot] = []
    count: Counter[tuple[int, str]] = Counter()
    for chunk, phases in turns:
        for phase in phases:
            mb = count[chunk, phase]
            if mb < microbatches:  # else all are through
                count[chunk, phase] += 1
                slots.append(slot(v_stage(pp, r, chunk), cast(ActionPhase, phase), mb))
    return slots
