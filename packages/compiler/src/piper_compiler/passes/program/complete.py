"""Check that a graph is a whole training step, and add the nodes that no directive writes.

It adds gradient buckets and their reductions, the loss weight, the gradient norm, and one Update per role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from piper_compiler.directives.split import split_all
from piper_compiler.passes.program.buckets import make_buckets
from piper_compiler.passes.program.moves import check_exchanges, exchange
from piper_compiler.passes.program.reductions import order_messages, reduce, share
from piper_compiler.request import Training
from piper_ir.graph.graph import Editor, Graph, Node
from piper_ir.graph.graph_parts import on_role
from piper_ir.ground.errors import CompileError
from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.ground.node_ids import compute_id
from piper_ir.ground.sizes import ITEM_BYTES, TensorSpec, bind
from piper_ir.plan.plan import COMPUTE, Bucket, Channel, inside_channel
from piper_ir.plan.plan_bytes import update_on_host_bytes
from piper_ir.program.ops import (
    COMM,
    Add,
    Collective,
    Compute,
    Send,
    SquaredNorm,
    Update,
    Zeros,
)
from piper_ir.program.program import Program

EVERYWHERE = "all"
"""The role of a model without any `place`: every rank runs all of it."""


def complete(graph: Graph, training: Training) -> Graph:
    """Return the graph with every node placed and every op that a step needs; raise CompileError if one is missing."""
    if not graph.microbatches:
        graph = split_all(graph, 1)
    graph = _place_rest(graph)
    check_exchanges(graph)
    _check_axes(graph)
    _check_buffers(graph, training.averages)
    _check_orders(graph)
    edit = exchange(graph).edit()
    make_buckets(edit, training)
    _meet_inside(edit)
    share(edit)
    reduce(edit)
    total = _loss_weight(edit) if graph.program.loss_kind == "sum" else {}
    norm = _gradient_norm(edit) if training.normed else {}
    for role in edit.roles:
        bucket_ids = tuple(b.id for b in edit.buckets.values() if role in b.roles)
        reads = tuple(v[role] for v in (total, norm) if v)
        held = _update_bytes(edit, bucket_ids, training)
        hosted = update_on_host_bytes([edit.buckets[b] for b in bucket_ids], edit.graph.mesh)
        update = Update(bucket_ids, bool(total), training.clip, held, training.scaled, hosted)
        edit.add(Node(f"update#{role}", update, {"phase": "U", "op": "update"}, reads, (), role))
    _order_buffers(edit)
    order_messages(edit)
    return edit.done()


def with_buckets(graph: Graph, training: Training) -> Graph:
    """Return the graph with every node placed and with the buckets of its parameters, but without further nodes.

    Buckets do not depend on the number of microbatches, so the buckets of one microbatch are the buckets of the plan.
    """
    edit = _place_rest(graph).edit()
    make_buckets(edit, training)
    return edit.done()


def _update_bytes(edit: Editor, held: tuple[str, ...], training: Training) -> int:
    """Return the bytes of temporaries in an update: the optimizer's, and gradients cast to the dtype of the update.

    Updates on the host hold none on the device.
    """
    buckets = [edit.buckets[id] for id in held if not edit.buckets[id].host]
    cast = sum(
        _updated(edit, b, training) * ITEM_BYTES[b.dtype]
        for b in buckets
        if b.accumulate_dtype != b.dtype
    )
    own = [replace(b, numel=b.numel // edit.graph.mesh.degree(b.shard.optim)) for b in buckets]
    return cast + training.update_bytes(own)


def _updated(edit: Editor, bucket: Bucket, training: Training) -> int:
    """Return the elements that a rank updates: of a bucket, or of its parameters if these go one by one."""
    if bucket.group in training.whole_groups:
        sizes = {p.name: bind(p.spec.numel, 0) for p in edit.graph.program.params}
        return sum(sizes[name] for name in bucket.params)
    return bucket.numel // edit.graph.mesh.degree(bucket.shard.optim)


def _place_rest(graph: Graph) -> Graph:
    unplaced = [n for n in graph.sequence if not n.role]
    if graph.roles and unplaced:
        compute = [n for n in unplaced if isinstance(n.op, Compute)] or unplaced
        count = sum(len(n.each) for n in compute)
        raise CompileError(
            f"{compute[0].name(compute[0].each[0])} (of {count} such nodes) is not placed, but others are placed "
            f"on {', '.join(graph.roles)}; add a place directive that selects it"
        )
    if not unplaced:
        return graph
    edit = graph.edit()
    edit.roles[EVERYWHERE] = {}
    for node in unplaced:
        edit.update(on_role(node, EVERYWHERE))
    return edit.done()


def _check_axes(graph: Graph) -> None:
    """Check that every rank has work, and that all chunks have the same data-parallel width."""
    placed = set(next(iter(graph.roles.values())))
    overs = {
        graph.replication[c.id].over if c.id in graph.replication else ()
        for c in graph.program.chunks
    }
    if len(overs) > 1:
        some = [c.id for c in graph.program.chunks if c.id not in graph.replication]
        raise CompileError(
            f"chunks are replicated differently: {sorted(overs)}"
            + (f"; {some[0]} is not replicated at all" if some else "")
            + ". The result would differ from one device; replicate all chunks over the same axes"
        )
    over = set(next(iter(overs)))
    for axis in graph.mesh.axes:
        if axis not in placed | over | set(dict(graph.program.axes)):
            raise CompileError(
                f"the mesh has {axis}={graph.mesh.size(axis)} but no directive uses {axis}; "
                "shard or replicate over it, place on it, or take it out of the mesh"
            )
    idle = set(range(graph.mesh.world)) - {
        r for fixed in graph.roles.values() for r in graph.mesh.ranks(fixed)
    }
    if idle:
        where = ", ".join(f"{a}={c}" for a, c in graph.mesh.coords(min(idle)).items())
        raise CompileError(
            f"nothing is placed on rank {min(idle)} ({where}) of {graph.mesh}; place a stage there or make the "
            f"mesh smaller"
        )


def _check_buffers(graph: Graph, averages: frozenset[str] | None) -> None:
    """Check that a buffer that the model updates gets the same values as on one device.

    `averages` are the buffers that nothing else reads, so that the buffers of replica 0 count.
    """
    wide = any(r.over for r in graph.replication.values())
    for chunk in graph.program.chunks:
        for output in chunk.outputs:
            if output.kind != "buffer" or counts_tokens(output.ref):  # ranks count their own
                continue
            if wide and output.varies and output.ref not in (averages or ()):
                chosen = (
                    'Job(batch_norm="microbatch") lets them, where forward only updates it, and '
                    "has that of replica 0"
                    if averages is None
                    else 'forward reads it beside that, so that Job(batch_norm="microbatch") does '
                    "not help"
                )
                raise CompileError(
                    f"buffer {output.ref!r} is updated from the batch in {chunk.id}, so its replicas would differ; "
                    f"do not replicate this model, or make the update independent of the batch. {chosen}"
                )
            users = _buffer_users(graph.program, output.ref)
            roles = {node.role for id in users for node in graph.compute(id, "F")}
            if len(roles) > 1:
                raise CompileError(
                    f"buffer {output.ref!r} is updated in {chunk.id} and used on {', '.join(sorted(roles))}, whose "
                    f"copies would differ; place {', '.join(users)} on one device",
                    tuple(users),
                )


def _buffer_users(program: Program, name: str) -> list[str]:
    """Return the chunks that read or update a buffer, in program order."""
    return [
        c.id
        for c in program.chunks
        if any(i.kind == "buffer" and i.ref == name for i in c.inputs)
        or any(o.kind == "buffer" and o.ref == name for o in c.outputs)
    ]


def _check_orders(graph: Graph) -> None:
    """Check that the one program of a device, or the data between devices, can keep all orders."""
    every = range(graph.microbatches)
    alike = {
        id: family[0].role
        for id, family in graph.families.items()
        if family[0].mbs == every and not _is_comm(family[0])
    }
    most = graph.microbatches
    for (before, after), applied in graph.order_edges.items():
        (first, i), (second, j) = before, after
        if first in alike and alike[first] == alike.get(second) and -1 < i < most and -1 < j < most:
            continue
        a, b = graph.at(before), graph.at(after)
        if (
            a is None
            or b is None
            or a.role != b.role
            or not (_may_be_ordered(a) and _may_be_ordered(b))
        ):
            names = [node.name(at[1]) if node else at[0] for node, at in ((a, before), (b, after))]
            where = ", ".join(
                f"{name} on {n.role if n else 'no device'}"
                for name, n in zip(names, (a, b), strict=True)
            )
            by = f" (by {graph.log[applied]})" if applied < len(graph.log) else ""
            raise CompileError(
                f"{names[0]} cannot be ordered before {names[1]}{by}: an order is among the compute and the sends of "
                f"one device, here {where}"
            )


def _may_be_ordered(node: Node) -> bool:
    """Return whether an order may name a node: a receive stands where its send does, a collective with its bucket."""
    return isinstance(node.op, Send) or not _is_comm(node)


def _is_comm(node: Node) -> bool:
    return isinstance(node.op, COMM)


def _order_buffers(edit: Editor) -> None:
    """Add edges so that an updated buffer is used in the order of microbatches, and within one along the program."""
    program = edit.graph.program
    outputs = [o for c in program.chunks for o in c.outputs if o.kind == "buffer"]
    updated = dict.fromkeys(o.ref for o in outputs if not counts_tokens(o.ref))
    for name in updated:
        users = _buffer_users(program, name)
        uses = [(compute_id(id, "F"), mb) for mb in range(edit.microbatches) for id in users]
        for before, after in pairwise(uses):
            edit.order(before, after)


def _meet_inside(edit: Editor) -> None:
    """Add the channels for collectives inside of steps, between the devices that share a role's chunks."""
    used: dict[str, set[str]] = {}
    for chunk in edit.graph.program.chunks:
        axes = {c.axis for step in chunk.steps.values() for c in step.collectives}
        for role in {
            node.role
            for step in ("F", "B")
            for node in edit.families.get(compute_id(chunk.id, step), ())
        }:
            used.setdefault(role, set()).update(axes)
    for role in edit.roles:
        for axis in sorted(used.get(role, ())):
            id = inside_channel(axis, role)
            edit.channels[id] = Channel(
                id, "group", (role,), (COMPUTE,), edit.graph.mesh.along(axis), "tensor"
            )


