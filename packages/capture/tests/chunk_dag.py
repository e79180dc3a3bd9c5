"""Runs a captured program without plan or runtime: F of every chunk in order, then I and W in reverse, gradients
summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper_capture import Captured, compile_step
from piper_ir.program.program import Chunk, Program, Step


@dataclass
class Run:
    """Results of one microbatch: scalars, gradients by parameter name, new buffers, and every port by (chunk, port)."""

    loss: Tensor
    weight: Tensor | None
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    ports: dict[tuple[str, str], Tensor] = field(default_factory=dict)


class ChunkDag:
    """`state`: parameters and buffers by first name; `seed` sets the random state before a chunk that draws."""

    def __init__(
        self,
        captured: Captured,
        rows: int,
        state: Mapping[str, Tensor],
        seed: Callable[[Chunk], None] = lambda _: None,
    ) -> None:
        self.captured, self.rows, self.state, self.seed = captured, rows, state, seed
        self.program: Program = captured.bind(rows)
        self.ports: dict[tuple[str, str], Tensor] = {}
        self.grads: dict[str, Tensor] = {}

    def run(self, batch: Mapping[str, Tensor]) -> Run:
        sums: dict[str, list[Tensor]] = {}
        loss = weight = None
        buffers: dict[str, Tensor] = {}
        for chunk in self.program.chunks:
            for k, i in enumerate(chunk.inputs):
                source, _, port = i.ref.partition(":")
                match i.kind:
                    case "value":
                        given = self.ports[source, port]
                    case "batch":
                        given = batch[i.ref]
                    case _:
                        given = self.state[i.ref]
                self.ports[chunk.id, f"in{k}"] = given
            if chunk.random:
                self.seed(chunk)
            self._step(chunk, "F")
            for k, o in enumerate(chunk.outputs):
                made = self.ports[chunk.id, f"out{k}"]
                match o.kind:
                    case "loss":
                        loss = made
                        if o.needs_grad:
                            sums[f"{chunk.id}:out{k}"] = [torch.ones_like(made)]
                    case "weight":
                        weight = made
                    case "buffer":
                        buffers[o.ref] = made
        assert loss is not None
        for name, content in buffers.items():
            self.state[name].copy_(content)  # before the backward, as with microbatches in flight
        for chunk in reversed(self.program.chunks):
            for k, o in enumerate(chunk.outputs):
                if o.needs_grad:
                    self.ports[chunk.id, f"tan{k}"] = sum(
                        sums[f"{chunk.id}:out{k}"][1:], sums[f"{chunk.id}:out{k}"][0]
                    )
            self._step(chunk, "I")
            for k, i in enumerate(chunk.inputs):
                if i.kind == "value" and i.needs_grad:
                    sums.setdefault(i.ref, []).append(self.ports[chunk.id, f"gin{k}"])
            self._step(chunk, "W")
        return Run(loss, weight, self.grads, buffers, self.ports)

    def _step(self, chunk: Chunk, step: Step) -> None:
        signature = chunk.steps[step]
        if signature.empty:
            return
        args = [self.ports[chunk.id, port] for port in signature.reads]
        for k in signature.accumulates:
            name = chunk.inputs[k].ref
            args.append(self.grads.setdefault(name, torch.zeros_like(self.state[name])))
        with torch.no_grad():
            results = compile_step(self.captured.code.get(chunk.code, self.rows)[step])(args)
        for port, value in zip(signature.writes, results, strict=True):
            spec = chunk.ports[port]
            # What F of an opaque chunk saves is autograd's, behind an empty tensor.
            shape = (0,) if chunk.coords.get("opaque") and port == "saved0" else spec.shape
            assert tuple(value.shape) == shape and str(value.dtype) == f"torch.{spec.dtype}", (
                chunk.id,
                step,
                port,
            )
            self.ports[chunk.id, port] = value
