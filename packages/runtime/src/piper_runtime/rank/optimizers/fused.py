"""Try fused optimizer kernels before they are used: one of torch's may be wrong for a dtype on a device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from piper_ir.ground.errors import PiperWarning

ELEMENTS = 64
"""The elements of a test tensor in whole vectors; one is added, since kernels treat a remainder differently."""
TOLERANCE = 0.05
"""The accepted relative difference of steps: bfloat16 rounds by 0.01, a kernel that skips vectors is off by 0.8."""
LEARNING_RATE = 0.1
PER_RUN = ("params", "param_names", "lr", "initial_lr", "fused", "foreach")
"""The entries of a parameter group that do not choose the arithmetic of a kernel."""

_tried: dict[tuple[type[Optimizer], torch.dtype, torch.device, str], str] = {}
_said: set[str] = set()


def fused_problem(optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> str:
    """Return why fused kernels cannot be used for the groups of an optimizer; an empty text when they are right.

    Two small steps are compared with steps of the plain kernel, once per process, kind, dtype, device and options.
    """
    problems = (
        _group_problem(type(optimizer), group, dtype, device) for group in optimizer.param_groups
    )
    return next(filter(None, problems), "")


def warn_unfused(optimizer: Optimizer, dtype: torch.dtype, problem: str) -> None:
    """Warn, once per process, that an optimizer runs without fused kernels."""
    text = (
        f"torch's fused {type(optimizer).__name__} {problem} in {str(dtype).removeprefix('torch.')}, so the plain "
        f"one is used, which goes from parameter to parameter"
    )
    if text not in _said:
        _said.add(text)
        warnings.warn(text, PiperWarning, stacklevel=2)


def _group_problem(
    kind: type[Optimizer], group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> str:
    options = {name: value for name, value in group.items() if name not in PER_RUN}
    key = (kind, dtype, device, repr(sorted(options.items())))
    if key not in _tried:
        _tried[key] = _try(kind, options, dtype, device)
    return _tried[key]


def _try(
    kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> str:
    plain = _moved(kind, options, dtype, device, fused=False)
    try:
        fused = _moved(kind, options, dtype, device, fused=True)
    except Exception as e:  # torch's error for a dtype or a device that a kernel does not know
        return f"cannot run on {device} ({type(e).__name__}: {str(e).splitlines()[0]})"
    # Written so that NaN is a difference.
    same = float((fused - plain).norm()) <= TOLERANCE * float(plain.norm())
    return "" if same else f"differs from the plain one on {device}"


def _moved(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    fused: bool,
) -> torch.Tensor:
    """Return how far two steps move a small parameter."""
    start = torch.linspace(-0.5, 0.5, ELEMENTS + 1).to(dtype).to(device)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], lr=LEARNING_RATE)  # type: ignore[call-arg]  # every optimizer takes lr
    optimizer.param_groups[0].update(options, fused=fused, foreach=False)
    for gradient in (
        torch.linspace(-1.0, 2.0, ELEMENTS + 1),
        torch.linspace(1.5, -1.0, ELEMENTS + 1),
    ):
        parameter.grad = gradient.to(dtype).to(device)
        optimizer.step()
    return (parameter.detach() - start).double().cpu()
