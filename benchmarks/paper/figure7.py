"""Simulate the figure of the paper that Piper follows (arXiv 2606.11169) that compares schedules of mixtures of
experts.

    python benchmarks/paper/figure7.py            the tables; no GPU is needed, and nothing runs but compiler and simulator
    python benchmarks/paper/figure7.py --write    docs/paper.md and its picture as well

Ours stand beside the published ratios, and what is assumed below them. The tuner searches on the same two setups.
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
from benchmarks.paper.schedule_changes import changed
from benchmarks.paper.schedule_lines import RATIOS, STACKS, Setup, lines, missed, setups, tuned
from benchmarks.paper.schedule_page import (
    CHANGE_HEADER,
    LINE_HEADER,
    RATIO_HEADER,
    TUNED_HEADER,
    WHY_HEADER,
    assumptions,
    change_cells,
    line_cells,
    page7,
    ratio_cells,
    tuned_cells,
    why_cells,
)
from benchmarks.paper.schedule_pictures import draw7

PAGE, PICTURE = ROOT / "docs" / "paper.md", ROOT / "docs" / "paper" / "figure7.png"
TRIALS, WIDTH = 60, 150


def main(
    argv: list[str] | None = None, of: tuple[Setup, ...] | None = None, trials: int = TRIALS
) -> int:
    """Print the tables, and write them if asked to; exit code 1 when the tuner finds nothing as fast as DualPipeV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="docs/paper.md and its picture as well"
    )
    parser.add_argument("--replicated", action="store_true", help="every rank has all experts")
    options = parser.parse_args(argv)
    chosen = of or setups(shared=not options.replicated)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(f"{machine()}", highlight=False)
    found, *others = ([*lines(chosen, stack)] for stack in STACKS)
    printed(console, "Schedules", LINE_HEADER, [line_cells(x) for x in found], left=3)
    printed(
        console,
        "Beside the paper",
        RATIO_HEADER,
        [ratio_cells(p, found, others) for p in RATIOS],
        left=3,
    )
    changes = [*changed(chosen)]
    printed(
        console,
        "What each assumption is worth",
        CHANGE_HEADER,
        [change_cells(x) for x in changes],
        left=2,
    )
    best = [tuned(setup, trials) for setup in chosen]
    dual = {x.setup.model: x for x in found if x.schedule == "DualPipeV"}
    printed(
        console, "Tuned", TUNED_HEADER, [tuned_cells(x, dual[x.setup.model]) for x in best], left=1
    )
    printed(console, "Why", WHY_HEADER, [row for x in best for row in why_cells(x)], left=2)
    printed(console, "Assumed", ("what", "how much", "source"), assumptions(chosen), left=3)
    for text in missed(found):
        console.print(f"not as published: {text}", highlight=False)
    if options.write:
        write_section(PAGE, "figure7", page7(found, others, changes, best, trials))
        draw7(found, changes, best, PICTURE)
        console.print(f"{PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")
    slower = [
        x
        for x in best
        if (x.found.tokens_per_s or 0.0) < dual[x.setup.model].tokens_per_s or not x.found.fits
    ]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
