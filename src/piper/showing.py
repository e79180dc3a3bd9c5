"""`piper show`: the graph, the plan, or the simulated schedule of a compiled strategy."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from piper.frontdoor import Compiled
from piper.session import device_named
from piper_ir.codec import dumps
from piper_ir.costs import Costs
from piper_ir.errors import JobError
from piper_simulator import simulate


def show_strategy(
    compiled: Compiled, *, cluster: str, costs: Costs | None, graph: bool, plan: bool, png: Path | None, as_json: bool
) -> None:
    """Print what was asked for; with `png`, draw the schedule into that file. JobError for two things at once."""
    if graph + plan + (png is not None) > 1:
        raise JobError("--graph, --plan and --png are three different things; give one of them")
    if graph:
        from piper_ir.graph_text import format_graph

        print(dumps(compiled.graph) if as_json else format_graph(compiled.graph), end="")
        return
    if plan:
        from piper_ir.text import format_plan

        print(dumps(compiled.plan) if as_json else format_plan(compiled.plan), end="")
        return
    from piper_report import draw_schedule, schedule_table

    trace = simulate(compiled.plan, device_named(cluster), costs=costs).trace
    if png is not None:
        draw_schedule(trace, png, plan=compiled.plan)
        print(f"the schedule is in {png}", file=sys.stderr)
    print(
        dumps(trace) if as_json else schedule_table(trace, plan=compiled.plan, width=shutil.get_terminal_size((120, 24)).columns)
    )
