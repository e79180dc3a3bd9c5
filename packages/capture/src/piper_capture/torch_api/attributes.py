"""Find attributes of modules beside parameters, buffers and submodules, under the names of the user's code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

HOOKS = frozenset(
    name
    for name, value in vars(nn.Module()).items()
    if "_hooks" in name and isinstance(value, dict)
)
"""The attributes of a module that hold its hooks: functions that run with its forward, its backward and its state."""


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors in attributes of modules, also within lists, dicts and objects.

    The names are as in the user's code: "0.cache", "history[3]", "state.last".
    """
    seen = {id(m) for m in model.modules()}
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(f"{prefix}.{name}" if prefix else name, value, seen)


def _tensors(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"{name}[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        items = [(f"{name}[{i}]", v) for i, v in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        items = [(f"{name}.{k}", v) for k, v in vars(value).items()]
    if items and id(value) not in seen:
        seen.add(id(value))
        for inner, v in items:
            yield from _tensors(inner, v, seen)


def attribute_name(source: str, attribute: str | None) -> str:
    """Return the user's name for Dynamo's: "layers.0.cache" for L['model']._modules['layers']._modules['0'].cache."""
    name = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", source)
    name = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)
    name = re.sub(r"^G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), name)
    name = re.sub(r"(^|\()[LG]\['(\w+)'\]", r"\1\2", name)
    if attribute is not None:
        name = (
            name.removesuffix(".cell_contents")
            if attribute == "cell_contents"
            else f"{name}.{attribute}"
        )
    return name.removeprefix("model.")
