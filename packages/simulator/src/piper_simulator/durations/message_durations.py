"""Give the durations of messages on a plan's channels: measured, else computed for the links of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from piper_ir.ground.errors import ClusterError
from piper_ir.plan.plan import Channel, Plan, RolePlan
from piper_ir.program.costs import Costs
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.durations.communication import (
    RankGroup,
    by_formula,
    crossed,
    duration,
    rank_group,
)
from piper_simulator.durations.cost_model import Work
from piper_simulator.durations.instances import instances, parts_of_equal_nodes
from piper_simulator.durations.provenance import Provenance
from piper_simulator.durations.transfers import Transfers


class MessageDurations:
    """Look the durations of a plan's messages up in measured costs, or compute them for a cluster.

    Args:
        known: the measured costs for each kind of device of the cluster; empty ones for other kinds than the measured.
        kinds_in: the kinds of devices, by number, that run a role.
        given: whether the plan's durations are given (`given_only`); its messages then take no time.
        device: the device whose software sends the messages.
        provenance: is told which durations were measured, and which computed.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster | None,
        costs: Costs,
        *,
        known: Sequence[Costs],
        kinds_in: Callable[[RolePlan], tuple[int, ...]],
        given: bool,
        device: Device | None,
        provenance: Provenance,
    ) -> None:
        self._plan, self._cluster, self._costs = plan, cluster, costs
        self._known, self._kinds_in, self._given = known, kinds_in, given
        self._provenance = provenance
        self._sent = Transfers(plan, device)
        self._works: dict[tuple[str, str, int], Work] = {}
        self._busy: dict[tuple[str, str, int], float] = {}
        self._groups: dict[str, frozenset[RankGroup]] = {}

    def work(self, channel: Channel, op: str, nbytes: int) -> Work:
        """Return the work of a message of a kind on a channel: as long as the slowest instance of the channel takes.

        Raises ClusterError if it must be computed and there is no cluster.
        """
        key = (channel.id, op, nbytes)
        if key not in self._works:
            self._works[key] = self._work(channel, op, nbytes)
        return self._works[key]

    def busy_s(self, channel: Channel, op: str, nbytes: int) -> float:
        """Return the processor seconds that a message takes of the host."""
        key = (channel.id, op, nbytes)
        if key not in self._busy:
            self._busy[key] = self._costs.busy_s(*self._measured_as(channel, op, nbytes))
        return self._busy[key]

    def _measured_as(self, channel: Channel, op: str, nbytes: int) -> tuple[str, int, int, int]:
        """Return the key of a message among measured costs: with the numbers of its ranks and of their nodes."""
        members = self._members(channel)
        cluster = self._cluster
        nodes = 1 if cluster is None else len({cluster.node_of(r) for r in members})
        return op, nbytes, len(members), nodes

    def _members(self, channel: Channel) -> Sequence[int]:
        """Return the ranks of one instance of a channel."""
        if not self._plan.roles:
            return instances(self._plan, channel)[0]
        return self._plan.peers(channel, self._plan.role(channel.roles[0]).ranks[0])

    def _work(self, channel: Channel, op: str, nbytes: int) -> Work:
        key = self._measured_as(channel, op, nbytes)
        measured = self._costs.comm and self._all_known(channel)
        known = self._costs.of_comm(*key) if measured else None
        if known is not None:
            self._provenance.sent(*key)
            stretched = known.seconds * self._stretch(channel, op, nbytes)
            return Work(stretched, known.source, bytes=nbytes)
        if self._given:
            return Work(0.0, "given", bytes=nbytes)
        cluster = self._cluster
        if cluster is None:
            raise no_duration(f"a message on channel {channel.id}")
        groups = self._instances(channel, cluster)
        each = [(g, self._sent.bytes_of(channel, op, nbytes, g)) for g in groups]
        slowest, sent = max(
            ((duration(cluster, op, n, g), n) for g, n in each), key=lambda took: took[0].seconds
        )
        if slowest.source == "formula":
            self._provenance.sent_unknown(*key)
        gathers = self._sent.gathers(channel, op)
        gathered_s = sum([self.work(c, "all_gather", nbytes).seconds for c in gathers])
        return Work(slowest.seconds + gathered_s, slowest.source, bytes=sent)

    def _stretch(self, channel: Channel, op: str, nbytes: int) -> float:
        """Return the factor by which slow links stretch a message, as its formula does."""
        cluster = self._cluster
        if cluster is None or not cluster.network.slow_links:
            return 1.0
        groups = self._instances(channel, cluster)
        healthy = max(
            by_formula(cluster, op, nbytes, replace(g, inter_factor=1.0, intra_factor=1.0))
            for g in groups
        )
        return max(by_formula(cluster, op, nbytes, g) for g in groups) / healthy if healthy else 1.0

    def _all_known(self, channel: Channel) -> bool:
        """Return whether the costs hold for all kinds of devices on a channel."""
        if not self._plan.roles:
            return all(known is self._costs for known in self._known)
        return all(
            self._known[k] is self._costs
            for role in channel.roles
            for k in self._kinds_in(self._plan.role(role))
        )

    def _instances(self, channel: Channel, cluster: Cluster) -> frozenset[RankGroup]:
        """Return the rank groups of a channel's instances; the slowest group gives the duration."""
        if channel.id not in self._groups:
            equal = parts_of_equal_nodes(self._plan, cluster)
            groups = [
                rank_group(cluster, members) for members in instances(self._plan, channel, equal)
            ]
            if (
                not self._plan.roles
            ):  # nobody knows yet where they are: at best over links that are not slow
                groups = [replace(g, inter_factor=1.0, intra_factor=1.0) for g in groups]
            self._groups[channel.id] = frozenset(groups)
            if any(g.slowed for g in self._groups[channel.id]):
                self._provenance.crossed(
                    slow
                    for members in instances(self._plan, channel)
                    for slow in crossed(cluster, members)
                )
        return self._groups[channel.id]


def no_duration(what: str) -> ClusterError:
    """Return the error for something whose duration must be computed, where there is no cluster."""
    return ClusterError(
        f"{what} has no given duration; name a cluster to simulate on, e.g. simulate(plan, 'h100x8')"
    )
