"""Resident memory of this process, as the system counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def most_resident() -> int | None:
    """The most bytes that were resident since the process began or `reset_most_resident`; None where the system does not say."""
    if not _STATUS.is_file():
        return None
    found = [line.split() for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else None


def reset_most_resident() -> None:
    """Count from now on; without effect where the system does not allow it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return
