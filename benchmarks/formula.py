"""Hold steps by formula, before any profile, against those that an H200 and an H100 took.

Nothing runs here: the plans are compiled again and simulated on `CLUSTER` without and with a kernel stack, and with the
kernels and the launch cost that were measured on that machine (`benchmarks/kernel_table.py`).

    GPTs of benchmarks/gpu.py               benchmarks/measured/gpu-h200.json; three wait for the host and are not judged
    blocks of benchmarks/gpu_check.py       benchmarks/measured/gpu-check-h200-last.txt; of an H100: gpu-check-h100.json there

The goal is for the formula with a stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import piper
from benchmarks import gpu_check, kernel_table
from benchmarks.gpu import REGIMES, SMALL, name_of, with_microbatches
from benchmarks.measure import Goal, Row
from piper import models
from piper_ir.plan.plan import Plan
from piper_simulator import load_cluster, simulate

CLUSTER, OTHER, STACK = "h200x1", "h100x1", "eager"
GOAL = Goal("below", 25)
MICROBATCHES = (4, 8, 16)
FILE = Path(__file__).parent / "measured" / "gpu-h200.json"
BLOCKS_FILE = Path(__file__).parent / "measured" / "gpu-check-h200-last.txt"
OTHER_FILE = Path(__file__).parent / "measured" / "gpu-check-h100.json"


def measured() -> dict[str, float]:
    """Return the seconds per step by the name of a plan, as the rows of its predictions tell them."""
    out = {}
    for run in json.loads(FILE.read_text(encoding="utf-8"))["runs"]:
        for row in run["rows"]:
            found = re.search(r"measured ([\d.]+)(?:;|$)", row.get("note", ""))
            if (
                row["section"] == "predicted"
                and row["name"].endswith(": step, by formula")
                and found
            ):
                out[row["name"].removesuffix(": step, by formula")] = float(found[1]) / 1e3
    return out


def measured_blocks() -> dict[str, float]:
    """Return the seconds per step of the blocks, from the table as it was printed."""
    lines = BLOCKS_FILE.read_text(encoding="utf-8").splitlines()
    found = (
        re.match(r"predicted (.+): step, by formula .*measured ([\d.]+);", line) for line in lines
    )
    return {f[1]: float(f[2]) / 1e3 for f in found if f}


def measured_on_other() -> dict[str, float]:
    """Return the seconds per step of the blocks on the other device."""
    rows = json.loads(OTHER_FILE.read_text(encoding="utf-8"))["rows"]
    taken = {
        r["name"]: re.search(r"measured ([\d.]+);", r["note"])
        for r in rows
        if r["name"].endswith(": step, by formula")
    }
    return {
        name.removesuffix(": step, by formula"): float(found[1]) / 1e3
        for name, found in taken.items()
        if found
    }


def rows(quick: bool) -> Iterator[Row]:
    """Return two or three rows per plan, then the goals; a plan that the files do not have is left out."""
    on_other = [
        (name, plan, taken, True)
        for name, plan, _, _ in blocks(quick)
        if (taken := measured_on_other().get(name))
    ]
    for title, place, found in (
        ("6 plans that wait for the device", CLUSTER, gpts(quick)),
        ("6 plans of blocks", CLUSTER, blocks(quick)),
        ("6 plans of blocks, H100", OTHER, on_other),
    ):
        judged = []
        for name, plan, taken, counts in found:
            for cluster in (
                place,
                f"{place}@{STACK}",
                *([kernel_table.OUT] if place == CLUSTER else []),
            ):
                row = _row(
                    f"{name}, {getattr(cluster, 'name', cluster)}",
                    simulate(plan, load_cluster(cluster)).period_s,
                    taken,
                )
                judged += [abs(row.value)] if counts and "@" in str(cluster) else []
                yield row
        if not judged:
            continue
        note = f"of {len(judged)} on {place}@{STACK}"
        name = f"step before a profile, {title}: largest error"
        yield Row("formula", name, max(judged), "%", min(judged), max(judged), GOAL, note)


def gpts(quick: bool) -> Iterator[tuple[str, Plan, float, bool]]:
    """Return name, plan, measured seconds, and whether the step waits for the device."""
    known = measured()
    for regime, precision, _ in REGIMES:
        for m in MICROBATCHES[1:2] if quick else MICROBATCHES:
            setup = with_microbatches(regime, precision, m)
            name = name_of(setup.regime, precision)
            if name in known:
                yield name, setup.plan, known[name], regime is not SMALL


def blocks(quick: bool) -> Iterator[tuple[str, Plan, float, bool]]:
    """Return the same for the blocks; for the first alone when it must be quick."""
    known = measured_blocks()
    for name, config in [*gpu_check.BLOCKS.items()][: 1 if quick else None]:
        work = models.job(config, global_batch=gpu_check.ROWS, precision="bfloat16")
        for m in gpu_check.MICROBATCHES:
            strategy = piper.Strategy(
                piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=m),)
            )
            plan = piper.compile(work, strategy).plan
            title = f"bfloat16, {name}, {plan.rows} x {config.length} tokens, m={m}"
            if title in known:
                yield title, plan, known[title], True


def _row(name: str, predicted: float, taken: float) -> Row:
    note = f"predicted {predicted * 1e3:.1f} ms/step, measured {taken * 1e3:.1f}"
    return Row("formula", name, 100 * (predicted / taken - 1), "% error", note=note)
