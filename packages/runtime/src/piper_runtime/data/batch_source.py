"""Say what a batch function of Piper's own offers beside being called, and what a checkpoint keeps of a job's data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from piper_ir.errors import JobError

FUNCTION = "function"
"""The kind of data that comes from a function of the job's own."""


class BatchSource(ABC):
    """Be a batch function that a job binds to its global batch, and that a checkpoint can check and restore.

    `follows_state` are the names in the fingerprint that may change where the state is restored, too.
    """

    follows_state: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, step: int, rows: range) -> tuple[Any, Any]:
        """Return the given rows of a step's global batch as (inputs, targets)."""

    @abstractmethod
    def bound(self, global_batch: int) -> Self:
        """Return the same for this number of rows per step; a Job calls this."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what has to be the same in a run that is resumed by its step alone, as numbers and words by name."""

    @abstractmethod
    def check_replicas(self, replicas: int) -> None:
        """Raise JobError when so many data-parallel replicas cannot share the rows."""

    @abstractmethod
    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what else is known of the data when `step` steps are done, as numbers and lists by name."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what `state_dict` has returned; raise JobError for one that does not fit."""


def bind_batch(batch: Callable[[int, range], Any], global_batch: int) -> Callable[[int, range], Any]:
    """Return a job's batch function, bound to the job's global batch if it is Piper's own."""
    return batch.bound(global_batch) if isinstance(batch, BatchSource) else batch


def check_data_replicas(batch: object, replicas: int) -> None:
    """Raise JobError when so many data-parallel replicas cannot share a job's data."""
    if isinstance(batch, BatchSource):
        batch.check_replicas(replicas)


def data_state(batch: object, step: int) -> dict[str, Any]:
    """Return what a checkpoint after `step` steps keeps of a job's data: numbers, words, lists and dicts only."""
    if not isinstance(batch, BatchSource):
        return {"fingerprint": {"kind": FUNCTION}, "state": {}}
    return {"fingerprint": batch.fingerprint(), "state": batch.state_dict(step)}


def restore_data(batch: object, stored: Mapping[str, Any]) -> None:
    """Let a job's data go on after what `data_state` has returned.

    Raises JobError, which names every difference, when the job would train on other rows than the run that wrote it.
    """
    now = data_state(batch, 0)["fingerprint"]
    before = stored["fingerprint"]
    free = batch.follows_state if isinstance(batch, BatchSource) else ()
    names = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in free]
    if names:
        changes = ", ".join(f"{name} {before.get(name, 'not there')!r} -> {now.get(name, 'not there')!r}" for name in names)
        raise JobError(
            f"the checkpoint was written by a job with other data, so that rows would be repeated or left out: {changes}. "
            f"Resume with the same data, seed and global batch, or start anew from the checkpoint's weights (Job.init)"
        )
    if isinstance(batch, BatchSource):
        batch.load_state_dict(stored["state"])
