"""List what is compared with torch.distributed: pipeline schedules, and data parallelism.

Each pipeline schedule is a recipe of ours and a class of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

import piper

WORLD = 2
DATA_PARALLEL = "DDP"


@dataclass(frozen=True)
class Pipeline:
    """Hold one schedule over two ranks on both sides.

    `chunks` are stages per rank; `vee` says that they go over the ranks and back, rather than round and round.
    """

    recipe: Callable[..., tuple[Any, ...]]
    torchs: type[PipelineScheduleSingle] | type[PipelineScheduleMulti]
    chunks: int = 1
    vee: bool = False

    @property
    def stages(self) -> int:
        return WORLD * self.chunks

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending, as torch's schedule expects them and the recipe places them."""
        return [
            k * WORLD + (WORLD - 1 - rank if self.vee and k % 2 else rank)
            for k in range(self.chunks)
        ]

    def schedule(
        self, stages: list[PipelineStage], microbatches: int, loss: Callable[..., Any]
    ) -> Any:
        """Return torch's schedule of a rank."""
        several = issubclass(self.torchs, PipelineScheduleMulti)
        return self.torchs(stages if several else stages[0], microbatches, loss_fn=loss)


PIPELINES = {
    "GPipe": Pipeline(piper.recipes.gpipe, ScheduleGPipe),
    "1F1B": Pipeline(piper.recipes.one_f_one_b, Schedule1F1B),
    "interleaved 1F1B": Pipeline(piper.recipes.interleaved, ScheduleInterleaved1F1B, chunks=2),
    "interleaved zero bubble": Pipeline(
        piper.recipes.interleaved_zb, ScheduleInterleavedZeroBubble, chunks=2
    ),
    "ZBV": Pipeline(piper.recipes.zbv, ScheduleZBVZeroBubble, chunks=2, vee=True),
    "DualPipeV": Pipeline(piper.recipes.dualpipe_v, ScheduleDualPipeV, chunks=2, vee=True),
}
KINDS = (*PIPELINES, DATA_PARALLEL)


@dataclass(frozen=True)
class Sharded:
    """Hold a comparison with FSDP2, whose two replicas share all states, on stages that run 1F1B (1: no pipeline)."""

    stages: int
    mesh: str


SHARDED = {"FSDP2": Sharded(1, "dp=2"), "FSDP2, 1F1B": Sharded(2, "pp=2 x dp=2")}
