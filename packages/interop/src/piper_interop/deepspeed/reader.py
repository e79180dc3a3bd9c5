"""Read DeepSpeed's file of options (ds_config.json), and the options of the command line beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from piper_interop.deepspeed.arguments import ARGUMENTS, PREFIX, filled_in
from piper_interop.deepspeed.table import KINDS
from piper_interop.deepspeed.zero import MAX_REUSE, gathers
from piper_interop.neutral.documents import options_of, setting
from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_interop.neutral.kinds import ANY, checked
from piper_interop.neutral.options import nearest_name
from piper_interop.neutral.system import Asked

VERSION = "0.19"
"""The version of DeepSpeed whose options are known; the file does not say its own."""


def read(source: str, asked: Asked) -> Foreign:
    """Return the options of a file; `asked.sets` has further ones, and TrainingArguments by their names.

    Raises JobError for a file that is no object of options, for values of another kind, and for "auto" without
    TrainingArguments.
    """
    return resolved({**options_of(source), **settings(asked)}, asked, source)


def settings(asked: Asked) -> dict[str, OptionValue]:
    """Return the options of the command line; names without dots are TrainingArguments if these have them."""
    values = {}
    for text in asked.sets:
        name, value = setting(text)
        full = f"{PREFIX}{name}" if name in ARGUMENTS and name not in KINDS else name
        values[full] = OptionValue(value, f"--set {name}")
    return values


def resolved(values: Mapping[str, OptionValue], asked: Asked, source: str) -> Foreign:
    """Return options of a file as DeepSpeed resolves them: without "auto", and with the defaults that matter."""
    values = filled_in(values, _takes_auto, asked, source)
    values = checked("deepspeed", source, values, KINDS)
    foreign = Foreign("deepspeed", VERSION, source, values)
    return replace(foreign, values={**_defaults(foreign), **values})


def _takes_auto(name: str) -> bool:
    kind = KINDS.get(nearest_name(KINDS, name), ANY)
    return kind.takes("auto")


def _defaults(foreign: Foreign) -> dict[str, OptionValue]:
    """Return the defaults that are taken in the nearest form, so that the judgement names them."""
    defaults: dict[str, object] = {}
    reuse = ("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance")
    if gathers(foreign) and foreign.first(*reuse) is None:
        defaults[reuse[1]] = MAX_REUSE
    if foreign.get("tensor_parallel.autotp_size", 0) > 1:
        defaults["tensor_parallel.vocab_parallel_lm_head"] = False
    return {name: OptionValue(value, default=True) for name, value in defaults.items()}
