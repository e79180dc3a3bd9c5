"""Tell whose line a frame of a stack trace is: the model's, torch's or Piper's."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_TORCH = (
    os.path.dirname(torch.__file__) + os.sep
)  # with the separator: torchvision and torchao begin alike
_PIPER = frozenset({"piper_ops", "piper_capture"})


def is_model_code(file: str) -> bool:
    """Return whether a file belongs to the model: to the user, or to a library other than torch and Piper's tracing."""
    return not file.startswith(_TORCH) and _PIPER.isdisjoint(Path(file).parts)
