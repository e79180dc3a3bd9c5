"""Write a rank's share of a checkpoint: one file with the boxes of its tensors, each as torch.save writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from piper_ops import dtype_name
from piper_runtime.checkpoint.box_archives import write_tensor
from piper_runtime.checkpoint.rank_tensors import NamedRange, Number, in_line
from piper_runtime.weights.boxes import Box, boxes_of_ranges, whole
from piper_runtime.weights.dcp_tensors import SavedBox

SUFFIX = ".distcp"


@dataclass(frozen=True, slots=True)
class SaveDone:
    """Report that a rank has written its share of a checkpoint.

    Attributes:
        step: the number of steps that are done.
        nbytes: the size of the rank's file; 0 if it wrote none.
        boxes: the boxes in it.
        numbers: the optimizer's state beside tensors.
        counters: the steps that the optimizer has counted, by parameter.
        optimizer: the class name of the optimizer, and of its schedule.
        groups: the settings of the optimizer's groups.
        schedule: the state of the schedule.
        loss_scale: the scale of the loss, see `RunningScale.state`; empty if it is not scaled.
        problem: why the rank could not write; empty when it could.
        copied_s: seconds of copying the state to the host.
        blocked_s: seconds for which the rank did not train, these among them; without waiting for the save before.
    """

    rank: int
    step: int
    nbytes: int = 0
    boxes: list[SavedBox] = field(default_factory=list)
    numbers: dict[str, Number] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    optimizer: tuple[str, str | None] = ("", None)
    groups: list[dict[str, Any]] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    copied_s: float = 0.0
    blocked_s: float = 0.0


def rank_file(writer: int | str) -> str:
    """Return the name of the file of a rank, or of another writer."""
    return f"__{writer}_0{SUFFIX}"


Contents = Sequence[tuple[torch.Tensor, Sequence[NamedRange]]]
"""The type of flat tensors on the CPU, each with the ranges that lie in it."""


def write_boxes(
    path: Path, contents: Contents, wrote: Callable[[], None] = lambda: None
) -> tuple[list[SavedBox], int]:
    """Write all ranges as boxes into a new file, and make it durable; return the boxes' places and the file's size.

    `wrote` is called after each box. Without ranges no file is made. Raises OSError, or torch's RuntimeError, when the
    file cannot be written.
    """
    if not any(ranges for _, ranges in contents):
        return [], 0
    boxes: list[SavedBox] = []
    at = 0
    with path.open("wb") as file:
        for flat, ranges in contents:
            for together in in_line(ranges):
                key, shape = together[0].key, together[0].shape
                for box, part in _parts(flat, together):
                    (size, checksum), name = write_tensor(file, part), dtype_name(flat.dtype)
                    boxes.append(
                        SavedBox(
                            key, name, shape, box.offsets, box.sizes, path.name, at, size, checksum
                        )
                    )
                    at += size
                    wrote()
        file.flush()
        os.fsync(file.fileno())
    return boxes, at


def _parts(flat: torch.Tensor, ranges: Sequence[NamedRange]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of ranges of one tensor, which follow each other in memory, with their content."""
    shape, at = ranges[0].shape, ranges[0].offset
    for box in boxes_of_ranges(shape, [part.span for part in ranges]):
        yield box, flat[at : at + box.numel].view(box.sizes)
        at += box.numel
    if not any(part.numel for part in ranges):  # a tensor without elements is there, too
        yield whole(shape), flat[:0].view(shape)
