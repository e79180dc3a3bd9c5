"""Add an exchange to each edge between chunks that need a value in different placements, forward and backward alike.

Tokens are exchanged between experts and the rest of a model by an all-to-all, and partial sums are all-reduced. A value
is exchanged once for all its readers on a role. The readers' role exchanges it: a value of another role is received
first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from piper_compiler.ports import AGAIN
from piper_ir.graph.graph import Editor, Graph, Node
from piper_ir.graph.graph_parts import GraphValue, common, in_mbs, without
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import whole_axis
from piper_ir.plan.plan import Channel
from piper_ir.program.ops import COMM, Collective, Compute, Recv


def check_exchanges(graph: Graph) -> None:
    """Raise CompileError if rows are not split along the axis of an exchange, or exchanges are missing."""
    if lost := [axis for axis, _ in graph.program.experts if axis not in graph.exchanges]:
        raise CompileError(
            f"the program was made for devices that share experts over {lost[0]}; compile its job, or keep shard"
        )
    over = {a for r in graph.replication.values() for a in r.over}
    experts = dict(graph.program.experts)
    check_rows_named([axis for axis in graph.exchanges if axis in experts], over)


def check_rows_named(axes: Iterable[str], over: Collection[str]) -> None:
    """Raise CompileError if `replicate`, which is over some axes, leaves out one along which rows differ."""
    for axis in axes:
        if axis not in over:
            raise CompileError(
                f"devices share experts over {axis} (by shard), and each has rows of its own elsewhere: name "
                f"{axis} in replicate, too, as in replicate(where(), over={(*sorted(over), axis)!r})"
            )


def exchange(graph: Graph) -> Graph:
    """Return the graph with its exchanges."""
    if not graph.exchanges:
        return graph
    edit = graph.edit()
    for node in graph.sequence:
        if not isinstance(node.op, COMM):
            for value in dict.fromkeys(node.reads):
                _connect(edit, node, value)
    return edit.done()


def _side(edit: Editor, node: Node) -> str:
    """Return the axis whose devices share the experts that a node computes; "" for all other nodes."""
    chunk = node.coords.get("chunk")
    return edit.graph.program.chunk(str(chunk)).trades if chunk is not None else ""


@dataclass(frozen=True)
class _Move:
    """Say along which axis a value is exchanged, and how.

    Attributes:
        over: the mesh axes of the ranks that take part: the parts of the axis, if it is split.
    """

    axis: str
    kind: str
    purpose: Literal["expert", "terms"]
    over: tuple[str, ...]
    coord: str


def _connect(edit: Editor, node: Node, value: str) -> None:
    """Let a node read an exchanged value if its writer has it in another placement."""
    here = _side(edit, node)
    for writer, mbs in list(edit.writers_of(value, node.mbs)):
        there = _side(edit, writer)
        move = (
            _Move(here or there, "all_to_all", "expert", (here or there,), "alltoall")
            if here != there
            else None
        )
        if (move := move or _sum(edit, writer, value)) is not None:
            copy = _exchanged(edit, value, in_mbs(writer, mbs), node.role, move)
            edit.reread(in_mbs(node, mbs), value, copy)


def _sum(edit: Editor, writer: Node, value: str) -> _Move | None:
    """Return the all-reduce of a value that is a partial sum; None for all other values.

    A value of another role is as it was sent, under the name of the sent value and a tail. A value that R makes again
    is as partial as the first one.
    """
    if not isinstance(writer.op, Compute | Recv):
        return None
    chunk, _, port = value.removesuffix(edit.values[value].tail).removesuffix(AGAIN).rpartition(":")
    over = (
        dict(edit.graph.program.chunk(chunk).terms).get(port, ())
        if chunk == writer.coords.get("chunk")
        else ()
    )
    return _Move(whole_axis(over[0]), "all_reduce", "terms", over, "allreduce") if over else None


def _exchanged(edit: Editor, value: str, writer: Node, role: str, move: _Move) -> str:
    """Return the id of the value after its exchange, which is added on first use."""
    axis = move.axis
    original, copy = edit.values[value], f"{value}#{axis}"
    edit.values[copy] = GraphValue(original.spec, original.category, f"{original.tail}#{axis}")
    mbs = writer.mbs
    for _, known in list(edit.writers_of(copy, mbs)):
        shared = common(mbs, known)
        mbs = None if mbs is None or shared is None else without(mbs, shared)
        if not mbs:
            return copy
    stream = edit.graph.exchanges[axis]
    id = f"{'+'.join(move.over)}.{role}.{stream.stream}"
    sms = () if stream.sms is None else (stream.sms,)
    edit.channels.setdefault(
        id, Channel(id, "group", (role,), (stream.stream,), move.over, move.purpose, sms)
    )
    coords = {**writer.coords, "op": move.coord}
    op = Collective(move.kind, id)
    edit.add(
        Node(
            f"move.{copy}",
            op,
            coords,
            (value,),
            (copy,),
            role,
            stream.stream,
            mbs,
            f"{original.tail}#{axis}",
        )
    )
    return copy
