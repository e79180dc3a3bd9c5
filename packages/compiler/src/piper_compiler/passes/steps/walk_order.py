"""Put the nodes of a DAG in topological order by keys that nearly give one, which is faster than to look for an order.

`piper_ir.fold.timing.with_waits` looks for one, whatever the DAG, and names the deadlock if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from piper_compiler.passes.steps.arrays import Flags, Ints, int_array
from piper_ir.fold.timing import Member, Prepared, SweepStep


class Walks:
    """Know the streams and groups of a DAG as columns.

    Attributes:
        bare: the DAG without waits.
        event_of: by node, the node that stands for it: the first member of its group, or itself.
    """

    def __init__(self, bare: Prepared) -> None:
        self.bare = bare
        n = len(bare.stream_of)
        self.event_of = np.arange(n)
        if bare.groups:
            first = np.repeat(
                int_array([g[0] for g in bare.groups]), int_array(map(len, bare.groups))
            )
            self.event_of[int_array(chain.from_iterable(bare.groups))] = first
        self._events = np.flatnonzero(self.event_of == np.arange(n))
        self._before = np.empty(n, np.int64)
        for s, nodes in enumerate(bare.streams):
            column = int_array(nodes)
            self._before[column[1:]] = column[:-1]
            self._before[column[0]] = n + s
        self._first = self._before >= n

    def by(self, waiter: Ints, target: Ints, keys: Sequence[np.ndarray]) -> list[int] | None:
        """Return the nodes that stand for all, sorted by these keys, of which the first counts most.

        The result is None when that is no topological order. Only the keys of nodes that stand for others count.

        Args:
            waiter: by wait, the node that waits.
            target: by wait, the node that is waited for.
            keys: by node.
        """
        order = self._events[np.lexsort([key[self._events] for key in reversed(keys)])]
        place = np.empty(len(self._before), np.int64)
        place[order] = np.arange(len(order))
        place = place[self.event_of]
        before = place[np.where(self._first, 0, self._before)]
        late: Flags = ~self._first & (before >= place)
        return None if late.any() or np.any(place[target] >= place[waiter]) else order.tolist()

    def steps(
        self, waits: Sequence[tuple[int, ...]], order: Sequence[int]
    ) -> tuple[SweepStep, ...]:
        """Return the steps of a sweep in this order."""
        before = self._before.tolist()
        met: list[tuple[tuple[Member, ...], bool] | None] = [None] * len(before)
        for members, p2p in zip(self.bare.groups, self.bare.p2p, strict=True):
            met[members[0]] = tuple([(m, before[m], waits[m]) for m in members]), p2p
        return tuple([(i, before[i], waits[i], met[i]) for i in order])
