"""Find the collectives inside of a step, and write them as code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from textwrap import indent
from typing import Any

from torch import fx

from piper_capture.graphs.posting import between
from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.steps import kernels
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_ir.program.layout import StepCollective
from piper_ir.program.program import OverlappedCollective
from piper_ops import (
    ANY_ROWS,
    AXIS,
    BODY,
    COLLECTIVE_KINDS,
    ROUNDS,
    WITHIN,
    all_reduce,
    experts_further_dgrad_,
    experts_return,
    experts_return_dgrad,
    wait,
)


def inside(graph: StepGraph) -> tuple[StepCollective, ...]:
    """Return the collectives of a step in order, with the bytes of the unsharded tensor."""
    return tuple(one for _, collectives in _by_node(graph) for one in collectives)


def overlapped(graph: StepGraph) -> tuple[OverlappedCollective, ...]:
    """Return the collectives that are under way while a step computes, with the kernels beside each."""
    nodes = [node for node, collectives in _by_node(graph) for _ in collectives]
    return tuple(
        OverlappedCollective(number, kernels.cost(between(node, waiting)))
        for number, node in enumerate(nodes)
        if (waiting := _wait_of(node)) is not None
    )


def _by_node(graph: StepGraph) -> list[tuple[fx.Node, list[StepCollective]]]:
    """Return the nodes of a step with collectives, in order."""
    collectives = []
    for node in graph.graph.nodes:
        if node.target in COLLECTIVE_KINDS:
            collectives.append((node, [_described(node)]))
        elif node.target in ROUNDS:
            collectives.append((node, _of_further_rounds(node)))
    return collectives


def _wait_of(node: fx.Node) -> fx.Node | None:
    """Return the wait for a collective that the step only starts; None for another one."""
    return next((user for user in node.users if user.target is wait), None)


def _described(node: fx.Node) -> StepCollective:
    source, axis = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(axis, str)
    assert isinstance(node.target, OpOverload)
    kind, why = COLLECTIVE_KINDS[node.target], str(node.meta.get("exchange_for", ""))
    nbytes = aliasing.tensor(node if kind == "all_gather" else source).nbytes
    return StepCollective(kind, axis, nbytes, why)


def _of_further_rounds(node: fx.Node) -> list[StepCollective]:
    """Return the messages of a further round: rows there, then results back, or gradients there and back.

    Where devices cut each expert, rows are gathered after each all-to-all there, and sums are scattered before one
    back. The number of rounds is known only in a run: a plan counts none.
    """
    other, rows = (aliasing.tensor(n) for n in node.args[:2])  # type: ignore[arg-type]  # nodes
    there, back = rows.nbytes, rows.shape[0] * other.shape[-1] * other.element_size()
    axis, within = str(node.args[AXIS]), str(node.args[WITHIN])
    devices = aliasing.tensor(node.args[3]).shape[0] if within else 1  # type: ignore[arg-type]  # a node
    cut_there, cut_back = (
        [(kind, within, devices)] * bool(within) for kind in ("all_gather", "reduce_scatter")
    )
    exchange = ("all_to_all", axis, 1)
    out, home = [exchange, *cut_there], [*cut_back, exchange]
    each = [*((there, *one) for one in out), *((back, *one) for one in out)]  # of a gradient
    if node.target is experts_return:
        each[len(out) :] = [(back, *one) for one in home]
    elif node.target in (experts_return_dgrad, experts_further_dgrad_):
        each += [(there, *one) for one in home]
    return [
        StepCollective(kind, over, 0, "further rounds of experts", nbytes * times)
        for nbytes, kind, over, times in each
    ]


def meeting(op: OpOverload, texts: Sequence[str], args: Sequence[Any]) -> str:
    """Return the text of an op that runs several collectives: a call of a function of ROUNDS, which gets EXCHANGE.

    `texts` are those of its arguments `args`; the body is the one that `bodies` defines.
    """
    arguments = ", ".join([*texts[:BODY], _body_name(args[BODY]), *texts[BODY + 1 :]])
    return f"ROUNDS[{op._schema.name!r}](EXCHANGE, {arguments})"


def bodies(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the lines that define the experts' computation for ops that run further rounds of it.

    Its ops are bound inside of a function: autograd derives its gradients, so they stay ops where kernels are called
    directly.
    """
    sources = dict.fromkeys(str(node.args[BODY]) for node in nodes if node.target in ROUNDS)
    lines = ["", "from piper_ops import ExpertBody"] if sources else []
    for source in sources:
        name = _body_name(source)
        inner = indent(source.removesuffix(ANY_ROWS), "    ").splitlines()
        lines += ["", "", f"def _{name}():", *inner, "    return step"]
        lines += ["", "", f"{name} = ExpertBody(_{name}(), any_rows={source.endswith(ANY_ROWS)})"]
    return lines


def _body_name(source: str) -> str:
    return f"experts_{sha256(source.encode()).hexdigest()[:8]}"


def call(node: fx.Node, source: str) -> str:
    """Return the text of a collective: a call of the engine's function EXCHANGE, which all-reduces in place.

    One that is only started is a call of POST, whose result is a function that waits.
    """
    op, axis, degree = node.target, *node.args[1:]
    assert isinstance(op, OpOverload)
    if op is all_reduce:
        source = f"{source}.clone(memory_format=torch.contiguous_format)"
    if _wait_of(node) is not None:
        return f"POST({COLLECTIVE_KINDS[op]!r}, {axis!r}, {degree}, {source})"
    return f"EXCHANGE({COLLECTIVE_KINDS[op]!r}, {axis!r}, {source})"
