"""Random orders that run: any map of stages to devices, any mix of B and I/W, some pairs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from piper_compiler.actions import Action, Slot

Rows = list[list[Slot]]


@st.composite
def legal_orders(draw: st.DrawFn, most: int = 5) -> Rows:
    """The slots of 1 to 4 devices, as a random run of up to `most` stages and microbatches leaves them."""
    devices, stages, m = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, most)),
        draw(st.integers(1, most)),
    )
    devices = min(devices, stages)
    home = [*range(devices), *(draw(st.integers(0, devices - 1)) for _ in range(stages - devices))]
    home = draw(st.permutations(home))
    split = {(s, i) for s in range(stages) for i in range(m) if draw(st.booleans())}
    waiting = _needs(stages, m, split)
    rows: Rows = [[] for _ in range(devices)]
    done: set[Action] = set()
    while waiting:
        ready = [a for a, needed in waiting.items() if needed <= done]
        first = draw(st.sampled_from(ready))
        partner = [
            a
            for a in ready
            if home[a.stage] == home[first.stage] and (a.phase == "F") != (first.phase == "F")
        ]
        slot: Slot = (first,)
        if partner and draw(st.booleans()):
            slot = tuple(
                sorted((first, draw(st.sampled_from(partner))), key=lambda a: a.phase != "F")
            )
        rows[home[first.stage]].append(slot)
        for action in slot:
            done.add(action)
            del waiting[action]
    return rows


def _needs(stages: int, m: int, split: set[tuple[int, int]]) -> dict[Action, set[Action]]:
    out: dict[Action, set[Action]] = {}
    for s in range(stages):
        for i in range(m):
            out[Action(s, "F", i)] = {Action(s - 1, "F", i)} if s else set()
            back = Action(s, "I" if (s, i) in split else "B", i)
            after = Action(s + 1, "I" if (s + 1, i) in split else "B", i)
            out[back] = {Action(s, "F", i)} | ({after} if s + 1 < stages else set())
            if (s, i) in split:
                out[Action(s, "W", i)] = {back}
    return out


def with_idle(
    rows: Sequence[Sequence[Slot]], places: Sequence[tuple[int, int]]
) -> list[list[Slot | None]]:
    """The rows with idle slots put in at some places (row, cell), taken modulo what there is."""
    out: list[list[Slot | None]] = [list(row) for row in rows]
    for r, c in places:
        row = out[r % len(out)]
        row.insert(c % (len(row) + 1), None)
    return out
