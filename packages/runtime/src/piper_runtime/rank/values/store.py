"""Hold the tensors of one rank: states that persist over steps, and values that live within one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch

from piper_ir.ground.errors import PlanError
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Bucket, Plan
from piper_runtime.rank.values.device import CPU
from piper_runtime.rank.values.host import HostMemory
from piper_runtime.weights import flat_range


class Store:
    """Hold a rank's states on its device, and `values`: id -> tensor, the only reference to each.

    The parameters of a bucket are views of one flat tensor (`flat_params`), their gradients (`grads`) of another
    (`flat_grads`), zeroed. Every other parameter, and every buffer, is a tensor of its own. If ranks share a bucket,
    a flat tensor may be this rank's shard alone; then `params` and `grads` lack its names. `own_params` and
    `own_grads` are its shards. Its optimizer updates `own_masters`: `own_params` themselves, or copies in a wider
    dtype or in the memory of the host (where shards of parameters may be, too), from which `copy_masters` writes
    `own_params`. `masters` are their views by name, if they are whole. `exact` has frozen parameters in the job's
    dtype, on the host, if a rank that saves them holds them in a narrower dtype. The store copies its arguments;
    `host` lends it memory of the host.
    """

    def __init__(
        self, plan: Plan, rank: int, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
        device: torch.device = CPU, host: HostMemory | None = None,
    ):  # fmt: skip
        self.role = plan.role_of(rank)
        self.device = device
        self.host = host or HostMemory(device)
        self.values: dict[str, torch.Tensor] = {}
        self.params: dict[str, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.flat_params: dict[str, torch.Tensor] = {}
        self.flat_grads: dict[str, torch.Tensor] = {}
        self.own_params: dict[str, torch.Tensor] = {}
        self.own_grads: dict[str, torch.Tensor] = {}
        self.masters: dict[str, torch.Tensor] = {}
        self.own_masters: dict[str, torch.Tensor] = {}
        self.exact: dict[str, torch.Tensor] = {}
        self._mesh, self._rank = plan.mesh, rank
        self._shape_of = {
            p.name: torch.Size([bind(d, 0) for d in p.spec.shape]) for p in plan.params
        }
        self._given = params
        self.buckets = held_buckets(plan, rank)
        self._bucket = {b.id: b for b in self.buckets}
        for bucket in self.buckets:
            self._add_bucket(bucket)
        dtypes = {p.name: getattr(torch, p.spec.dtype) for p in plan.params}
        for name in lone_tensors(plan, rank, "param"):
            self.params[name] = _copy(self._initial(name), device, dtypes[name])
        self.buffers = {
            n: _copy(_find(buffers, "buffer", n), device)
            for n in lone_tensors(plan, rank, "buffer")
        }
        del self._given

    def _initial(self, name: str) -> torch.Tensor:
        return _find(self._given, "parameter", name)

    def _initial_part(self, bucket: Bucket, size: int, first: int) -> torch.Tensor:
        """Return `size` elements of a bucket from `first` on, with the initial parameters that lie there."""
        device = CPU if bucket.host else self.device
        part = torch.zeros(size, dtype=getattr(torch, bucket.dtype), device=device)
        for name, offset, shape in zip(
            bucket.params, bucket.offsets, self._shapes(bucket), strict=True
        ):
            begin, end = max(offset, first), min(offset + shape.numel(), first + size)
            _check_there(self._given, "parameter", name)
            if begin < end:
                part[begin - first : end - first].copy_(
                    flat_range(self._given, name, begin - offset, end - offset)
                )
        return part

    def _add_bucket(self, bucket: Bucket) -> None:
        compute, summed = (
            getattr(torch, d) for d in (bucket.compute_dtype, bucket.accumulate_dtype)
        )
        shard, shapes = bucket.shard, self._shapes(bucket)
        size = bucket.numel // self._mesh.degree(shard.optim)
        master = self._initial_part(
            bucket, size, size * self._mesh.index_along(shard.optim, self._rank)
        )
        place = CPU if bucket.away else self.device
        own = flat = master.to(place, compute, copy=bucket.mastered)
        if bucket.away and self.device.type == "cuda":  # so that copies run beside compute
            own = flat = own.pin_memory()
        if shard.optim and not shard.params:  # the others' parts are gathered when the step begins
            flat = torch.zeros(bucket.numel, dtype=compute, device=self.device)
            own = self.part(flat, shard.optim).copy_(master)
        if not bucket.mastered:
            master = own
        kept = self._mesh.degree(shard.grads)
        grads = torch.zeros(bucket.numel // kept, dtype=summed, device=self.device)
        self.own_masters[bucket.id] = master
        if not shard.optim:
            self.masters |= bucket_views(bucket, master, shapes)
        self.flat_params[bucket.id], self.flat_grads[bucket.id] = flat, grads
        self.own_params[bucket.id] = own
        self.own_grads[bucket.id] = grads if shard.grads else self.part(grads, shard.optim)
        if not bucket.lent:
            self.params |= bucket_views(bucket, flat, shapes)
        if not shard.grads:
            self.grads |= bucket_views(bucket, grads, shapes)

    def copy_masters(self, buckets: Iterable[str]) -> None:
        """Write this rank's shard of the parameters of buckets from its masters, if these are other tensors."""
        for id in buckets:
            own, master = self.own_params[id], self.own_masters[id]
            bucket = self._bucket[id]
            if bucket.host and not bucket.away and own.dtype != master.dtype:
                # Cast here: to copy and cast at once takes memory of the device.
                own.copy_(self.host.take(tuple(master.shape), own.dtype).copy_(master))
            elif own is not master:
                own.copy_(master)

    def gradients_on_host(self, id: str, scale: float) -> torch.Tensor:
        """Return a copy of this rank's gradients of a bucket, multiplied by `scale`, in the dtype of its masters.

        The product is made in the wider of both dtypes.
        """
        master, grads = self.own_masters[id], self.own_grads[id]
        shape = tuple(grads.shape)
        copy = self.host.take(shape, grads.dtype).copy_(grads)
        if copy.dtype.itemsize < master.dtype.itemsize:
            copy = self.host.take(shape, master.dtype).copy_(copy)
        if scale != 1.0:
            copy.mul_(scale)
        if copy.dtype != master.dtype:
            copy = self.host.take(shape, master.dtype).copy_(copy)
        return copy

    def _shapes(self, bucket: Bucket) -> list[torch.Size]:
        return [self._shape_of[name] for name in bucket.params]

    def part(self, flat: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """Return this rank's shard of a flat tensor that is sharded along some axes."""
        parts = self._mesh.degree(axes)
        return flat if parts == 1 else flat.chunk(parts)[self._mesh.index_along(axes, self._rank)]

    def parameter(self, name: str) -> torch.nn.Parameter:
        """Return the master of a parameter for an optimizer, as an nn.Parameter that shares its memory."""
        return torch.nn.Parameter(self.masters[name])

    def state_tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the device that owns bytes of a state, without optimizer state."""
        bucketed = {name for bucket in self.buckets for name in bucket.params}
        own = [t for n, t in self.params.items() if n not in bucketed]
        masters = [self.own_masters[b.id] for b in self.buckets if b.mastered and not b.host]
        return [
            *[self.flat_params[b.id] for b in self.buckets if not b.away],
            *masters,
            *self.flat_grads.values(),
            *own,
            *self.buffers.values(),
        ]

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the masters and parameters in the memory of the host."""
        masters = [self.own_masters[b.id] for b in self.buckets if b.host and b.mastered]
        return masters + [self.own_params[b.id] for b in self.buckets if b.away]


def bucket_views(
    bucket: Bucket, flat: torch.Tensor, shapes: Sequence[torch.Size]
) -> list[tuple[str, torch.Tensor]]:
    """Return each parameter of a bucket with its view of a flat tensor of the whole bucket, given their shapes."""
    return [
        (name, flat[offset : offset + shape.numel()].view(shape))
        for name, offset, shape in zip(bucket.params, bucket.offsets, shapes, strict=True)
    ]


def held_buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """Return the buckets whose parameters a rank holds, whole or in part."""
    return tuple(
        plan.bucket(s.name) for s in plan.role_of(rank).states if s.flat and s.category == "grad"
    )


def lone_tensors(plan: Plan, rank: int, category: Literal["param", "buffer"]) -> tuple[str, ...]:
    """Return the names of the rank's parameters that are in no bucket, or of its buffers."""
    return tuple(s.name for s in plan.role_of(rank).states if s.category == category and not s.flat)


def held_params(plan: Plan, rank: int) -> tuple[str, ...]:
    """Return the names of the parameters that a rank holds, each once."""
    bucketed = [name for bucket in held_buckets(plan, rank) for name in bucket.params]
    return tuple(dict.fromkeys([*bucketed, *lone_tensors(plan, rank, "param")]))


def _copy(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return tensor.to(
        device, dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format
    )


def _find(given: Mapping[str, torch.Tensor], what: str, name: str) -> torch.Tensor:
    _check_there(given, what, name)
    return given[name]


def _check_there(given: Mapping[str, torch.Tensor], what: str, name: str) -> None:
    if name not in given:
        raise PlanError(
            f"the plan holds the {what} {name!r}, which the model does not have; compile the strategy with this job"
        )


def empty_value(plan: Plan, value: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a value's tensor."""
    spec = plan.values[value].spec
    return tuple(bind(d, 0) for d in spec.shape), getattr(torch, spec.dtype)
