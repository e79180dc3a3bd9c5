"""Count the rows that devices leave out for want of places (`shard(overflow="drop")`), by module of experts.

Only the op `experts_drop` in a step's code knows them. A rank puts a kernel of its own in its place, which counts while
a forward runs: a forward that is computed again leaves out the same rows once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload

from piper_ir.ground.expert_tokens import DROPPED_ROWS, counts_tokens
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk
from piper_ops import DIRECT, experts_drop
from piper_runtime.rank.values.device import NumberReader, Read


class DroppedRows:
    """Hold the rows that a rank has left out in this step, by module; there are only modules that count their tokens.

    `kernels` has the functions that a step's code calls in place of ops.
    """

    def __init__(
        self,
        plan: Plan,
        numbers: NumberReader,
        untracked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Find the modules of a plan; tensors that are made in a block of `untracked` are no memory of the plan."""
        counted = (
            o.ref
            for c in plan.chunks
            for o in c.outputs
            if o.kind == "buffer" and counts_tokens(o.ref)
        )
        self._modules = tuple(dict.fromkeys(ref.rpartition(".")[0] for ref in counted))
        self._numbers, self._untracked = numbers, untracked
        self._read: Read | None = None
        self._found: dict[str, int] = {}
        self.kernels: Mapping[OpOverload, Callable[..., Any]] = {experts_drop: self._drop}

    def begin(self) -> None:
        """Start a step."""
        self._found.clear()

    def counts(self) -> dict[str, list[int]]:
        """Return the dropped rows that a rank reports of a step, beside the tokens of its experts."""
        return {f"{module}.{DROPPED_ROWS}": [rows] for module, rows in self._found.items()}

    def counting(self, forward: Callable[[], object], chunk: Chunk) -> Callable[[], object]:
        """Return a chunk's forward, which counts the rows that it leaves out."""
        module = next(
            (
                m
                for i in chunk.inputs
                if i.kind == "param"
                for m in self._modules
                if i.ref.startswith(f"{m}.")
            ),
            None,
        )
        if module is None:
            return forward

        def add(rows: float) -> None:
            self._found[module] = self._found.get(module, 0) + int(rows)

        read = self._numbers.reader(torch.int64, add)

        def run() -> None:
            self._read = read
            try:
                forward()
            finally:
                self._read = None

        return run

    def _drop(self, chosen: torch.Tensor, experts: int, degree: int, slot: int) -> torch.Tensor:
        """Run the op's kernel, which replaces choices without a place by `experts`, and count these."""
        kept: torch.Tensor = DIRECT[experts_drop](chosen, experts, degree, slot)
        if self._read is not None:
            with self._untracked():
                self._read((kept == experts).sum())
        return kept
