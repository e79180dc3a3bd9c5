"""Run the measurements and write a CSV file and a table, with machine and date.

`make bench` runs them, or

python benchmarks/run.py                      all sections (about an hour on two quiet cores)
python benchmarks/run.py step tensor          some of them
python benchmarks/run.py --quick              fewer cases and repetitions: does it run

Numbers of a shared or busy machine are worth little; the load average before the first measurement is in the header.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Machine, Row, machine

SECTIONS = {
    "scale": "scale:rows",
    "step": "step_time:step_rows",
    "sharded": "step_time:sharded_rows",
    "tensor": "step_time:tensor_rows",
    "experts": "step_time:expert_rows",
    "draws": "draw_rates:rows",
    "loader": "loader:rows",
    "saving": "saving:rows",
    "faults": "faults:rows",
    "prediction": "prediction:rows",
    "accuracy": "accuracy:rows",
    "tune": "tuner:rows",
    "search": "zero_bubble_search:rows",
    "recompute": "recompute_flops:rows",
    "paper": "paper.figures:rows",
}
"""Name -> module and function of `quick`, which gives its rows. Modules are imported when their section runs."""

THREADS = 1
"""Per process."""
WIDTH = 170
"""Columns of the table where there is no terminal."""
COLUMNS = ("section", "name", "value", "low", "high", "unit", "goal", "met", "note")


def main(argv: list[str] | None = None) -> int:
    """Run the sections asked for; exit code 1 when one of them failed.

    A goal that is not met is a result, not a failure.
    """
    options = _options(argv)
    # As in the test suite; torch reads it when a section imports it, and worker processes inherit it.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, str(THREADS))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    where = machine(THREADS)
    console.print(f"[bold]{where}[/bold]")
    rows: list[Row] = []
    failed: list[str] = []
    for name in options.sections or SECTIONS:
        begin = time.perf_counter()
        measured: list[Row] = []
        try:
            for row in section(name)(options.quick):
                measured.append(row)
                if sys.stderr.isatty():
                    print(f"  {row.name}: {_number(row.value)} {row.unit}", file=sys.stderr)
        except (
            Exception
        ) as e:  # what has been measured, and the other sections, are still worth having
            console.print_exception()
            failed.append(f"{name}: {type(e).__name__}: {e}")
        console.print(_table(name, measured, time.perf_counter() - begin))
        rows += measured
    path = (
        options.csv or Path(__file__).parent / "results" / f"{where.date.replace(':', '')[:17]}.csv"
    )
    write(path, where, rows)
    console.print(f"{len(rows)} rows in {path}")
    for line in failed:
        console.print(f"[red]failed[/red] {line}")
    return 1 if failed else 0


def section(name: str) -> Callable[[bool], Iterable[Row]]:
    """Return the function that measures a section."""
    module, _, name = SECTIONS[name].partition(":")
    rows: Callable[[bool], Iterable[Row]] = getattr(import_module(f"benchmarks.{module}"), name)
    return rows


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=", ".join(SECTIONS)
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    parser.add_argument(
        "--csv", type=Path, help="where to write the rows (default: benchmarks/results/DATE.csv)"
    )
    return parser.parse_args(argv)


def _table(section: str, rows: list[Row], seconds: float) -> Table:
    table = Table(title=f"{section} ({seconds:.0f} s)", title_justify="left")
    table.add_column("")
    for column in ("value", "low", "high"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("goal")
    table.add_column("note", overflow="fold")
    for row in rows:
        goal = (
            ""
            if row.goal is None
            else f"{row.goal} {'[green]met[/green]' if row.met else '[red]missed[/red]'}"
        )
        table.add_row(
            row.name,
            _number(row.value),
            _number(row.low),
            _number(row.high),
            row.unit,
            goal,
            row.note,
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write(path: Path, where: Machine, rows: list[Row]) -> None:
    """Write one CSV: a comment line with the machine, the header, a line per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {where}\n")
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        for r in rows:
            met = "" if r.met is None else "yes" if r.met else "no"
            low, high = ("" if x is None else f"{x:.6g}" for x in (r.low, r.high))
            out.writerow(
                (r.section, r.name, f"{r.value:.6g}", low, high, r.unit, r.goal or "", met, r.note)
            )


if __name__ == "__main__":
    sys.exit(main())
