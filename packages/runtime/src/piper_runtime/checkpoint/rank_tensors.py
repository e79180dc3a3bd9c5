"""List the tensors of a rank's state: the places of named tensors' elements in them, and the ones that the rank saves.

A checkpoint has names and true shapes only, no ranks and buckets. Parameters and buffers are "model.NAME", optimizer
state is "optim.state.NAME.KEY" for each parameter, as in the checkpoints of torch's own training loops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Bucket, Plan
from piper_runtime.rank.binding.rank_state import RankState
from piper_runtime.rank.optimizers.optimizer import OptimizerState
from piper_runtime.rank.values.layouts import runs

MODEL, OPTIMIZER = "model", "optim.state"
Number = int | float | bool | str | None
"""The type of the numbers and texts in an optimizer's state, which JSON holds exactly."""


def model_key(name: str) -> str:
    """Return the name in a checkpoint of a parameter or a buffer."""
    return f"{MODEL}.{name}"


def optimizer_key(name: str, key: str) -> str:
    """Return the name in a checkpoint of the optimizer's state of a parameter under `key`."""
    return f"{OPTIMIZER}.{name}.{key}"


def key_path(key: str) -> tuple[str, ...]:
    """Return the path in nested dicts that a name in a checkpoint stands for."""
    if key.startswith(f"{OPTIMIZER}."):
        name, _, last = key.removeprefix(f"{OPTIMIZER}.").rpartition(".")
        return (*OPTIMIZER.split("."), name, last)
    return MODEL, key.removeprefix(f"{MODEL}.")


def kept_keys(keys: Collection[str]) -> dict[str, set[str]]:
    """Return by parameter the keys of its optimizer state in a checkpoint."""
    keys_by_param: dict[str, set[str]] = {}
    for path in map(key_path, keys):
        if path[0] != MODEL:
            keys_by_param.setdefault(path[-2], set()).add(path[-1])
    return keys_by_param


@dataclass(frozen=True, slots=True)
class NamedRange:
    """Say that elements of a flat tensor are a range of a named tensor.

    Attributes:
        key: the name in a checkpoint.
        shape: the shape of the whole named tensor.
        start: the first element of the range in the named tensor, in row-major order.
        offset: the first element of the range in the flat tensor.
        numel: the number of elements.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int

    @property
    def span(self) -> tuple[int, int]:
        """Return the first element of the range in the named tensor, and the element behind it."""
        return self.start, self.start + self.numel


def in_line(ranges: Sequence[NamedRange]) -> Iterator[list[NamedRange]]:
    """Yield groups of ranges of one tensor that follow each other in memory: the rows that a rank has of it."""
    group: list[NamedRange] = []
    for part in ranges:
        if group and (
            group[-1].key != part.key or group[-1].offset + group[-1].numel != part.offset
        ):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


@dataclass(frozen=True)
class FlatState:
    """Hold a tensor of one dimension with the ranges that lie in it.

    Attributes:
        early: whether a forward may write it, and not only an Update.
    """

    tensor: torch.Tensor
    ranges: tuple[NamedRange, ...]
    early: bool = False

    @property
    def shared(self) -> bool:
        """Return whether the ranges are one and the same element: the step counter of a bucket."""
        return len(self.ranges) > 1 and self.tensor.numel() == 1


@dataclass(frozen=True)
class Portion:
    """Name a part of a rank's states: ids of buckets, names of parameters outside of buckets, and names of buffers."""

    buckets: frozenset[str]
    params: frozenset[str]
    buffers: frozenset[str]


