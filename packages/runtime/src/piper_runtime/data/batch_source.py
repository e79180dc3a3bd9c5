"""Define the methods of Piper's own batch functions beside the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self


class BatchSource(ABC):
    """Be a batch function that a job binds to its global batch, and that a checkpoint can check and restore.

    A checkpoint calls `fingerprint`, `state_dict` and `load_state_dict`.
    """

    @abstractmethod
    def __call__(self, step: int, rows: range) -> tuple[Any, Any]:
        """Return the given rows of a step's global batch as (inputs, targets)."""

    @abstractmethod
    def bound(self, global_batch: int) -> Self:
        """Return this batch function for a number of rows per step; a Job calls this."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return the values that a run resumed by its step alone must have in common, as numbers and words by name."""

    @abstractmethod
    def check_replicas(self, replicas: int) -> None:
        """Raise JobError when so many data-parallel replicas cannot share the rows."""

    @abstractmethod
    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the further state of the data when `step` steps are done, as numbers and lists by name."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`; raise JobError for one that does not fit."""


def bind_batch(
    batch: Callable[[int, range], Any], global_batch: int
) -> Callable[[int, range], Any]:
    """Return a job's batch function, bound to the job's global batch if it is Piper's own."""
    return batch.bound(global_batch) if isinstance(batch, BatchSource) else batch


def check_data_replicas(batch: object, replicas: int) -> None:
    """Raise JobError when so many data-parallel replicas cannot share a job's data."""
    if isinstance(batch, BatchSource):
        batch.check_replicas(replicas)
