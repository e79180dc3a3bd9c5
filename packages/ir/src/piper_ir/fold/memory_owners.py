"""Attribute the bytes of a role at its fullest moment: to the states, and to the chunks of the values alive there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from piper_ir.fold.memory import peak
from piper_ir.fold.memory_steps import steps
from piper_ir.plan.plan import HOST, Part, Plan, RolePlan, State
from piper_ir.program.ops import Compute, Load, Recv, Send
from piper_ir.tools import size_text


@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """Hold the values or states of one category and owner at the peak.

    Attributes:
        name: the owner: a chunk, a bucket with its first parameter, or a batch tensor.
        count: how many values or states.
        mbs: their microbatches; empty for states.
        bytes: their total size.
    """

    category: str
    name: str
    count: int
    mbs: tuple[int, ...]
    bytes: int

    @property
    def text(self) -> str:
        """Return a line such as "layers.3: activation 12.1 GiB of 4 microbatches"."""
        count = len(self.mbs)
        return f"{self.name}: {self.category} {size_text(self.bytes)}" + (
            f" of {count} microbatch{'es' if count > 1 else ''}" if count else ""
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Name a state or value at the peak.

    Attributes:
        name: its owner.
        mb: its microbatch, -1 for none.
        value: its id; for workspace the node that runs.
        chunk: its chunk, "" for states.
    """

    category: str
    name: str
    mb: int
    bytes: int
    value: str
    chunk: str = ""


def owners(plan: Plan, role: RolePlan) -> list[MemoryOwner]:
    """Return the owners of the bytes at a role's peak, largest first.

    They add up to the peak as `piper_ir.fold.memory.peak` counts it. "workspace" belongs to the chunk that runs at the
    peak; inputs that it has given back by then are left out, as there.
    """
    held_by_owner: dict[tuple[str, str], list[Held]] = {}
    for held in held_at_peak(plan, role):
        held_by_owner.setdefault((held.category, held.name), []).append(held)
    memory_owners = [
        MemoryOwner(
            category,
            name,
            len(held),
            tuple(sorted({h.mb for h in held if h.mb >= 0})),
            sum(h.bytes for h in held),
        )
        for (category, name), held in held_by_owner.items()
    ]
    return sorted(
        (o for o in memory_owners if o.bytes), key=lambda o: (-o.bytes, o.category, o.name)
    )


def held_at_peak(plan: Plan, role: RolePlan) -> Iterator[Held]:
    """Yield everything that is held at the peak."""
    for state in role.device_states:
        yield Held(state.category, _state_owner(plan, state), -1, state.nbytes, state.id)
    alive, extra, running = _at_peak(plan, role)
    whose = origins(plan, role, alive)
    for v, nbytes in alive.items():
        name, mb = whose.get(v, (v, -1))
        if (category := plan.values[v].category) != HOST:
            yield Held(category, name, mb, nbytes, v, name)
    if extra and running is not None:
        chunk = running.op.chunk if isinstance(running.op, Compute) else ""
        yield Held("workspace", running.node, -1, extra, running.node, chunk)


def origins(plan: Plan, role: RolePlan, wanted: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return for each value its owner and microbatch.

    The owner is the chunk whose step writes the value, or reads it if it is a sum or a seed; a batch tensor; for a
    value that arrives, the owner of the sent value; and for a value of the whole step itself.
    """
    origin_of: dict[str, tuple[str, int]] = {}
    arrived: dict[str, list[str]] = {}
    others: dict[str, int] = {}
    for part in (part for instr in role.program for part in instr.parts):
        match part.op:
            case Compute(chunk=chunk):
                origin_of |= {v: (chunk, part.mb) for v in part.writes if v in wanted}
                for v in part.reads:
                    if v in others:
                        origin_of.setdefault(v, (chunk, part.mb))
            case Load(tensor=tensor):
                origin_of |= {v: (tensor, part.mb) for v in part.writes if v in wanted}
            case Recv(channel=channel):
                arrived.setdefault(channel, []).extend(part.writes)
            case _:
                others |= {v: part.mb for v in part.writes if v in wanted}
    origin_of |= {v: (v, mb) for v, mb in others.items() if v not in origin_of}
    for channel, values in arrived.items():
        if any(v in wanted for v in values):
            origin_of |= _sent(plan, channel, values, wanted)
    return origin_of


def _sent(
    plan: Plan, channel: str, values: list[str], wanted: Collection[str]
) -> dict[str, tuple[str, int]]:
    """Return the owners of values that arrive by a channel: the n-th to arrive is the n-th that was sent."""
    source = plan.role(plan.channel(channel).roles[0])
    parts = (part for instr in source.program for part in instr.parts)
    sent = [
        v
        for part in parts
        if isinstance(part.op, Send) and part.op.channel == channel
        for v in part.reads
    ]
    pairs = {here: there for here, there in zip(sent, values, strict=False) if there in wanted}
    known = origins(plan, source, pairs)
    return {there: known.get(here, (here, -1)) for here, there in pairs.items()}


def _at_peak(plan: Plan, role: RolePlan) -> tuple[dict[str, int], int, Part | None]:
    """Return the bytes of each value at the fullest moment, the workspace beside them, and the part that runs."""
    most = peak(plan, role)
    states = sum(s.nbytes for s in role.device_states)
    alive = device_bytes(plan, role.allocs_first)
    for step in steps(plan, role):
        if step.index > most.instr:
            break
        for v in step.early:
            del alive[v]
        for use in step.uses:
            alive |= device_bytes(plan, use.part.writes)
            if step.index == most.instr and states + sum(alive.values()) + use.beside == most.total:
                return (
                    _without(alive, use.part.frees, max(0, -use.beside)),
                    max(0, use.beside),
                    use.part,
                )
            for v in use.part.frees:
                del alive[v]
        alive |= device_bytes(plan, step.made)
    return alive, 0, None


def device_bytes(plan: Plan, values: Iterable[str]) -> dict[str, int]:
    """Return the bytes that each of some values has on the device; a value in the memory of the host has 0."""
    found = ((v, plan.values[v]) for v in values)
    return {v: 0 if value.category == HOST else value.nbytes for v, value in found}


def _without(alive: dict[str, int], dying: tuple[str, ...], gone: int) -> dict[str, int]:
    """Return the values alive when `gone` bytes of the dying inputs have been given back already."""
    left = dict(alive)
    for v in dying:
        early = min(gone, left[v])
        left[v] -= early
        gone -= early
    return left


def _state_owner(plan: Plan, state: State) -> str:
    """Return a state's name for people: that of a bucket tells its first parameter, and how many more it has."""
    params = plan.bucket(state.name).params if state.flat else ()
    if not params:
        return state.name
    more = f" and {len(params) - 1} more" if len(params) > 1 else ""
    return f"{state.name}: {params[0]}{more}"
