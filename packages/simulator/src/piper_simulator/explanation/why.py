"""Explain why a step takes as long as it does: its critical path, its idle time, and the effects of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from piper_ir.fold.memory import peak
from piper_ir.ground.errors import PlanError
from piper_ir.ground.keywords import checked_call
from piper_ir.ground.trace import Source
from piper_ir.plan.plan import Plan, check_plan
from piper_ir.program.costs import Costs
from piper_ir.tools import no_garbage_collection
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.named import load_cluster
from piper_simulator.durations.checked import under_load
from piper_simulator.durations.cost_model import CostModelFactory
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.durations.expert_loads import GivenLoad, load_of
from piper_simulator.explanation.causes import Cause, Causes
from piper_simulator.explanation.critical import Chains, PathPiece
from piper_simulator.explanation.gaps import Gap, Share, idle_gaps, time_shares
from piper_simulator.explanation.interval import StepInterval, interval
from piper_simulator.explanation.whatif import Case, Sensitivity, WhatIf, sensitivities, what_if
from piper_simulator.memory.device_memory import device_type


@dataclass(frozen=True, slots=True)
class CauseCost:
    """Hold the cost of the instructions of one cause in one step.

    Attributes:
        source: where their durations come from.
        count: how many they are.
        seconds: of all of them, on one rank of each role.
        on_path: seconds of the ones on the critical path.
    """

    owner: Cause
    source: Source
    count: int
    seconds: float
    on_path: float


@dataclass(frozen=True)
class Why:
    """Explain one step alone (`Simulation.step_s`), in seconds.

    Attributes:
        path: the critical path, in order of time, without a gap.
        gaps: idle time of each role.
        shares: the time of each role by activity.
        what_if: the step under other conditions, see `piper_simulator.explanation.whatif`.
        sensitivities: how the step follows the cluster's constants.
        interval: how far the step may be off, see `piper_simulator.explanation.interval`.
        peak_bytes: allocated bytes by category, at the peak of the rank with the most.
        case: the plan as it was timed.
    """

    step_s: float
    path: tuple[PathPiece, ...]
    gaps: Sequence[Sequence[Gap]]
    shares: Sequence[Share]
    what_if: Sequence[WhatIf]
    sensitivities: Sequence[Sensitivity]
    interval: StepInterval | None
    peak_bytes: Mapping[str, int]
    case: Case = field(repr=False)

    @property
    def plan(self) -> Plan:
        return self.case.plan

    @cached_property
    def owners(self) -> Causes:
        return Causes(self.case.plan, self.case.prepared)

    @cached_property
    def path_by_owner(self) -> Mapping[Cause, float]:
        """Return the seconds on the critical path by cause, most first. They add up to the step."""
        return self.owners.totals(self.path)

    @cached_property
    def slowed_s(self) -> float:
        """Return how many seconds contention adds to the instructions of the critical path."""
        case, alone = self.case, 0.0
        for piece in (p for p in self.path if p.holder in ("compute", "communication")):
            g = case.prepared.group_of[piece.node]
            alone += (
                case.work[piece.node if g < 0 else case.prepared.groups[g][0]].seconds
                - piece.seconds
            )
        return max(0.0, -alone) if case.interferes else 0.0

    @cached_property
    def idle_by_owner(self) -> Sequence[Mapping[Cause, float]]:
        return [self.owners.totals(p for gap in own for p in gap.pieces) for own in self.gaps]

    @cached_property
    def device_by_owner(self) -> Mapping[tuple[str, str], float]:
        """Return the activities of the mean rank: (kind, name) -> seconds, most first; they add up to the step.

        Kinds are "compute" by phase, "bubble" by the phase of another role that it waits for, "communication" by
        purpose, and "host".
        """
        seconds_by_owner: dict[tuple[str, str], float] = {}
        for r, (role, idle) in enumerate(zip(self.plan.roles, self.idle_by_owner, strict=True)):
            weight = len(role.ranks) / self.plan.mesh.world
            idled = [
                ("bubble" if o.kind == "compute" else o.kind, o.what, s) for o, s in idle.items()
            ]
            computed = [("compute", o.what, s) for o, s in self._computed(r).items()]
            for kind, what, seconds in (*idled, *computed):
                seconds_by_owner[kind, what] = (
                    seconds_by_owner.get((kind, what), 0.0) + weight * seconds
                )
        return dict(sorted(seconds_by_owner.items(), key=lambda x: -x[1]))

    def _computed(self, r: int) -> Mapping[Cause, float]:
        """Return the seconds that a role computes, by cause."""
        prepared, times = self.case.prepared, self.case.times
        own = range(prepared.offsets[r], prepared.offsets[r + 1])
        ran = (n for n in own if prepared.group_of[n] < 0 and times.end[n] > times.start[n])
        return self.owners.totals(
            PathPiece(times.start[n], times.end[n], "compute", n) for n in ran
        )

    @cached_property
    def costs(self) -> Sequence[CauseCost]:
        on_path: dict[int, float] = {}
        for piece in self.path:
            if piece.holder != "host":
                on_path[piece.node] = on_path.get(piece.node, 0.0) + piece.seconds
        sums_by_key: dict[tuple[Cause, Source], tuple[int, float, float]] = {}
        prepared = self.case.prepared
        for node, work in enumerate(self.case.work):
            g = prepared.group_of[node]
            if (
                g >= 0 and prepared.groups[g][0] != node
            ):  # one message, whatever the number of its ends
                continue
            key = self.owners.of_node(node), work.source
            count, seconds, path = sums_by_key.get(key, (0, 0.0, 0.0))
            ends = prepared.groups[g] if g >= 0 else (node,)
            sums_by_key[key] = (
                count + 1,
                seconds + work.seconds,
                path + sum(on_path.get(m, 0.0) for m in ends),
            )
        costs = [CauseCost(owner, source, *sums) for (owner, source), sums in sums_by_key.items()]
        return sorted(costs, key=lambda c: (-c.seconds, c.owner.text))

    @property
    def formulas(self) -> Sequence[CauseCost]:
        """Return the costs that a formula gave."""
        return [c for c in self.costs if c.source == "formula" and c.seconds]

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and text, for programs; nodes are named by role, index in its program, and name."""
        return {
            "step_s": self.step_s,
            "slowed_s": self.slowed_s,
            "critical_path": [self._piece(p) for p in self.path],
            "critical_path_by_owner": [self._owned(o, s) for o, s in self.path_by_owner.items()],
            "roles": [self._role(r) for r in range(len(self.gaps))],
            "what_if": [asdict(w) for w in self.what_if],
            "sensitivities": [asdict(s) for s in self.sensitivities],
            "formulas": [asdict(c) | {"owner": c.owner.text} for c in self.formulas],
            "interval": asdict(self.interval) if self.interval else None,
            "peak_bytes": dict(self.peak_bytes),
        }

    def _role(self, r: int) -> dict[str, Any]:
        role = self.plan.roles[r]
        return {
            "role": role.role,
            "ranks": list(role.ranks),
            **asdict(self.shares[r]),
            "waited_for": [self._owned(o, s) for o, s in self.idle_by_owner[r].items()],
            "gaps": [
                {
                    "start": gap.start,
                    "end": gap.end,
                    "before": self.owners.at(gap.node)[1].name if gap.node >= 0 else None,
                    "waited_for": [self._piece(p) for p in gap.pieces],
                }
                for gap in self.gaps[r]
            ],
        }

    def _piece(self, piece: PathPiece) -> dict[str, Any]:
        role, instr = self.owners.at(piece.node)
        entry = {
            "start": piece.start,
            "end": piece.end,
            "holder": piece.holder,
            "owner": self.owners.of_piece(piece).text,
        }
        return entry | {"role": role.role, "stream": instr.stream, "instruction": instr.name}

    def _owned(self, owner: Cause, seconds: float) -> dict[str, Any]:
        return {"owner": owner.text, **asdict(owner), "seconds": seconds}


