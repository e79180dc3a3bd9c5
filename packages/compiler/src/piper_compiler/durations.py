"""Give canonical durations, so that the compiler can order work when no cluster is known.

They decide ties and the points at which values are freed, never results: any durations give a legal plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan_bytes import state_message_bytes
from piper_ir.program.costs import Costs
from piper_ir.program.ops import Collective, Compute, Op
from piper_ir.program.program import Chunk, Cost, Signature, Step

FLOPS = 3e14
"""The FLOP/s of a nominal accelerator: about the rate of dense bf16 matrix products on an A100-class device."""
BANDWIDTH = 2e12
"""The bytes/s of the nominal accelerator's memory."""
LINK = 1e11
"""The nominal bytes/s between devices."""
HOST_LINK = 2.5e10
"""The nominal bytes/s between a device and its host, each way: about the rate of 16 lanes of PCIe 4."""


def chunk_seconds(chunk: Chunk, step: Step, costs: Costs | None = None) -> float:
    """Return the seconds of one step of a chunk with bound sizes: those given, else from `costs`, else nominal.

    The seconds of collectives inside of the step, between devices that share it, are added.
    """
    known, sig = _known(chunk, step, costs), chunk.steps[step]
    return (nominal(sig.cost) if known is None else known) + inside_seconds(sig)


def nominal(cost: Cost) -> float:
    """Return the seconds of a step by its FLOPs and bytes on the nominal accelerator."""
    return max(cost.flops / FLOPS, cost.bytes / BANDWIDTH)


def inside_seconds(sig: Signature) -> float:
    """Return the seconds for which a step waits for collectives between devices that share it; sizes must be bound."""
    beside = {o.number: nominal(o.beside) for o in sig.overlaps}
    return sum(
        [
            max(0.0, collective_seconds(bind(c.nbytes, 0)) - beside.get(k, 0.0))
            for k, c in enumerate(sig.collectives)
        ]
    )


def _known(chunk: Chunk, step: Step, costs: Costs | None) -> float | None:
    given = chunk.steps[step].cost.seconds
    if given is not None or costs is None:
        return given
    known = costs.of_compute(chunk.id, step, chunk.cost_code(step))
    return None if known is None else known.seconds


SCALAR_BYTES = 8
"""The bytes up to which a message counts as a number, which takes no time beside computation."""


def collective_seconds(nbytes: int) -> float:
    """Return the seconds of a collective between nominal devices whose message has this many bytes."""
    return nbytes / LINK if nbytes > SCALAR_BYTES else 0.0


def collective_bytes(graph: Graph, node: Node, op: Collective, rows: int) -> int:
    """Return the bytes of a collective's message, its whole tensor, at this many rows per microbatch."""
    if op.bucket:
        return state_message_bytes(graph.buckets[op.bucket], op, graph.mesh)
    return bind(
        graph.values[(node.reads if op.law.reads == "whole" else node.writes)[0]].spec.nbytes, rows
    )


class InstructionSeconds:
    """Give the seconds of a plan's instructions without a cluster.

    If the chunks have given durations, collectives take no time.
    """

    def __init__(self, chunks: Iterable[Chunk], costs: Costs | None = None) -> None:
        listed = list(chunks)
        self._steps: dict[tuple[str, str], float] = {}
        unknown: dict[int, float] = {}  # by the id of a cost, which equal layers share
        inside: dict[int, float] = {}  # by the id of the value that is exchanged
        for chunk in listed:
            for step, sig in chunk.steps.items():
                seconds = _known(chunk, step, costs)
                if seconds is None and (seconds := unknown.get(id(sig.cost))) is None:
                    seconds = unknown[id(sig.cost)] = nominal(sig.cost)
                if sig.collectives:
                    if (key := id(sig.collectives)) not in inside:
                        inside[key] = inside_seconds(sig)
                    seconds += inside[key]
                self._steps[chunk.variant, step] = seconds
        self._given = not listed or listed[0].steps["F"].cost.seconds is not None

    def compute(self, ops: Iterable[Op]) -> float:
        """Return the seconds of an instruction with parts of these ops: the sum over its steps of chunks."""
        return sum([self._steps[(op.variant, op.step)] for op in ops if isinstance(op, Compute)])

    def step(self, chunk: str, step: Step) -> float:
        """Return the seconds of one step of a chunk, or of its variant with that name."""
        return self._steps[chunk, step]

    def transfer(self, nbytes: int) -> float:
        """Return the seconds of a Send or Recv of this many bytes."""
        return nbytes / LINK

    def collective(self, nbytes: int) -> float:
        """Return the seconds of a collective with a message of this size."""
        return 0.0 if self._given else collective_seconds(nbytes)

    def host_copy(self, nbytes: int) -> float:
        """Return the seconds of a copy of this size between a device and its host."""
        return nbytes / HOST_LINK


@dataclass(frozen=True, slots=True)
class BoundChunks:
    """Hold a program's chunks at the size at which they run.

    Attributes:
        by_name: the chunks, and their variants by the names of these.
        rows: the rows of one microbatch on one rank.
        seconds: the durations of their steps.
    """

    by_name: Mapping[str, Chunk]
    rows: int
    seconds: InstructionSeconds
