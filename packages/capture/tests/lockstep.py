"""Judges the graph of a chunk that devices share: runs it on all of them in lock-step, and the whole graph beside
it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from packages.capture.tests.joint_harness import Case, capture
from packages.capture.tests.layout_judge import place_of
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import Agreed, Sharded, ordered, split_degrees
from piper_capture.layouts.choice import SharedChunk, share
from piper_capture.layouts.decide import PARTIAL
from piper_capture.layouts.indexes import LoopIndex, key_of
from piper_capture.layouts.local import Placements, sharded
from piper_capture.steps.joint import trace_joint
from piper_capture.steps.phases import backward_nodes
from piper_capture.values.coordinate import Coordinate
from piper_ir.ground.mesh import Mesh
from piper_ir.program.layout import Sharding
from piper_ops import COLLECTIVE_KINDS

Values = dict[fx.Node, Any]
ONE = Mesh(tp=1)
ALONE = Agreed()


@cache
def joint_of(case: Case) -> Joint:
    """The graph of forward and backward of a case, all of whose outputs of floats get a gradient."""
    made = case.function(*(t.detach().clone() for t in case.tensors))
    outputs = made if isinstance(made, tuple) else (made,)
    return trace_joint(capture(case), case.inputs(), [o.is_floating_point() for o in outputs])


@dataclass(frozen=True)
class Judged:
    """What a chunk's devices made: the largest relative error, and the messages of forward and backward."""

    shared: Sharded
    error: float
    forward: Counter[str]
    backward: Counter[str]


def shared_by(case: Case, asked: Sequence[Sharding]) -> tuple[SharedChunk, Sharded]:
    """What `shared_joint` makes for several axes, with the indexes."""
    joint = joint_of(case)
    ways = [ordered(one, [joint]) if one.context else one for one in asked]
    split = [
        replace(one, split=found)
        for one, found in zip(ways, split_degrees(joint, ways), strict=True)
    ]
    found = share(joint, split, ALONE.whole)
    return found, sharded(found.joint, found.indexes, found.axes)


def shared_of(
    case: Case,
    degree: int | tuple[int, ...],
    *,
    stream: bool = False,
    agreed: Agreed = ALONE,
    keep: bool = False,
) -> tuple[SharedChunk, Sharded]:
    """What `shared_joint` makes for an axis, which is split into several degrees where these are given, with the
    indexes."""
    joint = joint_of(case)
    size = prod(degree) if isinstance(degree, tuple) else degree
    asked = Sharding("tp", size, stream="tokens" if stream else "", keep=keep)
    (split,) = (degree,) if isinstance(degree, tuple) else split_degrees(joint, [asked])
    found = share(joint, [replace(asked, split=split)], agreed.whole)
    return found, sharded(
        found.joint, found.indexes, found.axes, keep=keep, partial_grads=agreed.partial_grads
    )


def judge(
    case: Case,
    degree: int | tuple[int, ...],
    *,
    stream: bool = False,
    agreed: Agreed = ALONE,
    keep: bool = False,
    instead: Mapping[Any, Any] | None = None,
) -> Judged:
    """Shares a case among devices, and compares all outputs and gradients with those of the whole graph.

    `instead` maps ops to what devices run instead of them.
    """
    return judged(case, *shared_of(case, degree, stream=stream, agreed=agreed, keep=keep), instead)


def judged(
    case: Case, found: SharedChunk, made: Sharded, instead: Mapping[Any, Any] | None = None
) -> Judged:
    """Compares what devices make of a case with what one makes."""
    joint = joint_of(case)
    mesh = Mesh(tuple((axis.name, axis.degree) for axis in made.axes))
    whole = _given(joint, case.tensors)
    (wanted,) = _run(joint.graph, {node: [value] for node, value in whole.items()}, ONE, {})

    def part(value: Tensor, node: fx.Node, lying: Placements, rank: int) -> Tensor:
        return _part(value, found.indexes.tensors[key_of(node)], lying, made, mesh, rank)

    parts: dict[fx.Node, list[Any]] = {}
    for old, between, new, lying in _pairs(joint, found.joint, made):
        parts[new] = [part(whole[old], between, lying, rank) for rank in range(mesh.world)]
    for node, name in made.joint.constant_names.items():
        parts[node] = [joint.constants[name]] * mesh.world
    env = _run(made.joint.graph, parts, mesh, instead or {})
    results = [
        *zip(joint.outputs, found.joint.outputs, made.joint.outputs, made.outputs, strict=True)
    ]
    results += [
        (n, found.joint.grads[k], made.joint.grads[k], made.grads[k])
        for k, n in joint.grads.items()
    ]
    error = max(
        _error(_settled(env, new, lying, made, mesh, rank), part(wanted[old], between, lying, rank))
        for old, between, new, lying in results
        for rank in range(mesh.world)
    )
    late = backward_nodes(made.joint)
    sent = [
        (n in late, COLLECTIVE_KINDS[n.target])
        for n in made.joint.graph.nodes
        if n.target in COLLECTIVE_KINDS
    ]
    return Judged(
        made,
        error,
        *(Counter(kind for when, kind in sent if when == which) for which in (False, True)),
    )


