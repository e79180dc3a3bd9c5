"""Make the table of a plan: the actions of each role, stage by stage, with its sends and receives.

I and W of one stage and microbatch in one instruction are a B. A backward that has only one of them is a B, too: an
embedding passes no gradient on, and a stage may have no parameters. A forward and a backward whose instructions
alternate form an overlapped pair. Recomputation at the beginning of a backward is part of the backward.
"""

from __future__ import annotations

from piper_compiler.actions import Action, ActionPhase, Slot
from piper_compiler.interchange.sharded import Placed, check_scatters, parameter_cells
from piper_compiler.interchange.table import CommCell, Rows
from piper_ir.fold.memory_owners import origins
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Compute, Recv, Send

_BackwardSteps = dict[tuple[int, int], set[str]]
"""The steps of each backward, by (stage, microbatch)."""


def rows_of_plan(plan: Plan, *, lowered: bool) -> Rows:
    """Return one row per coordinate of pp; raise FormatError for a plan that has no such table."""
    stages = {chunk.id: _stage_of(plan, chunk.id) for chunk in plan.chunks}
    return tuple(_Row(plan, role, stages).cells(lowered) for role in _devices(plan))


def _stage_of(plan: Plan, chunk: str) -> int:
    stage = plan.chunk(chunk).coords.get("stage")
    if not isinstance(stage, int):
        raise FormatError(
            f"chunk {chunk} has no stage, and a table of a schedule is made of stages; use partition or a recipe"
        )
    return stage


def _devices(plan: Plan) -> list[RolePlan]:
    """Return the roles by their coordinate of pp; a plan without placement is one device."""
    if len(plan.roles) == 1:
        return list(plan.roles)
    other = {axis for role in plan.roles for axis in role.placed} - {"pp"}
    if other:
        raise FormatError(
            f"the plan places stages on {sorted(other)}, but the rows of a table are devices of the axis pp alone"
        )
    return sorted(plan.roles, key=lambda role: role.placed["pp"])


