"""Choose the beginning of a run: its first step, or the step of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Plan
from piper_ir.tools import user_code
from piper_runtime.checkpoint.commits import CheckpointCommits
from piper_runtime.checkpoint.meta import data_of
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.checkpoint.restoring import unheld_tensors
from piper_runtime.checkpoint.saved_run import (
    SavedRun,
    check_resumable,
    check_settings,
    open_checkpoint,
)
from piper_runtime.checkpoint.settings import (
    Checkpoints,
    chosen_checkpoint,
    complete_checkpoints,
    prepare_folder,
)
from piper_runtime.checkpoint.snapshot_files import HostSnapshot
from piper_runtime.checkpoint.sole_writer import sole_writer
from piper_runtime.launch.ground.recovery import RecoveryOptions
from piper_runtime.launch.torchrun.torchrun import is_first, restart_count
from piper_runtime.rank.job.job import InitialState, Job, constructed_only, materialize


@dataclass(frozen=True)
class Beginning:
    """Hold the beginning of a run and the settings of its checkpoints.

    Attributes:
        step: the number of the first step.
        saved: the checkpoint that it goes on from; None without one.
        checkpoint: the settings of its own checkpoints, with an absolute folder; None without them.
        copied: the host snapshot that it goes on from, in place of a checkpoint.
    """

    step: int
    saved: SavedRun | None
    checkpoint: Checkpoints | None
    copied: HostSnapshot | None = None

    @property
    def state_text(self) -> str:
        """Return the state that the run begins with, for people."""
        if self.copied is not None:
            return self.copied.text
        if self.saved is not None:
            return f"the checkpoint {self.saved.path}"
        return "the beginning: there is no checkpoint" + (
            " yet" if self.checkpoint is not None else ""
        )


def beginning_of(
    plan: Plan,
    job: Job,
    checkpoint: Checkpoints | None,
    resume: str | Path | None,
    first_step: int | None,
) -> Beginning:
    """Return the beginning of a run, and make its folder ready.

    Raises JobError if the arguments do not fit together or the checkpoint is of another training, FormatError for one
    that was changed, and OutputError for a folder that cannot be written.
    """
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        raise JobError(f"checkpoint={checkpoint!r}: piper.Checkpoints(folder) is needed")
    if first_step is not None and (
        isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0
    ):
        raise JobError(f"first_step={first_step!r}: an integer of at least 0 is needed")
    saved = None
    if resume is not None:
        saved = open_checkpoint(chosen_checkpoint(resume, checkpoint))
        if first_step not in (None, saved.meta.step):
            raise JobError(
                f"first_step={first_step}: the checkpoint {saved.path} goes on with step "
                f"{saved.meta.step}; leave "
                f"first_step out"
            )
        check_resumable(saved, plan, job)
        check_settings(saved, plan, job)
        _load_data_state(job, saved.meta.data)
    step = saved.meta.step if saved is not None else first_step or 0
    if checkpoint is not None:
        prepare_folder(checkpoint, step, first=is_first())
        checkpoint = replace(checkpoint, folder=checkpoint.path)
    return Beginning(step, saved, checkpoint)


def _load_data_state(job: Job, data: Mapping[str, Any]) -> None:
    """Load the "state" in the data of a checkpoint into a job's batch function, if both have one."""
    if "state" in data and callable(go_on := getattr(job.batch, "load_state_dict", None)):
        with user_code("Job.batch.load_state_dict(state)", JobError):
            go_on(data["state"])


def initial_of(plan: Plan, job: Job, saved: SavedRun | None) -> InitialState:
    """Return the initial state of a run; if its ranks go on from a checkpoint, no file of Job.init is read.

    Raises JobError if the job has no such weights.
    """
    if saved is None:
        return materialize(job)
    return replace(materialize(constructed_only(job)), restored=unheld_tensors(saved, plan))


def next_beginning(
    first: Beginning, plan: Plan, job: Job, snapshot: Callable[[int], HostSnapshot | None]
) -> Beginning:
    """Return the beginning for a failed run to go on: its newest complete checkpoint, else its own beginning.

    `snapshot` is asked for a newer host snapshot, which takes precedence. Raises as `beginning_of`.
    """
    found = {} if first.checkpoint is None else complete_checkpoints(first.checkpoint.path)
    newest = max(found, default=0)
    if (copied := snapshot(max(newest, first.step))) is not None:
        _load_data_state(job, data_of(job, copied.step))
        return replace(beginning_of(plan, job, first.checkpoint, None, copied.step), copied=copied)
    if newest > first.step:
        return beginning_of(plan, job, first.checkpoint, found[newest], None)
    if first.saved is not None:
        return beginning_of(plan, job, first.checkpoint, first.saved.path, None)
    return beginning_of(plan, job, first.checkpoint, None, first.step)


def under_torchrun(
    recovering: RecoveryOptions,
    checkpoint: Checkpoints | None,
    resume: str | Path | None,
    first_step: int | None,
    steps: int,
) -> tuple[RecoveryOptions, Path | None, int]:
    """Return recovery options, checkpoint and steps if torchrun starts the ranks: only it can start them again.

    It does so in new processes. There, a run with restarts goes on from its newest complete checkpoint, which is
    returned, with the number of steps left. Raises JobError if `replan` is asked for.
    """
    if recovering.replan is not None:
        raise JobError(
            'on_loss="replan": torchrun has started the ranks, and their number cannot change; use '
            'launcher="ray", or '
            '"processes" without torchrun'
        )
    alone = replace(recovering, restarts=0)
    if not recovering.restarts or checkpoint is None or resume is not None or not restart_count():
        return alone, None, steps
    found = complete_checkpoints(checkpoint.path)
    newest, begin = max(found, default=0), first_step or 0
    return (
        (alone, found[newest], begin + steps - newest) if newest > begin else (alone, None, steps)
    )


@contextmanager
def committing(
    checkpoint: Checkpoints | None, plan: Plan, job: Job, initial: InitialState
) -> Iterator[Callable[[SaveDone], None] | None]:
    """Yield the function that completes checkpoints as ranks report their shares; drop incomplete ones at the end.

    It is None without checkpoints, and in the processes of torchrun but the first. Raises JobError while another run
    writes to their folder.
    """
    if checkpoint is None or not is_first():
        yield None
        return
    with sole_writer(checkpoint.path):
        commits = CheckpointCommits(checkpoint, plan, job, initial)
        try:
            yield commits.add
        finally:
            commits.close()
