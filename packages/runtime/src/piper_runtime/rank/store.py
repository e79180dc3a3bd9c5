"""Hold the tensors of one rank: states that persist over steps, and values that live within one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from piper_ir.errors import PlanError
from piper_ir.plan import Bucket, Plan
from piper_ir.sizes import bind
from piper_runtime.rank.device import CPU


class Store:
    """Hold a rank's states on its device, and `values`: id -> tensor, the only reference to each.

    The parameters of a bucket are views of one flat tensor (`flat_params`), their gradients (`grads`) of another
    (`flat_grads`), zeroed. What an optimizer updates are `masters`, views of `flat_masters`: the parameters themselves,
    or others in a wider dtype, from which `copy_masters` writes the parameters. Every other parameter, and every
    buffer, is a tensor of its own. The store copies its arguments.
    """

    def __init__(
        self, plan: Plan, rank: int, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
        device: torch.device = CPU,
    ):  # fmt: skip
        self.role = plan.role_of(rank)
        self.device = device
        self.values: dict[str, torch.Tensor] = {}
        self.params: dict[str, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.masters: dict[str, torch.Tensor] = {}
        self.flat_params: dict[str, torch.Tensor] = {}
        self.flat_masters: dict[str, torch.Tensor] = {}
        self.flat_grads: dict[str, torch.Tensor] = {}
        self._given = params
        self.buckets = held_buckets(plan, rank)
        for bucket in self.buckets:
            self._add_bucket(bucket)
        dtypes = {p.name: getattr(torch, p.spec.dtype) for p in plan.params}
        for name in lone_tensors(plan, rank, "param"):
            self.params[name] = _copy(self._initial(name), device, dtypes[name])
        self.buffers = {n: _copy(_find(buffers, "buffer", n), device) for n in lone_tensors(plan, rank, "buffer")}
        del self._given

    def _initial(self, name: str) -> torch.Tensor:
        return _find(self._given, "parameter", name)

    def _add_bucket(self, bucket: Bucket) -> None:
        names = (bucket.compute_dtype, bucket.reduce_dtype, bucket.dtype)
        made = [torch.zeros(bucket.numel, dtype=getattr(torch, n), device=self.device) for n in names[: 2 + bucket.mastered]]
        flat, grad, master = *made[:2], made[-1] if bucket.mastered else made[0]
        for name, offset in zip(bucket.params, bucket.offsets, strict=True):
            initial = self._initial(name)
            part = slice(offset, offset + initial.numel())
            self.params[name], self.masters[name] = flat[part].view(initial.shape), master[part].view(initial.shape)
            self.masters[name].copy_(initial)
            self.grads[name] = grad[part].view(initial.shape)
        self.flat_params[bucket.id], self.flat_masters[bucket.id], self.flat_grads[bucket.id] = flat, master, grad
        self.copy_masters((bucket.id,))

    def copy_masters(self, buckets: Iterable[str]) -> None:
        """Write the parameters of buckets from their masters, where these are others."""
        for id in buckets:
            flat, master = self.flat_params[id], self.flat_masters[id]
            if flat is not master:
                flat.copy_(master)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """Return what an optimizer updates of a parameter, as an nn.Parameter that shares its memory."""
        return torch.nn.Parameter(self.masters[name])

    def state_tensors(self) -> list[torch.Tensor]:
        """Return every tensor that owns bytes of a state, without optimizer state."""
        bucketed = self.grads.keys()
        own = [t for n, t in self.params.items() if n not in bucketed]
        masters = [t for id, t in self.flat_masters.items() if t is not self.flat_params[id]]
        return [*self.flat_params.values(), *masters, *self.flat_grads.values(), *own, *self.buffers.values()]


def held_buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """Return the buckets of which a rank holds parameters, whole or in part."""
    return tuple(plan.bucket(s.name) for s in plan.role_of(rank).states if s.flat and s.category == "param")


def lone_tensors(plan: Plan, rank: int, category: Literal["param", "buffer"]) -> tuple[str, ...]:
    """Return the names of the rank's parameters that are in no bucket, or of its buffers."""
    return tuple(s.name for s in plan.role_of(rank).states if s.category == category and not s.flat)


def held_params(plan: Plan, rank: int) -> tuple[str, ...]:
    """Return the names of the parameters that a rank holds, each once."""
    bucketed = [name for bucket in held_buckets(plan, rank) for name in bucket.params]
    return tuple(dict.fromkeys([*bucketed, *lone_tensors(plan, rank, "param")]))


def _copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.to(device, dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)


def _find(given: Mapping[str, torch.Tensor], what: str, name: str) -> torch.Tensor:
    if name not in given:
        raise PlanError(f"the plan holds the {what} {name!r}, which the model does not have; compile the strategy with this job")
    return given[name]


def empty_value(plan: Plan, value: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a value's tensor."""
    spec = plan.values[value].spec
    return tuple(bind(d, 0) for d in spec.shape), getattr(torch, spec.dtype)
