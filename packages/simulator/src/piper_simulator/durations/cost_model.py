"""Define what a cost model is: it says how long each instruction of a plan takes.

That is all that predictions, explanations, searches and emulated runs ask.
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
    """Say what one instruction takes, moves and computes.

    Attributes:
        seconds: its duration where nothing runs beside it.
        source: where the duration comes from.
        bytes: of a communication, the size of the message on one rank.
        flops: FLOPs of its compute.
    """

    seconds: float
    source: Source
    bytes: int = 0
    flops: int = 0


class CostModel(Protocol):
    """Give durations to the instructions of one plan. Inherit from it to have the defaults.

    Attributes:
        issue_s: host seconds per instruction, beside the device.
        uniform: whether an instruction takes as long wherever it stands in its role's program, and whatever its
            microbatch. A search then times the outline of a plan, which is much faster; otherwise it times every plan
            whole.
    """

    issue_s: float = 0.0
    uniform: bool = False

    @abstractmethod
    def work(self, role: RolePlan, instr: Instr) -> Work:
        """Return what an instruction takes; for a communication, the message without waiting for its peers."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a user should know of the durations asked for so far. Each note is shown as a warning."""
        return ()


CostModelFactory = Callable[[Plan, Cluster | None, Costs | None], CostModel]
"""A factory makes the cost model of a plan on a cluster with measured costs, as `model=` takes it: a class, as a rule.
The plan may have more roles than the one that was asked about: ranks that differ are apart
(`piper_simulator.times.splitting`)."""


def model_for(plan: Plan, cluster: Cluster | None, costs: Costs | None, factory: CostModelFactory) -> CostModel:
    """Make the cost model of a plan. ClusterError: the plan has more ranks than the cluster has devices."""
    if cluster is not None and plan.mesh.world > cluster.devices:
        world = plan.mesh.world
        raise ClusterError(
            f"the plan runs on {world} ranks; {cluster.name} has {cluster.devices} devices; name a cluster of at least "
            f"{world}, or use a smaller mesh"
        )
    return factory(plan, cluster, costs)


def given_only(plan: Plan) -> bool:
    """Return whether all compute of a plan has given durations (a synthetic program).

    Then everything else takes no time."""
    costs = [sig.cost for chunk in plan.chunks for sig in chunk.steps.values()]
    return bool(costs) and all(c.seconds is not None for c in costs)
