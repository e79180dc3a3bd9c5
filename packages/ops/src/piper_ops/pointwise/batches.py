"""Define the values that a batch may hold beside tensors of rows, for capture and for the feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Constant = bool | int | float | str
_SHARED = "_piper_shared"


def shared(tensor: Tensor) -> Tensor:
    """Mark a tensor of a batch as one without rows: positions, offsets of fields, a temperature.

    Job.batch returns it whole for any rows, in a shape that does not depend on them: `piper.shared(positions)`. Its
    values may change from call to call. Returns a tensor with the same memory.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"shared got a {type(tensor).__name__}; a tensor of the batch is needed")
    marked = tensor.detach()
    setattr(marked, _SHARED, True)
    return marked


def is_shared(tensor: Tensor, name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a tensor of a batch has no rows, by its mark or by its name ("inputs.positions", "positions")."""
    last = name.rpartition(".")[2]
    return hasattr(tensor, _SHARED) or any(
        fnmatchcase(name, p) or fnmatchcase(last, p) for p in patterns
    )


def batch_pair(result: object) -> tuple[Any, Any] | None:
    """Return a batch function's return value as (inputs, targets), with plain dicts for mappings of other kinds.

    A mapping or a dataclass alone is the inputs, without targets. Return None for any value that is neither one of
    these nor a pair. The class of a dataclass is registered, so that torch finds the tensors in it.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return _plain(result[0]), _plain(result[1])
    return (_plain(result), None) if isinstance(result, Mapping) or is_dataclass(result) else None


def _register_dataclasses(nest: Any) -> None:
    """Register the dataclasses in a nest with torch, if their fields are all arguments of their constructor."""
    while kinds := {type(leaf) for leaf in pytree.tree_leaves(nest) if _is_record(leaf)}:
        for kind in kinds:
            pytree.register_dataclass(kind)


def _is_record(leaf: Any) -> bool:
    return (
        is_dataclass(leaf)
        and not isinstance(leaf, type | Mapping)
        and all(f.init for f in fields(leaf))
    )


def _plain(nest: Any) -> Any:
    def leaf(value: Any) -> Any:
        return (
            {key: _plain(item) for key, item in value.items()}
            if isinstance(value, Mapping)
            else value
        )

    _register_dataclasses(nest)
    return pytree.tree_map(leaf, nest)


def batch_leaves(inputs: Any, targets: Any) -> Iterator[tuple[str, Any]]:
    """Yield a batch's leaves with their paths: "inputs" (a single tensor), "inputs.0", "inputs.mask", "targets.y.0"."""
    for root, nest in (("inputs", inputs), ("targets", targets)):
        for path, leaf in pytree.tree_flatten_with_path(nest)[0]:
            if leaf is not None:
                yield ".".join([root, *map(_key, path)]), leaf


def _key(entry: Any) -> str:
    """Return the name of one step of a path: a dict's key, a sequence's index, or a field's name."""
    return next(
        (str(getattr(entry, a)) for a in ("key", "idx", "name") if hasattr(entry, a)), str(entry)
    )
