"""Hold the data from which candidates are compiled and scored, and bring it to worker processes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from piper_autotune.space.objective import Objective, weight
from piper_compiler import CaptureRequest, Options, Strategy, Training, capture_request
from piper_ir.ground.errors import PiperError, TuneError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Bucket, Plan
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource, Step
from piper_ir.program.program import Chunk, Program
from piper_simulator import (
    CPU,
    Cluster,
    CostModelFactory,
    Device,
    DeviceModel,
    GivenLoad,
    device_type,
    load_text,
)


@dataclass(frozen=True)
class TuningProblem:
    """Describe a search.

    Attributes:
        program: describes the job, with `training`.
        global_batch: rows per step; None for one per microbatch and replica.
        training: the optimizer's groups and states.
        cluster: gives durations; without a cluster the program has its own.
        costs: measured durations.
        memory_limit: the bytes on every device within which a plan must stay; None when any plan fits.
        one_role: why plans of several roles are refused; empty when they are not.
        model: the cost model that gives durations.
        objective: the quantity that the search minimises.
        tokens_per_step: tokens of a step on all ranks, if they are known.
        model_content: a text that is equal, in any process, only for models that give the same durations; None when it
            is not known. Piper's own model needs none.
        load: of experts, as in `piper_simulator.simulate`; bounds of candidates hold for a load of 1, the least.
        kernels: of the plans, as in `piper_compiler.Options`, and so is `cuda_graph`.
    """

    program: Program
    global_batch: int | None = None
    training: Training = field(default_factory=Training)
    cluster: Cluster | None = None
    costs: Costs | None = None
    memory_limit: int | None = None
    one_role: str = ""
    model: CostModelFactory = DeviceModel
    model_content: str | None = None
    objective: Objective = "period"
    tokens_per_step: int | None = None
    load: GivenLoad | None = None
    kernels: KernelSource = "eager"
    cuda_graph: bool = False

    def weight(self, strategy: Strategy) -> float:
        """Return the weight of a second of a strategy's period in the objective."""
        return weight(self.objective, strategy, self.cluster, self.tokens_per_step)

    @property
    def options(self) -> Options:
        """Return the compiler's options: memory is counted with the kernels of the cluster's devices."""
        return Options(
            device=device_type(self.cluster), kernels=self.kernels, cuda_graph=self.cuda_graph
        )

    @property
    def compiles(self) -> bool:
        """Return whether steps of plans have compiled groups, which exist only in a program at one number of rows."""
        return self.kernels != "eager"

    def limit_of(self, device: Device | None) -> int | None:
        """Return the bytes that a plan may hold on a device; with several kinds never more than the device has."""
        if device is None or self.cluster is None or len(self.cluster.kinds) == 1:
            return self.memory_limit
        return min(self.memory_limit or device.memory_bytes, device.memory_bytes)

    @property
    def several_devices(self) -> Sequence[Device]:
        """Return the types of devices of a cluster with several, else nothing."""
        kinds = () if self.cluster is None else self.cluster.kinds
        return [kind.device for kind in kinds] if len(kinds) > 1 else []

    @property
    def bounds_steps(self) -> bool:
        """Return whether the cost model may be asked for single steps before there is a plan (`CostModel`).

        Of steps with compiled groups only Piper's own model knows a part that no compiler makes shorter.
        """
        if self.compiles:
            return self._factory is DeviceModel and self.costs is None
        return self._factory is DeviceModel or getattr(self._factory, "bounds_steps", False) is True

    @property
    def _factory(self) -> Any:
        return self.model.func if isinstance(self.model, partial) else self.model

    @property
    def own_modules(self) -> Sequence[ModuleType]:
        """Return the modules of a user's cost model, which workers get by value: they may not find them."""
        home = getattr(self._factory, "__module__", "")
        return (
            [sys.modules[home]]
            if home in sys.modules and home.partition(".")[0] != "piper_simulator"
            else []
        )

    @property
    def device_limits(self) -> dict[str, int]:
        """Return `limit_of` by type of device, if there are several kinds."""
        limits = [(device.name, self.limit_of(device) or 0) for device in self.several_devices]
        return dict(sorted(limits, key=lambda f: -f[1]))

    def facts(self) -> tuple[object, ...]:
        """Return the facts that scores depend on, the same in another process.

        The CPU device stands for this machine by its name, however fast it was just measured.
        """
        cluster = (
            self.cluster.name
            if self.cluster is not None and self.cluster.device.name == CPU
            else self.cluster
        )
        trained = tuple(p for p in self.program.params if p.trained)
        whole = Bucket(
            "",
            tuple(p.name for p in trained),
            (),
            sum(bind(p.spec.numel, 0) for p in trained),
            "float32",
            (),
        )
        groups = sorted(self.training.group_of.items())
        training = (groups, self.training.clip, self.training.state_bytes(whole))
        model = () if self.model is DeviceModel else (self.model_content,)
        prices = (
            [kind.device.price_per_hour for kind in self.cluster.kinds]
            if self.cluster is not None
            else []
        )
        goal = () if self.objective == "period" else (self.objective, self.tokens_per_step, prices)
        load = () if self.load is None else ("load", load_text(self.load))
        plain = not self.compiles and not self.cuda_graph
        variant = () if plain else (self.kernels, self.cuda_graph)
        return (
            self.program.key,
            self.global_batch,
            training,
            cluster,
            self.costs,
            self.memory_limit,
            *model,
            *goal,
            *load,
            *variant,
        )

    def check_can_be_resumed(self) -> None:
        """Raise TuneError if a search in a storage could take the scores of another cost model for its own."""
        if self.model is DeviceModel or self.model_content is not None:
            return
        name = getattr(self._factory, "__qualname__", type(self._factory).__qualname__)
        raise TuneError(
            f"tune(storage=..., model={name}): it cannot be told whether the storage has scores of this model or "
            f"of another, for the model depends on more than its own code and plain values, such as a file, an "
            f"installed package, or an object that cannot be looked into. Give it what it needs as numbers, texts, "
            f"lists or dicts (functools.partial(model, table=...)), or leave storage out"
        )


