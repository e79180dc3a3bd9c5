"""Choose a strategy for the devices that are left when a run has lost some, in simulation, and compile it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from piper.api.compiling.compiling import Compiled, compile
from piper.api.problems.other_meshes import on_devices
from piper_compiler import Options, Strategy
from piper_ir.fold.memory import on_device
from piper_ir.ground.errors import JobError, MissingPackageError, PiperError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs

if TYPE_CHECKING:
    from piper_runtime import Job
    from piper_runtime.launch import RunOptions
    from piper_runtime.rank import ExportedCode

Fallbacks = Callable[[Any], Strategy] | Sequence[Strategy]
"""The strategies for fewer devices: a function of a trial to search, or a list in the order of preference."""
TRIALS = 24
"""The candidates of a function of a trial that are simulated."""
LOSSES = ("restart", "replan")
"""The answers to a rank that died: its device is taken to be there again, or to be gone."""


def check_on_loss(on_loss: object, strategy: object, options: RunOptions) -> None:
    """Raise JobError for arguments of `execute` that do not go together."""
    if on_loss not in LOSSES:
        raise JobError(f'on_loss={on_loss!r}: "restart" or "replan" is accepted')
    if on_loss == "restart":
        if strategy is not None:
            raise JobError(
                'execute(strategy=...): it is for the devices that are left with on_loss="replan"; '
                "leave it out"
            )
        return
    from piper_runtime.launch import launcher_kind

    options.check_replans(launcher_kind(options.launcher))
    listed = (
        isinstance(strategy, Sequence)
        and strategy
        and all(isinstance(s, Strategy) for s in strategy)
    )
    if strategy is not None and not callable(strategy) and not listed:
        raise JobError(
            f"execute(strategy={strategy!r:.80}): a function of a trial, or a list of piper.Strategy for fewer "
            f"devices, is needed"
        )


class Replanner:
    """Give the plan for so many devices; `compiled` and `strategy` always belong to the last one."""

    def __init__(
        self,
        compiled: Compiled,
        job: Job,
        fallbacks: Fallbacks | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.compiled, self._job, self._fallbacks, self._costs = compiled, job, fallbacks, costs
        self._options = Options(kernels=compiled.kernels, cuda_graph=compiled.plan.cuda_graph)
        self.strategy: Strategy | None = None
        self._first = compiled.strategy
        if callable(fallbacks):
            _check_tuner()
        if fallbacks is None and self._first is None:
            raise JobError(
                'on_loss="replan": nothing says which strategy this was compiled from; give '
                "strategy=[...]"
            )

    def __call__(self, devices: int) -> tuple[Plan, ExportedCode]:
        """Return a plan for at most so many devices, with its code; raise JobError when there is none."""
        from piper_ir.verify import verify

        match self._fallbacks:
            case None:
                self.strategy, replanned = self._same_recipe(devices)
            case Sequence() as listed:
                self.strategy, replanned = self._first_legal(devices, listed)
            case function:
                self.strategy, replanned = self._searched(devices, function)
        plan = (
            on_device(replanned.plan, self.compiled.plan.device)
            if self.compiled.plan.device
            else replanned.plan
        )
        self.compiled = replace(replanned, plan=plan)
        verify(plan)
        return plan, exported(self.compiled)

    def _same_recipe(self, devices: int) -> tuple[Strategy, Compiled]:
        """Return the strategy of the beginning on the largest legal mesh; of several the fastest in simulation."""
        from piper.api.ground.this_machine import devices_of_runs
        from piper_simulator import simulate

        assert self._first is not None
        why = ""
        for world in range(devices, 0, -1):
            cluster, timed = devices_of_runs(world), list[tuple[float, int, Strategy, Compiled]]()
            for strategy, compiled in self._legal(
                on_devices(self._first, world, self._job.global_batch)
            ):
                predicted = simulate(compiled.plan, cluster, costs=self._costs)
                if predicted.oom is None:
                    timed.append((predicted.period_s, len(timed), strategy, compiled))
                else:
                    why = f"; {predicted.oom.text}"
            if timed:
                return min(timed)[2:]
        raise JobError(
            f"the strategy of this run, on {self._first.mesh}, is not legal on {_counted(devices)} or fewer{why}; "
            f"give strategy=[...] with others, or a function of a trial"
        )

    def _first_legal(self, devices: int, listed: Iterable[Strategy]) -> tuple[Strategy, Compiled]:
        for pair in self._legal(s for s in listed if s.mesh.world <= devices):
            return pair
        raise JobError(
            f"execute(strategy=[...]): none of the strategies is legal for this job on {_counted(devices)}"
        )

    def _searched(
        self, devices: int, function: Callable[[Any], Strategy]
    ) -> tuple[Strategy, Compiled]:
        from piper.api.ground.this_machine import devices_of_runs
        from piper.api.problems.tuning_problem import Conditions, problem_of
        from piper_autotune import tune

        def fitting(trial: Any) -> Strategy:
            strategy = function(trial)
            if isinstance(strategy, Strategy) and strategy.mesh.world > devices:
                raise JobError(
                    f"{strategy.mesh} has {strategy.mesh.world} ranks, and {_counted(devices)} are left"
                )
            return strategy

        cluster = devices_of_runs(devices)
        limit = max(kind.device.memory_bytes for kind in cluster.kinds)
        problem, more = problem_of(self._job, Conditions(cluster, self._costs, limit))
        study = tune(problem, fitting, trials=TRIALS, workers=0, **more)
        assert study.best is not None, "a search that found nothing has raised"
        return study.best, compile(self._job, study.best, costs=self._costs, options=self._options)

    def _legal(self, strategies: Iterable[Strategy]) -> Iterator[tuple[Strategy, Compiled]]:
        for strategy in strategies:
            try:
                yield (
                    strategy,
                    compile(self._job, strategy, costs=self._costs, options=self._options),
                )
            except PiperError:  # not legal for this job
                continue


def exported(compiled: Compiled) -> ExportedCode:
    """Return the code of a plan's chunks, and the code that counts in its batch."""
    assert compiled.code is not None
    return compiled.code.export(compiled.plan.codes, compiled.plan.rows)


def _check_tuner() -> None:
    """Raise MissingPackageError if strategies cannot be searched: when the devices are lost it would be too late."""
    try:
        import_module("piper_autotune")
    except ImportError as e:
        raise MissingPackageError(
            f'on_loss="replan" searches the function of a trial with the tuner, which cannot be '
            f"imported ({e}); install what is missing (`pip install optuna`), or give a list of strategies"
        ) from e


def _counted(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
