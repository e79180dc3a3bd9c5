"""Simulate the figure of the paper that Piper follows (arXiv 2606.11169) that scales a mixture over stages and
replicas.

python benchmarks/paper/figure9.py            the table; no GPU is needed, and nothing runs but compiler and simulator
python benchmarks/paper/figure9.py --write    docs/paper.md and its picture as well
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console

from benchmarks.measure import machine
from benchmarks.paper.page import ROOT, printed, write_section
from benchmarks.paper.schedule_changes import rates
from benchmarks.paper.schedule_lines import MESHES, STEP, Line, Setup, grid
from benchmarks.paper.schedule_page import (
    GRID_HEADER,
    RATE_HEADER,
    assumptions,
    grid_cells,
    grid_error,
    page9,
    rate_cells,
)
from benchmarks.paper.schedule_pictures import draw9

PAGE, PICTURE = ROOT / "docs" / "paper.md", ROOT / "docs" / "paper" / "figure9.png"
WIDTH = 150


def largest(found: list[Line]) -> Setup:
    """Return the mesh with the most devices."""
    return max((x.setup for x in found), key=lambda setup: setup.pp * setup.width)


def main(argv: list[str] | None = None, of: list[Line] | None = None) -> int:
    """Print the table, and write it if asked to; exit code 1 when the published rate is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="docs/paper.md and its picture as well"
    )
    parser.add_argument("--replicated", action="store_true", help="every rank has all experts")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(f"{machine()}", highlight=False)
    found = of or [*grid(shared=not options.replicated)]
    printed(console, "Meshes", GRID_HEADER, [grid_cells(x) for x in found], left=0)
    others = [*rates(largest(found))]
    printed(console, "The largest mesh", RATE_HEADER, [rate_cells(*x) for x in others], left=2)
    printed(
        console,
        "Assumed",
        ("what", "how much", "source"),
        assumptions([x.setup for x in found], MESHES),
        left=3,
    )
    if options.write:
        write_section(PAGE, "figure9", page9(found, others))
        draw9(found, others, PICTURE)
        console.print(f"{PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")
    error = grid_error(found)
    return 0 if error is None or abs(error) <= STEP else 1


if __name__ == "__main__":
    sys.exit(main())
