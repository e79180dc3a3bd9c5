"""Find the collectives inside of a step, and write them as code."""

from __future__ import annotations

from typing import Any

from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture._torch_joint import OpOverload
from piper_compiler.capture.stepgraph import StepGraph
from piper_ir.layout import StepCollective
from piper_ops import ROUNDS, all_gather, all_reduce, all_reduce_, all_to_all, reduce_scatter, shift

KINDS: dict[Any, str] = {
    all_reduce: "all_reduce",
    all_reduce_: "all_reduce",
    all_gather: "all_gather",
    reduce_scatter: "reduce_scatter",
    all_to_all: "all_to_all",
    shift: "shift",
}
"""The ops that stand for collectives, each with its kind."""


def inside(graph: StepGraph) -> tuple[StepCollective, ...]:
    """Return the collectives of a step in their order, with the bytes of the whole tensor."""
    return tuple(_described(n) for n in graph.graph.nodes if n.target in KINDS or n.target in ROUNDS)


def _described(node: fx.Node) -> StepCollective:
    if node.target in ROUNDS:  # how often they meet, only a run knows: a plan counts on none
        return StepCollective("all_to_all", str(node.args[5]), 0, "further rounds of experts")
    given, axis = node.args[0], node.args[1]
    assert isinstance(given, fx.Node) and isinstance(axis, str)
    whole = node if KINDS[node.target] == "all_gather" else given
    return StepCollective(KINDS[node.target], axis, aliasing.tensor(whole).nbytes, str(node.meta.get("exchange_for", "")))


def meeting(op: OpOverload, arguments: str) -> str:
    """Return the text of an op that runs as many collectives as it needs: a call of a function that gets EXCHANGE."""
    return f"ROUNDS[{op._schema.name!r}](EXCHANGE, {arguments})"


def call(op: OpOverload, source: str, axis: object) -> str:
    """Return the text of a collective: a call of what the engine gives the code as EXCHANGE, which adds up in place."""
    if op is all_reduce:
        source = f"{source}.clone(memory_format=torch.contiguous_format)"
    return f"EXCHANGE({KINDS[op]!r}, {axis!r}, {source})"
