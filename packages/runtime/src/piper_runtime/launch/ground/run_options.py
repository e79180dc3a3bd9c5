"""Define the options of a run, in one record from the caller to the ranks, and refuse impossible ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from piper_ir.ground.errors import JobError
from piper_ir.ground.keywords import checked_fields
from piper_runtime.checkpoint.settings import Checkpoints
from piper_runtime.launch.ground.progress import OnStep
from piper_runtime.launch.ground.restart import OnRestart, Replan
from piper_runtime.launch.ground.workers import Launcher, LauncherKind, Workers
from piper_runtime.rank.binding.evaluation import Evaluation

LOADERS = ("thread", "processes", "none")
"""The accepted words for who calls a batch function; a number is so many processes per rank."""


@checked_fields(JobError)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Hold the options of a run.

    Attributes:
        steps: how many optimizer steps to run.
        launcher: "ray" (one actor per rank), "processes" (one process per rank, gloo over loopback; under torchrun this
            process is one rank, see `piper_runtime.launch.torchrun.torchrun`) or "inline" (all ranks in this process).
        cluster: for Ray: "auto", or the address of a cluster to join.
        timeout_s: the run ends that many seconds after the last sign of progress of any rank; an instruction that takes
            longer counts as hung.
        trace: keep the last step's spans (about 1 us per instruction).
        memory: measure peak bytes in the second step, or in the only one (slows that step).
        gradients: keep the gradients of every step.
        ranges: name instructions in profilers, see `piper_runtime.engine.ranges`.
        profiler: a folder that all ranks can write to, for a trace of torch's profiler of each rank's last step, with
            the names of instructions; the profiler slows that step down.
        first_step: the number of the first step, which decides rows, random numbers and the schedule of learning rates;
            weights come from Job.init all the same. Default: 0, or the step of the checkpoint.
        checkpoint: the folder and frequency of checkpoints; None: never.
        resume: "latest", the newest complete checkpoint in the folder of `checkpoint`, or the path of one; the run goes
            on from there with `steps` more steps, under this or any other strategy.
        loader: who calls Job.batch, one step ahead at most: "thread" (a thread of the rank, once the function has
            turned out to take a share of the step), "processes" or a number (so many processes per rank, from the
            start), or "none" (the issuing thread, when a microbatch is loaded; as with "inline" always).
        restarts: how many times the run is started again after a rank died, raised or hung: from host snapshots of the
            ranks that are left, if `checkpoint` asks for them and they have all of the state, else from the newest
            complete checkpoint, else from where this run began.
        spares: with "ray", the number of spare ranks with reserved room, which take the places of ranks that die.
        pool: workers to use again; without one they are started and ended with the run.
        on_step: called with every finished step, in order, while the run goes on; when it raises, that is a warning and
            the run goes on.
        replan: gives a plan for fewer ranks, if ranks that died took their devices with them.
        on_restart: called when a run that failed is about to go on.
        trainable: names of the parameters that had requires_grad when the plan was made (None: not known).
        evaluation: how the model is evaluated beside training; None: not at all.
    """

    steps: int
    launcher: Launcher = "ray"
    cluster: str = "auto"
    timeout_s: float = 60.0
    trace: bool = False
    memory: bool = False
    gradients: bool = False
    ranges: bool = False
    profiler: str | Path | None = None
    first_step: int | None = None
    checkpoint: Checkpoints | None = None
    resume: str | Path | None = None
    loader: str | int = "thread"
    restarts: int = 0
    spares: int = 0
    pool: Workers | None = None
    on_step: OnStep | None = None
    replan: Replan | None = None
    on_restart: OnRestart | None = None
    trainable: Collection[str] | None = None
    evaluation: Evaluation | None = None

    @property
    def first(self) -> int:
        """Return the number of the first step."""
        return self.first_step or 0

    @property
    def numbers(self) -> range:
        """Return the numbers of the steps."""
        return range(self.first, self.first + self.steps)

    @property
    def measured(self) -> int:
        """Return the step in which memory is measured: the second, or the only one.

        Some optimizers make their state in the first step, after the peak of the forward.
        """
        return self.first + min(1, self.steps - 1)

    @property
    def named(self) -> bool:
        """Return whether instructions are named in profilers."""
        return self.ranges or self.profiler is not None

    @property
    def goes_on(self) -> bool:
        """Return whether the run may be started again after a failure."""
        return self.restarts > 0

    @property
    def once(self) -> RunOptions:
        """Return the options of the same run, which a failure ends."""
        return replace(self, restarts=0)

    @property
    def reports_steps(self) -> bool:
        """Return whether ranks report every finished step: somebody listens, or a restart has to know them."""
        return self.on_step is not None or self.goes_on

    @property
    def snapshot_every(self) -> int | None:
        """Return the number of steps between two copies of the ranks' state in memory; None without copies.

        Only a run that may be started again has a use for them.
        """
        return self.checkpoint.snapshot if self.checkpoint is not None and self.goes_on else None

    def devices(self, world: int) -> int:
        """Return how many ranks there can be at the beginning of a run of `world` ranks."""
        return max(world, 0 if self.pool is None else self.pool.world) + self.spares

    def for_ranks(self) -> RunOptions:
        """Return these options without the objects that stay in the caller's process."""
        return replace(
            self,
            pool=None,
            on_step=None,
            replan=None,
            on_restart=None,
            trainable=None,
            evaluation=None,
        )

    def check(self, kind: LauncherKind) -> None:
        """Raise JobError when no run can have these options; `kind` describes the launcher."""
        if self.cluster != "auto" and not kind.on_clusters:
            raise JobError(
                f'execute(cluster={self.cluster!r}): launcher "{self.launcher}" runs on this machine; launcher="ray" '
                f'takes an address, launcher="emulated" any cluster to imitate'
            )
        if self.profiler is not None and kind.open is None:
            raise JobError(
                f'execute(profiler={str(self.profiler)!r}): launcher "inline" runs all ranks in one process, whose '
                f'trace would mix them; take launcher="processes" or "ray"'
            )
        self._check_loader(kind)
        self.check_numbers()
        self._check_recovery(kind)
        if self.checkpoint is not None and not isinstance(self.checkpoint, Checkpoints):
            raise JobError(f"checkpoint={self.checkpoint!r}: piper.Checkpoints(folder) is needed")
        if self.first_step is not None and not _is_count(self.first_step):
            raise JobError(f"first_step={self.first_step!r}: an integer of at least 0 is needed")

    def check_numbers(self) -> None:
        """Raise JobError when no run can have these numbers of steps and seconds."""
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise JobError(f"steps={self.steps!r}: an integer of at least 1 is needed")
        if not self.timeout_s > 0:
            raise JobError(
                f"timeout_s={self.timeout_s!r}: a number of seconds above 0 is needed; inf waits for ever"
            )

    def _check_loader(self, kind: LauncherKind) -> None:
        """Raise JobError for a loader that there is not, or that cannot run if one thread runs all ranks."""
        loader = self.loader
        number = isinstance(loader, int) and not isinstance(loader, bool) and loader >= 1
        if not number and loader not in LOADERS:
            raise JobError(
                f'execute(loader={loader!r}): "thread", "processes", "none" or a number of processes per rank '
                f"(1, 2, ...) is expected"
            )
        if kind.open is None and (number or loader == "processes"):
            raise JobError(
                f'execute(loader={loader!r}): launcher "inline" runs all ranks in one thread, which calls Job.batch, '
                f'too; take launcher="processes" or launcher="ray", or no loader'
            )

    def _check_recovery(self, kind: LauncherKind) -> None:
        """Raise JobError when a run with these options could not be started again as they say."""
        for name, number in (("restarts", self.restarts), ("spares", self.spares)):
            if not _is_count(number):
                raise JobError(f"{name}={number!r}: an integer of at least 0 is needed")
        if self.goes_on and self.gradients:
            raise JobError(
                f"restarts={self.restarts} and gradients=True: the gradients of the steps before a failure would be "
                f"lost; leave one of them out"
            )
        for name, function in (("replan", self.replan), ("on_restart", self.on_restart)):
            if function is not None and not callable(function):
                raise JobError(f"{name}={function!r}: a function is needed")
        if self.spares and not kind.on_clusters:
            raise JobError(
                f'spares={self.spares}: launcher "{self.launcher}" runs on this machine; launcher="ray" keeps room on '
                f"others"
            )
        if self.spares and self.pool is not None:
            raise JobError(
                f"spares={self.spares}: the pool that is given has its own workers; leave spares out"
            )

    def check_replans(self, kind: LauncherKind) -> None:
        """Raise JobError when a run with these options cannot go on with fewer devices."""
        if not self.goes_on:
            raise JobError(
                'on_loss="replan": a run that may not be started again cannot go on; give restarts of at least 1'
            )
        if kind.open is None:
            raise JobError(
                'on_loss="replan": launcher "inline" has no devices to lose; use launcher="processes" or "ray"'
            )


class FurtherOptions(TypedDict, total=False):
    """Hold the options of a run beyond the named arguments of `piper.execute`; `RunOptions` explains them."""

    gradients: bool
    ranges: bool
    profiler: str | Path | None
    loader: str | int
    first_step: int | None
    spares: int
    pool: Workers | None
    replan: Replan | None
    on_restart: OnRestart | None


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
