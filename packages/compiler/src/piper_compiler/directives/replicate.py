"""Define `replicate`: train data-parallel, with gradients summed over replicas.

    before  layer0.B@0 on ranks 0..1, each alone
    after   layer0.B@0 on ranks 0..1 with different rows; its gradient bucket is summed over dp after the last one

Legality
 1. `over` names axes; at least one. (An axis of degree 1 is not an error.)
 2. Whole chunks are selected: parameters belong to a chunk, not to a phase or microbatch.
 3. No selected chunk is replicated already.
 4. The axes are not axes on which the nodes are placed.
 5. bucket_mb is a positive number, and zero is a level that exists (0).
 6. The stream for reductions is not the compute stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from piper_compiler.directives.base import compute_nodes, directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_ir.graph import Graph, Node, Replication
from piper_ir.mesh import AXES
from piper_ir.plan import COMPUTE
from piper_ir.select import Where

MOST_BUCKET_MB = 2**40
"""The largest bucket in MiB that is accepted; no model is larger."""


@directive
@dataclass(frozen=True)
class Replicate:
    """Give each coordinate along `over` all parameters of the selected chunks, and rows of its own.

    Gradients are summed in flat buckets, with one reduction per bucket and step, which starts when the bucket's last
    gradient is ready.

    Attributes:
        over: mesh axes.
        zero: 0 keeps gradients and optimizer state whole.
        bucket_mb: MiB of a bucket, in the gradients' dtype.
        reduce: name of the reductions' stream (default: one for all reductions of the role).
        site: where the user wrote it.
    """

    selection: Where
    over: tuple[str, ...] = ("dp",)
    zero: int = 0
    bucket_mb: float = 25
    reduce: str = ""
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        unknown = [a for a in self.over if a not in AXES]
        if not self.over or unknown:
            raise fail(self, 1, f"over={self.over!r}; one or more of {', '.join(sorted(AXES))} are accepted, as a tuple")
        if self.zero != 0:
            raise fail(self, 5, f"zero={self.zero} is not available yet; use zero=0")
        if type(self.bucket_mb) not in (int, float) or not 0 < self.bucket_mb < inf:
            raise fail(self, 5, f"bucket_mb must be positive and finite; it is {self.bucket_mb!r}")
        if self.reduce == COMPUTE:
            raise fail(self, 6, f"the stream {COMPUTE!r} is for compute; choose another name")
        nodes = compute_nodes(self, graph, self.selection)
        self._check_nodes(graph, nodes)

    def _check_nodes(self, graph: Graph, nodes: list[Node]) -> None:
        counts: dict[str, int] = {}
        over = set(graph.mesh.axes) & set(self.over)
        for node in nodes:
            chunk = str(node.coords["chunk"])
            counts[chunk] = counts.get(chunk, 0) + len(node.each)
            if chunk in graph.replication:
                raise fail(self, 3, f"{chunk} is replicated by {graph.log[graph.replication[chunk].applied]} already")
            if node.role and set(graph.roles[node.role]) & over:
                raise fail(
                    self, 4, f"{node.name(node.each[0])} is placed on {node.role}; it cannot be replicated over the same axis"
                )
        for chunk, count in counts.items():
            every = [node for id in graph.index[("chunk", chunk)] for node in graph.families[id]]
            there = sum(len(node.each) for node in every if node.coords["op"] == "compute")
            if there != count:
                raise fail(self, 2, f"{count} of {there} nodes of {chunk} are selected; select by region, not by phase or mb")

    def decided(self) -> Decided | None:
        """Return what it decides before it is compiled."""
        return None if self.zero else Decided(self)

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        over = tuple(a for a in graph.mesh.axes if a in self.over)
        record = Replication(over, int(min(self.bucket_mb, MOST_BUCKET_MB) * 2**20), self.reduce, edit.applied)
        for node in graph.pick(self.selection):
            edit.replication[str(node.coords["chunk"])] = record
        return edit.done()
