"""The nodes of a scheduled graph and their edges as arrays. What follows scheduling says little about each of very many nodes, so
it works on whole columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from piper_compiler.passes.arrays import Flags, Ints, int_array, run_starts
from piper_compiler.passes.dependencies import Dependencies
from piper_ir.graph import Graph


@dataclass(frozen=True)
class Columns:
    """An entry per node, by number: `of` and `mb` as in `Dependencies`, the index of its role in the graph, whether it is
    communication, its `place` in the global order. An entry per edge, by target: the node `source` is before the node `target`;
    `first[i]` is the first edge to node i."""

    of: Ints
    mb: Ints
    role: Ints
    comm: Flags
    place: Ints
    source: Ints
    target: Ints
    first: Ints

    def each(self, facts: Iterable[int]) -> Ints:
        """A fact of each of `Dependencies.nodes`, by number."""
        return int_array(facts)[self.of]


def columns(graph: Graph, deps: Dependencies, sequence: Sequence[int]) -> Columns:
    """Of a graph whose nodes are scheduled in the order `sequence`."""
    index = {role: r for r, role in enumerate(graph.roles)}
    of = int_array(deps.of)
    place = np.empty(len(of), np.int64)
    place[sequence] = np.arange(len(of))
    roles = int_array(index[n.role] for n in deps.nodes)
    first = run_starts(np.bincount(deps.target, minlength=len(of)))
    return Columns(of, int_array(deps.mb), roles[of], np.array(deps.comm, np.bool_), place, deps.source, deps.target, first)
