"""Make gradient buckets. They belong to the whole graph and are keyed by the ranks that hold their parameters.

The rules R22-buckets and R23-holders of `piper_ir.verify` check them.
"""

from __future__ import annotations

from collections.abc import Iterable

from piper_compiler.ports import trains
from piper_compiler.request import Training
from piper_ir.errors import CompileError
from piper_ir.graph import Editor, Replication
from piper_ir.graph_parts import compute_id
from piper_ir.plan import Bucket, Channel
from piper_ir.program import Param, Program
from piper_ir.sizes import ITEM_BYTES, bind

ALIGN_BYTES = 256
"""The alignment in bytes of a parameter in its bucket, as CUDA's vectorised kernels and NCCL prefer it.

torch's allocator gives the same.
"""

_BucketKey = tuple[tuple[str, ...], tuple[str, ...], tuple[str, str, str], int, int, str]


def make_buckets(edit: Editor, training: Training) -> None:
    """Add the buckets of all trained parameters and the channels that reduce them.

    Parameters stand in the order in which their gradients become complete. A bucket ends where the next parameter would
    exceed its size. Parameters of one bucket share their roles, replicas, dtypes and optimizer group.
    """
    held = holders(edit, edit.graph.program)
    open_: dict[_BucketKey, list[Param]] = {}
    filled: dict[_BucketKey, int] = {}
    made: list[tuple[_BucketKey, list[Param]]] = []
    for param, policy in _by_completion(edit):
        roles = held[param.name]
        group = training.group_of.get(param.name, 0)
        reduced = len(roles) > 1 or bool(policy.over)
        limit = policy.bucket_bytes if reduced else 2**62
        dtypes = training.bucket_dtypes(param)
        key = (roles, policy.over, dtypes, group, limit, policy.stream)
        members = open_.get(key)
        item = ITEM_BYTES[dtypes[2] or dtypes[0]]
        if members is None or filled[key] + bind(param.spec.numel, 0) * item > limit:
            members = open_[key] = []
            filled[key] = 0
            made.append((key, members))
        members.append(param)
        filled[key] += _aligned(param, dtypes) * item
    for number, (key, members) in enumerate(made):
        _add(edit, f"bucket{number}", key, members)


def _by_completion(edit: Editor) -> list[tuple[Param, Replication]]:
    """Return the trained parameters with their policy, in the order in which their gradients become complete.

    Backward runs against the program, so a gradient is complete with the first chunk that uses its parameter.
    """
    none = Replication((), 25 * 2**20, "", -1)
    by_name = {p.name: p for p in edit.graph.program.params}
    out: dict[str, Replication] = {}
    for chunk in reversed(edit.graph.program.chunks):
        policy = edit.replication.get(chunk.id, none)
        for name in reversed(trains(chunk)):
            other = out.pop(name, policy)
            if (other.over, other.bucket_bytes, other.stream) != (policy.over, policy.bucket_bytes, policy.stream):
                raise CompileError(
                    f"parameter {name!r} is shared by chunks that are replicated in different ways; replicate them together"
                )
            out[name] = policy
    return [(by_name[name], policy) for name, policy in out.items()]


def _aligned(param: Param, dtypes: Iterable[str]) -> int:
    """Return the elements that a parameter takes in a bucket, aligned in the narrowest of its dtypes."""
    step = ALIGN_BYTES // min(ITEM_BYTES[dtype] for dtype in dtypes if dtype)
    return -(-bind(param.spec.numel, 0) // step) * step


def _add(edit: Editor, id: str, key: _BucketKey, members: list[Param]) -> None:
    roles, over, dtypes, group, _, stream = key
    dtype, compute, reduce = dtypes
    offsets, numel = [], 0
    for param in members:
        offsets.append(numel)
        numel += _aligned(param, dtypes)
    channel = ""
    if len(roles) > 1 or over:
        name = "+".join(roles) + ("/" + "+".join(over) if over else "")
        used = stream or "reduce"
        channel = f"reduce.{name}.{used}"
        edit.channels.setdefault(channel, Channel(channel, "group", roles, (used,) * len(roles), over, "reduce"))
    names = tuple(p.name for p in members)
    edit.buckets[id] = Bucket(id, names, tuple(offsets), numel, dtype, roles, over, group, channel, compute, reduce)


def holders(graph: Editor, program: Program) -> dict[str, tuple[str, ...]]:
    """Return for each trained parameter, in order, the roles whose chunks read it; each must update it."""
    trained = {name for chunk in program.chunks for name in trains(chunk)}
    out: dict[str, set[str]] = {}
    for chunk in program.chunks:
        mine = [i.ref for i in chunk.inputs if i.kind == "param" and i.ref in trained]
        if mine:
            roles = {node.role for node in graph.families[compute_id(chunk.id, "F")]}
            for name in mine:
                out.setdefault(name, set()).update(roles)
    order = list(graph.roles)
    return {name: tuple(sorted(roles, key=order.index)) for name, roles in out.items()}
