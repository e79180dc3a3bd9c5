"""Hold a captured model: a program with sizes affine in rows, and the functions of its chunks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from piper_capture.chunks.advancing import Advancing
from piper_capture.chunks.layers import Layers
from piper_capture.chunks.other_rows import check_rows
from piper_capture.steps.linearity import Auxiliary
from piper_capture.store.codestore import CodeStore
from piper_capture.trace.dynamo import Forward
from piper_ir.program.layout import Sharding
from piper_ir.program.ops import KernelSource, Step
from piper_ir.program.program import Program, bind_chunks


@dataclass(frozen=True)
class Captured:
    """Hold a captured model: its program with sizes affine in rows, and the code of its chunks.

    Plans take their sizes from `bind(rows)`, which is exact for every number of rows, one included.

    Attributes:
        forward: the captured graph.
        advancing: buffers that advance once per microbatch.
        auxiliary: the backwards that are not linear in the gradients that come in.
        remarks: chunk -> a text that a message about it should add.
        under: the program with the variants for policies of recomputation, by policies and the rows at which alone its
            new sizes need to hold, 0 for any; filled when they are asked for.
        shared: the same capture for devices that share its chunks, by shardings and such rows, filled like `under`; at
            () the one that is also cut at regions of experts.
        layers: the layers.
        layered: the same capture with other layers, by the layers that were asked for.
        reduce: the dtype of gradient accumulators; None for the dtype of their parameters.
        unshared: of a capture for such devices, "parameter:dimension" -> why it stays whole, though its use would allow
            to share it.
        tiled: the same capture with logits and loss in tiles, by their number, filled like `under`.
        kernels: "eager", or "inductor" for chunks in which Inductor compiles groups of operations; `bind` gives these.
    """

    program: Program
    code: CodeStore
    forward: Forward
    advancing: tuple[Advancing, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)
    under: dict[tuple[tuple[str, ...], int], Program] = field(
        default_factory=dict, repr=False, compare=False
    )
    shared: dict[tuple[tuple[Sharding, ...], int], Captured] = field(
        default_factory=dict, repr=False, compare=False
    )
    unshared: Mapping[str, str] = field(default_factory=dict)
    layers: Layers = field(default_factory=Layers)
    layered: dict[tuple[str, ...], Captured] = field(
        default_factory=dict, repr=False, compare=False
    )
    reduce: torch.dtype | None = None
    auxiliary: tuple[Auxiliary, ...] = ()
    tiled: dict[int, Captured] = field(default_factory=dict, repr=False, compare=False)
    kernels: KernelSource = "eager"

    @property
    def assembled(self) -> Captured:
        """Return itself, as a traced model returns its capture with the usual layers."""
        return self

    @property
    def outline(self) -> Program:
        """Return the program, which serves as the outline that a traced model has."""
        return self.program

    def bind(self, rows: int, runs: Mapping[str, Collection[Step]] | None = None) -> Program:
        """Return the program with integer sizes for microbatches of `rows` rows on one device.

        Sizes at one row come from a trace at one row, at which torch makes views instead of copies. Inductor's choice
        of kernels depends on the sizes, so that they come from a trace at the very rows. It compiles the steps `runs`,
        by the chunk's variant; all without. Raises CaptureError if the model takes another path at this number of rows
        than the captured one.
        """
        check_rows(self.forward, rows)
        chunks, variants = self.program.chunks, self.program.variants
        if not self.is_affine(rows):
            codes = self._codes(runs)
            pairs = {(c.code, codes[c.variant]) for c in (*chunks, *variants)}
            traced = {
                code: self.code.alone(code, rows)
                for own, code in sorted(pairs)
                if rows == 1 or code != own
            }
            chunks, variants = (
                tuple(
                    replace(c, code=code, ports=traced[code][0], steps=traced[code][1])
                    if (code := codes[c.variant]) in traced
                    else c
                    for c in cs
                )
                for cs in (chunks, variants)
            )
        return replace(
            self.program, chunks=bind_chunks(chunks, rows), variants=bind_chunks(variants, rows)
        )

    def _codes(self, runs: Mapping[str, Collection[Step]] | None) -> dict[str, str]:
        """Return the code of each variant, with the steps `runs` compiled by Inductor where that is asked for.

        Chunks of equal code that compile any step share one.
        """
        chunks = (*self.program.chunks, *self.program.variants)
        if self.kernels == "eager":
            return {chunk.variant: chunk.code for chunk in chunks}
        steps_by_code: dict[str, set[Step]] = {}
        compiled = {c.variant: c.steps if runs is None else runs.get(c.variant, ()) for c in chunks}
        for chunk in chunks:
            steps_by_code.setdefault(chunk.code, set()).update(compiled[chunk.variant])
        return {
            c.variant: self.code.fused(c.code, steps_by_code[c.code])
            if compiled[c.variant]
            else c.code
            for c in chunks
        }

    def is_affine(self, rows: int) -> bool:
        """Return whether the program for a number of rows follows from the one with sizes affine in rows."""
        return rows > 1 and self.kernels == "eager"
