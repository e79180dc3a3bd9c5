"""Tell for how long a thread could run and waited for its turn on a core, because other threads had it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from pathlib import Path

_COUNTED, _THREADS = Path("/proc/thread-self/schedstat"), "/proc/self/task/*/schedstat"


def core_waits() -> Callable[[], float]:
    """Return a function that says how many seconds the thread that calls this now has waited for a core so far.

    It returns 0 if the system does not count them, as outside of Linux. A call takes about a microsecond.
    """
    try:
        file = _COUNTED.open("rb", buffering=0)
    except OSError:
        return lambda: 0.0
    return lambda: int(os.pread(file.fileno(), 64, 0).split()[1]) / 1e9


def core_waits_of_all() -> float:
    """Return the seconds of all living threads of this process together, which takes some 10 us for each of them."""
    waited = 0
    for path in glob(_THREADS):
        with suppress(OSError):  # the thread has ended
            waited += int(Path(path).read_bytes().split()[1])
    return waited / 1e9
