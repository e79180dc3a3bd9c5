"""Bound the seconds of a step by the fill and the drain of its pipeline.

A role begins with the first forward of the chunk that comes first among its chunks. Before it, that microbatch is
forward on the chunks that lead there, from one whose parameters are trained: its next forward needs its update, and so
the gradients of all microbatches. Then the role computes everything between that forward and the same chunk's backward
for each microbatch, one after the other. After the last of these backwards, its microbatch goes back to the trained
chunk. The bubble of 1F1B follows (Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2), whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from piper_ir.graph.graph import Graph, Node
from piper_ir.program.ops import Compute, Recv

Seconds = Callable[[Node], float]
"""A lower bound of the seconds of a compute node in one microbatch."""


@dataclass(eq=False)
class MicrobatchPaths:
    """Find the paths through the compute of one microbatch of a graph in which everything is placed."""

    graph: Graph

    @cached_property
    def _nodes(self) -> Sequence[Node]:
        """Return the nodes in an order in which each comes behind the nodes that it needs."""
        nodes = [node for family in self.graph.families.values() for node in family]
        needs = self._needed(nodes)
        readers: list[list[int]] = [[] for _ in nodes]
        for k, others in enumerate(needs):
            for other in others:
                readers[other].append(k)
        missing = [len(others) for others in needs]
        order = [k for k, count in enumerate(missing) if not count]
        for k in order:  # grows below
            for reader in readers[k]:
                missing[reader] -= 1
                if not missing[reader]:
                    order.append(reader)
        return [nodes[k] for k in order]

    @cached_property
    def _reads(self) -> Sequence[set[int]]:
        """Return for each node the numbers of the nodes that it needs."""
        return self._needed(self._nodes)

    def _needed(self, nodes: Sequence[Node]) -> list[set[int]]:
        """Return for each node the nodes whose values it reads, receives, or finds saved by a forward, by number."""
        writer = {value: k for k, node in enumerate(nodes) for value in node.writes}
        forward = {
            node.op.chunk: k
            for k, node in enumerate(nodes)
            if isinstance(node.op, Compute) and node.op.step == "F"
        }
        needs = []
        for k, node in enumerate(nodes):
            read = {writer[value] for value in node.reads if value in writer}
            if isinstance(node.op, Recv):
                sent = [value.rpartition("#")[0] for value in node.writes]
                read |= {writer[value] for value in sent if value in writer}
            elif isinstance(node.op, Compute) and node.op.chunk in forward:
                read.add(forward[node.op.chunk])
            needs.append(read - {k})
        return needs

    @cached_property
    def _first(self) -> Mapping[str, tuple[int, int]]:
        """Return for each role its first forward, and the backward of the same chunk that passes gradients on."""
        number = {id(node): k for k, node in enumerate(self._nodes)}
        first: dict[str, tuple[int, int]] = {}
        for k, node in enumerate(self._nodes):
            if isinstance(node.op, Compute) and node.op.step == "F" and node.role not in first:
                back = [n for step in ("B", "I") for n in self.graph.compute(node.op.chunk, step)]
                if back:
                    first[node.role] = k, number[id(back[0])]
        return first

    @cached_property
    def _trained(self) -> tuple[int, int] | None:
        """Return the forward and the last backward of the first chunk whose parameters are trained, if there is one."""
        number = {id(node): k for k, node in enumerate(self._nodes)}
        for chunk in self.graph.program.chunks:
            if any(sig.accumulates for sig in chunk.steps.values()):
                last = [n for step in ("B", "W") for n in self.graph.compute(chunk.id, step)]
                forward = self.graph.compute(chunk.id, "F")[0]
                return (number[id(forward)], number[id(last[0])]) if last else None
        return None

    def seconds(self, seconds: Seconds, microbatches: int) -> float:
        """Return the least seconds of a step of so many microbatches; 0.0 if no parameters are trained."""
        if self._trained is None:
            return 0.0
        begin, end = self._trained
        took = [seconds(n) if isinstance(n.op, Compute) else 0.0 for n in self._nodes]
        filled = self._longest(begin, took, forward=True)
        drained = self._longest(end, took, forward=False)
        least = 0.0
        for role, (first, back) in self._first.items():
            if filled[first] < 0 or drained[back] < 0:
                continue
            between = self._from(first) & self._to(back)
            busy = sum([took[k] for k in between if self._nodes[k].role == role])
            around = filled[first] - took[first] + drained[back] - took[back]
            least = max(least, around + microbatches * busy)
        return least

    def _longest(self, start: int, took: Sequence[float], *, forward: bool) -> list[float]:
        """Return for each node the seconds of the longest path from the start to it, or from it to the start.

        Both ends count. It is negative if there is no path.
        """
        longest = [-1.0] * len(took)
        longest[start] = took[start]
        if forward:
            for k, reads in enumerate(self._reads):
                best = max([longest[other] for other in reads], default=-1.0)
                if best >= 0:
                    longest[k] = max(longest[k], best + took[k])
            return longest
        for k in reversed(range(len(took))):
            if longest[k] >= 0:
                for other in self._reads[k]:
                    longest[other] = max(longest[other], longest[k] + took[other])
        return longest

    def _from(self, start: int) -> set[int]:
        """Return a node and all that need it."""
        found = {start}
        for k in range(start + 1, len(self._nodes)):
            if not found.isdisjoint(self._reads[k]):
                found.add(k)
        return found

    def _to(self, end: int) -> set[int]:
        """Return a node and all that it needs."""
        found, todo = {end}, [end]
        while todo:
            more: Iterable[int] = [k for k in self._reads[todo.pop()] if k not in found]
            found.update(more)
            todo += more
        return found
