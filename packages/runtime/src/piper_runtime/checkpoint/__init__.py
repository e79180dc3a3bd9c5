"""Save the state of a run as files that any strategy can read, and bring ranks to the state of such files.

May import: rank, weights.
"""

from piper_runtime.checkpoint.commits import CheckpointCommits
from piper_runtime.checkpoint.converting import checkpoint_at, convert
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.checkpoint.rank_saver import RankSaver
from piper_runtime.checkpoint.rank_tensors import varying_buffers
from piper_runtime.checkpoint.restoring import Restore, restore
from piper_runtime.checkpoint.saved_run import (
    SavedRun,
    check_resumable,
    check_settings,
    open_checkpoint,
)
from piper_runtime.checkpoint.settings import (
    Checkpoints,
    chosen_checkpoint,
    complete_checkpoints,
    prepare_folder,
)
from piper_runtime.weights.boxes import Box, boxes_of_range
from piper_runtime.weights.dcp_tensors import SavedBox

__all__ = [
    "Box",
    "CheckpointCommits",
    "Checkpoints",
    "RankSaver",
    "Restore",
    "SaveDone",
    "SavedBox",
    "SavedRun",
    "boxes_of_range",
    "check_resumable",
    "check_settings",
    "checkpoint_at",
    "chosen_checkpoint",
    "complete_checkpoints",
    "convert",
    "open_checkpoint",
    "prepare_folder",
    "restore",
    "varying_buffers",
]
