"""Count the changes of objects that Dynamo sees, for the reuse of traces (`_torch_reuse`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    MutationType,
    ValueMutationExisting,
)
from torch._dynamo.variables.iter import IteratorVariable


class Changes:
    """Count the changes of objects that existed before the capture.

    Once such an object may hold a new one, changes of new objects count, too, if these were there at the last trace. A
    call can read a younger object only through its arguments, which are compared, or through an object that was there
    at the last trace, and to put it into that one is a change that counts.
    """

    def __init__(self) -> None:
        self.number = 0
        self._open = False
        self._traces = 0
        self._sources: dict[Any, None] = {}

    def after_trace(self) -> None:
        """Let all objects that are made from now on be younger than the last trace."""
        self._traces += 1

    def dated(self) -> dict[str, Callable[..., None]]:
        """Return a version of MutationType's constructor that notes how many traces there were."""
        build = MutationType.__init__

        def init(mutation_type: Any, *args: Any) -> None:
            build(mutation_type, *args)
            mutation_type.piper_traces = self._traces

        return {"__init__": init}

    def counted(self) -> dict[str, Callable[..., None]]:
        """Return versions of the methods of SideEffects for every change that Dynamo sees, which also count it."""
        store, mutate = SideEffects.store_attr, SideEffects.mutation

        def store_attr(effects: SideEffects, item: Any, name: str, value: Any, *rest: Any) -> None:
            self._count(
                item, makes_reachable=not isinstance(value, TensorVariable | ConstantVariable)
            )
            store(effects, item, name, value, *rest)

        def mutation(effects: SideEffects, var: Any) -> None:
            self._count(var, makes_reachable=True)
            mutate(effects, var)

        return {"store_attr": store_attr, "mutation": mutation}

    @property
    def sources(self) -> list[Any]:
        """Return the sources of the objects that existed before the capture and have changed."""
        return list(self._sources)

    def _count(self, var: Any, makes_reachable: bool) -> None:
        existed = isinstance(var.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        younger = getattr(var.mutation_type, "piper_traces", -1) == self._traces
        iterates = isinstance(var, IteratorVariable)
        self.number += existed or (self._open and not younger and not iterates)
        self._open |= existed and makes_reachable
        if existed:
            self._sources[var.source] = None
