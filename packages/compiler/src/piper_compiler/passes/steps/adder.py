"""Add nodes to a scheduled graph, each next to the compute that it belongs to, and edges to and from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from piper_compiler.passes.steps.arrays import int_array
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_ir.graph.graph import Editor, Graph, Node
from piper_ir.graph.graph_parts import in_mbs, mbs_of
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import HOST, Bucket, Category, Channel
from piper_ir.program.ops import Collective, Fold

COPY_ENGINES = 0
"""The SMs that a copy to the host or back takes from compute: copy engines move it."""

HeldValues = tuple[tuple[Category, str, str], ...]
"""The values that a node uses in place of others: each as (category, bucket, value) in place of states.

An entry ("host", value, copy) is about a tensor that waits on the host: the node uses the copy in place of the value.
"""


@dataclass(frozen=True)
class Scheduled:
    """Hold the nodes of a graph in scheduled order.

    Attributes:
        deps: the nodes' numbers and edges.
        sequence: the numbers in order.
        held: the values that numbers hold; numbers that hold none are left out.
    """

    graph: Graph
    deps: Dependencies
    sequence: list[int]
    held: dict[int, HeldValues]


@dataclass
class _New:
    """Hold a node that is added, in all of its microbatches.

    Attributes:
        id: the id of the node.
        mbs: the microbatches, in the order of `key`; None: one node of the whole step.
    """

    id: str
    node: Node
    mbs: list[int] | None
    key: list[int] = field(default_factory=list)


class Adder:
    """Collect nodes and their positions, and return the graph with them."""

    def __init__(self, graph: Graph, deps: Dependencies) -> None:
        self.graph, self.deps = graph, deps
        self.edit: Editor = graph.edit()
        self.new: dict[str, _New] = {}
        self.count = 0
        self.front: list[int] = []
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        self.edges: list[tuple[int, int]] = []  # temporary numbers are negative
        self.held: dict[int, list[tuple[Category, str, str]]] = {}
        self.replaced: dict[int, Node] = {}
        self.moved: set[int] = set()
        self.folds = {
            (n.op.bucket, n.role): k
            for k, n in enumerate(deps.nodes)
            if isinstance(n.op, Fold) and not n.reads
        }

    def value(
        self, id: str, numel: int, bucket: Bucket, category: Category, dtype: str = ""
    ) -> str:
        """Declare a value that holds a flat tensor of a bucket, in the dtype of its category unless one is given."""
        if id not in self.edit.values:
            spec = TensorSpec((numel,), dtype or bucket.dtype_of(category))
            self.edit.value(id, spec, category)
        return id

    def host_channel(self, kind: str, role: str) -> str:
        """Return the channel of a role's copies to the memory of the host, or back; it is made on first use."""
        id, known = f"{kind}.{role}", self.edit.channels
        if id not in known:
            known[id] = Channel(id, "group", (role,), (kind,), (), HOST, (COPY_ENGINES,))
        return id

    def add(self, node: Node, mb: int) -> int:
        """Add a node in a microbatch (-1: of the whole step), and return its temporary number."""
        known = self.new.get(node.id)
        if known is None:
            known = self.new[node.id] = _New(node.id, node, None if mb < 0 else [])
        self.count -= 1
        known.key.append(self.count)
        if known.mbs is not None:
            known.mbs.append(mb)
        return self.count

    def done(self, sequence: list[int]) -> Scheduled:
        """Return the graph with all new nodes, numbered behind the old ones."""
        deps = self.deps
        nodes, starts, of, mbs, comm = (
            list(deps.nodes),
            list(deps.starts),
            list(deps.of),
            list(deps.mb),
            list(deps.comm),
        )
        number = [0] * -self.count
        for k, node in self.replaced.items():
            self.edit.update(node)
            nodes[k] = node
        for new in self.new.values():
            own = [-1] * len(new.key) if new.mbs is None else new.mbs
            order = sorted(range(len(own)), key=own.__getitem__)
            node = new.node if new.mbs is None else in_mbs(new.node, mbs_of(own))
            self.edit.add(node)
            starts.append(len(of))
            for place, n in enumerate(order, len(of)):
                number[new.key[n]] = place
            of += [len(nodes)] * len(own)
            mbs += [own[n] for n in order]
            comm += [isinstance(node.op, Collective)] * len(own)
            nodes.append(node)
        flat = int_array(chain.from_iterable(self.edges))
        added = flat < 0
        flat[added] = int_array(number)[flat[added]]
        source, target = (
            np.concatenate((old, flat[k::2])) for k, old in enumerate((deps.source, deps.target))
        )
        by_target = np.argsort(target, kind="stable")
        updated = replace(
            deps,
            nodes=tuple(nodes),
            starts=starts,
            of=of,
            mb=mbs,
            comm=comm,
            source=source[by_target],
            target=target[by_target],
        )
        held_by_number = {i: tuple(entries) for i, entries in self.held.items()}
        return Scheduled(self.edit.done(), updated, self._spliced(sequence, number), held_by_number)

    def _spliced(self, sequence: list[int], number: list[int]) -> list[int]:
        spliced = [number[n] for n in self.front]
        before, after, moved = self.before, self.after, self.moved
        for i in sequence:
            if i in before:
                spliced += [number[n] if n < 0 else n for n in before[i]]
            if i not in moved:
                spliced.append(i)
            if i in after:
                spliced += [number[n] for n in after[i]]
        return spliced
