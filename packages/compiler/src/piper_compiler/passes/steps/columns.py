"""Turn the nodes of a scheduled graph and their edges into arrays.

The passes after scheduling do little per node but for many nodes, so they work on numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from piper_compiler.passes.steps.arrays import Flags, Ints, int_array, run_starts
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_ir.graph.graph import Graph


@dataclass(frozen=True)
class Columns:
    """Hold an entry per node, by number, and an entry per edge, by target.

    Attributes:
        of: index of each number in `Dependencies.nodes`.
        mb: microbatch, as in `Dependencies`.
        role: index of the node's role in the graph.
        comm: whether the node is communication.
        place: the node's position in the global order.
        source: the node that an edge comes from, which is before `target`.
        target: the node that an edge leads to.
        first: the first edge to each node.
    """

    of: Ints
    mb: Ints
    role: Ints
    comm: Flags
    place: Ints
    source: Ints
    target: Ints
    first: Ints

    def each(self, facts: Iterable[int]) -> Ints:
        """Return a fact for each number, given one for each of `Dependencies.nodes`."""
        return int_array(facts)[self.of]


def columns(graph: Graph, deps: Dependencies, sequence: Sequence[int]) -> Columns:
    """Return the columns of a graph whose nodes are scheduled in the order `sequence`."""
    index = {role: r for r, role in enumerate(graph.roles)}
    of = int_array(deps.of)
    place = np.empty(len(of), np.int64)
    place[sequence] = np.arange(len(of))
    roles = int_array(index[n.role] for n in deps.nodes)
    first = run_starts(np.bincount(deps.target, minlength=len(of)))
    return Columns(
        of,
        int_array(deps.mb),
        roles[of],
        np.array(deps.comm, np.bool_),
        place,
        deps.source,
        deps.target,
        first,
    )
