"""Show the files of a result folder as tables, figures, one HTML page and Chrome traces.

Other packages import its names from here. Names are loaded on first use: a text summary needs neither pandas nor
matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_report.facts.clocks import aligned, offsets
    from piper_report.facts.results import Results, load
    from piper_report.facts.schedule_text import schedule_table
    from piper_report.facts.summary import (
        COUNTED,
        FAR,
        FIRST_STEP,
        MFU,
        WIDTH,
        Table,
        beside_table,
        memory_line,
        memory_table,
        percent,
        prediction_table,
    )
    from piper_report.figures.schedule_figure import Drawing, draw_schedule, draw_schedules
    from piper_report.pages.beside import write_beside
    from piper_report.pages.chrome import write_chrome
    from piper_report.pages.report import Report, write_report

__all__ = [
    "COUNTED",
    "Drawing",
    "FAR",
    "FIRST_STEP",
    "MFU",
    "Report",
    "Results",
    "Table",
    "WIDTH",
    "aligned",
    "beside_table",
    "draw_schedule",
    "draw_schedules",
    "load",
    "memory_line",
    "memory_table",
    "offsets",
    "percent",
    "prediction_table",
    "schedule_table",
    "write_beside",
    "write_chrome",
    "write_report",
]

_NAMES_BY_MODULE = {
    "pages.beside": ("write_beside",),
    "pages.chrome": ("write_chrome",),
    "facts.clocks": ("aligned", "offsets"),
    "pages.report": ("Report", "write_report"),
    "facts.results": ("Results", "load"),
    "figures.schedule_figure": ("Drawing", "draw_schedule", "draw_schedules"),
    "facts.schedule_text": ("schedule_table",),
    "facts.summary": (
        "COUNTED",
        "MFU",
        "FAR",
        "FIRST_STEP",
        "Table",
        "WIDTH",
        "beside_table",
        "memory_line",
        "memory_table",
        "percent",
        "prediction_table",
    ),
}
_HOME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'piper_report' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(f"piper_report.{_HOME[name]}"), name)
    globals()[name] = value
    return value
