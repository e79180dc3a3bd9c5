"""Make the code that counts, in a microbatch, the numbers of the whole batch that a loss reads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

from piper_capture.steps.joint import JointInput, TracedChunk, cut_chunk, trace_joint
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import line_of
from piper_capture.whole_batch.batch_loss import counting
from piper_ir.ground.errors import CaptureError
from piper_ir.program.ops import KEEP_ALL


@dataclass(frozen=True)
class CounterSpec:
    """Say how to trace the counter of a captured graph at any number of rows."""

    forward: Forward

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the tensors of the batch that it reads."""
        return counting(self.forward, 2)[1]

    @cached_property
    def code(self) -> str:
        """Return its code id: the same for counters that do the same."""
        texts = [counting(self.forward, rows)[0].code for rows in (2, 3)]
        return hashlib.sha256(f"counter {texts} {self.reads}".encode()).hexdigest()[:16]

    def trace(self, rows: int) -> TracedChunk:
        """Return the counter as a chunk with an F alone."""
        module, reads = counting(self.forward, rows)
        inputs = [JointInput("batch", self._example(name, rows)) for name in reads]
        traced = cut_chunk(trace_joint(module, inputs, (False,)), KEEP_ALL)
        if traced.draws:
            drawn = next(n for n in self.forward.graph.nodes if n.name == traced.draws[0].origin)
            raise CaptureError(
                f"{line_of(drawn)}: the loss reads a sum or a mean over rows of what is drawn here, beside what "
                f"the model computes. Numbers of the whole batch are counted before a step, where nothing is "
                f"drawn: draw what all rows share without them, such as torch.rand(()), or return a pair (sum, "
                f"weight)"
            )
        return traced

    def _example(self, name: str, rows: int) -> torch.Tensor:
        tensor = self.forward.batch[name]
        shape = tuple(tensor.shape) if name in self.forward.fixed else (rows, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
