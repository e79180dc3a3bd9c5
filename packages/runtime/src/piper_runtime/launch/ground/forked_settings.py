"""Capture the settings of a process beside its memory, so that a process forked from another one gets the same."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LIMITS = tuple(
    sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
)


@dataclass(frozen=True)
class Surroundings:
    """Hold the settings that a child process inherits.

    Attributes:
        environment: the environment variables.
        path: `sys.path`.
        folder: the working folder.
        mask: the permissions that new files do not get; None if the system does not show them.
        cores: the processor cores that may be used; None if the system does not show them.
        limits: the limits of resources, by number.
    """

    environment: dict[str, str]
    path: list[str]
    folder: str
    mask: int | None
    cores: frozenset[int] | None
    limits: dict[int, tuple[int, int]]

    @classmethod
    def of_now(cls, environment: Mapping[str, str], path: Sequence[str]) -> Self:
        """Return the surroundings of this process, with another environment and path."""
        cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        return cls(
            dict(environment),
            list(path),
            os.getcwd(),
            _mask(),
            cores,
            {n: resource.getrlimit(n) for n in _LIMITS},
        )

    def take(self) -> None:
        """Apply them to this process; a limit that it may not have stays as it is."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        if self.mask is not None:
            os.umask(self.mask)
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        for number, limits in self.limits.items():
            with suppress(ValueError, OSError):  # it was raised after the fork server had started
                resource.setrlimit(number, limits)


def _mask() -> int | None:
    """Return the mask of new files; `os.umask` could only set it, for all threads."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), None)
