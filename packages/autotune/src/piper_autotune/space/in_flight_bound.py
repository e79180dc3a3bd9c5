"""Bound the memory at the moment when most microbatches of some chunks are forward and not yet backward.

Two instructions run at that moment: the last forward, after which all is kept, and the first backward, before which
nothing of it is freed. Each holds whole buckets, and the backward may begin with making tensors again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from piper_autotune.space.flights import ChunkGroup
from piper_autotune.space.whole_buckets import WholeBuckets
from piper_compiler import AGAIN, steps_of
from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.sizes import bind
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Step


@dataclass(frozen=True)
class ChunkRun:
    """Hold how a chunk runs: the variant, its forward, and the nodes of its backward in their order."""

    chunk: Chunk
    forward: Node
    backward: tuple[Node, ...]

    @property
    def steps(self) -> list[Step]:
        """Return the steps of its backward, with R if that begins it."""
        return [step for node in self.backward for step in _steps(self.chunk, node)]

    @property
    def kept(self) -> dict[str, str]:
        """Return by value the ports that live from F to the backward: F has them, and the backward reads them.

        If values are recomputed for the next chunk of a group, the backward reads these; they and inputs are left out.
        """
        first = self.chunk.steps["F"]
        read = {port for step in self.steps for port in self.chunk.steps[step].reads}
        inputs = [
            (f"in{k}", entry.ref)
            for k, entry in enumerate(self.chunk.inputs)
            if entry.kind == "value"
        ]
        outputs = [
            (f"out{k}", f"{self.chunk.id}:out{k}")
            for k, o in enumerate(self.chunk.outputs)
            if o.kind == "value"
        ]
        again = {v.removesuffix(AGAIN) for n in self.backward for v in n.reads if v.endswith(AGAIN)}
        had = {*first.reads, *first.writes}
        return {
            value: port
            for port, value in [*([] if again else inputs), *outputs]
            if port in had and port in read and value not in again
        }


class FullestMoment:
    """Find the bytes at the fullest moment of groups of chunks on one role, by how many microbatches are in flight.

    `chunks` are the variants by name, for microbatches of `rows` rows.
    """

    def __init__(
        self, graph: Graph, buckets: WholeBuckets, chunks: Mapping[str, Chunk], rows: int
    ) -> None:
        self._graph, self._buckets, self._chunks, self._rows = graph, buckets, chunks, rows

    def bytes_of(self, groups: Iterable[ChunkGroup]) -> int:
        """Return a lower bound of the bytes beside states: saved tensors, values between chunks, and whole buckets."""
        runs = [([run for id in ids if (run := self._run(id)).backward], n) for ids, n in groups]
        runs = [(own, most) for own, most in runs if own]
        if not runs:
            return 0
        # a value that two groups read is there as long as the longer of them
        values: dict[str, int] = {}
        for own, most in runs:
            for run in own:
                for value, port in run.kept.items():
                    filled = most * self._size(run.chunk, port)
                    values[value] = max(values.get(value, 0), filled)
        saved = sum(
            most * sum([saved_bytes(run.chunk, self._rows) for run in own]) for own, most in runs
        )
        last = min(self._last_forward(own) for own, _ in runs)
        first = min(self._first_backward(own) for own, _ in runs)
        return sum(values.values()) + saved + max(last, first)

    def bytes_for_weights(self, groups: Iterable[ChunkGroup]) -> int:
        """Return the bytes that the weight gradients of so many microbatches wait with, beside states."""
        return sum(
            most * sum([saved_bytes(self._run(id).chunk, self._rows, weights=True) for id in ids])
            for ids, most in groups
        )

    def _run(self, id: str) -> ChunkRun:
        forward = self._graph.compute(id, "F")[0]
        backward = [node for step in ("B", "I", "W") for node in self._graph.compute(id, step)]
        assert isinstance(forward.op, Compute)
        return ChunkRun(self._chunks[forward.op.variant], forward, tuple(backward))

    def _last_forward(self, runs: list[ChunkRun]) -> int:
        """Return the least bytes of whole buckets of a forward that may be the last: no other reads its writes."""
        read = {v for run in runs for v in run.forward.reads}
        last = [run.forward for run in runs if not read.intersection(run.forward.writes)]
        return min([self._buckets.bytes_in(self._buckets.use(node)) for node in last], default=0)

    def _first_backward(self, runs: list[ChunkRun]) -> int:
        """Return the least bytes, beside microbatches in flight, of a backward that may be the first.

        That is one which reads no other's result.
        """
        written = {v for run in runs for node in run.backward for v in node.writes}
        first = [run for run in runs if not written.intersection(run.backward[0].reads)]
        return min(map(self._beginning, first), default=0)

    def _beginning(self, run: ChunkRun) -> int:
        """Return the bytes that a backward holds at its beginning: recomputed tensors, less values that may die."""
        node, chunk = run.backward[0], run.chunk
        whole = self._buckets.bytes_in(self._buckets.use(node))
        if "R" not in _steps(chunk, node):
            return whole
        dying = sum([self._size(chunk, port) for port in run.kept.values()])
        return whole + max(
            0, sum([self._size(chunk, port) for port in chunk.steps["R"].writes]) - dying
        )

    def _size(self, chunk: Chunk, port: str) -> int:
        return bind(chunk.ports[port].nbytes, self._rows)


def saved_bytes(chunk: Chunk, rows: int, *, weights: bool = False) -> int:
    """Return the bytes that a chunk's forward keeps for its backward, per microbatch.

    With `weights` it is what all before the weight gradient keeps for that.
    """
    writing: tuple[Step, ...] = ("F", "R", "I") if weights else ("F",)
    reading: tuple[Step, ...] = ("W",) if weights else ("I", "W")
    read = {port for step in reading if step in chunk.steps for port in chunk.steps[step].reads}
    written = {port for step in writing if step in chunk.steps for port in chunk.steps[step].writes}
    kept = [port for port in written & read if port.startswith(("saved", "iw"))]
    return sum(bind(chunk.ports[port].nbytes, rows) for port in kept)


def _steps(chunk: Chunk, node: Node) -> tuple[Step, ...]:
    op = node.op
    assert isinstance(op, Compute), "backward nodes run steps"
    return steps_of(chunk, op.step, op.apart)
