"""Refuse a capture under a mode of torch that is not part of the model and would change the traced graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from piper_ir.ground.errors import CaptureError

_LEAVE = "leave it before this call, and enter it again afterwards"


def _autocast() -> Iterator[str]:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            yield (
                f"torch.autocast({device!r}) is active around this call, and a plan computes in the one dtype of "
                f"Job.precision. {_LEAVE.capitalize()}; Precision(params='bfloat16') trains in bfloat16"
            )


def _global_hooks() -> Iterator[str]:
    for name, hooks in vars(modules).items():
        if name.startswith("_global_") and name.endswith("_hooks") and hooks:
            register = f"register_module_{name.removeprefix('_global_').removesuffix('s')}"
            yield (
                f"a hook for all modules is registered (torch.nn.modules.module.{register}), which a plan would "
                f"not run as torch does. Remove it, or register it on the modules of the model, in its constructor"
            )


def _modes() -> Iterator[str]:
    if torch.is_inference_mode_enabled():
        yield (
            f"torch.inference_mode is active, in which nothing can be trained. {_LEAVE.capitalize()}"
        )
    functions = [
        mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext
    ]
    for mode in [*functions, *_get_current_dispatch_mode_stack()]:
        yield (
            f"the mode {type(mode).__name__} is active, which changes torch's operations. {_LEAVE.capitalize()}"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        yield (
            "a transform of torch.func or of forward-mode gradients is active. Call Piper outside of it"
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield (
            f"torch.autograd.graph.saved_tensors_hooks (or save_on_cpu) is active. {_LEAVE.capitalize()}"
        )


def check_autocast() -> None:
    """Raise CaptureError inside of autocast, because a plan's operators would then run in other dtypes than it says."""
    for problem in _autocast():
        raise CaptureError(problem)


def check_context() -> None:
    """Raise CaptureError if a mode of torch is active that changes the graph traced from the model.

    The grad mode does not: captures enable gradients. The default dtype and device change it by the rules of the model
    itself, so captures count them instead.
    """
    for problem in chain(_autocast(), _global_hooks(), _modes()):
        raise CaptureError(problem)


def tracer_settings() -> list[str]:
    """Return the settings of Dynamo and AOTAutograd that differ from torch's defaults, since they change the graph."""
    changed: list[str] = []
    for config in filter(
        None, map(sys.modules.get, ("torch._dynamo.config", "torch._functorch.config"))
    ):
        for line in config.codegen_config().splitlines():  # the settings that were ever set
            name = line.partition(" = ")[0].rpartition(".")[2]
            if getattr(config, name, None) != config._config[name].default:
                changed.append(line)
    return changed