def _sum_over_roles(
    edit: Editor, name: str, local: Mapping[str, str], over: tuple[str, ...], spec: TensorSpec
) -> dict[str, str]:
    """Return by role the value with the sum over all roles (and `over`) of a scalar that each role has.

    It is the scalar itself when only one rank has it.
    """
    roles = tuple(edit.roles)
    if len(roles) == 1 and not over:
        return dict(local)
    assert name in ("weight", "norm")
    channel = Channel(
        name, "group", roles, (name,) * len(roles), over, "weight" if name == "weight" else "norm"
    )
    edit.channels[name] = channel
    totals = {}
    for role in roles:
        totals[role] = edit.value(f"{name}.total#{role}", spec, "scalar")
        coords: dict[str, int | str] = {"phase": "U", "op": "allreduce"}
        edit.add(
            Node(
                f"reduce.{name}#{role}",
                Collective("all_reduce", name),
                coords,
                (local[role],),
                (totals[role],),
                role,
                name,
            )
        )
    return totals


def _zeros(edit: Editor, name: str, role: str, spec: TensorSpec) -> str:
    value = edit.value(f"{name}#{role}", spec, "scalar")
    edit.add(
        Node(
            f"zeros.{name}#{role}",
            Zeros(spec.dtype),
            {"phase": "U", "op": "zeros"},
            (),
            (value,),
            role,
        )
    )
    return value


