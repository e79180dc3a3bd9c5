"""Run `piper show`: the graph, the plan, or the schedule of a compiled strategy or a recipe, or its CSV file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from piper.api.compiling.compiling import Compiled
from piper.api.ground.clusters import cluster_named
from piper.api.ground.results import written_trace
from piper.views.recipe_view import SimulatedRecipe
from piper_ir.ground.codec import dumps
from piper_ir.ground.errors import JobError
from piper_ir.ground.trace import Trace
from piper_ir.program.costs import Costs
from piper_simulator import simulate


@dataclass(frozen=True)
class What:
    """Choose the output and the files to write; raise JobError for options that contradict each other."""

    graph: bool = False
    plan: bool = False
    png: Path | None = None
    csv: Path | None = None
    lowered: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.graph + self.plan + (self.png is not None) > 1:
            raise JobError("--graph, --plan and --png are three different things; give one of them")
        if self.lowered and self.csv is None:
            raise JobError("--lowered says what --csv FILE.csv writes; give both")


def show_strategy(compiled: Compiled, what: What, *, cluster: str, costs: Costs | None) -> None:
    """Print the requested views, and write their files; the schedule is that of a simulation on `cluster`."""
    if _printed(compiled, what):
        return
    simulation = simulate(compiled.plan, cluster_named(cluster), costs=costs)
    table = _drawn(compiled, simulation.role_trace, what)
    print(
        dumps(written_trace(simulation))
        if what.as_json
        else "\n".join([table, *(f"warning: {note}" for note in simulation.notes)])
    )


def show_recipe(shown: SimulatedRecipe, what: What) -> None:
    """Print a recipe's schedule and its numbers, and write the requested files."""
    if _printed(shown.compiled, what):
        return
    table = _drawn(shown.compiled, shown.simulation.role_trace, what)
    print(json.dumps(shown.numbers()) if what.as_json else f"{table}\n\n{shown.text()}")


def _printed(compiled: Compiled, what: What) -> bool:
    """Write the CSV file, print the graph or the plan if requested, and return whether one was."""
    if what.csv is not None:
        from piper_compiler import write_schedule_csv

        write_schedule_csv(compiled, what.csv, lowered=what.lowered)
        print(f"the schedule for torch.distributed.pipelining is in {what.csv}", file=sys.stderr)
    if what.graph:
        from piper_ir.graph.graph_text import format_graph

        print(dumps(compiled.graph) if what.as_json else format_graph(compiled.graph), end="")
    elif what.plan:
        from piper_ir.plan.text import format_plan

        print(dumps(compiled.plan) if what.as_json else format_plan(compiled.plan), end="")
    return what.graph or what.plan


def _drawn(compiled: Compiled, trace: Trace, what: What) -> str:
    """Return the schedule as a table, and write its picture if requested."""
    from piper_report import draw_schedule, schedule_table

    if what.png is not None:
        draw_schedule(trace, what.png, plan=compiled.plan)
        print(f"the schedule is in {what.png}", file=sys.stderr)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return schedule_table(
        trace, plan=compiled.plan, width=shutil.get_terminal_size((120, 24)).columns, colour=colour
    )
