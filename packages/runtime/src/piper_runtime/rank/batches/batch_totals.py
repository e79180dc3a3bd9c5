"""Count numbers of the whole global batch before a step, such as how many targets its loss has.

Each rank that reads such numbers counts in its own microbatches. The ranks of one replica that share the work of a
chunk have the same rows, so one of them counts. A `Meeting` adds up the ranks' counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Load
from piper_runtime.rank.batches.batch_call import TensorLook

Counters = Callable[[str], Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]]
"""A function that returns the counting function with a code id."""


class Meeting(Protocol):
    """Add up, in each step, the counts of a plan's ranks."""

    def begin(self) -> None:
        """Start a step."""

    def give(self, counted: torch.Tensor) -> None:
        """Hand over this rank's counts of this step; return at once."""

    def total(self) -> torch.Tensor:
        """Return the sum over the ranks that count, once all have given."""


class Assumed:
    """Stand for the other ranks if there are none, as in a profile: each is assumed to have equal counts."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._counted = ranks, torch.empty(0)

    def begin(self) -> None:
        """Do nothing: each step has its own count."""

    def give(self, counted: torch.Tensor) -> None:
        self._counted = counted

    def total(self) -> torch.Tensor:
        return self._counted * self._ranks


def counting_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the ranks whose counts are added up; none if the loss reads no numbers of the whole batch."""
    roles = set(_counting_roles(plan).values())
    shared = plan.shared
    return tuple(
        r
        for r in range(plan.mesh.world)
        if plan.role_of(r).role in roles and not plan.mesh.index_along(shared, r)
    )


def _counting_roles(plan: Plan) -> dict[int, str]:
    """Return the role that counts in each microbatch: the first that reads numbers of the whole batch for it."""
    counted = {b.name for b in plan.batch if b.counter}
    roles: dict[int, str] = {}
    for role in plan.roles if counted else ():
        for part in (p for i in role.program for p in i.parts):
            if isinstance(part.op, Load) and part.op.tensor in counted:
                roles.setdefault(part.mb, role.role)
    return roles


class BatchTotals:
    """Hold the totals of one step on one rank.

    Attributes:
        counts: the tensors of totals by name -> the tensors of a microbatch that are counted for them.
        meeting: adds up the ranks' counts; set by the engine or transport that connects them.
        open: whether this rank has yet to count in this step.
        early: whether it counts as a step begins, since several roles count: another may need these numbers for a
            message to this one.
        counted: the numbers that it has counted.
    """

    def __init__(
        self, plan: Plan, rank: int, counters: Counters | None, looks: Mapping[str, TensorLook]
    ) -> None:
        self._plan, self._rank, self._counters, self._looks = plan, rank, counters, looks
        self._tensors = [b for b in plan.batch if b.counter]
        self._ranks = counting_ranks(plan)
        role, roles = plan.role_of(rank), _counting_roles(plan)
        self._own = {mb for mb, name in roles.items() if name == role.role}
        self.early = len({*roles.values()}) > 1
        loads = {p.op.tensor for i in role.program for p in i.parts if isinstance(p.op, Load)}
        self.counts = {b.name: b.counts for b in self._tensors if b.name in loads}
        self.meeting: Meeting = Assumed(len(self._ranks))
        self.open = False
        self.counted = torch.empty(0)

    def begin(self) -> None:
        """Start a step."""
        self.open = bool(self.counts)
        if self.open:
            self.meeting.begin()

    def give(
        self, microbatches: Callable[[], Iterable[tuple[int, Mapping[str, torch.Tensor]]]]
    ) -> None:
        """Count in the microbatches of this rank, and hand the result over if this rank counts for its replica."""
        self.open = False
        assert self._counters is not None
        (tensor,) = self._tensors
        count = self._counters(tensor.counter)
        total = torch.zeros([int(str(size)) for size in tensor.spec.shape], dtype=torch.float64)
        for mb, microbatch in microbatches():
            if mb not in self._own:
                continue
            with torch.no_grad():
                total += count([self._planned(name, microbatch[name]) for name in tensor.counts])[0]
        self.counted = total
        if self._rank in self._ranks:
            self.meeting.give(total)

    def of(self, name: str) -> torch.Tensor:
        """Return the totals over the whole global batch."""
        return self.meeting.total()

    def _planned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the batch on the host, in the dtype of the plan."""
        return tensor.to("cpu", self._looks[name].dtype)
