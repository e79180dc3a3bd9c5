"""Print a configuration of torchtitan as JSON, by torchtitan's own parser; run by the interpreter that has torchtitan.

    python ask.py --module llama3 --config llama3_70b --training.steps=10
    python ask.py --list
    python ask.py --every

It needs torchtitan and the standard library alone: that interpreter need not have Piper.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SYSTEM = "torchtitan"
MARK = "piper-ask:"
"""The beginning of the line with the answer: torchtitan prints lines of its own."""


@contextmanager
def newest_device() -> Iterator[None]:
    """Let recipes choose kernels that this machine's device lacks: they are read here, and nothing is run."""
    utils: Any = importlib.import_module(f"{SYSTEM}.tools.utils")
    known = getattr(utils, "has_cuda_capability", None)
    utils.has_cuda_capability = lambda major, minor: True
    try:
        yield
    finally:
        utils.has_cuda_capability = known


def plain(value: Any) -> Any:
    """Return a configuration as mappings, lists and plain values; an object keeps its class's name as "__class__"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"__class__": f"{kind.__module__}.{kind.__qualname__}", **fields}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def unchanged(value: Any, prefix: str = "") -> list[str]:
    """Return the full names of options at the defaults of their classes."""
    names: list[str] = []
    for f in dataclasses.fields(value):
        if prefix == "" and f.name == "model_spec":
            continue
        mine = getattr(value, f.name)
        if dataclasses.is_dataclass(mine) and not isinstance(mine, type):
            names += unchanged(mine, f"{prefix}{f.name}.")
            continue
        default = f.default if f.default is not dataclasses.MISSING else None
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        if plain(mine) == plain(default):
            names.append(f"{prefix}{f.name}")
    return names


def parameters(config: Any) -> int | str | None:
    """Return the model's count of parameters, built without memory; why it cannot be built so, as a text; or None."""
    import torch

    spec = getattr(config, "model_spec", None)
    if spec is None:
        return None
    try:
        with torch.device("meta"):
            count: int = sum(p.numel() for p in spec.model.build().parameters())
            return count
    except (ImportError, AssertionError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"


def answer(arguments: list[str]) -> dict[str, Any]:
    """Return the configuration of torchtitan's command line."""
    with newest_device():
        manager = importlib.import_module(f"{SYSTEM}.config").ConfigManager()
        config = manager.parse_args(arguments)
    return answer_of(config)


def every() -> dict[str, Any]:
    """Return the answer of every recipe by "module:name", or why it cannot be made here, as a text."""
    answers: dict[str, Any] = {}
    with newest_device():
        recipes = registry()
    for module, name in recipes:
        recipe = getattr(importlib.import_module(f"{SYSTEM}.models.{module}.config_registry"), name)
        try:
            with newest_device():
                config = recipe()
            answers[f"{module}:{name}"] = answer_of(config)
        except (ImportError, ValueError) as e:  # of a library or a device that a recipe needs
            answers[f"{module}:{name}"] = f"{type(e).__name__}: {e}"
    return answers


def answer_of(config: Any) -> dict[str, Any]:
    """Return a configuration with its defaults and the count of parameters."""
    return {
        "version": importlib.metadata.version(SYSTEM),
        "config": plain(config),
        "defaults": unchanged(config),
        "parameters": parameters(config),
    }


def registry() -> list[tuple[str, str]]:
    """Return the module and the name of every configuration of torchtitan's models."""
    models = importlib.import_module(f"{SYSTEM}.models")
    pairs: list[tuple[str, str]] = []
    missing: set[str | None] = set()
    for module in pkgutil.iter_modules(models.__path__):
        try:
            known = importlib.import_module(f"{SYSTEM}.models.{module.name}.config_registry")
        except ModuleNotFoundError as e:
            missing.add(e.name)
            continue  # a folder without configurations, or one whose own packages are not installed
        pairs += [
            (module.name, name)
            for name, f in inspect.getmembers(known, inspect.isfunction)
            if f.__module__ == known.__name__ and not name.startswith("_")
            if not inspect.signature(f).parameters
        ]
    if not pairs:
        raise ModuleNotFoundError(
            f"no configuration can be read without {sorted(map(str, missing))}"
        )
    return pairs


if __name__ == "__main__":
    modes = {"--list": lambda: {"registry": registry()}, "--every": every}
    mode = modes.get(sys.argv[1]) if len(sys.argv) == 2 else None
    print(MARK + json.dumps(mode() if mode is not None else answer(sys.argv[1:])))