def _weights_by_role(edit: Editor, program: Program) -> tuple[dict[str, list[str]], TensorSpec]:
    """Return by role the weights of the losses that it computes, one for each microbatch."""
    weights: dict[str, list[str]] = {}
    spec = TensorSpec((), "float32")
    for chunk in program.chunks:
        for k, output in enumerate(chunk.outputs):
            if output.kind == "weight":
                spec = output.spec
                for node in edit.families[compute_id(chunk.id, "F")]:
                    weights.setdefault(node.role, []).extend(
                        [f"{chunk.id}:out{k}"] * len(node.each)
                    )
    return weights, spec


def _loss_weight(edit: Editor) -> dict[str, str]:
    """Return by role the value with the sum of the loss weights of the whole global batch."""
    weights, spec = _weights_by_role(edit, edit.graph.program)
    local = {}
    for role in edit.roles:
        mine = weights.get(role, [])
        if not mine:
            local[role] = _zeros(edit, "weight", role, spec)
        elif len(mine) == 1:
            local[role] = mine[0]
        else:
            local[role] = edit.value(f"weight#{role}", spec, "scalar")
            edit.add(
                Node(
                    f"sum.weight#{role}",
                    Add(),
                    {"phase": "U", "op": "add"},
                    tuple(dict.fromkeys(mine)),
                    (local[role],),
                    role,
                )
            )
    return _sum_over_roles(edit, "weight", local, edit.graph.replicated, spec)


def _gradient_norm(edit: Editor) -> dict[str, str]:
    """Return by role the value with the squared norm of the whole gradient.

    A bucket counts once, on the first role that holds it, and each part of it on the first of the ranks that have it.
    Replicas hold equal gradients after their reductions, so the sum is over roles at each data-parallel coordinate, and
    over the ranks that share buckets, the work of chunks or experts.
    """
    wide = any(b.accumulate_dtype == "float64" for b in edit.buckets.values())
    spec = TensorSpec((), "float64" if wide else "float32")
    shared = {axis for b in edit.buckets.values() for axis in b.shard.optim}
    over = tuple(
        a
        for a in edit.graph.mesh.axes
        if a in {*shared, *dict(edit.graph.program.axes), *dict(edit.graph.program.experts)}
    )
    local = {}
    for role in edit.roles:
        owned = tuple(b.id for b in edit.buckets.values() if b.roles[0] == role)
        if not owned:
            local[role] = _zeros(edit, "norm", role, spec)
            continue
        local[role] = edit.value(f"norm#{role}", spec, "scalar")
        once = tuple(
            [b for b in owned if set(over) - {*edit.buckets[b].shard.optim, *edit.buckets[b].parts}]
        )
        op = SquaredNorm(owned, spec.dtype, once, over if once else ())
        edit.add(
            Node(f"norm#{role}", op, {"phase": "U", "op": "squarednorm"}, (), (local[role],), role)
        )
    return _sum_over_roles(edit, "norm", local, over, spec)
