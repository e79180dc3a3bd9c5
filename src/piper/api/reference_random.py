"""Set the random state of plain PyTorch as a plan does: before the model, before each layer, and after all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class RandomState:
    """Set torch's generator before the model, before each layer, and when all layers have run (`head`).

    Layers are the entries of the outermost nn.ModuleLists, numbered consecutively in the order of registration, or the
    runs of modules that are named.
    """

    def __init__(self, model: nn.Module, seed: int, head: int | str, layers: Sequence[str] = ()):
        self._seed, self._head = seed, head
        self._numbers: dict[nn.Module, list[int]] = {}
        for number, layer in enumerate(_entries(model, set()) if not layers else map(model.get_submodule, layers)):
            numbers = self._numbers.setdefault(layer, [])
            if layers or not numbers:
                numbers.append(number)
        self._runs: dict[nn.Module, int] = {}
        self._step = self._row = 0
        self._waiting: set[int] = set()
        self._latest: int | str = "root"
        self._at_head = False
        self._set: set[int | str] = set()
        self._doubtful: set[int | str] = set()
        self._again: list[RemovableHandle] = []

    @property
    def places(self) -> frozenset[int | str]:
        """Return where the state was set: numbers of layers, "root" and the head."""
        return frozenset(self._set - self._doubtful)

    @contextmanager
    def during(self, step: int, row: int) -> Iterator[None]:
        """Set the random state during one forward, whose microbatch begins at `row` of the global batch.

        A layer that runs again in the backward, under torch.utils.checkpoint, draws the same numbers as before.
        """
        self._stop()
        self._step, self._row, self._waiting = step, row, {n for numbers in self._numbers.values() for n in numbers}
        self._runs = dict.fromkeys(self._numbers, 0)
        self._at_head, self._latest = False, "root"
        hooks = [layer.register_forward_pre_hook(lambda layer, _: self._before(layer)) for layer in self._numbers]
        hooks += [layer.register_forward_hook(lambda layer, *_: self._after(layer)) for layer in self._numbers]
        self._at("root")
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._again = [layer.register_forward_pre_hook(lambda layer, _: self._repeat(layer)) for layer in self._numbers]

    def _stop(self) -> None:
        for hook in self._again:
            hook.remove()

    def _repeat(self, layer: nn.Module) -> None:
        """Set the random state of a layer's run in the backward, which makes the last run again first."""
        self._at(self._number(layer))
        self._runs[layer] = max(1, self._runs[layer] - 1)

    def _before(self, layer: nn.Module) -> None:
        if self._at_head:  # a layer runs again: what ran in between was no head, and had the head's state
            self._doubtful |= {self._head, self._latest}
        self._runs[layer] += 1
        self._at_head, self._latest = False, self._number(layer)
        self._at(self._latest)

    def _after(self, layer: nn.Module) -> None:
        number = self._number(layer)
        done = self._waiting == {number}
        self._waiting.discard(number)
        if done:
            self._at_head = True
            self._at(self._head)

    def _number(self, layer: nn.Module) -> int:
        """Return the number of a layer's latest run."""
        return self._numbers[layer][min(self._runs[layer], len(self._numbers[layer])) - 1]

    def _at(self, place: int | str) -> None:
        self._set.add(place)
        digest = blake2b(f"{self._seed}/{self._step}/{self._row}/{place}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)  # torch.manual_seed: 50 times as long


def _entries(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the entries of the ModuleLists that are in no other one, except modules in `seen`."""
    for child in module.children():
        if child not in seen:
            seen.add(child)
            entries = (
                [entry for entry in child if entry is not None] if isinstance(child, nn.ModuleList) else _entries(child, seen)
            )
            yield from entries
