"""Show simulated beside emulated times as a table."""

from __future__ import annotations

from piper_ir.tools import time_text
from piper_report import Table, percent
from piper_runtime.launch import Emulation
from piper_simulator import Simulation


def emulation_table(simulated: Simulation, emulated: Emulation, *, title: str) -> Table:
    """Return simulated beside emulated seconds, with the difference in percent of the simulated."""
    pairs = [("makespan of a step", simulated.step_s, emulated.step_s[0])]
    if emulated.period_s is not None:
        pairs.append(("step in steady state", simulated.period_s, emulated.period_s))
    rows = tuple((name, time_text(a), time_text(b), _difference(a, b)) for name, a, b in pairs)
    notes = emulated.trace.notes
    below = (f"{notes['time_scale']} s are slept for each simulated second", notes["host"])
    warnings = tuple(f"warning: {note}" for note in simulated.notes)
    return Table(title, ("", "simulated", "emulated", "difference"), rows, (*below, *warnings))


def _difference(simulated: float, emulated: float) -> str:
    return f"{'+' if emulated >= simulated else ''}{percent(emulated / simulated - 1 if simulated else None)}"
