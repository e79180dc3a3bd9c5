"""Hold the calls of a constructor that make the tensors of a model, and make each tensor alone.

A recording is a list of calls of operators. Tensors in it are places in numbered storages, so that views and copies
need no care: to make a tensor, the calls that gave its storage its content run again, in their order. Each call that
draws random numbers does so under a seed of its own (`draw_seed`). So a tensor's content does not depend on the other
tensors that are made, on their order, or on the process. Memory that no call fills is zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper_ir.ground.errors import JobError

TRUNCATED = "trunc_normal_"
"""The name of the one function of `torch.nn.init` that counts as one call: how often it draws depends on the draws."""


def draw_seed(seed: int, draw: int) -> int:
    """Return the seed of a constructor's random call: a hash in 0..2**63-1 of the job's seed and the call's number.

    Calls that draw are numbered from 0, in the order of the whole constructor.
    """
    digest = blake2b(f"{seed}/init/{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class StorageView:
    """Locate a tensor in a numbered storage, as torch does: strides and offset count elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    conjugate: bool = False
    negative: bool = False

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor for a storage."""
        tensor = torch.empty(0, dtype=self.dtype).set_(
            storage, self.offset, self.shape, self.stride
        )
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Describe one call that changes a storage or makes one.

    Attributes:
        op: the operator, as "aten::normal_" with an overload's name after a dot, or `TRUNCATED`.
        args: positional arguments, with a `StorageView` for each tensor.
        kwargs: keyword arguments, likewise.
        made: for each tensor of the result its place in a new storage, or None if its storage existed.
        reads: the storages whose content matters to the call.
        writes: the storages whose content the call changes or makes.
        fills: whether it overwrites one whole storage, regardless of its old content.
        draw: the number among the calls that draw random numbers; None if it does not.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[StorageView | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fills: bool = False
    draw: int | None = None


@dataclass(frozen=True)
class Recording:
    """Hold the calls of a constructor, by position, and the places of its named tensors.

    Attributes:
        seed: the job's.
        default: torch's default dtype in the constructor.
        calls: by position in the constructor.
        sizes: bytes of each storage.
        constants: bytes that storages begin with; the others begin with zeros.
        places: the final view of each named tensor.
    """

    seed: int
    default: torch.dtype
    calls: Mapping[int, RecordedCall]
    sizes: Mapping[int, int]
    constants: Mapping[int, Tensor]
    places: Mapping[str, StorageView]

    def tensor(self, name: str) -> Tensor:
        """Make one tensor, and nothing that it does not depend on; the caller's random state stays as it was."""
        place = self.places[name]
        memory: dict[int, torch.UntypedStorage] = {}
        positions = self._needed(place.storage)
        last = {
            storage: p
            for p in positions
            for storage in (*self.calls[p].reads, *self.calls[p].writes)
        }
        last[place.storage] = -1  # needed beyond the last call
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _default_dtype(self.default):
            for position in positions:
                call = self.calls[position]
                self._run(call, memory)
                for storage in {s for s in (*call.reads, *call.writes) if last[s] == position}:
                    del memory[storage]
        return place.of(self._storage(place.storage, memory))

    def part(self, names: Iterable[str]) -> Recording:
        """Return the part of the recording that some tensors need, to be sent to the process that makes them."""
        places = {name: self.places[name] for name in names}
        positions = sorted({p for place in places.values() for p in self._needed(place.storage)})
        calls = {p: self.calls[p] for p in positions}
        used = {place.storage for place in places.values()}
        used.update(storage for call in calls.values() for storage in (*call.reads, *call.writes))
        constants = {s: c for s, c in self.constants.items() if s in used}
        return replace(
            self,
            calls=calls,
            sizes={s: self.sizes[s] for s in used},
            constants=constants,
            places=places,
        )

    @cached_property
    def _writers(self) -> Mapping[int, list[int]]:
        """Return for each storage the positions of the calls that write it, ascending."""
        positions: dict[int, list[int]] = {}
        for position, call in sorted(self.calls.items()):
            for storage in call.writes:
                positions.setdefault(storage, []).append(position)
        return positions

    def _needed(self, storage: int) -> list[int]:
        """Return the positions, ascending, of the calls that determine the last content of a storage."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        waiting = [(storage, len(self._writers.get(storage, ())))]
        while waiting:
            asked, count = waiting.pop()
            if (asked, count) in seen:
                continue
            seen.add((asked, count))
            for position in reversed(self._writers.get(asked, [])[:count]):
                call = self.calls[position]
                if position not in needed:
                    needed.add(position)
                    waiting += [
                        (s, bisect_left(self._writers.get(s, []), position)) for s in call.reads
                    ]
                if call.fills:
                    break
        return sorted(needed)

    def _run(self, call: RecordedCall, memory: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            return (
                leaf.of(self._storage(leaf.storage, memory))
                if isinstance(leaf, StorageView)
                else leaf
            )

        args, kwargs = pytree.tree_map(real, (call.args, call.kwargs))
        if call.draw is not None:
            torch.default_generator.manual_seed(draw_seed(self.seed, call.draw))
        result = _function(call.op)(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for place, tensor in zip(call.made, tensors, strict=True):
            if place is not None:
                memory[place.storage] = self._laid_out(tensor, place, memory)

    def _storage(
        self, number: int, memory: dict[int, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        """Return a storage; one that no call has made yet begins with its constant, or with zeros."""
        if number not in memory:
            constant = self.constants.get(number)
            initial = (
                torch.zeros(self.sizes[number], dtype=torch.uint8)
                if constant is None
                else constant.clone()
            )
            memory[number] = initial.untyped_storage()
        return memory[number]

    def _laid_out(
        self, tensor: Tensor, place: StorageView, memory: Mapping[int, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        """Return the storage of a result, with the strides that were recorded and shared with no other storage."""
        storage = tensor.untyped_storage()
        same = (tensor.dtype, tensor.stride(), tensor.storage_offset()) == (
            place.dtype,
            place.stride,
            place.offset,
        )
        alone = all(storage._cdata != other._cdata for other in memory.values())
        if same and alone and storage.nbytes() == self.sizes[place.storage]:
            return storage
        target = torch.zeros(self.sizes[place.storage], dtype=torch.uint8).untyped_storage()
        place.of(target).copy_(tensor)
        return target


def _function(op: str) -> Callable[..., Any]:
    """Return the function of a recorded name."""
    if op == TRUNCATED:
        return torch.nn.init.trunc_normal_
    space, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    try:
        function: Callable[..., Any] = getattr(
            getattr(getattr(torch.ops, space), name), overload or "default"
        )
    except AttributeError as error:
        raise JobError(
            f"the model's constructor calls the operator {op}, which this process does not have: {error}"
        ) from error
    return function


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