def saved_portion(plan: Plan, rank: int) -> Portion:
    """Return the states that a rank writes into a checkpoint.

    The ranks that hold the same part of a bucket, or the same parameter, share the writing: the one at (index mod
    holders) writes it. A buffer is written by the lowest rank, whose copy counts everywhere.
    """
    holders: dict[str, list[int]] = {}
    for role in plan.roles:
        for state in role.states:
            holders.setdefault(state.id, []).extend(role.ranks)
    for ranks in holders.values():
        ranks.sort()

    def mine(id: str, index: int, axes: tuple[str, ...] = ()) -> bool:
        part = plan.mesh.index_along(axes, rank)
        ranks = [r for r in holders.get(id, []) if plan.mesh.index_along(axes, r) == part]
        return bool(ranks) and ranks[index % len(ranks)] == rank

    buckets = frozenset(
        b.id
        for k, b in enumerate(plan.buckets)
        if mine(f"grad:{b.id}", k, (*b.shard.optim, *b.parts))
    )
    bucketed = {name for b in plan.buckets for name in b.params}
    alone = [(k, p) for k, p in enumerate(plan.params) if p.name not in bucketed]
    params = frozenset(
        p.name
        for k, p in alone
        if mine(f"param:{p.name}", k, tuple(part.axis for part in p.layout))
    )
    return Portion(
        buckets, params, frozenset(b.name for b in plan.buffers if mine(f"buffer:{b.name}", 0))
    )


