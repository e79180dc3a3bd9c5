"""Add the collectives on the states of buckets that ranks hold together: all-gathers, reduce-scatters, all-reduces.

`order_messages` puts them into the orders that name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from piper_compiler.ports import trains
from piper_ir.graph.graph import At, Coord, Editor, Node
from piper_ir.graph.graph_parts import MessageOrder, OrderEnd
from piper_ir.ground.errors import CompileError
from piper_ir.ground.node_ids import compute_id
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Bucket
from piper_ir.program.ops import Cast, Collective, Fold

_ON_BUCKETS = {
    "gather": ("all_gather", "F"),
    "scatter": ("reduce_scatter", "B"),
    "reduce": ("all_reduce", "B"),
}
"""The collectives on whole buckets, by the name of their nodes: the kind, and the phase."""


def share(edit: Editor) -> None:
    """Add the all-gathers, reduce-scatters and folds of states that ranks shard.

    If states are sharded and parameters are not, the parameters are all-gathered once, at the start of a step: in the
    order of their first use, which is the reverse order of buckets. Whole gradients are reduce-scattered once they are
    complete. If gradients are sharded, the last fold of a bucket is a node too; `residency` adds the others. A role
    that only reads the parameters, without a gradient, has nothing to fold.
    """
    for bucket in reversed(list(edit.buckets.values())):
        if bucket.shard.optim and not bucket.shard.params:
            for role, channel in zip(bucket.roles, bucket.gather, strict=True):
                _on_bucket(edit, "gather", bucket, role, channel)
    added = _added_on(edit)
    for bucket in list(edit.buckets.values()):
        for role, channel in zip(bucket.roles, bucket.scatter, strict=bool(bucket.scatter)):
            if bucket.shard.grads and not any((role, name) in added for name in bucket.params):
                continue
            if bucket.shard.grads:
                coords = _coords("U", "fold", bucket)
                edit.add(Node(f"fold.{bucket.id}#{role}", Fold(bucket.id), coords, (), (), role))
            elif not bucket.casts:
                _on_bucket(edit, "scatter", bucket, role, channel)


def _added_on(edit: Editor) -> set[tuple[str, str]]:
    """Return the roles, each with a parameter to whose gradient a chunk on it adds."""
    return {
        (node.role, name)
        for chunk in edit.graph.program.chunks
        for node in edit.graph.families[compute_id(chunk.id, "F")]
        for name in trains(chunk)
    }


def reduce(edit: Editor) -> None:
    """Add one all-reduce per bucket and holder, for buckets that several ranks keep replicated."""
    for bucket in list(edit.buckets.values()):
        for number, role in enumerate(bucket.roles):
            if bucket.casts:
                _reduce_cast(edit, bucket, role, number)
            elif bucket.channel:
                _on_bucket(edit, "reduce", bucket, role, bucket.channel)


def _reduce_cast(edit: Editor, bucket: Bucket, role: str, number: int) -> None:
    """Add the reductions of a bucket that is summed in another dtype: of a cast, whose sum is folded back."""
    shard, mesh = bucket.shard, edit.graph.mesh
    scatters = [("scatter", bucket.scatter[number])] if shard.optim and not shard.grads else []
    numel = bucket.numel // mesh.degree(shard.grads)
    value = f"cast.{bucket.id}#{role}"
    kinds = [*scatters, *[("reduce", bucket.channel)] * bool(bucket.channel)]
    if not kinds:
        return
    edit.value(f"{value}:whole", TensorSpec((numel,), bucket.reduce_dtype), "reduced")
    coords = _coords("B", "cast", bucket)
    edit.add(Node(value, Cast(bucket.id), coords, (), (f"{value}:whole",), role))
    value = f"{value}:whole"
    for name, channel in kinds:
        read, value = value, f"{name}.{bucket.id}#{role}:sum"
        numel //= mesh.degree(shard.optim) if name == "scatter" else 1
        edit.value(value, TensorSpec((numel,), bucket.reduce_dtype), "reduced")
        _on_bucket(edit, name, bucket, role, channel, (read,), (value,))
    coords = _coords("U", "fold", bucket)
    edit.add(Node(f"fold.reduce.{bucket.id}#{role}", Fold(bucket.id), coords, (value,), (), role))


def order_messages(edit: Editor) -> None:
    """Add the edges of orders that name gathers or reductions; raise CompileError where there are none."""
    for one in edit.message_orders:
        role = one.role or next(iter(edit.roles))
        for pair in product(_ends(edit, role, one, one.before), _ends(edit, role, one, one.after)):
            if pair[0] != pair[1]:
                edit.order_edges.setdefault(pair, one.applied)
    edit.message_orders.clear()


_MESSAGES = {"gather": ("gather",), "reduce": ("scatter", "reduce")}
"""The names of nodes in `_ON_BUCKETS` that an order's word stands for."""


def _ends(edit: Editor, role: str, order: MessageOrder, end: OrderEnd) -> Iterable[At]:
    """Return the nodes of an end of an order."""
    if not end.chunks:
        return [(end.id, end.mb)]
    chunks = edit.graph.program.chunks
    params = {i.ref for c in chunks if c.id in end.chunks for i in c.inputs if i.kind == "param"}
    buckets = [b for b in edit.buckets.values() if params.intersection(b.params)]
    for bucket in buckets:
        windows = bucket.lent if end.id == "gather" else bool(bucket.shard.grads)
        if windows:
            what, by = ("gathered", "prefetch") if end.id == "gather" else ("reduced", "reduced_mb")
            raise _refused(
                edit, order, f"{bucket.params[0]!r} is {what} for its uses, as {by} says"
            )
    nodes = [f"{name}.{b.id}#{role}" for b in buckets for name in _MESSAGES[end.id]]
    found = [(id, -1) for id in nodes if id in edit.families]
    if not found:
        what = "no parameters are gathered" if end.id == "gather" else "no gradients are reduced"
        raise _refused(edit, order, f"{what} for {', '.join(end.chunks[:4])} on {role}")
    return found


def _refused(edit: Editor, order: MessageOrder, reason: str) -> CompileError:
    return CompileError(
        f"{edit.graph.log[order.applied]}: {reason}; an order names messages that are made once in a step: gathers of "
        f"zero=1 and of whole_mb, reductions of zero=0 and 1. Leave them out of it [order condition 7]"
    )


def _coords(phase: str, op: str, bucket: Bucket) -> dict[str, Coord]:
    return {"phase": phase, "op": op, "bucket": bucket.id}


def _on_bucket(
    edit: Editor,
    name: str,
    bucket: Bucket,
    role: str,
    channel: str,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
) -> None:
    """Add a collective of `_ON_BUCKETS` to a role: on the bucket's state, or on a value that it reads."""
    kind, phase = _ON_BUCKETS[name]
    op = Collective(kind, channel, "" if reads else bucket.id)
    coords = _coords(phase, kind.replace("_", ""), bucket)
    stream = edit.channels[channel].stream_on(role)
    edit.add(Node(f"{name}.{bucket.id}#{role}", op, coords, reads, writes, role, stream))
