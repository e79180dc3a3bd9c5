"""Share resources: activities that run at the same time slow each other down (processor sharing).

Rates change only when an activity begins or ends. An activity has work, in seconds alone, and runs at a rate of at most
1 second of it per second.

*Messages* share links. A message takes a fraction of each of its resources (a direction of a device's port, of a NIC)
at full speed. Rates are max-min fair: all messages of a bottleneck get the same fraction of it, smaller ones get no
more than they need, and the rest is shared again (progressive filling). Of a message with several resources the largest
fraction counts (Dominant Resource Fairness, Ghodsi et al., NSDI 2011). Messages do not wait for compute: their kernels
hold their SMs while they run.

*Compute* gets the capacity that messages leave: rate = 1 - f_sm - f_memory, summed over the messages under way on its
device, at least `SLOWEST`. f_sm counts while a message runs, f_memory in proportion to its rate.
`piper_simulator.contention.flows` defines the two, with their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

SLOWEST = 1 / 8
"""The lowest rate of compute, since the linear law would reach 0.

A kernel slows down by at most 8x in the measurements of Echo (arXiv 2412.12487), as others report them; we have not
seen the original numbers.
"""

_FULL = 1 + 1e-9
"""The load above which a resource is short of capacity, since sums of fractions are rounded."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Describe the load of a message.

    Attributes:
        id: equal for equal flows, of which one runs at a time.
        shares: resource -> the fraction of its capacity that the message takes at full speed, with all messages that it
            stands for (one for each of a role's ranks).
        largest: the largest fraction that one message alone takes, at most 1.
        takes: role that takes part -> (f_sm, f_memory at full speed).
    """

    id: int
    seconds: float
    shares: Mapping[int, float]
    largest: float
    takes: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Activity:
    """Track an activity that is under way.

    Attributes:
        left: seconds of work at the moment `since`.
        since: when `left` was right.
        end: when it ends if nothing changes.
        rate: seconds of work per second.
        look: the next moment at which a waiter for the end checks it.
    """

    left: float
    since: float
    end: float
    rate: float = 1.0
    look: float = 0.0

    def change(self, rate: float, now: float) -> None:
        """Go on at another rate from `now` on."""
        left = self.left - self.rate * (now - self.since)
        self.left = left = left if left > 0.0 else 0.0
        self.since, self.rate = now, rate
        self.end = now + left / rate


@dataclass(slots=True, eq=False)
class RunningMessage(Activity):
    """Track a message, which shares links and slows compute; `ended`, if given, is called at its end."""

    flow: Flow = field(kw_only=True)
    ended: Callable[[], None] | None = None


_Beside = tuple[RunningMessage, float, float]
"""A message beside a role, with its f_sm and its f_memory at full speed there."""


def compute_rate(sms: float, memory: float) -> float:
    """Return the rate of compute beside messages that take these fractions of the SMs and of the memory's bandwidth."""
    left = 1.0 - sms - memory
    return left if left > SLOWEST else SLOWEST


def fair_rates(flows: Sequence[Flow]) -> list[float]:
    """Return the max-min fair rates of messages that run together, each in (0, 1].

    Resources have capacity 1. The level, the fraction of its bottleneck that each message gets, rises until a resource
    is full or a message has all that it can use. These messages keep their rate, and the level of the others rises on.
    """
    rates = [0.0] * len(flows)
    free: dict[int, float] = {r: 1.0 for f in flows for r in f.shares}
    live = {i for i, f in enumerate(flows) if f.shares}
    for i in set(range(len(flows))) - live:
        rates[i] = 1.0
    while live:
        slope = dict.fromkeys(free, 0.0)  # the share of each resource that a unit of level takes
        for i in live:
            for r, share in flows[i].shares.items():
                slope[r] += share / flows[i].largest
        limit = {r: free[r] / s for r, s in slope.items() if s > 0}
        level = min(min(limit.values()), min(flows[i].largest for i in live))
        full = {r for r, at in limit.items() if at <= level * _FULL}
        settled = {
            i for i in live if flows[i].largest <= level or not full.isdisjoint(flows[i].shares)
        }
        for i in settled:
            rates[i] = min(1.0, level / flows[i].largest)
            for r, share in flows[i].shares.items():
                free[r] = max(0.0, free[r] - share * rates[i])
        live -= settled
    return rates


@dataclass(slots=True, eq=False)
class _Link:
    """Track the load of a resource, and the messages under way that use it.

    `held` has the fractions that messages inside of instructions may take without being under way here.
    """

    load: float = 0.0
    users: dict[int, RunningMessage] = field(default_factory=dict)
    held: dict[LinkHolder, float] = field(default_factory=dict)


class LinkHolder(Protocol):
    """Compute of a role, with messages that are not under way in a pool as long as their links have room for them."""

    def give_way(self) -> RunningMessage | None:
        """Return the message that runs, which is under way in the pool from now on; None if it is compute."""
        ...

    def plan(self) -> None:
        """Go on with the messages that have room on their links."""
        ...


class SharedPool:
    """Hold the activities under way on all devices.

    `sooner(activity)` is called when the end of one has moved before its `look`.
    """

    def __init__(self, roles: int, sooner: Callable[[Activity], None]) -> None:
        self._sooner = sooner
        self._computing: list[Activity | None] = [None] * roles
        self._beside: list[dict[int, _Beside]] = [{} for _ in range(roles)]
        self._lone: dict[int, RunningMessage] = {}  # messages beside no role
        self._links: dict[int, _Link] = {}
        self._shares: dict[int, list[tuple[_Link, float]]] = {}  # by flow
        self._known: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self._held: dict[LinkHolder, list[_Link]] = {}

    def message(self, flow: Flow, now: float) -> RunningMessage:
        """Begin a message."""
        running = RunningMessage(flow.seconds, now, now + flow.seconds, flow=flow)
        holders = self._crowded_holders(flow) if self._held else ()
        for holder in holders:
            if (other := holder.give_way()) is not None:
                self._add(other)
        crowded = self._add(running)
        for holder in holders:
            if holder in self._held:
                holder.plan()
        self._slow(self._share({flow.id: running}, flow.takes, now) if crowded else flow.takes, now)
        return running

    def arrived(self, message: RunningMessage, now: float) -> None:
        """End a message."""
        flow = message.flow
        relieved: dict[int, RunningMessage] = {}
        id = flow.id
        for link, share in self._shares[id]:
            load, users = link.load, link.users
            del users[id]
            link.load = load - share if users else 0.0
            if load > _FULL:
                relieved.update(users)
        for role in flow.takes:
            del self._beside[role][id]
        if not flow.takes:
            del self._lone[id]
        self._slow(self._share(relieved, flow.takes, now) if relieved else flow.takes, now)

    def under_way(self) -> Iterator[tuple[tuple[str, int], Activity]]:
        """Yield the compute of roles and the messages, each with a name."""
        for role, compute in enumerate(self._computing):
            if compute is not None:
                yield ("compute", role), compute
        messages = {i: m for users in self._beside for i, (m, _, _) in users.items()}
        for users in (self._lone, *[link.users for link in self._links.values()]):
            messages.update(users)
        for id, message in sorted(messages.items()):
            yield ("message", id), message

    def enter(self, role: int, compute: Activity) -> float:
        """Begin the compute of a role, or messages inside of it, and return its rate now."""
        self._computing[role] = compute
        return self._left_over(role)

    def leave(self, role: int, holder: LinkHolder | None) -> None:
        """End the compute of a role, and give back the links that a holder held."""
        self._computing[role] = None
        if holder is not None:
            for link in self._held.pop(holder, ()):
                link.held.pop(holder, None)

    def hold(self, holder: LinkHolder, flows: Iterable[Flow]) -> None:
        """Hold the links of messages inside of an instruction, one of which runs at a time."""
        links = self._held[holder] = []
        for flow in flows:
            for link, share in self._shares.get(flow.id) or self._shares_of(flow):
                if share > link.held.get(holder, 0.0):
                    link.held[holder] = share
                    links.append(link)

    def misfits(self, holder: LinkHolder, flows: Iterable[Flow]) -> set[int]:
        """Return which of the messages of a holder would find a link short of capacity."""
        found, shares = set(), self._shares
        for flow in flows:
            for link, share in shares.get(flow.id) or self._shares_of(flow):
                held = link.held
                shared = len(held) > (holder in held)
                if link.users or shared or share > _FULL:
                    others = sum([s for h, s in held.items() if h is not holder]) if shared else 0.0
                    if link.load + share + others > _FULL:
                        found.add(flow.id)
                        break
        return found

    def _crowded_holders(self, flow: Flow) -> list[LinkHolder]:
        """Return who holds links that would be short of capacity with one more message."""
        holders: dict[LinkHolder, None] = {}
        for link, share in self._shares.get(flow.id) or self._shares_of(flow):
            if link.held and link.load + share + sum(link.held.values()) > _FULL:
                holders.update(dict.fromkeys(link.held))
        return list(holders)

    def _add(self, running: RunningMessage) -> bool:
        """Put a message on its links and beside its roles; return whether a link is short of capacity."""
        flow, crowded = running.flow, False
        id = flow.id
        for link, share in self._shares.get(id) or self._shares_of(flow):
            link.users[id] = running
            link.load = load = link.load + share
            if load > _FULL:
                crowded = True
        for role, (f_sm, f_memory) in flow.takes.items():
            self._beside[role][id] = running, f_sm, f_memory
        if not flow.takes:
            self._lone[id] = running
        return crowded

    def _shares_of(self, flow: Flow) -> list[tuple[_Link, float]]:
        """Return the fraction that a flow takes of each of its links."""
        link_shares = self._shares.get(flow.id)
        if link_shares is None:
            link_shares = [
                (self._links.setdefault(r, _Link()), share) for r, share in flow.shares.items()
            ]
            self._shares[flow.id] = link_shares
        return link_shares

    def _crowd(self, message: RunningMessage) -> dict[int, RunningMessage]:
        """Return the messages tied to a message by scarce resources; no others matter to their rates."""
        crowd = {message.flow.id: message}
        queue = [message]
        seen: set[_Link] = set()
        for known in queue:  # which grows
            for link, _ in self._shares[known.flow.id]:
                if link.load > _FULL and link not in seen:
                    seen.add(link)
                    for id, other in link.users.items():
                        if id not in crowd:
                            crowd[id] = other
                            queue.append(other)
        return crowd

    def _share(
        self, messages: dict[int, RunningMessage], roles: Iterable[int], now: float
    ) -> dict[int, None]:
        """Give messages and all tied to them their fair rates; return `roles`, and the roles whose messages changed."""
        touched = dict.fromkeys(roles)
        while messages:
            crowd = self._crowd(next(iter(messages.values())))
            for i, rate in self._rates(crowd):
                message = crowd[i]
                if rate != message.rate:
                    message.change(rate, now)
                    if message.end < message.look:
                        self._sooner(message)
                    for role in message.flow.takes:
                        touched[role] = None
            if len(messages) == 1:
                break
            messages = {i: m for i, m in messages.items() if i not in crowd}
        return touched

    def _rates(self, crowd: Mapping[int, RunningMessage]) -> list[tuple[int, float]]:
        """Return the fair rates of messages that are tied to no others, in the order of their ids."""
        key = tuple(sorted(crowd)) if len(crowd) > 1 else tuple(crowd)
        rates = self._known.get(key)
        if rates is None:
            fair = fair_rates([crowd[i].flow for i in key])
            rates = self._known[key] = list(zip(key, fair, strict=True))
        return rates

    def _left_over(self, role: int) -> float:
        """Return the rate of compute beside the messages under way."""
        sms = memory = 0.0
        for message, f_sm, f_memory in self._beside[role].values():
            sms += f_sm
            memory += f_memory * message.rate
        left = 1.0 - sms - memory  # `compute_rate`, which is called a million times
        return left if left > SLOWEST else SLOWEST

    def _slow(self, roles: Iterable[int], now: float) -> None:
        computing = self._computing
        for role in roles:
            running = computing[role]
            if running is not None:
                rate = self._left_over(role)
                if rate != running.rate:
                    running.change(rate, now)
                    if running.end < running.look:
                        self._sooner(running)