def left_out(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the parameters and the buffers that no rank holds, since no operation uses them."""
    state_ids = {s.id for role in plan.roles for s in role.states}
    bucketed = {name for b in plan.buckets for name in b.params}
    params = [
        p.name for p in plan.params if p.name not in bucketed and f"param:{p.name}" not in state_ids
    ]
    return params, [b.name for b in plan.buffers if f"buffer:{b.name}" not in state_ids]


def varying_buffers(plan: Plan) -> set[str]:
    """Return the buffers whose content depends on the batch, so that replicas may have different ones."""
    return {
        o.ref for chunk in plan.chunks for o in chunk.outputs if o.kind == "buffer" and o.varies
    }


def saved_dtypes(plan: Plan) -> dict[str, str]:
    """Return the dtypes of floating-point parameters in checkpoints: the dtype in which the job makes all of them.

    A trained one is saved as the optimizer has it, and a frozen one without a loss of bits; forward and backward may
    read both in a narrower dtype. Without trained parameters each has its dtype in the plan.
    """
    bucket_dtype = next((b.dtype for b in plan.buckets), None)
    floats = [p for p in plan.params if getattr(torch, p.spec.dtype).is_floating_point]
    return {p.name: bucket_dtype or p.spec.dtype for p in floats}


def rank_tensors(rank: RankState, portion: Portion | None = None) -> Iterator[FlatState]:
    """Yield the states of a rank, or a portion of them.

    The tensors are views of the states if these are contiguous.
    """
    store = rank.store
    for bucket in store.buckets:
        if portion is None or bucket.id in portion.buckets:
            yield FlatState(store.own_masters[bucket.id], _ranges(rank, bucket, model_key))
            yield from _optimizer_tensors(rank, bucket, again=portion is None)
    bucketed = {name for bucket in store.buckets for name in bucket.params}
    for name, tensor in store.params.items():
        if name not in bucketed and (portion is None or name in portion.params):
            precise = store.exact.get(name, tensor)
            yield FlatState(
                precise.detach().reshape(-1),
                tuple(_in_named(rank, name, model_key(name), range(precise.numel()), 0)),
            )
    for name, tensor in store.buffers.items():
        if portion is None or name in portion.buffers:
            yield _alone(model_key(name), tensor, early=True)


def _first_part(rank: RankState, bucket: Bucket) -> bool:
    """Return whether a rank has the first part of a bucket, so that it saves the state that all parts have alike."""
    return not rank.plan.mesh.index_along((*bucket.shard.optim, *bucket.parts), rank.rank)


def _ranges(
    rank: RankState, bucket: Bucket, key: Callable[[str], str], piece: OptimizerState | None = None
) -> tuple[NamedRange, ...]:
    """Return the ranges of a bucket's parameters in a rank's part of it, or in a piece of that part."""
    mesh, axes = rank.plan.mesh, bucket.shard.optim
    size = bucket.numel // mesh.degree(axes)
    first = size * mesh.index_along(axes, rank.rank)
    if piece is not None:
        first, size = first + piece.first, piece.tensor.numel()
    ranges: list[NamedRange] = []
    for name, offset in zip(bucket.params, bucket.offsets, strict=True):
        shape = rank.place_of[name].size
        begin, end = max(offset, first), min(offset + prod(shape), first + size)
        if begin < end:
            elements = range(begin - offset, end - offset)
            ranges += _in_named(rank, name, key(name), elements, begin - first)
        elif not prod(shape) and not first:
            ranges.append(NamedRange(key(name), shape, 0, 0, 0))
    return tuple(ranges)


def _in_named(
    rank: RankState, name: str, key: str, elements: range, offset: int
) -> Iterator[NamedRange]:
    """Yield the places in a whole parameter of some elements of a rank's part of it.

    They begin at `offset` in memory.
    """
    plan = rank.plan
    shape = plan.whole_shapes[name]
    for run in runs(rank.own_shapes[name], plan.layouts[name], plan.mesh, rank.rank, elements):
        yield NamedRange(key, shape, run.whole, offset + run.own - elements.start, run.numel)


def _alone(key: str, tensor: torch.Tensor, *, early: bool = False) -> FlatState:
    return FlatState(
        tensor.detach().reshape(-1),
        (NamedRange(key, tuple(tensor.shape), 0, 0, tensor.numel()),),
        early,
    )


def _optimizer_tensors(rank: RankState, bucket: Bucket, *, again: bool) -> Iterator[FlatState]:
    """Yield the optimizer's state of a bucket. State that all parts and pieces have alike is read by each (`again`).

    The first one saves it.
    """
    for of in rank.optimizer.states(bucket):
        for key, value in of.state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not of.flat:
                yield _of_parameter(rank, of, key, value)
            elif value.ndim:
                yield FlatState(value, _ranges(rank, bucket, partial(_under, key), of))
            elif again or (_first_part(rank, bucket) and not of.first):
                yield FlatState(
                    value.view(1),
                    tuple(NamedRange(optimizer_key(n, key), (), 0, 0, 1) for n in of.names),
                )


def _of_parameter(rank: RankState, of: OptimizerState, key: str, value: torch.Tensor) -> FlatState:
    """Return a state of one parameter: the part that this rank has, if it has the parameter's shape."""
    (name,) = of.names
    if tuple(value.shape) != tuple(rank.own_shapes[name]):
        return _alone(optimizer_key(name, key), value)
    own = _in_named(rank, name, optimizer_key(name, key), range(value.numel()), 0)
    return FlatState(value.detach().reshape(-1), tuple(own))


def _under(key: str, name: str) -> str:
    return optimizer_key(name, key)


def optimizer_numbers(rank: RankState, portion: Portion) -> dict[str, Number]:
    """Return the optimizer's state beside tensors, by name; raise JobError for values that no checkpoint can hold."""
    numbers: dict[str, Number] = {}
    for bucket in rank.store.buckets:
        if bucket.id not in portion.buckets:
            continue
        for of in rank.optimizer.states(bucket):
            for key, value in of.state.items():
                if not isinstance(value, torch.Tensor):
                    number = _number(value, f"{key!r} of parameter {of.names[0]}")
                    numbers |= {optimizer_key(name, key): number for name in of.names}
    return numbers


def _number(value: Any, what: str) -> Number:
    if value is None or isinstance(value, int | float | bool | str):
        return value
    raise JobError(
        f"the optimizer keeps a {type(value).__name__} as {what}, which a checkpoint cannot hold; keep tensors and "
        f"numbers in Optimizer.state, or run without checkpoints"
    )


def step_counters(rank: RankState, portion: Portion) -> dict[str, float]:
    """Return how many steps the optimizer has counted for each parameter, if it counts them."""
    counters: dict[str, float] = {}
    for bucket in rank.store.buckets:
        if bucket.id in portion.buckets:
            for of in rank.optimizer.states(bucket):
                if "step" in of.state:
                    counters |= dict.fromkeys(of.names, float(of.state["step"]))
    return counters


def group_settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups: learning rate, decay, ..."""
    return [plain_settings(group) for group in groups]


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, or the state of a schedule, as far as JSON holds them."""
    plain = {key: _plain(value) for key, value in settings.items() if key != "params"}
    return {key: value for key, value in plain.items() if value is not _NONE}


_NONE = object()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, int | float | bool | str):
        return value
    if isinstance(value, list | tuple) and all(
        isinstance(v, int | float | bool | str) for v in value
    ):
        return list(value)
    return _NONE
