"""Refuse the batch norms that no plan supports: synchronized over replicas, or with cumulative averages."""

from __future__ import annotations

from torch import nn

from piper_ir.ground.errors import CaptureError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_batch_norms(model: nn.Module, *, statistics: bool) -> None:
    """Raise CaptureError for a batch norm that cannot be captured, with the name of its module."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"{name or 'the model'} is SyncBatchNorm, whose statistics are those of all replicas, which no "
                f"plan takes; "
                'use nn.BatchNorm2d (or 1d, 3d) with Job(batch_norm="microbatch"), which takes '
                "those of each microbatch on its replica, or GroupNorm"
            )
        average = (
            isinstance(module, BATCH_NORMS)
            and module.momentum is None
            and module.track_running_stats
        )
        if statistics and average and module.training:
            raise CaptureError(
                f"{name or 'the model'} is {type(module).__name__}(momentum=None), whose averages weigh by the "
                f"number of batches that it reads while it runs; give it a momentum, such as momentum=0.1, or set "
                f"track_running_stats=False"
            )