def _given(joint: Joint, tensors: Sequence[Tensor]) -> Values:
    torch.manual_seed(3)
    given: Values = dict(zip(joint.inputs, tensors, strict=True))
    given |= {
        node: torch.randn(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        for node in joint.tangents.values()
    }
    return given | {node: joint.constants[name] for node, name in joint.constant_names.items()}


def _pairs(
    joint: Joint, between: Joint, made: Sharded
) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, Placements]]:
    """What is given to the graph: a node of the whole graph, of the analysed and of a device's, and how the tensor
    lies."""
    yield from zip(joint.inputs, between.inputs, made.joint.inputs, made.inputs, strict=True)
    for k, node in joint.tangents.items():
        yield node, between.outputs[k], made.joint.tangents[k], made.outputs[k]


def _part(
    whole: Tensor,
    dims: Sequence[tuple[LoopIndex, ...]],
    lying: Placements,
    shared: Sharded,
    mesh: Mesh,
    rank: int,
) -> Tensor:
    done: set[LoopIndex] = set()
    for how, axis in zip(lying, shared.axes, strict=True):
        if isinstance(how, LoopIndex):
            dim, inside = next((d, inside) for d, inside in enumerate(dims) if how in inside)
            outer = prod(i.size for i in inside[: inside.index(how)] if i not in done)
            place = mesh.index_along((axis.name,), rank)
            if how in axis.halves:
                whole = _mirrored(whole, dim, outer, axis.degree, place)
            else:
                whole = place_of(whole, dim, outer, axis.degree, place)
            done.add(how)
    return whole


def _mirrored(whole: Tensor, dim: int, outer: int, degree: int, place: int) -> Tensor:
    """The blocks `place` and 2 * degree - 1 - place of each 2 * degree of a dimension."""
    blocks = whole.chunk(outer * degree, dim)
    own = [
        blocks[first + k]
        for first in range(0, outer * degree, 2 * degree)
        for k in (place, 2 * degree - 1 - place)
    ]
    return torch.cat(own, dim)


def _settled(
    made: Sequence[Values], node: fx.Node, lying: Placements, shared: Sharded, mesh: Mesh, rank: int
) -> Tensor:
    """A device's tensor, or the sum of what all that make terms of it have."""
    over = [axis.name for how, axis in zip(lying, shared.axes, strict=True) if how is PARTIAL]
    mates = [
        r
        for r in range(mesh.world)
        if all(mesh.coords(r)[a] == c for a, c in mesh.coords(rank).items() if a not in over)
    ]
    return torch.stack([made[r][node] for r in mates]).sum(0)


def _error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return (
        float((found - wanted).abs().max() / (wanted.abs().max() + 1e-30)) if found.numel() else 0.0
    )


def _run(
    graph: fx.Graph, given: Mapping[fx.Node, list[Any]], mesh: Mesh, instead: Mapping[Any, Any]
) -> list[Values]:
    """All values on all devices."""
    envs: list[Values] = [{} for _ in range(mesh.world)]
    for node in graph.nodes:
        if node.op == "output":
            break
        for rank, result in enumerate(
            given[node] if node in given else _results(node, envs, mesh, instead)
        ):
            envs[rank][node] = result
    return envs


def _results(
    node: fx.Node, envs: Sequence[Values], mesh: Mesh, instead: Mapping[Any, Any]
) -> list[Any]:
    if node.target in COLLECTIVE_KINDS:
        source, axis, _ = node.args
        assert isinstance(source, fx.Node) and isinstance(axis, str)
        groups = [[envs[r][source] for r in _group(mesh, axis, rank)] for rank in range(mesh.world)]
        return [
            _exchanged(COLLECTIVE_KINDS[node.target], group, _place(mesh, axis, rank))
            for rank, group in enumerate(groups)
        ]
    op = (
        torch.reshape
        if node.target is torch.ops.aten.view.default
        else instead.get(node.target, node.target)
    )
    return [_call(op, node, env, mesh, rank) for rank, env in enumerate(envs)]


def _place(mesh: Mesh, axis: str, rank: int) -> int:
    return mesh.index_along(mesh.along(axis), rank)


def _group(mesh: Mesh, axis: str, rank: int) -> list[int]:
    """The devices that a rank meets along an axis, by their places."""
    over = mesh.along(axis)
    coords = mesh.coords(rank)
    mates = [
        r
        for r in range(mesh.world)
        if all(mesh.coords(r)[a] == c for a, c in coords.items() if a not in over)
    ]
    return sorted(mates, key=lambda r: _place(mesh, axis, r))


def _exchanged(kind: str, given: Sequence[Tensor], place: int) -> Tensor:
    match kind:
        case "all_reduce":
            return torch.stack(list(given)).sum(0)
        case "all_gather":
            return torch.stack(list(given))
        case "reduce_scatter":
            return torch.stack([g[place] for g in given]).sum(0)
        case "all_to_all":
            return torch.stack([g[place] for g in given])
        case "shift":
            return given[place - 1].clone()
    raise AssertionError(kind)


def _call(op: Any, node: fx.Node, env: Values, mesh: Mesh, rank: int) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)

    def own(value: Any) -> Any:
        return value.at(_place(mesh, value.axis, rank)) if isinstance(value, Coordinate) else value

    args, kwargs = pytree.tree_map(own, (tuple(args), dict(kwargs)))
    if node.target is operator.getitem:
        return operator.getitem(*args)
    made = op(*args, **kwargs)
    expected = node.meta["val"]
    if isinstance(expected, Tensor):
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype), node
    return made
