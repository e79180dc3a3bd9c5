"""Time a plan again on a cluster that differs in one constant, or without some cause of delay.

Measured durations do not follow from a cluster's constants. Each changes by the factor by which its formula does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from piper_ir.fold.issue import Issue, issue_times
from piper_ir.fold.timing import Times, sweep
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.cluster.network import Links
from piper_simulator.durations.checked import model_for
from piper_simulator.durations.cost_model import CostModelFactory, Work, work_of
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.times.splitting import split
from piper_simulator.times.timed import contention_applies, durations_of, shared_flows, step_alone

T = TypeVar("T")
STEP = 0.01
"""The fraction by which a constant is raised to see how the step follows."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Hold the seconds of the step under a condition; None if unknown, and `note` says why."""

    name: str
    step_s: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Hold by how many percent the step changes when a constant ("peak_flops[bfloat16]") grows by one percent."""

    name: str
    value: float
    per_percent: float


class Case:
    """Time a plan on a cluster any number of times; raise the errors of `simulate`.

    Attributes:
        plan: with roles split by the differences of ranks on the cluster; no change here adds one
            (`piper_simulator.times.splitting`).
        work: per node its work if nothing runs beside it.
        issue_s: host seconds per instruction, before its kernels are launched.
        times: when each node ran, with contention as far as there is any (`interferes`).
        durations: seconds per node as they were in `times`.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster | None,
        costs: Costs | None,
        *,
        contention: bool = True,
        model: CostModelFactory = DeviceModel,
    ) -> None:
        self.cluster, self.costs, self.contention, self.model = cluster, costs, contention, model
        self.plan = split(
            plan, cluster, shared=contention and contention_applies(plan, cluster)
        ).plan
        self._taken = durations_of(self.plan, cluster, costs, model, contention=contention)
        self.prepared, self.work, self.issue_s = (
            self._taken.prepared,
            self._taken.work,
            self._taken.issue_s,
        )
        self.times, self.interferes = step_alone(self._taken), self._taken.flows is not None
        self.durations = [w.seconds for w in self.work]
        if self.interferes:
            self.durations = [
                end - start for start, end in zip(self.times.start, self.times.end, strict=True)
            ]
        self.step_s = self.times.makespan
        self._formula: tuple[list[Work], float] | None = None

    @property
    def issue(self) -> Issue | None:
        """Return when hosts issue; None if they take no time."""
        return self._taken.issue

    def run(
        self, durations: Sequence[float], issue_s: float, latency: float | None = None
    ) -> Times:
        """Return the times of one step from a common start, in which each node takes its duration."""
        launches = [work.launch_s for work in self.work]
        return sweep(
            self.prepared,
            durations,
            latency=self.plan.hop if latency is None else latency,
            issue=issue_times(self.prepared.offsets, issue_s, launches, durations),
        )

    def on(self, cluster: Cluster) -> float:
        """Return the seconds of the step on a changed cluster.

        Measured durations, of the plan or of the cluster's messages, change by the factor by which their formulas do.
        """
        measured = self.costs is not None or any(kind.links.messages for kind in cluster.kinds)
        costing = model_for(self.plan, cluster.each_links(_without_table), None, self.model)
        work, issue_s = work_of(costing, self.plan), costing.issue_s
        if measured:
            before, issue_before = self._before()
            work = [_changed(*each) for each in zip(self.work, work, before, strict=True)]
            issue_s = _scaled(self.issue_s, issue_s, issue_before)
        flows = shared_flows(self.plan, cluster, self.prepared, work, contention=self.contention)
        return step_alone(replace(self._taken, work=work, flows=flows, issue_s=issue_s)).makespan

    def _before(self) -> tuple[list[Work], float]:
        """Return the results of formulas on the unchanged cluster."""
        if self._formula is None:
            plain = None if self.cluster is None else self.cluster.each_links(_without_table)
            costing = model_for(self.plan, plain, None, self.model)
            self._formula = work_of(costing, self.plan), costing.issue_s
        return self._formula

    def alone(self) -> float:
        """Return the seconds of the step without contention."""
        return self.run([w.seconds for w in self.work], self.issue_s).makespan

    def perfect_overlap(self) -> float:
        """Return the seconds of the step when no computation waits for a message.

        It is at least the time of the busiest stream of messages.
        """
        messages = [0.0] * len(self.prepared.streams)
        durations = [w.seconds for w in self.work]
        for members in self.prepared.groups:
            for m in members:
                messages[self.prepared.stream_of[m]] += self.work[members[0]].seconds
                durations[m] = 0.0
        return max(self.run(durations, self.issue_s, latency=0.0).makespan, *messages, 0.0)


def _without_table(links: Links) -> Links:
    return replace(links, messages=())


def _changed(work: Work, new: Work, old: Work) -> Work:
    """Return the work on a changed cluster, by its formulas there and on the unchanged one.

    A duration without launches was measured with them, or has none.
    """
    if work.launch_s:
        seconds = _scaled(work.seconds, new.seconds, old.seconds)
    else:
        longer, before = max(new.seconds, new.launch_s), max(old.seconds, old.launch_s)
        seconds = _scaled(work.seconds, longer, before)
    launch_s = _scaled(work.launch_s, new.launch_s, old.launch_s)
    return replace(work, seconds=seconds, inside=new.inside, launch_s=launch_s)


def _scaled(value: float, new: float, old: float) -> float:
    return value * (new / old) if old else value


def changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield name and cluster of each condition that changes the cluster; latencies stay as they are."""
    yield (
        "twice the bandwidth within nodes",
        cluster.each_links(lambda x: replace(x, intra_bandwidth=2 * x.intra_bandwidth)),
    )
    if cluster.node_count > 1:
        yield (
            "twice the bandwidth between nodes",
            cluster.each_links(lambda x: replace(x, inter_bandwidth=2 * x.inter_bandwidth)),
        )
    yield (
        "twice the memory bandwidth",
        cluster.each_device(lambda d: replace(d, memory_bandwidth=2 * d.memory_bandwidth)),
    )
    yield "twice the peak FLOP/s", cluster.each_device(_twice_the_peak)
    yield (
        "no launch cost",
        cluster.each_device(lambda d: replace(d, launch_s=0.0, host_issue_s=0.0)),
    )


def _twice_the_peak(device: Device) -> Device:
    return replace(device, peak_flops={k: 2 * v for k, v in device.peak_flops.items()})


def what_if(case: Case) -> list[WhatIf]:
    """Return the table; for a plan with given durations, only the rows that need no cluster."""
    changed = () if case.cluster is None else changes(case.cluster)
    rows = [WhatIf(name, case.on(cluster)) for name, cluster in changed]
    if case.interferes:
        rows.append(WhatIf("no interference", case.alone()))
    return [*rows, WhatIf("perfect overlap", case.perfect_overlap())]


def sensitivities(case: Case) -> list[Sensitivity]:
    """Return the sensitivity of the step to each constant that it depends on, the strongest first."""
    if case.cluster is None or not case.step_s:
        return []
    effects = []
    for name, value, put in cluster_constants(case.cluster):
        changed = case.on(put(value * (1 + STEP)))
        if changed != case.step_s:
            effects.append(Sensitivity(name, value, (changed / case.step_s - 1) / STEP))
    return sorted(effects, key=lambda s: (-abs(s.per_percent), s.name))


def cluster_constants(cluster: Cluster) -> Iterator[tuple[str, float, Callable[[float], Cluster]]]:
    """Yield the constants of the first kind of device and of the network, and of each other kind with its name.

    Each comes with its value and a function that returns the cluster with another value. Equally slow ranks share one
    constant, their factor. The same holds for links.
    """
    for k, kind in enumerate(cluster.kinds):
        prefix = "" if k == 0 else f"{kind.device.name}."
        again = any(
            kind.device == other.device for other in cluster.kinds[:k]
        )  # the same device on other links
        for name, value, put in () if again else constants(kind.device, prefix):
            yield name, value, _put_inner(_each_that_is(cluster.each_device, kind.device), put)
        for name, value, put in constants(kind.links, prefix):
            yield name, value, _put_inner(_each_that_is(cluster.each_links, kind.links), put)
    network, slow = cluster.network, cluster.slow_ranks
    yield (
        "oversubscription",
        network.oversubscription,
        lambda new: _on_network(cluster, oversubscription=new),
    )
    for factor in dict.fromkeys(slow.values()):
        yield f"slow_ranks[{factor:g}]", factor, _slower(cluster, factor)
    for factor in dict.fromkeys(x.factor for x in network.slow_links):
        yield f"slow_links[{factor:g}]", factor, _slower_links(cluster, factor)


def _each_that_is(each: Callable[[Callable[[T], T]], Cluster], old: T) -> Callable[[T], Cluster]:
    """Return a function that replaces each record that equals `old`."""
    return lambda new: each(lambda record: new if record == old else record)


def _on_network(cluster: Cluster, **changed: Any) -> Cluster:
    return replace(cluster, network=replace(cluster.network, **changed))


def _slower(cluster: Cluster, old: float) -> Callable[[float], Cluster]:
    slow = cluster.slow_ranks
    return lambda new: replace(
        cluster, slow_ranks={rank: new if f == old else f for rank, f in slow.items()}
    )


def _slower_links(cluster: Cluster, old: float) -> Callable[[float], Cluster]:
    slow = cluster.network.slow_links
    return lambda new: _on_network(
        cluster, slow_links=tuple([replace(x, factor=new) if x.factor == old else x for x in slow])
    )


def constants(thing: Any, prefix: str = "") -> Iterator[tuple[str, float, Callable[[float], Any]]]:
    """Yield the floats in a frozen dataclass, in the dataclasses inside it and in its mappings.

    Each comes with a function that returns the whole with another value there. Integers are counts and sizes; tuples
    and fields hidden from repr are tables, not constants.
    """
    for field in fields(thing):
        value = getattr(thing, field.name)

        def put(new: Any, name: str = field.name) -> Any:
            return replace(thing, **{name: new})

        if not field.init or not field.repr:
            continue
        if isinstance(value, float):
            yield prefix + field.name, value, put
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                if isinstance(entry, float):
                    yield f"{prefix}{field.name}[{key}]", entry, _put_entry(put, value, key)
        elif is_dataclass(value) and not isinstance(value, type):
            for name, entry, inner in constants(value, f"{prefix}{field.name}."):
                yield name, entry, _put_inner(put, inner)


def _put_entry(
    put: Callable[[Any], Any], mapping: Mapping[Any, float], key: Any
) -> Callable[[float], Any]:
    return lambda new: put({**mapping, key: new})


def _put_inner(put: Callable[[Any], Any], inner: Callable[[float], Any]) -> Callable[[float], Any]:
    return lambda new: put(inner(new))
