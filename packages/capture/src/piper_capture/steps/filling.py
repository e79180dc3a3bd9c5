"""Put operations beside collectives that nothing waits for yet, such as a shared expert beside the exchange of rows.

    F   rows to experts | a part of the shared expert | the experts | results back | the rest of it | their sum

The collectives that `FILLED` marks start as early as data allow: the operations that make their operands come first.
Behind each stand operations that neither need it, nor are needed for a later collective. Several collectives share
these out by FLOPs. `piper_capture.graphs.posting` then puts the waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from piper_capture.graphs.closures import ancestors
from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.steps.kernels import flops_of
from piper_ops import COLLECTIVE_KINDS, ROUNDS

FILLED = "filled"
"""The key of the meta of a collective beside which a step computes whatever else it can."""


def fill(step: StepGraph) -> None:
    """Reorder the operations of a step with marked collectives."""
    nodes = [n for n in step.graph.nodes if n.op == "call_function"]
    if any(FILLED in n.meta for n in nodes):
        last = next(n for n in step.graph.nodes if n.op == "output")
        for node in _ordered(nodes):
            last.prepend(node)


def _ordered(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the operations in another order that data allow."""
    done: dict[fx.Node, None] = {}
    stops = [n for n in nodes if n.target in COLLECTIVE_KINDS or n.target in ROUNDS]
    left = sum(FILLED in n.meta for n in stops)
    for number, stop in enumerate(stops):
        needed = ancestors([stop])
        done.update(dict.fromkeys(n for n in nodes if n in needed))
        if FILLED in stop.meta:
            free = _free(nodes, done, stops[number:])
            total, taken = sum(map(flops_of, free)), 0
            for node in free:
                if taken * left >= total:
                    break
                done[node] = None
                taken += flops_of(node)
            left -= 1
    return [*done, *(n for n in nodes if n not in done)]


def _free(nodes: Iterable[fx.Node], done: Iterable[fx.Node], stops: list[fx.Node]) -> list[fx.Node]:
    """Return the operations left that neither need these collectives nor are needed for one of them."""
    made, later = set(done), ancestors(stops)
    waiting = set(stops)
    free = []
    for node in nodes:
        if waiting.intersection(node.all_input_nodes):
            waiting.add(node)
        elif node not in made and node not in later:
            free.append(node)
    return free
