"""Simulate the memory figure of the paper that Piper follows (arXiv 2606.11169): pipelines with ZeRO, by largest batch.

    python benchmarks/paper/figure8.py            the tables; no GPU is needed, and nothing runs but compiler and simulator
    python benchmarks/paper/figure8.py --write    docs/paper.md, its picture and the table as CSV as well

A system is a plan of ours that keeps what the system keeps. What is assumed is listed below the tables.
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
from benchmarks.paper.zero_batches import COMPARED, Setting, lines, missed, split_up
from benchmarks.paper.zero_page import (
    HEADER,
    SPLIT_HEADER,
    assumptions,
    cells,
    draw,
    page,
    split_cells,
    write_table,
)

PAGE, PICTURE, TABLE = (
    ROOT / "docs" / "paper.md",
    ROOT / "docs" / "paper" / "figure8.png",
    ROOT / "docs" / "paper" / "figure8.csv",
)
WIDTH = 150


def main(argv: list[str] | None = None, setting: Setting | None = None) -> int:
    """Print the tables, and write them if asked to; exit code 1 when something is not as published."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="docs/paper.md, its picture and CSV as well"
    )
    options = parser.parse_args(argv)
    s = setting or Setting()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(f"{machine()}", highlight=False)
    found, split = list(lines(s)), list(split_up(s, *COMPARED))
    printed(console, "Largest batches of pipelines with ZeRO", HEADER, [cells(x) for x in found])
    title = f"Batch {COMPARED[0]}, policy {COMPARED[1]!r} for all"
    printed(console, title, SPLIT_HEADER, [split_cells(*x) for x in split], left=1)
    printed(console, "Assumed", ("what", "how much", "source"), assumptions(s), left=3)
    for text in missed(found):
        console.print(f"not as published: {text}", highlight=False)
    if options.write:
        write_section(PAGE, "figure8", page(s, found, split))
        write_table(TABLE, found)
        draw(found, split, PICTURE)
        console.print(
            f"{PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}, {TABLE.relative_to(ROOT)}"
        )
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
