"""Resident memory of this process, as the system counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> tuple[int, int] | None:
    """Bytes resident now, and the most since the process began or `reset_most`; None where the system does not say."""
    if not _STATUS.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    try:
        now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    except KeyError:
        return None
    return now, most


def reset_most() -> None:
    """Count the most from now on; without effect where the system does not allow it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return
