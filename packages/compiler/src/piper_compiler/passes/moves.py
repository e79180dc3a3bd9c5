"""Add an exchange to each edge between experts and the rest of a model, forward and backward alike.

A value is exchanged once for all who read it on a role. It is exchanged where it is read: what comes from another role
is received first.
"""

from __future__ import annotations

from piper_ir.errors import CompileError
from piper_ir.graph import Editor, Graph, Node
from piper_ir.graph_parts import GraphValue, common, in_mbs, without
from piper_ir.ops import COMM, Collective
from piper_ir.plan import Channel


def check_exchanges(graph: Graph) -> None:
    """Raise CompileError where rows are not shared out along the axis of an exchange, or exchanges are missing."""
    if lost := [axis for axis, _ in graph.program.experts if axis not in graph.exchanges]:
        raise CompileError(f"the program was made for devices that share experts over {lost[0]}; compile its job, or keep shard")
    over = {a for r in graph.replication.values() for a in r.over}
    for axis in graph.exchanges:
        if axis not in over:
            raise CompileError(
                f"devices share experts over {axis} (by shard), and each has rows of its own elsewhere: name {axis} in "
                f"replicate, too, as in replicate(where(), over={(*sorted(over), axis)!r})"
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


def _connect(edit: Editor, node: Node, value: str) -> None:
    """Let a node read an exchanged value where its writer is on the other side."""
    here = _side(edit, node)
    for writer, mbs in list(edit.writers_of(value, node.mbs)):
        there = _side(edit, writer)
        if here != there:
            copy = _exchanged(edit, value, in_mbs(writer, mbs), node.role, here or there)
            edit.reread(in_mbs(node, mbs), value, copy)


def _exchanged(edit: Editor, value: str, writer: Node, role: str, axis: str) -> str:
    """Return the id of the value after its exchange, which is added on first use."""
    held, copy = edit.values[value], f"{value}#{axis}"
    edit.values[copy] = GraphValue(held.spec, held.category, f"{held.tail}#{axis}")
    mbs = writer.mbs
    for _, known in list(edit.writers_of(copy, mbs)):
        shared = common(mbs, known)
        mbs = None if mbs is None or shared is None else without(mbs, shared)
        if not mbs:
            return copy
    stream = edit.graph.exchanges[axis]
    id = f"{axis}.{role}.{stream.stream}"
    sms = () if stream.sms is None else (stream.sms,)
    edit.channels.setdefault(id, Channel(id, "group", (role,), (stream.stream,), (axis,), "expert", sms))
    coords = {**writer.coords, "op": "alltoall"}
    op = Collective("all_to_all", id)
    edit.add(Node(f"move.{copy}", op, coords, (value,), (copy,), role, stream.stream, mbs, f"{held.tail}#{axis}"))
    return copy
