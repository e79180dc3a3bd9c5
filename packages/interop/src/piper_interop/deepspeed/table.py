"""Hold DeepSpeed's table: every option of its file, and of the TrainingArguments that fill it in."""

from __future__ import annotations

from piper_interop.deepspeed.arguments import ARGUMENTS, PREFIX
from piper_interop.deepspeed.options import (
    BATCH,
    CHECKPOINTING,
    COMPILE,
    EXPERT,
    GRADIENTS,
    OPTIMIZERS,
    PARALLEL,
    PRECISIONS,
)
from piper_interop.deepspeed.other import OTHER
from piper_interop.deepspeed.zero import ZERO
from piper_interop.neutral.kinds import OptionKind, OptionSpec
from piper_interop.neutral.options import OptionTable

OPTIONS: dict[str, OptionSpec] = {
    **BATCH,
    **GRADIENTS,
    **PRECISIONS,
    **OPTIMIZERS,
    **ZERO,
    **CHECKPOINTING,
    **PARALLEL,
    **EXPERT,
    **COMPILE,
    **OTHER,
    **{f"{PREFIX}{name}": option for name, option in ARGUMENTS.items()},
}
"""The options of a DeepSpeed 0.19 file by its full name, each with its kind and its row."""

KINDS: dict[str, OptionKind] = {name: kind for name, (kind, _) in OPTIONS.items()}
TABLE: OptionTable = {name: row for name, (_, row) in OPTIONS.items()}
