"""Read a file of `accelerate config`, or TrainingArguments as JSON, with the DeepSpeed file that either names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from piper_interop.accelerate.launch import LAUNCH
from piper_interop.accelerate.table import KINDS, PREFIX
from piper_interop.accelerate.trainer import DEFAULTS
from piper_interop.deepspeed.arguments import ARGUMENTS as SHARED
from piper_interop.deepspeed.arguments import PREFIX as ARGUMENTS
from piper_interop.deepspeed.reader import resolved
from piper_interop.neutral.documents import options_of, setting
from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_interop.neutral.kinds import checked
from piper_interop.neutral.options import nearest_name
from piper_interop.neutral.system import Asked
from piper_ir.ground.errors import JobError

VERSION = "1.15"
"""The version of Accelerate whose options are known (of transformers: 5.24); a file does not say its own."""

FILES = (
    "deepspeed_config.deepspeed_config_file",
    "deepspeed_config.hf_ds_config",
    f"{ARGUMENTS}deepspeed",
)
"""The options that name a DeepSpeed file."""

FIELDS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}
"""The options of DeepSpeed by the names that a launch file has for them."""


def read(source: str, asked: Asked) -> Foreign:
    """Return the options of a launch file or of TrainingArguments; `asked.sets` has further ones.

    Names of TrainingArguments have the prefix "TrainingArguments.", names of a DeepSpeed file "deepspeed.".
    Raises JobError for a file that is neither, and for values of another kind.
    """
    written = options_of(source)
    if arguments := _are_arguments(written):
        written = {f"{ARGUMENTS}{name}": value for name, value in written.items()}
    values = {**written, **_settings(asked, arguments)}
    inner = f"{ARGUMENTS}deepspeed."
    values = {
        name.removeprefix(ARGUMENTS) if name.startswith(inner) else name: value
        for name, value in values.items()
    }
    values = checked("accelerate", source, values, KINDS)
    if arguments:
        values = {**_defaults(values), **values}
    own = {name: value for name, value in values.items() if not name.startswith(PREFIX)}
    return Foreign("accelerate", VERSION, source, {**own, **_deepspeed(values, asked, source)})


def _are_arguments(values: Mapping[str, OptionValue]) -> bool:
    """Return whether a file has TrainingArguments: more of its keys are these than options of a launch file."""
    keys = {name.partition(".")[0] for name in values}
    launch = {name.partition(".")[0] for name in LAUNCH}
    trainer = {name.split(".")[1] for name in KINDS if name.startswith(ARGUMENTS)}
    return len(keys & trainer) > len(keys & launch)


def _settings(asked: Asked, arguments: bool) -> dict[str, OptionValue]:
    """Return the options of the command line; TrainingArguments are named without their prefix."""
    values = {}
    for text in asked.sets:
        name, value = setting(text)
        known = nearest_name(KINDS, f"{ARGUMENTS}{name}") != "" or name in SHARED
        full = f"{ARGUMENTS}{name}" if known and (arguments or name not in KINDS) else name
        values[full] = OptionValue(value, f"--set {name}")
    return values


def _defaults(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    return {
        f"{ARGUMENTS}{name}": OptionValue(value, default=True)
        for name, value in DEFAULTS.items()
        if f"{ARGUMENTS}{name}" not in values
    }


def _deepspeed(
    values: Mapping[str, OptionValue], asked: Asked, source: str
) -> dict[str, OptionValue]:
    """Return the DeepSpeed options of a job under their prefix; none if it does not use DeepSpeed."""
    options = {
        name.removeprefix(PREFIX): value
        for name, value in values.items()
        if name.startswith(PREFIX)
    }
    named = next((name for name in FILES if name in values and values[name].value), None)
    if named is not None:
        options = options_of(_beside(source, named, values[named].value))
    elif "distributed_type" in values and values["distributed_type"].value == "DEEPSPEED":
        options = _by_fields(values)
    if not options:
        return {}
    trainer = {name: value for name, value in values.items() if name.startswith(ARGUMENTS)}
    foreign = resolved({**options, **trainer}, asked, source)
    return {
        f"{PREFIX}{name}": value
        for name, value in foreign.values.items()
        if not name.startswith(ARGUMENTS)
    }


def _beside(source: str, option: str, path: Any) -> str:
    """Return the path of a file that an option names: from the folder of the options, or from the current one."""
    folders = (Path(source).parent, Path())
    files = [
        folder / path for folder in folders if isinstance(path, str) and (folder / path).is_file()
    ]
    if not files:
        raise JobError(f"{source}: {option}={path!r}: there is no such file")
    return str(files[0])


def _by_fields(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the options of DeepSpeed that Accelerate makes of the fields of a launch file."""
    options = {
        option: values[f"deepspeed_config.{field}"]
        for field, option in FIELDS.items()
        if f"deepspeed_config.{field}" in values
    }
    # Accelerate's plugin has stage 2 where nothing is said, and rows of the script.
    options.setdefault("zero_optimization.stage", OptionValue(2, default=True))
    precision = values.get("mixed_precision", OptionValue("no"))
    # beside fp8, all but its products is in bf16
    enabled = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(precision.value)
    if enabled:
        options[f"{enabled}.enabled"] = replace(precision, value=True)
    rows = values.get(f"{ARGUMENTS}per_device_train_batch_size")
    if rows is not None:
        options["train_micro_batch_size_per_gpu"] = rows
    return options
