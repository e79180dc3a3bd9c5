"""Who holds the bytes of a role at its fullest moment: the states, and the values that are alive there, by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper_ir.memory import peak
from piper_ir.plan import COMPUTE, Plan, RolePlan, part_peak
from piper_ir.tools import size_text


@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """`count` values or states of one category and owner (a chunk, a bucket with its first parameter, a batch tensor) that hold
    `bytes` together, in the microbatches `mbs` (empty for states)."""

    category: str
    name: str
    count: int
    mbs: tuple[int, ...]
    bytes: int

    @property
    def text(self) -> str:
        """As in "layers.3: activation 12.1 GiB of 4 microbatches"."""
        count = len(self.mbs)
        return f"{self.name}: {self.category} {size_text(self.bytes)}" + (
            f" of {count} microbatch{'es' if count > 1 else ''}" if count else ""
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A state or value at the peak: its id (of workspace the node that runs), its chunk ("" for states), microbatch (-1 for
    none) and bytes."""

    category: str
    name: str
    mb: int
    bytes: int
    value: str
    chunk: str = ""


def owners(plan: Plan, role: RolePlan) -> list[MemoryOwner]:
    """Largest first; their bytes add up to the role's peak as `piper_ir.memory.peak` counts it. "workspace" belongs to the chunk
    that runs at the peak; inputs that it has given back by then are left out, as there."""
    found: dict[tuple[str, str], list[Held]] = {}
    for held in held_at_peak(plan, role):
        found.setdefault((held.category, held.name), []).append(held)
    out = [
        MemoryOwner(category, name, len(held), tuple(sorted({h.mb for h in held if h.mb >= 0})), sum(h.bytes for h in held))
        for (category, name), held in found.items()
    ]
    return sorted((o for o in out if o.bytes), key=lambda o: (-o.bytes, o.category, o.name))


def held_at_peak(plan: Plan, role: RolePlan) -> Iterator[Held]:
    """Everything at the peak."""
    for state in role.states:
        yield Held(state.category, _state_owner(plan, state.id), -1, state.nbytes, state.id)
    alive, extra, running = _at_peak(plan, role)
    for v, nbytes in alive.items():
        chunk = v.partition("@")[0].partition(":")[0]
        yield Held(plan.values[v].category, chunk, _microbatch(v), nbytes, v, chunk)
    if extra:
        yield Held("workspace", running, -1, extra, running, running.partition("@")[0].rpartition(".")[0])


def _at_peak(plan: Plan, role: RolePlan) -> tuple[dict[str, int], int, str]:
    """The values at the fullest moment with their bytes, the workspace beside them, and the node that runs then. The rules are
    those of `piper_ir.plan`, walked up to the instruction at which `peak` finds the maximum."""
    most = peak(plan, role)
    states = sum(s.nbytes for s in role.states)
    alive = {v: plan.values[v].nbytes for v in role.allocs_first}
    for index, instr in enumerate(role.program[: most.instr + 1]):
        if instr.stream != COMPUTE:
            continue
        for v in instr.frees_before:
            del alive[v]
        for part in instr.parts:
            before = sum(alive.values()) if index == most.instr else 0
            alive |= {v: plan.values[v].nbytes for v in part.writes}
            if index == most.instr and states + before + part_peak(plan, part, alive) == most.total:
                above = most.total - states - sum(alive.values())
                return _without(alive, part.frees, max(0, -above)), max(0, above), part.node
            for v in part.frees:
                del alive[v]
        alive |= {v: plan.values[v].nbytes for v in instr.allocs_after}
    return alive, 0, ""


def _without(alive: dict[str, int], dying: tuple[str, ...], gone: int) -> dict[str, int]:
    """What is left when `gone` bytes of the inputs that die have been given back already."""
    left = dict(alive)
    for v in dying:
        early = min(gone, left[v])
        left[v] -= early
        gone -= early
    return left


def _state_owner(plan: Plan, id: str) -> str:
    """A bucket's name says little: its first parameter, and how many more it has, say where it is."""
    name = id.partition(":")[2] or id
    bucket = next((b for b in plan.buckets if b.id == name), None)
    if bucket is None or not bucket.params:
        return name
    more = f" and {len(bucket.params) - 1} more" if len(bucket.params) > 1 else ""
    return f"{name}: {bucket.params[0]}{more}"


def _microbatch(value: str) -> int:
    digits = value.partition("@")[2].partition("#")[0]
    return int(digits) if digits.isdigit() else -1
