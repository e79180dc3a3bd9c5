"""Choose the beginning of a run: its first step, or the step of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.torchrun.torchrun import is_first, restart_count
from piper_runtime.rank.job.job import InitialState, Job, constructed_only, materialize


@dataclass(frozen=True)
class Beginning:
    """Hold the beginning of a run, or of an attempt to go on with it.

    Attributes:
        options: the options of the run, with the first step, the number of steps and the absolute folder of checkpoints
            that hold from here on.
        saved: the checkpoint that it goes on from; None without one.
        copied: the host snapshot that it goes on from, in place of a checkpoint.
    """

    options: RunOptions
    saved: SavedRun | None = None
    copied: HostSnapshot | None = None

    @property
    def step(self) -> int:
        """Return the number of the first step."""
        return self.options.first

    @property
    def state_text(self) -> str:
        """Return the state that the run begins with, for people."""
        if self.copied is not None:
            return self.copied.text
        if self.saved is not None:
            return f"the checkpoint {self.saved.path}"
        return "the beginning: there is no checkpoint" + (
            " yet" if self.options.checkpoint is not None else ""
        )


def beginning_of(plan: Plan, job: Job, options: RunOptions) -> Beginning:
    """Return the beginning of a run, and make its folder ready.

    Raises JobError if the options do not fit together or the checkpoint is of another training, FormatError for one
    that was changed, and OutputError for a folder that cannot be written.
    """
    checkpoint, saved, step = options.checkpoint, None, options.first
    if options.resume is not None:
        saved = open_checkpoint(chosen_checkpoint(options.resume, checkpoint))
        step = saved.meta.step
        if options.first_step not in (None, step):
            raise JobError(
                f"first_step={options.first_step}: the checkpoint {saved.path} goes on with step {step}; leave "
                f"first_step out"
            )
        check_resumable(saved, plan, job)
        check_settings(saved, plan, job)
        _load_data_state(job, saved.meta.data)
    if checkpoint is not None:
        prepare_folder(checkpoint, step, first=is_first())
        checkpoint = replace(checkpoint, folder=checkpoint.path)
    return Beginning(replace(options, first_step=step, checkpoint=checkpoint), saved)


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
    options = first.options
    checkpoints = (
        {} if options.checkpoint is None else complete_checkpoints(options.checkpoint.path)
    )
    newest = max(checkpoints, default=0)
    again = options
    if (copied := snapshot(max(newest, first.step))) is not None:
        _load_data_state(job, data_of(job, copied.step))
        again = replace(options, resume=None, first_step=copied.step)
    elif newest > first.step:
        again = replace(options, resume=checkpoints[newest], first_step=None)
    elif first.saved is not None:
        again = replace(options, resume=first.saved.path, first_step=None)
    begin = beginning_of(plan, job, again)
    left = first.step + options.steps - begin.step
    # Without steps, ranks only bring back the state of the checkpoint.
    saving = begin.options.checkpoint if left else None
    options = replace(begin.options, steps=left, checkpoint=saving)
    return replace(begin, options=options, copied=copied)


def under_torchrun(options: RunOptions) -> RunOptions:
    """Return the options of a run whose ranks torchrun starts: only it can start them again.

    It does so in new processes. There, a run that may go on does so from its newest complete checkpoint with the steps
    that are left. Raises JobError if `replan` is asked for.
    """
    if options.replan is not None:
        raise JobError(
            'on_loss="replan": torchrun has started the ranks, and their number cannot change; use launcher="ray", '
            'or "processes" without torchrun'
        )
    alone, checkpoint = options.once, options.checkpoint
    if (
        not options.goes_on
        or checkpoint is None
        or options.resume is not None
        or not restart_count()
    ):
        return alone
    checkpoints = complete_checkpoints(checkpoint.path)
    newest = max(checkpoints, default=0)
    if newest <= options.first:
        return alone
    left = options.first + options.steps - newest
    return replace(alone, resume=checkpoints[newest], first_step=None, steps=left)


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
