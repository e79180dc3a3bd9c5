"""What candidates are compiled from and scored against, and how it reaches worker processes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from piper_compiler import Options, Strategy, Training
from piper_ir.costs import Costs
from piper_ir.errors import PiperError, TuneError
from piper_ir.plan import Bucket
from piper_ir.program import Program
from piper_ir.sizes import bind
from piper_simulator import Cluster
from piper_simulator.clusters import CPU
from piper_simulator.device_memory import kind_of


@dataclass(frozen=True)
class Problem:
    """`program` and `training` describe the job, `global_batch` its rows per step (None: one per microbatch and replica).
    `cluster` and `costs` give durations; without a cluster the program has its own. A plan must stay within `memory_limit`
    bytes on every device (None: any plan fits). `one_role`: why plans of several roles are refused, empty when they are not."""

    program: Program
    global_batch: int | None = None
    training: Training = field(default_factory=Training)
    cluster: Cluster | None = None
    costs: Costs | None = None
    memory_limit: int | None = None
    one_role: str = ""

    @property
    def options(self) -> Options:
        """Of the compiler: memory is counted with the kernels of the cluster's devices."""
        return Options(device=kind_of(self.cluster))

    def limit_of(self, kind: Cluster | None) -> int | None:
        """Bytes that a plan may hold on a device: where there are several kinds never more than it has."""
        if kind is None or self.cluster is None or not self.cluster.others:
            return self.memory_limit
        return min(self.memory_limit or kind.memory_bytes, kind.memory_bytes)

    @property
    def device_limits(self) -> dict[str, int]:
        """`limit_of` by type of device, where there are several kinds."""
        several = self.cluster.kinds if self.cluster is not None and self.cluster.others else ()
        found = [(kind.device, self.limit_of(kind) or 0) for kind in several]
        return dict(sorted(found, key=lambda f: -f[1]))

    def facts(self) -> tuple[object, ...]:
        """What scores depend on, the same in another process. This machine is itself, however fast it was just measured."""
        cluster = self.cluster.name if self.cluster is not None and self.cluster.device == CPU else self.cluster
        trained = tuple(p for p in self.program.params if p.trained)
        whole = Bucket("", tuple(p.name for p in trained), (), sum(bind(p.spec.numel, 0) for p in trained), "float32", ())
        groups = sorted(self.training.group_of.items())
        training = (groups, self.training.clip, self.training.state_bytes(whole))
        return (self.program.key, self.global_batch, training, cluster, self.costs, self.memory_limit)


Variants = Mapping[int, Program | str | None]
"""Rows per microbatch -> the program there: None for the problem's own, a text where the model cannot run with that many."""


class Programs:
    """The program by rows per microbatch, asked for once each. `at_rows`: as in `compile_program`; it stays in this process."""

    def __init__(self, problem: Problem, at_rows: Callable[[int], Program] | None) -> None:
        self._own, self._at_rows = problem.program, at_rows
        self.found: dict[int, Program | str | None] = {}

    def add(self, rows: int) -> Program | str | None:
        """Find the program at a number of rows."""
        if rows not in self.found:
            try:
                program = self._own if self._at_rows is None else self._at_rows(rows)
            except PiperError as e:
                self.found[rows] = str(e)
            else:
                self.found[rows] = None if program is self._own else program
        return self.found[rows]

    def exact(self, rows: int) -> Program | None:
        """The program itself; None where there is none."""
        found = self.add(rows)
        return self._own if found is None else None if isinstance(found, str) else found


def packed(item: Any, modules: Iterable[ModuleType] = ()) -> bytes:
    """Bytes for another process of this Python, which gets what stands in `modules` by value, the rest by name. TuneError when
    something cannot be sent."""
    try:
        with _by_value(modules):
            out: bytes = cloudpickle.dumps(item)
            return out
    except (TypeError, AttributeError, pickle.PicklingError) as e:
        raise TuneError(
            f"cannot send a {type(item).__name__} to worker processes: {e}; keep open files, locks and generators out of "
            "directives, or search in this process (workers=0)"
        ) from e


def packed_strategy(strategy: Strategy) -> bytes:
    """A strategy for another process. Directives of the user's own travel by value: their file may not be importable there."""
    homes = {type(d).__module__ for d in strategy.directives}
    theirs = [h for h in homes if h.partition(".")[0] != "piper_compiler"]
    if not theirs:  # then pickle, which is quicker, does as a rule: not for what a script defines, or for a function
        with suppress(TypeError, AttributeError, pickle.PicklingError):
            if b"__main__" not in (plain := pickle.dumps(strategy)):
                return plain
    return packed(strategy, [sys.modules[h] for h in theirs if h in sys.modules])


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    mine = [m for m in modules if m.__name__ not in known and m.__name__ != "__main__"]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)
