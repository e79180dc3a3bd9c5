"""Describe the dropless experts of a chunk's steps, with the work of a further round, which no graph of a step shows.

`piper_ops.experts.rounds` runs further rounds inside of operators and keeps nothing of them. So a round of a step runs
again the nodes that stand, for round 0, between the rows' coming and going in the graphs of the steps:

    F, R   rows there, the experts, results back
    I      rows and gradients there, the experts, the gradients of rows, these back
    W      rows and gradients there, the experts, the gradients inside of them, those of the matrices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from torch import fx

from piper_capture.graphs.closures import ancestors
from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.steps import kernels
from piper_capture.values import aliasing
from piper_ir.program.program import Cost, ExpertRegion, Kernel, Step
from piper_ops import (
    ROUNDS,
    experts_give,
    experts_home,
    experts_send,
    experts_take,
)

TRADES = (experts_send, experts_take, experts_give, experts_home)
"""The operators that bring rows into and out of the places for them."""


def has_experts(graph: fx.Graph) -> bool:
    """Return whether devices share dropless experts in a graph."""
    return bool(_calls(graph, *TRADES, *ROUNDS))


def expert_regions(steps: Mapping[Step, StepGraph]) -> dict[Step, ExpertRegion]:
    """Return the dropless experts of each step of a chunk, at concrete sizes; none if devices share none in it."""
    sends = _calls(steps["F"].graph, experts_send)
    if not sends:
        return {}
    came = _calls(steps["F"].graph, experts_take)[0].all_input_nodes[0]
    places = prod(aliasing.tensor(came).shape[:2])
    # devices that cut each expert compute the rows of all of them
    cut_by = places // prod(aliasing.tensor(sends[0]).shape[:2])
    rows = cut_by * aliasing.tensor(sends[0].all_input_nodes[0]).shape[0]
    return {step: ExpertRegion(rows, places, Cost(tuple(_round(step, steps)))) for step in steps}


def _round(step: Step, steps: Mapping[Step, StepGraph]) -> Iterator[Kernel]:
    """Yield the kernels of a further round that fills all places; none if the step runs no further rounds."""
    if not any(node.target in ROUNDS for node in steps[step].graph.nodes):
        return
    forward, backward = steps["F"].graph, steps["I"].graph
    there = kernels.cost(_calls(forward, experts_send, experts_take)).kernels
    yield from (*there, *kernels.cost(_results(forward)).kernels)
    if step in ("F", "R"):
        for back in kernels.cost(_calls(forward, experts_give)).kernels:
            yield from (back, replace(back, op="experts_home"))
    elif step == "I":
        yield from kernels.cost((*_gradients(backward), *_calls(backward, *TRADES))).kernels
    else:
        yield from (*there, *kernels.cost(_gradients_inside(steps["I"])).kernels)
        of_matrices = kernels.cost(steps["W"].graph.nodes).kernels
        yield from (kernel for kernel in of_matrices if kernel.rows_dim is not None)


def _results(forward: fx.Graph) -> list[fx.Node]:
    """Return the nodes that make the experts' results from the rows that came and from matrices."""
    before = ancestors(_calls(forward, experts_take))
    inside = ancestors(n for give in _calls(forward, experts_give) for n in give.all_input_nodes)
    return [node for node in forward.nodes if node in inside - before]


def _gradients(backward: fx.Graph) -> list[fx.Node]:
    """Return the nodes that make gradients of the rows from gradients of the results, which come in I."""
    came = _calls(backward, experts_take)
    inside = ancestors(n for give in _calls(backward, experts_give) for n in give.all_input_nodes)
    return [n for n in backward.nodes if n in inside and came[0] in ancestors(n.all_input_nodes)]


def _gradients_inside(step: StepGraph) -> list[fx.Node]:
    """Return the values that gradients of matrices need: none of the last ones, none of the rows, nor their sum."""
    written = zip(step.writes, step.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]  # a tuple
    needed = ancestors(node for port, node in written if port.startswith("iw"))
    return [n for n in _gradients(step.graph) if n in needed]


def _calls(graph: fx.Graph, *ops: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in ops]