class _Row:
    """Make one device's cells from the instructions of its role."""

    def __init__(self, plan: Plan, role: RolePlan, stages: dict[str, int]) -> None:
        self.plan, self.role, self.stages = plan, role, stages
        moved = [p for i in role.program for p in i.parts if isinstance(p.op, Send | Recv)]
        self.origins = origins(plan, role, {v for p in moved for v in (*p.reads, *p.writes)})
        self.readers: dict[str, set[int]] = {}  # value -> stages that read it here
        for instr in role.program:
            for part in instr.parts:
                if isinstance(part.op, Compute):
                    for value in part.reads:
                        self.readers.setdefault(value, set()).add(stages[part.op.chunk])

    def cells(self, lowered: bool) -> tuple[Slot | CommCell, ...]:
        backward = self._backwards()
        pieces = [
            (i, a)
            for i, instr in enumerate(self.role.program)
            for a in self._actions(instr, backward)
        ]
        first: dict[Action, int] = {}
        last: dict[Action, int] = {}
        for place, (_, action) in enumerate(pieces):
            first.setdefault(action, place)
            last[action] = place
        slots: list[tuple[int, Slot]] = []  # with the index of its last instruction
        group: list[Action] = []
        end = -1
        for action in sorted(first, key=lambda a: first[a]):
            if group and first[action] > end:
                slots.append((pieces[end][0], self._slot(group)))
                group = []
            group.append(action)
            end = max(end, last[action])
        slots.append((pieces[end][0], self._slot(group)))
        if not lowered:
            return tuple(slot for _, slot in slots)
        check_scatters(self.role)
        gathers = parameter_cells(
            self.plan, self.role, slots, lambda part: self._action(part, backward)
        )
        return self._with_transfers(slots, gathers)

    def _backwards(self) -> dict[tuple[int, int], bool]:
        """Return for each (stage, microbatch) whether its backward is a B: I and W in one instruction, or one alone."""
        together: dict[tuple[int, int], bool] = {}
        steps: _BackwardSteps = {}
        for instr in self.role.program:
            here: _BackwardSteps = {}
            for part in instr.parts:
                if isinstance(part.op, Compute) and part.op.step not in ("F", "R"):
                    here.setdefault((self.stages[part.op.chunk], part.mb), set()).add(part.op.step)
            for key, step_set in here.items():
                steps.setdefault(key, set()).update(step_set)
                together[key] = together.get(key, False) or len(step_set) == 2 or "B" in step_set
        return {key: together[key] or len(step_set) == 1 for key, step_set in steps.items()}

    def _actions(self, instr: Instr, backward: dict[tuple[int, int], bool]) -> list[Action]:
        """Return the actions of an instruction, stage after stage; the two of an overlapped pair occur twice each."""
        actions: dict[Action, None] = {}
        if {part.op.step for part in instr.parts if isinstance(part.op, Compute)} == {"R"}:
            raise FormatError(
                f"{instr.name} is recomputation alone, which the format cannot say; use recompute without apart"
            )
        for part in instr.parts:
            if isinstance(part.op, Compute) and part.op.step != "R":
                actions[self._action(part, backward)] = None
        return [*actions, *actions] if len({a.phase == "F" for a in actions}) > 1 else [*actions]

    def _action(self, part: Part, backward: dict[tuple[int, int], bool]) -> Action:
        """Return the action that a step of a chunk is part of; recomputation belongs to the backward that follows."""
        assert isinstance(part.op, Compute)
        stage, step = self.stages[part.op.chunk], part.op.step
        apart: ActionPhase = "I" if step == "R" else step
        return Action(stage, "B" if step != "F" and backward[stage, part.mb] else apart, part.mb)

    def _slot(self, group: list[Action]) -> Slot:
        slot = tuple(sorted(group, key=lambda a: a.phase != "F"))
        if len(slot) > 1 and [a.phase == "F" for a in slot] != [True, False]:
            names = ", ".join(map(str, slot))
            raise FormatError(
                f"{self.role.role} computes {names} in alternating pieces; the format has only whole stages, and "
                f"pairs of one forward and one backward"
            )
        return slot

    def _with_transfers(
        self, slots: list[tuple[int, Slot]], gathers: list[Placed]
    ) -> tuple[Slot | CommCell, ...]:
        """Return the slots with gathers, transfers and reductions between them.

        A receive stands at the post of the first of its values, a send after the last one. Reductions stand after the
        stage's last action: a plan reduces bucket by bucket, which the format cannot express.
        """
        items: list[tuple[int, int, Slot | CommCell]] = [(i, 0, slot) for i, slot in slots]
        places: dict[CommCell, int] = {}
        for i, instr in enumerate(self.role.program):
            if instr.stream != COMPUTE and (comm := self._transfer(instr)) is not None:
                places[comm] = places.get(comm, i) if comm.kind.startswith("RECV") else i
        items += [(i, 1, comm) for comm, i in places.items()]
        done = {action.stage: i for i, slot in slots for action in slot}
        items += [(i, 2, CommCell(stage, "REDUCE_GRAD")) for stage, i in done.items()]
        return tuple(cell for *_, cell in sorted([*items, *gathers], key=lambda item: item[:2]))

    def _transfer(self, instr: Instr) -> CommCell | None:
        """Return the transfer between neighbouring stages that an instruction is part of, or None."""
        part = instr.parts[0]
        if not isinstance(part.op, Send | Recv):
            return None
        channel = self.plan.channel(part.op.channel)
        if channel.purpose not in ("activation", "gradient"):
            return None
        sends = isinstance(part.op, Send)
        value = (part.reads if sends else part.writes)[0]
        source, forward = self.stages[self.origins[value][0]], channel.purpose == "activation"
        target = source + 1 if forward else source - 1
        if not sends and self.readers.get(value, {target}) != {target}:
            raise FormatError(
                f"{value} of stage {source} is read by stages {sorted(self.readers[value])}; the format has only "
                f"transfers to neighbouring stages. Write the compute-only table"
            )
        if sends:
            return CommCell(source, "SEND_F" if forward else "SEND_B", part.mb)
        return CommCell(target, "RECV_F" if forward else "RECV_B", part.mb)
