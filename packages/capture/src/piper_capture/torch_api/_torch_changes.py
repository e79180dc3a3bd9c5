"""Count the changes of objects that Dynamo sees, for the reuse of traces (`_torch_reuse`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    MutationType,
    ValueMutationExisting,
    is_side_effect_safe,
)
from torch._dynamo.variables.iter import IteratorVariable


@dataclass(frozen=True)
class RegionChange:
    """Hold a change that is seen outside of the region in which it happened.

    Attributes:
        region: the tracer of the outermost region in which it happened; None outside of regions.
        items: the objects that changed.
        first: whether none of them had changed before.
        module: the module, if an attribute of a module was stored.
        name: that attribute.
        value: its new value.
    """

    region: Any
    items: tuple[Any, ...]
    first: bool
    module: Any = None
    name: str = ""
    value: Any = None

    @property
    def stores_tensor(self) -> bool:
        """Return whether it stores a tensor that the region made in an attribute of a module."""
        made = isinstance(self.value, TensorVariable) and self.value.source is None
        return made and self.module is not None and self.module.source is not None


class Changes:
    """Count the changes of objects that existed before the capture.

    Once such an object may hold a new one, changes of new objects count, too, if these were there at the last trace. A
    call can read a younger object only through its arguments, which are compared, or through an object that was there
    at the last trace, and to put it into that one is a change that counts.
    """

    def __init__(self) -> None:
        self.number = 0
        self._open = self._quiet = False
        self._traces = 0
        self._sources: dict[Any, bool] = {}
        self._log: list[RegionChange] = []

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

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the stores of a reused trace out of `number`; `sources` has them."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def of_region(self) -> list[RegionChange]:
        """Return the changes of the region that was traced last, once; none if several regions had some."""
        log, self._log = self._log, []
        return log if len({id(change.region) for change in log}) == 1 else []

    def counted(self) -> dict[str, Callable[..., Any]]:
        """Return versions of the methods of SideEffects for every change that Dynamo sees, which also count it."""
        store, mutate = SideEffects.store_attr, SideEffects.mutation
        allowed = SideEffects.check_allowed_side_effect

        def check_allowed_side_effect(effects: SideEffects, item: Any) -> Any:
            if item.mutation_type is not None and not is_side_effect_safe(item.mutation_type):
                self._note(effects, item)
            return allowed(effects, item)

        def store_attr(effects: SideEffects, item: Any, name: str, value: Any, *rest: Any) -> None:
            noted = len(self._log)
            store(effects, item, name, value, *rest)
            existed = isinstance(item.mutation_type, AttributeMutationExisting)
            if existed and noted == len(self._log):  # Dynamo checks it later
                self._note(effects, item)
            self._count(
                item, makes_reachable=not isinstance(value, TensorVariable | ConstantVariable)
            )

        def mutation(effects: SideEffects, var: Any) -> None:
            mutate(effects, var)
            self._count(var, makes_reachable=True)

        return {
            "store_attr": store_attr,
            "mutation": mutation,
            "check_allowed_side_effect": check_allowed_side_effect,
        }

    def stored(self) -> dict[str, Callable[..., Any]]:
        """Return a version of the method of a module's variable that notes a stored attribute as one change."""
        method = UnspecializedNNModuleVariable.call_method

        def call_method(module: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            noted = len(self._log)
            result = method(module, tx, name, args, kwargs)
            parts = self._log[noted:]
            if name == "__setattr__" and parts and len(args) == 2 and args[0].is_python_constant():
                items = tuple(item for part in parts for item in part.items)
                first = all(part.first for part in parts)
                attribute, value = args[0].as_python_constant(), args[1].realize()
                change = RegionChange(parts[0].region, items, first, module, attribute, value)
                self._log[noted:] = [change]
            return result

        return {"call_method": call_method}

    def sources(self, *, uncounted: bool = False) -> list[Any]:
        """Return the sources of the objects that existed before the capture and have changed.

        With `uncounted` only those are returned that were changed by reused traces.
        """
        return [source for source, quiet in self._sources.items() if quiet or not uncounted]

    def _note(self, effects: SideEffects, item: Any) -> None:
        first = item.source is not None and item.source not in self._sources
        self._log.append(RegionChange(_region(effects), (item,), first))

    def _count(self, var: Any, makes_reachable: bool) -> None:
        existed = isinstance(var.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        younger = getattr(var.mutation_type, "piper_traces", -1) == self._traces
        iterates = isinstance(var, IteratorVariable)
        if not self._quiet:
            self.number += existed or (self._open and not younger and not iterates)
        self._open |= existed and makes_reachable
        if existed:
            self._sources[var.source] = self._quiet or self._sources.get(var.source, False)


def _region(effects: SideEffects) -> Any:
    """Return the tracer of the outermost region that is being traced; None outside of regions."""
    output: Any = effects.output_graph_weakref()
    tracer = output.current_tracer
    if tracer is output.root_tracer:
        return None
    while tracer.parent is not output.root_tracer:
        tracer = tracer.parent
    return tracer
