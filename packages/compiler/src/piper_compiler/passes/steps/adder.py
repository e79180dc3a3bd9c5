"""Add nodes to a scheduled graph, each next to the compute that it belongs to, and edges to and from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from piper_compiler.passes.steps.arrays import int_array
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_ir.graph.graph import Editor, Graph, Node
from piper_ir.graph.graph_parts import mbs_of
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
        number: dict[int, int] = {}
        for k, node in self.replaced.items():
            self.edit.update(node)
            nodes[k] = node
        for new in self.new.values():
            order = np.argsort(int_array(new.mbs or [0] * len(new.key)), kind="stable").tolist()
            node = new.node if new.mbs is None else replace(new.node, mbs=mbs_of(new.mbs))
            self.edit.add(node)
            starts.append(len(of))
            for n in order:
                number[new.key[n]] = len(of)
                of.append(len(nodes))
                mbs.append(-1 if new.mbs is None else new.mbs[n])
                comm.append(isinstance(node.op, Collective))
            nodes.append(node)
        flat = int_array(number.get(i, i) for edge in self.edges for i in edge)
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

    def _spliced(self, sequence: list[int], number: dict[int, int]) -> list[int]:
        spliced = [number[n] for n in self.front]
        for i in sequence:
            spliced += [number.get(n, n) for n in self.before.get(i, ())]
            spliced += [i] if i not in self.moved else []
            spliced += [number[n] for n in self.after.get(i, ())]
        return spliced
