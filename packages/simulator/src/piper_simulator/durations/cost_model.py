"""Define a cost model: it gives the duration of each instruction of a plan.

Predictions, explanations, searches and emulated runs ask nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from piper_ir.ground.trace import Source
from piper_ir.plan.plan import Instr, Plan, RolePlan
from piper_ir.program.costs import Costs
from piper_ir.program.program import Program
from piper_simulator.cluster.cluster import Cluster


@dataclass(frozen=True, slots=True)
class StepMessages:
    """Hold the messages of one kind that devices exchange inside of an instruction's steps.

    Attributes:
        axis: the mesh axis along which the devices share the work.
        op: the kind of collective.
        count: how many there are.
        bytes: the bytes of all of them, on one rank.
        seconds: the duration of all of them.
        hidden_s: the part of it in which the step computes beside them.
    """

    axis: str
    op: str
    count: int
    bytes: int
    seconds: float
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which the step waits for them."""
        return self.seconds - self.hidden_s


@dataclass(frozen=True, slots=True)
class Work:
    """Hold the duration, bytes and FLOPs of one instruction.

    Attributes:
        seconds: its duration if nothing runs beside it, with the messages inside of its steps for which these wait.
        bytes: of a communication, the size of the message on one rank; of compute, of the messages inside of its steps.
        inside: the messages inside of its steps.
        launch_s: seconds in which the host launches its kernels, beside the device.
    """

    seconds: float
    source: Source
    bytes: int = 0
    flops: int = 0
    inside: tuple[StepMessages, ...] = ()
    launch_s: float = 0.0

    @property
    def inside_s(self) -> float:
        """Return the seconds in which its steps wait for the messages inside of them."""
        return sum([m.exposed_s for m in self.inside])


class CostModel(Protocol):
    """Give durations to the instructions of one plan; inherit from it to have the defaults.

    Attributes:
        issue_s: host seconds per instruction, beside the device.
        uniform: whether an instruction's duration depends neither on its position in its role's program nor on its
            microbatch. Searches and simulations then ask once for all equal microbatches, which is faster. Piper's own
            model says True on most clusters, and so does a class that inherits from it, unless it sets False again.
        bounds_steps: whether a search may ask for single steps before there is a plan, to leave out candidates that are
            too slow. The attribute of the class, or of the function that makes models, counts. It promises three
            things: the model can be made of a plan that has chunks only, and no roles; `work` answers there, for a role
            without a name or program, at rank 0; and in a plan no instruction takes less than its steps alone do there.
            It is not inherited from Piper's own model.
    """

    issue_s: float = 0.0
    uniform: bool = False
    bounds_steps: ClassVar[bool] = False

    @abstractmethod
    def work(self, role: RolePlan, instr: Instr) -> Work:
        """Return the work of an instruction; for a communication, the message without waiting for its peers."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on the durations asked for so far; each is shown as a warning."""
        return ()


CostModelFactory = Callable[[Plan, Cluster | None, Costs | None], CostModel]
"""A function or class, for `model=`, that makes the cost model of a plan on a cluster with measured costs.

The plan may have more roles than the user's: ranks that differ are apart (`piper_simulator.times.splitting`).
"""


def work_of(model: CostModel, plan: Plan) -> list[Work]:
    """Return the work of each instruction of a plan.

    A uniform model is asked once for equal instructions of a role.
    """
    done: list[Work] = []
    for role in plan.roles:
        work = partial(model.work, role)
        done += role.table.each(work) if model.uniform else map(work, role.program)
    return done


def given_only(plan: Plan | Program) -> bool:
    """Return whether all compute has given durations (a synthetic program); other ops then take no time."""
    costs = [sig.cost for chunk in plan.chunks for sig in chunk.steps.values()]
    return bool(costs) and all(c.seconds is not None for c in costs)
