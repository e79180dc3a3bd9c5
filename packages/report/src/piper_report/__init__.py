"""Piper's reports: tables, figures, one HTML page and Chrome traces from the files of a result folder.

Names are imported on first use: a text summary needs neither pandas nor matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "load": "piper_report.results",
    "Results": "piper_report.results",
    "write_report": "piper_report.report",
    "Report": "piper_report.report",
    "draw_schedule": "piper_report.schedule_figure",
    "draw_schedules": "piper_report.schedule_figure",
    "Drawing": "piper_report.schedule_figure",
    "schedule_table": "piper_report.schedule_text",
    "aligned": "piper_report.clocks",
    "offsets": "piper_report.clocks",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'piper_report' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(home), name)
