"""Define a cost model: it gives the duration of each instruction of a plan.

Predictions, explanations, searches and emulated runs ask nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from piper_ir.costs import Costs
from piper_ir.errors import ClusterError
from piper_ir.plan import Instr, Plan, RolePlan
from piper_ir.trace import Source
from piper_simulator.cluster.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Work:
    """Hold the duration, bytes and FLOPs of one instruction.

    Attributes:
        seconds: its duration where nothing runs beside it.
        bytes: of a communication, the size of the message on one rank.
    """

    seconds: float
    source: Source
    bytes: int = 0
    flops: int = 0


class CostModel(Protocol):
    """Give durations to the instructions of one plan; inherit from it to have the defaults.

    Attributes:
        issue_s: host seconds per instruction, beside the device.
        uniform: whether an instruction's duration depends neither on its position in its role's program nor on its
            microbatch. A search then asks once for all equal microbatches, which is faster.
    """

    issue_s: float = 0.0
    uniform: bool = False

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


def model_for(plan: Plan, cluster: Cluster | None, costs: Costs | None, factory: CostModelFactory) -> CostModel:
    """Return the cost model of a plan; raise ClusterError when it has more ranks than the cluster has devices."""
    if cluster is not None and plan.mesh.world > cluster.devices:
        world = plan.mesh.world
        raise ClusterError(
            f"the plan runs on {world} ranks; {cluster.name} has {cluster.devices} devices; name a cluster of at least "
            f"{world}, or use a smaller mesh"
        )
    return factory(plan, cluster, costs)


def given_only(plan: Plan) -> bool:
    """Return whether all compute of a plan has given durations (a synthetic program); other ops then take no time."""
    costs = [sig.cost for chunk in plan.chunks for sig in chunk.steps.values()]
    return bool(costs) and all(c.seconds is not None for c in costs)
