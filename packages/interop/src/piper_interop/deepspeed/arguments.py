"""Fill in the "auto" values of a DeepSpeed file from Hugging Face's TrainingArguments, as their Trainer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from piper_interop.neutral.foreign import OptionValue
from piper_interop.neutral.kinds import ANY, BOOL, COUNT, FROM_ZERO, NUMBER, OptionSpec
from piper_interop.neutral.options import Ignored, Mapped
from piper_interop.neutral.system import Asked
from piper_ir.ground.errors import JobError

PREFIX = "TrainingArguments."
"""The prefix of TrainingArguments among the options of a DeepSpeed file."""

LEARNING = Ignored("a factor of the optimizer's update, which changes neither time nor memory")
ARGUMENTS: dict[str, OptionSpec] = {
    "per_device_train_batch_size": (COUNT, Mapped("rows of a microbatch")),
    "gradient_accumulation_steps": (COUNT, Mapped("microbatches")),
    "max_grad_norm": (FROM_ZERO, Mapped("clip_norm")),
    "learning_rate": (NUMBER, Mapped("lr")),
    "adam_beta1": (NUMBER, LEARNING),
    "adam_beta2": (NUMBER, LEARNING),
    "adam_epsilon": (NUMBER, LEARNING),
    "weight_decay": (NUMBER, LEARNING),
    "warmup_steps": (NUMBER, LEARNING),
    "bf16": (BOOL, Mapped("precision")),
    "fp16": (BOOL, Mapped("precision, by the DeepSpeed file")),
    "gradient_checkpointing": (BOOL, Mapped("recompute")),
    "gradient_checkpointing_kwargs.*": (ANY, Ignored("chooses between forms of the same")),
    "torch_compile": (BOOL, Mapped("the kernel stack inductor")),
}
"""The TrainingArguments that fill a DeepSpeed file, and further ones that say the rest of a job."""

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "bf16": False,
    "fp16": False,
}
"""The defaults of TrainingArguments (transformers 5.24, training_args.py)."""

SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
"""The options of DeepSpeed, each with the argument that must equal it."""

BY_WIDTH: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""The options of DeepSpeed that follow from the model's width (transformers 5.24, integrations/deepspeed.py)."""


def filled_in(
    values: Mapping[str, OptionValue], takes_auto: Callable[[str], bool], asked: Asked, source: str
) -> dict[str, OptionValue]:
    """Return options without "auto".

    Args:
        values: DeepSpeed's options, and the TrainingArguments under PREFIX; none of these if nobody gave them.
        takes_auto: whether "auto" is a value of an option.
        asked: the model, whose width counts.
        source: the file, for messages.

    Raises JobError that names all "auto" without an argument, and all values that contradict the arguments.
    """
    arguments = {
        name.removeprefix(PREFIX): value.value
        for name, value in values.items()
        if name.startswith(PREFIX)
    }
    open_names, resolved = [], {}
    for name, value in values.items():
        if value.value != "auto" or takes_auto(name):
            resolved[name] = value
        elif not arguments:
            open_names.append(name)
        elif (filled := _filled(name, arguments, asked)) is not None:
            resolved[name] = replace(value, value=filled)
        elif name not in ("train_batch_size", "optimizer.params.betas") and not name.startswith(
            "scheduler."
        ):
            open_names.append(name)
    if open_names:
        raise JobError(
            f'{source}: "auto" of {", ".join(open_names)} is filled in by TrainingArguments; give these with the '
            "file that has them (`piper import accelerate training_args.json`), or one by one: --set "
            "per_device_train_batch_size=4"
        )
    if arguments:
        _agree(resolved, arguments, source)
    return resolved


def _filled(name: str, arguments: Mapping[str, Any], asked: Asked) -> Any:
    """Return the value of an "auto"; None if no argument says it."""
    if name in SAME:
        return arguments.get(SAME[name], DEFAULTS[SAME[name]])
    if name in BY_WIDTH and asked.sizes is not None:
        return BY_WIDTH[name](asked.sizes.fields["width"])
    return None


def _agree(values: Mapping[str, OptionValue], arguments: Mapping[str, Any], source: str) -> None:
    """Raise JobError for options that contradict the arguments, which the Trainer refuses, too."""
    differences = [
        f"  {name}={values[name].value!r}, but {argument}={arguments[argument]!r}"
        for name, argument in SAME.items()
        if name in values and argument in arguments and values[name].value != arguments[argument]
    ]
    if differences:
        raise JobError(
            "\n".join([f"{source}: DeepSpeed's options and TrainingArguments differ", *differences])
        )
