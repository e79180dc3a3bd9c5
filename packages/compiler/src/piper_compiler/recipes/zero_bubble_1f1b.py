"""Make 1F1B with the weight gradients moved into its bubble: ZB-H1, ZB-H2, and both over several chunks per device."""

from __future__ import annotations

from piper_compiler.actions import Orders, Slot
from piper_compiler.directives import Boundaries, Directive
from piper_compiler.recipes.registry import recipe
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.recipes.stages import check_numbers, first_microbatches, round_robin, slot

_QI = "Qi et al. 2024, arXiv 2401.10241"


@recipe(
    source=_QI,
    formula="bubble (p - 1)(F + I - W); W <= F, W <= I, m >= p",
    peak="min(m, p)",
    use="a third of the bubble of 1F1B for the memory of its first device on every device",
    rule="any pp, microbatches >= 1",
)
def zb_h1(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Run 1F1B with each weight gradient r microbatches late on device r, one stage per device.

    Also known as ZB1P. Source: Qi et al. 2024, arXiv 2401.10241. Span and global bubble (p - 1)(F + I - W) if W <= F,
    W <= I and m >= p; peak on every device: min(m, p) activations. Any pp and microbatches.
    """
    check_numbers("zb_h1", pp=pp, microbatches=microbatches)
    return scheduled(late_weight_orders(pp, microbatches), microbatches=microbatches, at=at)


@recipe(
    source=_QI,
    formula="span bubble (p - 1)(F + I - 2W), global (p - 1) max(F, F + I - 2W); W <= F, W <= I, m >= 2p - 1",
    peak="min(m, 2p - 1)",
    use="no bubble in steady state where F = I = W, for twice the memory of ZB-H1",
    rule="any pp, microbatches >= 1",
)
def zb_h2(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Run ZB-H1 with twice the forwards ahead; also known as ZB2P.

    Device r starts with 2(p - 1 - r) and runs each weight gradient 2r microbatches late. Source: Qi et al. 2024, arXiv
    2401.10241. Span bubble (p - 1)(F + I - 2W), global bubble (p - 1) max(F, F + I - 2W), if W <= F, W <= I and m >=
    2p - 1; peak on every device: min(m, 2p - 1) activations. Any pp and microbatches.
    """
    check_numbers("zb_h2", pp=pp, microbatches=microbatches)
    return scheduled(
        late_weight_orders(pp, microbatches, ahead=2), microbatches=microbatches, at=at
    )


@recipe(
    source=f"{_QI}, over the chunks of arXiv 2104.04473",
    formula="bubble (p - 1)(F + I - W), which is 1/v of that of ZB-H1 on the same model; W <= F, W <= I, m a "
    "multiple of p",
    peak="min(v m, v p)",
    use="as interleaved, with a third of its bubble and less memory on the first device",
    rule="any pp, microbatches, chunks >= 1",
)
def interleaved_zb(
    *, pp: int, microbatches: int, chunks: int = 2, at: Boundaries = "even"
) -> tuple[Directive, ...]:
    """Run ZB-H1 over `chunks` chunks per device, stage s on device s mod pp.

    pp microbatches go through a chunk before the next chunk's turn. Sources: Qi et al. 2024, arXiv 2401.10241;
    Narayanan et al. 2021, arXiv 2104.04473.

    Span and global bubble (p - 1)(F + I - W) in times of one chunk, if W <= F, W <= I and m is a multiple of p;
    otherwise the last group is not full, and the bubble is larger. Peak on every device: min(v m, v p) activations of a
    chunk. Any pp, microbatches and chunks.
    """
    check_numbers("interleaved_zb", pp=pp, microbatches=microbatches, chunks=chunks)
    return scheduled(
        late_weight_orders(pp, microbatches, chunks=chunks), microbatches=microbatches, at=at
    )


def late_weight_orders(pp: int, microbatches: int, *, chunks: int = 1, ahead: int = 1) -> Orders:
    """Return the orders with late weight gradients.

    Device r starts with `ahead` (p - 1 - r) + (v - 1)p forwards. Then it repeats a forward, an input gradient, and the
    weight gradient of `ahead` r input gradients ago.
    """
    groups = -(-microbatches // pp)
    orders: list[list[Slot]] = []
    for r in range(pp):
        forward = [slot(s, "F", i) for s, i in round_robin(pp, chunks, r, groups, pp)]
        backward = list(round_robin(pp, chunks, r, groups, pp, back=True))
        warm = min(ahead * (pp - 1 - r) + (chunks - 1) * pp, len(forward))
        late = min(ahead * r, len(backward))
        weight = [slot(s, "W", i) for s, i in backward]
        slots = forward[:warm]
        for k, (stage, mb) in enumerate(backward):
            slots += forward[warm + k : warm + k + 1]
            slots.append(slot(stage, "I", mb))
            if k >= late:
                slots.append(weight[k - late])
        orders.append([*slots, *weight[len(weight) - late :]])
    return first_microbatches(orders, microbatches)
