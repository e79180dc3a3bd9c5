"""Name this machine, since measured costs hold for one machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine_name() -> str:
    """Return the processor and the number of cores that this process may use, such as "AMD EPYC 9654, 2 cores"."""
    return f"{_processor()}, {usable_cores()} cores"


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
