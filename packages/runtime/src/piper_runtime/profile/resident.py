"""Measure memory of this process as the system counts it: resident, or taken from a CUDA device."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def most_resident() -> int | None:
    """Return the most bytes resident since the process began or `reset_most_resident`; None if that is unknown."""
    if not _STATUS.is_file():
        return None
    fields = [
        line.split() for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")
    ]
    return int(fields[0][1]) * 1024 if fields else None


def reset_most_resident() -> None:
    """Count from now on, if the system allows it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def most_on_device(device: torch.device) -> int:
    """Return the most bytes taken from a CUDA device since the process began or `reset_most_on_device`.

    Everything counts, the context too; this is for a process that has the device alone.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return outside + torch.cuda.max_memory_reserved(device)


def reset_most_on_device(device: torch.device) -> None:
    """Count from now on, and free the unused memory of torch's allocator."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
