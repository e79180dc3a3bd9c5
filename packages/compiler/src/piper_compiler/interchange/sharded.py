"""Write gathers and scatters of sharded buckets as UNSHARD, RESHARD and REDUCE_GRAD of whole stages.

The format gathers all parameters of a stage at once, and reduces its gradients once. A plan does so bucket by bucket,
so a table can show it only if all buckets of a stage are kept from and to the same actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from piper_compiler.actions import Action, Slot
from piper_compiler.interchange.table import CommCell
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Part, Plan, RolePlan
from piper_ir.program.ops import Collective, Compute, Fresh
from piper_ir.program.program import Chunk

WAY_OUT = "or write the compute-only table (lowered=False)"
Placed = tuple[int, int, CommCell]
"""An instruction, the order among the cells there, and a cell."""
RESHARD_ORDER, UNSHARD_ORDER = 3, 4
"""The places behind the other cells of the same instruction: an action, its transfers, and REDUCE_GRAD."""


@dataclass
class _Window:
    """Hold the interval in which a bucket is gathered.

    Attributes:
        gather: the instruction of its gather.
        stays: whether it is gathered in place, and whole until the step ends.
        slots: the slots that use it.
    """

    gather: int
    stays: bool
    slots: list[int] = field(default_factory=list)


def parameter_cells(
    plan: Plan,
    role: RolePlan,
    slots: Sequence[tuple[int, Slot]],
    action_of: Callable[[Part], Action],
) -> list[Placed]:
    """Return the cells of a role's gathers; raise FormatError if the format cannot express them.

    `slots` are the role's slots, with the last instruction of each.
    """
    place = {action: k for k, (_, slot) in enumerate(slots) for action in slot}
    windows, stages = _windows(plan, role, lambda part: place[action_of(part)], action_of)
    cells: list[Placed] = []
    for stage in dict.fromkeys(stages.values()):
        own = {b: w for b, w in windows.items() if stages[b] == stage}
        last = max(k for action, k in place.items() if action.stage == stage)
        for window in (w for of_bucket in own.values() for w in of_bucket if w.stays):
            window.slots.append(last)
        cells += _stage_cells(role, stage, own, slots)
    return cells


def check_scatters(role: RolePlan) -> None:
    """Raise FormatError if the gradients of a bucket are scattered more than once in a step."""
    scatters = Counter(
        p.op.bucket for instr in role.program for p in instr.parts if isinstance(p.op, Fresh)
    )
    bucket, times = max(scatters.items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise FormatError(
            f"{role.role} scatters the gradients of {bucket} {times} times in a step; the format has one "
            f"REDUCE_GRAD per "
            f'stage, after its last backward. Use reduced_mb="step", {WAY_OUT}'
        )


def _windows(
    plan: Plan, role: RolePlan, slot_of: Callable[[Part], int], action_of: Callable[[Part], Action]
) -> tuple[dict[str, list[_Window]], dict[str, int]]:
    """Return the windows of each gathered bucket in order, and the stage of each."""
    windows_by_bucket: dict[str, list[_Window]] = {}
    of_value: dict[str, tuple[str, _Window]] = {}
    in_place: dict[str, tuple[str, _Window]] = {}
    used_by: dict[str, set[int]] = defaultdict(set)
    for index, instr in enumerate(role.program):
        for part in instr.parts:
            if isinstance(part.op, Collective) and part.op.law.state == "param":
                window = _Window(index, not part.writes)
                windows_by_bucket.setdefault(part.op.bucket, []).append(window)
                names = part.writes or plan.bucket(part.op.bucket).params
                (of_value if part.writes else in_place).update(
                    dict.fromkeys(names, (part.op.bucket, window))
                )
            elif isinstance(part.op, Compute):
                whole = {
                    in_place[name][0]: in_place[name][1]
                    for name in _read(plan, part)
                    if name in in_place
                }
                whole |= {of_value[v][0]: of_value[v][1] for v in part.held if v in of_value}
                for bucket, window in whole.items():
                    window.slots.append(slot_of(part))
                    used_by[bucket].add(action_of(part).stage)
    for bucket, stages in used_by.items():
        if len(stages) > 1:
            several = ", ".join(map(str, sorted(stages)))
            raise FormatError(
                f"{role.role} gathers {bucket} for stages {several}; the format gathers each stage by itself. "
                f"Untie them, {WAY_OUT}"
            )
    return {b: windows_by_bucket[b] for b in used_by}, {
        b: next(iter(stages)) for b, stages in used_by.items()
    }


def _read(plan: Plan, part: Part) -> list[str]:
    """Return the parameters that a step reads."""
    assert isinstance(part.op, Compute)
    chunk: Chunk = plan.chunk(part.op.variant)
    inputs = [
        chunk.inputs[int(p[2:])] for p in chunk.steps[part.op.step].reads if p.startswith("in")
    ]
    return [i.ref for i in inputs if i.kind == "param"]


def _stage_cells(
    role: RolePlan,
    stage: int,
    windows: Mapping[str, Sequence[_Window]],
    slots: Sequence[tuple[int, Slot]],
) -> list[Placed]:
    """Return UNSHARD and RESHARD of a stage; raise FormatError unless its buckets come and go together."""
    leading = max(windows, key=lambda b: len({k for w in windows[b] for k in w.slots}))
    spans = [(min(w.slots), max(w.slots)) for w in windows[leading]]
    cells: list[Placed] = []
    behind = -1
    for first, last in spans:
        inside = {
            b: [w for w in own if first <= min(w.slots) and max(w.slots) <= last]
            for b, own in windows.items()
        }
        again = next((b for b, own in inside.items() if len(own) > 1), None)
        if again is not None:
            _refuse(
                role,
                stage,
                f"{again} is gathered {len(inside[again])} times while {leading} is kept",
            )
        gathers = [w.gather for own in inside.values() for w in own]
        cells.append((max(behind, min(gathers)), UNSHARD_ORDER, CommCell(stage, "UNSHARD")))
        behind = slots[last][0]
        cells.append((behind, RESHARD_ORDER, CommCell(stage, "RESHARD")))
    for bucket, own in windows.items():
        if any(not any(a <= min(w.slots) and max(w.slots) <= b for a, b in spans) for w in own):
            _refuse(role, stage, f"{bucket} is kept from and to other actions than {leading}")
    for k, (_, slot) in enumerate(slots):
        for action in slot:
            if action.stage == stage and not any(a <= k <= b for a, b in spans):
                _refuse(
                    role,
                    stage,
                    f"{action} runs without its parameters, which torch's runtime does not allow",
                )
    return cells


def _refuse(role: RolePlan, stage: int, what: str) -> None:
    raise FormatError(
        f"{role.role} does not gather stage {stage} as a whole: {what}; the format has UNSHARD and RESHARD of "
        f"whole stages. Use "
        f'one bucket per stage (bucket_mb) or resident_mb="step", {WAY_OUT}'
    )
