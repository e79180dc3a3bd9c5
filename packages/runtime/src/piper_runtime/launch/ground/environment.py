"""Compare the versions that all processes of a run must share."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

import torch

from piper_ir.ground.errors import ExecutionError

Environment = dict[str, str]
"""The versions of this process by name."""


def environment() -> Environment:
    """Return the versions that must be equal on every node: Python, torch, the CUDA and NCCL that torch uses, Piper."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": nccl,
        "Piper": _installed("piper-training"),
    }


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "not installed"


def check_environments(ours: Environment, here: str, found: Mapping[str, Environment]) -> None:
    """Raise ExecutionError, which names every node whose environment differs from `here`, and both versions."""
    differences = [
        f"{node} has {name} {theirs[name]}, {here} has {version}"
        for node, theirs in found.items()
        for name, version in ours.items()
        if theirs[name] != version
    ]
    if differences:
        raise ExecutionError(
            f"the nodes do not run the same software: {'; '.join(differences)}; install the same on all of them"
        )
