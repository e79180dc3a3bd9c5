"""Hold Accelerate's table: launch files, TrainingArguments, and the DeepSpeed options in either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from piper_interop.accelerate.launch import LAUNCH
from piper_interop.accelerate.trainer import TRAINER
from piper_interop.deepspeed.arguments import PREFIX as ARGUMENTS
from piper_interop.deepspeed.table import TABLE as DEEPSPEED
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.kinds import OptionKind
from piper_interop.neutral.options import Nearest, OptionRow, OptionTable, Unsupported

PREFIX = "deepspeed."
"""The prefix of DeepSpeed's options among Accelerate's."""

STAND_INS = {
    "bf16": "fp8 of a recipe that is not here, and fp16 under DeepSpeed's torch_autocast, are taken as bf16",
    "adamw": "another optimizer is taken as AdamW, with two states of four bytes per parameter",
}


def deepspeed_of(foreign: Foreign) -> Foreign:
    """Return the DeepSpeed options of a job, and its TrainingArguments, as DeepSpeed's folder reads them."""
    values = {
        name.removeprefix(PREFIX): value
        for name, value in foreign.values.items()
        if name.startswith((PREFIX, ARGUMENTS))
    }
    return Foreign("deepspeed", "", foreign.source, values)


def _inner(row: OptionRow) -> OptionRow:
    """Return a row of DeepSpeed's table, whose condition looks at DeepSpeed's options."""
    if isinstance(row, Nearest | Unsupported) and row.when is not None:
        return replace(row, when=_within(row.when))
    return row


def _within(when: Callable[[Foreign], bool]) -> Callable[[Foreign], bool]:
    return lambda foreign: when(deepspeed_of(foreign))


KINDS: dict[str, OptionKind] = {name: kind for name, (kind, _) in {**LAUNCH, **TRAINER}.items()}
TABLE: OptionTable = {
    **{name: row for name, (_, row) in {**LAUNCH, **TRAINER}.items()},
    **{
        f"{PREFIX}{name}": tuple(
            _inner(row) for row in (rows if isinstance(rows, tuple) else (rows,))
        )
        for name, rows in DEEPSPEED.items()
        if not name.startswith(ARGUMENTS)
    },
}
