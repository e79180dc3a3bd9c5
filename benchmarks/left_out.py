"""Score predictions of published runs by software that nobody has fitted: leave one stack out.

python benchmarks/left_out.py published_runs.csv [ROWS]

Each run keeps the facts of its stack (kernels, attention, messages), and takes the constants that were fitted to it from
the other stacks of its device, as the mean of those that were fitted to runs; where there are none, from the priors. It
prints the mean error of each source with its own constants and with these, and the error that four in five of its runs
have at most with these. ROWS is a pattern of cases.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from piper.published.run_cluster import cluster_of, with_constants_of_others
from piper.published.scoring import HEADLINE, Scores, by_model, percentile, predict, scores
from piper.published.table import PublishedRow, read_rows
from piper_simulator import Stack


def without_own(stack: Stack, device: str) -> Stack:
    """Return a stack whose fitted constants come from others of a device, or are its priors."""
    fitted = [name for name, constant in stack.constants.items() if constant.fitted]
    return with_constants_of_others(stack, device, fitted)


def scored(rows: Sequence[PublishedRow], *, left_out: bool) -> Scores:
    """Return the scores of predictions, under the stack of each row or without its own constants."""
    predictions = []
    for row in rows:
        device = cluster_of(row).device
        stack = device.stack
        own = without_own(stack, device.name) if left_out and stack is not None else None
        predictions.append(predict(row, stack=own, memory=False))
    return scores(predictions)


def main(table: str, pattern: str = "*") -> None:
    """Print the scores of a table by source, with the constants of its stacks and without."""
    runs = [r for r in read_rows(Path(table), pattern) if r.block == HEADLINE and not r.unread]
    rows = [runs[at] for at in by_model(runs)]
    own, other = (scored(rows, left_out=left_out) for left_out in (False, True))
    for a, b in zip(own.sources, other.sources, strict=True):
        if a.mean is not None and b.mean is not None and b.signed is not None:
            errors = [p.error for p in other.predictions if p.row.publisher == b.name]
            most = percentile(sorted(abs(e) for e in errors if e is not None), 0.8)
            means = f"{a.mean:7.1%} {b.mean:7.1%} ({b.signed:+.1%}"
            print(f"{a.name:70.70} {a.n:4} rows {means}; 80 % within {most:.1%})")
    if own.macro is not None and other.macro is not None:
        print(f"{'macro mean':70} {own.macro:17.1%} {other.macro:7.1%}")
    print(f"{time.process_time():.0f} CPU s")


if __name__ == "__main__":
    main(*sys.argv[1:])
