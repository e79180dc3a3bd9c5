"""Check that each step gets the inputs that its chunk asks for, before a plan is made of a graph and on its chunks.

These rules of `piper_ir.verify` do not depend on the strategy, but on how capture and passes have joined chunks. A node
stands for all microbatches with the same work, so the check takes little of the time to compile. Rules about the order
of instructions are left to `verify`, which a run calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from piper_compiler.ports import AGAIN, port_value, value_reads
from piper_ir.graph.graph import Graph
from piper_ir.graph.graph_parts import Mbs
from piper_ir.ground.errors import CompileError
from piper_ir.ground.node_ids import send_id
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Add, Collective, Compute, Recv
from piper_ir.program.program import Chunk
from piper_ir.verify import check_joined

AxisNames = frozenset[str]
SummedValue = tuple[str, AxisNames, AxisNames]
"""A value, the axes that it is summed over, and the axes along which it was exchanged with experts."""
NOWHERE: AxisNames = frozenset()
ADVICE = (
    "This is a defect of Piper, or of a directive of your own; please report it, with the "
    "strategy. Others may be right"
)


def check_wiring(graph: Graph) -> None:
    """Raise CompileError if a step reads another value than its chunk asks for, as rule R27 has it of a plan."""
    asked = _Asked(graph)
    for mb in _unlike(graph):
        values = _Values(graph, range(mb, mb + 1))
        for node in graph.sequence:
            if isinstance(node.op, Compute) and node.mbs is not None and mb in node.mbs:
                for value, (port, wanted) in zip(node.reads, asked.of(node.op), strict=True):
                    if (actual := values.terms(value)) != wanted:
                        text = (
                            f"{node.name(mb)} reads {_named(actual)} as {port}, and its chunk asks "
                            f"for {_named(wanted)}"
                        )
                        raise CompileError(
                            f"the plan would not be valid: {text}. {ADVICE}", (node.op.chunk,)
                        )


def check_chunks(plan: Plan) -> None:
    """Raise CompileError if the chunks of a plan do not fit each other, by the rules of `check_joined`."""
    for violation in check_joined(plan)[:1]:
        raise CompileError(f"the plan would not be valid: {violation}. {ADVICE}")


def _unlike(graph: Graph) -> Iterator[int]:
    """Yield one microbatch of each kind: microbatches of a kind are in the same nodes."""
    each = {node.mbs: node.each for node in graph.sequence if node.mbs is not None}
    seen: set[tuple[bool, ...]] = set()
    for mb in range(graph.microbatches):
        kind = tuple(mb in mbs for mbs in each.values())
        if kind not in seen:
            seen.add(kind)
            yield mb


class _Values:
    """Follow the values of a microbatch back to the steps that write them, through sends, sums and collectives."""

    def __init__(self, graph: Graph, mbs: Mbs) -> None:
        self._graph, self._mbs = graph, mbs
        self._known: dict[str, Counter[SummedValue]] = {}

    def terms(self, value: str) -> Counter[SummedValue]:
        """Return the terms that a value is the sum of, each with its count."""
        counts = self._known.get(value)
        if counts is None:
            counts = self._known[value] = self._terms(value)
        return counts

    def _terms(self, value: str) -> Counter[SummedValue]:
        node = next((node for node, _ in self._graph.writers_of(value, self._mbs)), None)
        match None if node is None else node.op:
            case Recv():
                senders = self._graph.families[send_id(value)]
                (sent,) = (
                    n.reads[0] for n in senders if n.mbs is not None and self._mbs[0] in n.mbs
                )
                return self.terms(sent)
            case Add() if node is not None:
                return sum((self.terms(read) for read in node.reads), Counter())
            case Collective(kind=kind, channel=channel, bucket="") if node is not None:
                over = frozenset(
                    a for a in self._graph.channels[channel].over if self._graph.mesh.size(a) > 1
                )
                (read,) = node.reads
                read_terms = self.terms(read).items()
                if kind == "all_reduce":
                    return Counter(
                        {(id, summed | over, traded): n for (id, summed, traded), n in read_terms}
                    )
                return Counter(
                    {(id, summed, traded | over): n for (id, summed, traded), n in read_terms}
                )
            case _:
                # an output that R makes again is the same value
                return Counter([(value.removesuffix(AGAIN), NOWHERE, NOWHERE)])


class _Asked:
    """Find the values that the ports of steps ask for: another chunk's output, or the gradients of all its readers."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._tangents = graph, _tangents(graph)
        self._known: dict[Compute, tuple[tuple[str, Counter[SummedValue]], ...]] = {}
        self._trades = {c.id: c.trades for c in graph.program.chunks}

    def of(self, op: Compute) -> tuple[tuple[str, Counter[SummedValue]], ...]:
        """Return the ports whose values a step reads, in order, each with the terms that it asks for."""
        asked = self._known.get(op)
        if asked is None:
            chunk = self._graph.program.chunk(op.variant)
            ports = value_reads(chunk, op.step, op.apart)
            asked = self._known[op] = tuple(
                (port, Counter(self._terms(chunk, port))) for port in ports
            )
        return asked

    def _terms(self, chunk: Chunk, port: str) -> Iterator[SummedValue]:
        value = port_value(chunk, port)
        if port.startswith("in") and chunk.inputs[int(port[2:])].kind == "value":
            yield self._term(chunk, value)
        elif port.startswith("tan") and chunk.outputs[int(port[3:])].kind != "loss":
            yield from (self._term(chunk, gradient) for gradient in self._tangents.get(value, ()))
        else:
            yield value, NOWHERE, NOWHERE

    def _term(self, reader: Chunk, value: str) -> SummedValue:
        """Return a value of another chunk as its reader sees it.

        It is summed up, or exchanged if one of the two is of experts.
        """
        id, _, port = value.rpartition(":")
        traded = {self._trades[reader.id], self._trades[id]}
        terms = dict(self._graph.program.chunk(id).terms).get(port, ())
        over = frozenset(a for a in terms if self._graph.mesh.size(a) > 1)
        return value, over, frozenset(traded - {""}) if len(traded) > 1 else NOWHERE


def _tangents(graph: Graph) -> dict[str, list[str]]:
    """Return for each output's tangent the gradients that the readers of the output write."""
    gradients_by_tangent: dict[str, list[str]] = {}
    for chunk in graph.program.chunks:
        written = {port for sig in chunk.steps.values() for port in sig.writes}
        for k, entry in enumerate(chunk.inputs):
            if entry.kind == "value" and f"gin{k}" in written:
                source, _, port = entry.ref.rpartition(":")
                gradients_by_tangent.setdefault(
                    f"{source}:tan{port.removeprefix('out')}", []
                ).append(f"{chunk.id}:gin{k}")
    return gradients_by_tangent


def _named(terms: Counter[SummedValue]) -> str:
    shown = [
        _name(*term) + f" {count} times" * (count > 1)
        for term, count in sorted(terms.items(), key=lambda t: t[0][0])
    ]
    return " + ".join(shown) or "nothing"


def _name(value: str, over: Iterable[str], traded: Iterable[str]) -> str:
    said = [f"summed over {', '.join(sorted(over))}"] if over else []
    said += [f"exchanged along {', '.join(sorted(traded))}"] if traded else []
    return " ".join([value, *said])
