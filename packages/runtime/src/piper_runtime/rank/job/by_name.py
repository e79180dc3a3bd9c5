"""Give each parameter to an optimizer by its name: `Job(optimizer={"layers.*.weight": muon, "*": adamw})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from piper_ir.ground.errors import JobError


@dataclass(frozen=True)
class ByName:
    """Make one optimizer for each pattern of names, of the parameters that match it and none before it.

    Attributes:
        makers: pattern and function of the named parameters, in their order.
    """

    makers: tuple[tuple[str, Callable[[list[tuple[str, Any]]], Any]], ...]

    def __call__(self, named: list[tuple[str, Any]]) -> list[Any]:
        """Return the optimizers, in the order of patterns; raise JobError for a pattern without parameters."""
        left, optimizers = list(named), []
        for pattern, maker in self.makers:
            mine = [(name, p) for name, p in left if fnmatchcase(name, pattern)]
            if not mine:
                names = ", ".join(name for name, _ in named[:5])
                raise JobError(
                    f"Job(optimizer=...): no parameter is left for the pattern {pattern!r}: patterns are those of "
                    f"file names, and a parameter goes to the first one that it matches; the parameters are "
                    f"{names}{' and more' if len(named) > 5 else ''}"
                )
            taken = {name for name, _ in mine}
            left = [(name, p) for name, p in left if name not in taken]
            optimizers.append(maker(mine))
        return optimizers


def bound_by_name(optimizer: Any) -> Any:
    """Return Job.optimizer as a function: itself, or a `ByName` for a mapping from patterns to functions."""
    return ByName(tuple(optimizer.items())) if isinstance(optimizer, Mapping) else optimizer


def by_name_problem(makers: Mapping[Any, Any]) -> str | None:
    """Return the problem with a mapping as Job.optimizer, or None."""
    advice = (
        "a mapping from patterns of names to functions of named parameters is needed, such as "
        '{"layers.*.weight": lambda named: torch.optim.Muon([p for _, p in named]), "*": adamw}'
    )
    if not makers:
        return f"Job(optimizer={{}}) is empty: {advice}"
    for pattern, maker in makers.items():
        if not isinstance(pattern, str) or not pattern:
            return f"Job(optimizer=...) has {pattern!r} as a pattern: {advice}"
        if not callable(maker):
            return f"Job(optimizer=...) has an object of type {type(maker).__name__} for {pattern!r}: {advice}"
    return None