@checked_call(PlanError)
def why(
    plan: Plan,
    cluster: str | Path | Cluster | None = None,
    *,
    costs: Costs | None = None,
    contention: bool = True,
    model: CostModelFactory = DeviceModel,
    load: GivenLoad | None = None,
    draws: int = 100,
    seed: int = 0,
) -> Why:
    """Explain the step of a plan; arguments and errors are as in `simulate`, `draws` and `seed` as in `interval`."""
    check_plan("why", plan)
    if type(draws) is not int or draws < 1:
        raise PlanError(f"why(draws={draws!r}): at least one draw is needed, as an integer")
    with no_garbage_collection():
        target = (
            cluster if cluster is None or isinstance(cluster, Cluster) else load_cluster(cluster)
        )
        experts = load_of(plan, load)
        loaded = model if experts is None else under_load(model, experts.loads)
        case = Case(plan, target, costs, contention=contention, model=loaded)
        chains = Chains(case.prepared, case.times, latency=plan.hop, issue=case.issue)
        gaps = idle_gaps(case.prepared, case.times, chains)
        counted = plan if case.cluster is None else replace(plan, device=device_type(case.cluster))
        peaks = [peak(counted, role) for role in plan.roles]
        return Why(
            step_s=case.step_s,
            path=chains.critical_path(),
            gaps=gaps,
            shares=time_shares(case.step_s, gaps),
            what_if=what_if(case),
            sensitivities=sensitivities(case),
            interval=interval(case, draws=draws, seed=seed),
            peak_bytes=max(peaks, key=lambda p: p.total).bytes if peaks else {},
            case=case,
        )
