"""Steps by formula, before any profile, held against those that an H200 took (benchmarks/measured/gpu-h200.json).

Nothing runs here: the plans of `benchmarks.gpu` are compiled again and simulated on `CLUSTER`, without and with a kernel stack.
The goal is for plans whose step waits for the device and for the formula with a stack. Where the host decides, its speed does,
and no built-in device knows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import REGIMES, SMALL, name_of, with_microbatches
from benchmarks.measure import Goal, Row
from piper_simulator import load_cluster, simulate

CLUSTER, STACK = "h200x1", "eager"
GOAL = Goal("below", 25)
MICROBATCHES = (4, 8, 16)
FILE = Path(__file__).parent / "measured" / "gpu-h200.json"


def measured() -> dict[str, float]:
    """Seconds per step by the name of a plan, as the rows of its predictions tell them."""
    out = {}
    for run in json.loads(FILE.read_text(encoding="utf-8"))["runs"]:
        for row in run["rows"]:
            found = re.search(r"measured ([\d.]+)(?:;|$)", row.get("note", ""))
            if row["section"] == "predicted" and row["name"].endswith(": step, by formula") and found:
                out[row["name"].removesuffix(": step, by formula")] = float(found[1]) / 1e3
    return out


def rows(quick: bool) -> Iterator[Row]:
    """Two rows per plan, then the goal. A plan that the file does not have is left out."""
    known, judged = measured(), []
    for regime, precision, _ in REGIMES:
        for m in MICROBATCHES[1:2] if quick else MICROBATCHES:
            setup = with_microbatches(regime, precision, m)
            name = name_of(setup.regime, precision)
            if name not in known:
                continue
            for cluster in (CLUSTER, f"{CLUSTER}@{STACK}"):
                row = _row(f"{name}, {cluster}", simulate(setup.plan, load_cluster(cluster)).period_s, known[name])
                if "@" in cluster and regime is not SMALL:
                    judged.append(abs(row.value))
                yield row
    note = f"of {len(judged)} plans that wait for the device, on {CLUSTER}@{STACK}"
    yield Row("formula", "step before a profile: largest error", max(judged), "%", min(judged), max(judged), GOAL, note)


def _row(name: str, predicted: float, taken: float) -> Row:
    note = f"predicted {predicted * 1e3:.1f} ms/step, measured {taken * 1e3:.1f}"
    return Row("formula", name, 100 * (predicted / taken - 1), "% error", note=note)