def bare_plan(
    program: Program,
    mesh: Mesh,
    rows: int,
    chunks: Iterable[Chunk] = (),
    variants: Iterable[Chunk] = (),
    *,
    cuda_graph: bool = False,
) -> Plan:
    """Return a plan of nothing but chunks and variants, to ask a cost model before there is a plan.

    It has no key of its program: that would be the hash of all of a large program, for each candidate's bounds.
    """
    shared = tuple(axis for axis, _ in program.axes)
    return Plan(
        "",
        mesh,
        rows,
        1,
        (),
        (),
        (),
        (),
        {},
        tuple(chunks),
        variants=tuple(variants),
        shared=shared,
        cuda_graph=cuda_graph,
    )


USUAL = CaptureRequest()
"""The request of a strategy that needs nothing but the usual capture."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Say which program is wanted.

    Attributes:
        rows: the rows per microbatch; 0 stands for any number of rows.
        request: what the strategy asks of the capture.
        alone: whether sizes need to hold at these rows alone, as for a bound of time; that takes fewer traces.
        runs: the steps that run in compiled groups, by variant of a chunk; () for a program of torch's own kernels.
    """

    rows: int = 0
    request: CaptureRequest = USUAL
    alone: bool = False
    runs: tuple[tuple[str, tuple[Step, ...]], ...] = ()

    @property
    def special(self) -> bool:
        """Return whether it is another program than the problem's own, whatever the rows."""
        return not self.request.empty


def wanted_by(strategy: Strategy, problem: TuningProblem, rows: int = 0) -> Wanted:
    """Return which program a strategy of a problem wants."""
    request = capture_request(strategy.mesh, strategy.directives, problem.program, problem.kernels)
    return Wanted(rows, request)


def with_runs(wanted: Wanted, runs: Mapping[str, Collection[Step]]) -> Wanted:
    """Return the wanted program whose steps `runs` have compiled groups; equal ones for equal steps."""
    return replace(wanted, runs=tuple((name, tuple(sorted(runs[name]))) for name in sorted(runs)))


Variants = Mapping[Wanted, Program | str | None]
"""The program that is wanted: None for the problem's own, a text if the model cannot run so."""
Under = Callable[[Wanted], Program]
"""A function that returns the program under policies and shardings."""


class Programs:
    """Keep the programs that are wanted, made once each by `at_rows` or `under`, which stay in this process."""

    def __init__(
        self,
        problem: TuningProblem,
        at_rows: Callable[[int], Program] | None,
        under: Under | None = None,
    ) -> None:
        self._own, self._at_rows, self._under = problem.program, at_rows, under
        self.found: dict[Wanted, Program | str | None] = {}

    def add(self, wanted: Wanted) -> Program | str | None:
        """Return the program that is wanted, and keep it."""
        if wanted not in self.found:
            try:
                program = self._made(wanted)
            except PiperError as e:
                self.found[wanted] = str(e)
            else:
                self.found[wanted] = None if program is self._own else program
        return self.found[wanted]

    def _made(self, wanted: Wanted) -> Program:
        if wanted.special or wanted.runs:
            return self._own if self._under is None else self._under(wanted)
        return self._own if self._at_rows is None else self._at_rows(wanted.rows)

    def exact(self, wanted: Wanted) -> Program | None:
        """Return the program itself; None if there is none."""
        variant = self.add(wanted)
        return self._own if variant is None else None if isinstance(variant, str) else variant


def packed(item: Any, modules: Iterable[ModuleType] = ()) -> bytes:
    """Return an item as bytes for another process of this Python; raise TuneError when something cannot be sent.

    The process gets the contents of `modules` by value, everything else by name.
    """
    try:
        with _by_value(modules):
            pickled: bytes = cloudpickle.dumps(item)
            return pickled
    except (TypeError, AttributeError, pickle.PicklingError) as e:
        raise TuneError(
            f"cannot send a {type(item).__name__} to worker processes: {e}; keep open files, locks and generators "
            f"out of directives, or search in this process (workers=0)"
        ) from e


def packed_strategy(strategy: Strategy) -> bytes:
    """Return a strategy as bytes for another process, with the user's directives by value."""
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
