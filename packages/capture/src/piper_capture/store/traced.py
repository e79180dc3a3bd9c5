"""Hold a traced model, whose program is made when it is known which of its modules are its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from piper_capture.chunks.cut import Cut
from piper_capture.chunks.layers import Layers
from piper_capture.store.captured import Captured
from piper_capture.trace.dynamo import Forward
from piper_ir.program.program import Chunk, Program


@dataclass(eq=False)
class Traced:
    """Hold a traced model, and its captures with the usual layers or others.

    To make a program takes as long as the trace, so one with the usual layers is not made for a strategy that asks for
    others. Both are made from the same graph, and each only once.

    Attributes:
        forward: the captured graph.
        layers: the usual layers.
        outline: the program with these, without its steps and tensors.
        reduce: the dtype of gradient accumulators; None for the dtype of their parameters.
        make: makes the capture with the usual layers.
        experts: whether the model has regions of experts, which devices may share.
        layered: the captures with other layers, by the layers that were asked for.
    """

    forward: Forward
    layers: Layers
    outline: Program
    reduce: torch.dtype | None
    make: Callable[[], Captured]
    experts: bool
    layered: dict[tuple[str, ...], Captured] = field(default_factory=dict)

    @cached_property
    def assembled(self) -> Captured:
        """Return the capture with the usual layers."""
        return self.make()

    @property
    def has_cross_entropy(self) -> bool:
        """Return whether the model's loss, or a part of it, is torch's cross_entropy."""
        loss = torch.ops.piper.cross_entropy.default
        return any(node.target is loss for node in self.forward.graph.nodes)

    @property
    def dropless(self) -> bool:
        """Return whether experts take every token that chose them, by grouped products."""
        product = torch.ops.piper.grouped_mm.default
        return any(node.target is product for node in self.forward.graph.nodes)

    @property
    def found(self) -> Captured | None:
        """Return the capture with the usual layers if it was made already."""
        return vars(self).get("assembled")


def outline_of(pieces: Cut) -> Program:
    """Return the program of a graph that is cut, without its steps and tensors."""
    chunks = tuple(
        Chunk(piece.region.id, piece.region.coords, (), (), {}, {}) for piece in pieces.pieces
    )
    return Program(chunks, chained=pieces.layers.chained)
