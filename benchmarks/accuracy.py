"""Score predictions of the runs that are committed here, by source (docs/accuracy.md): of others, and our own.

`piper accuracy benchmarks/published/mixtures.csv` prints the same with its rows. Notes name the runs that a stack was fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Goal, Row
from piper.published.scoring import by_model, predict, scores
from piper.published.table import read_rows

FOLDER = Path(__file__).parent / "published"
TABLES = {
    "automodel_runs.csv": "*qwen3*",
    "bigscience_runs.csv": "*13312x82-tp4pp12-2-*",
    "fsdp_runs.csv": "fms-7b",
    "llm_foundry_h100.csv": "*13b-2048*",
    "mixtures.csv": "*mbc4",
    "nanotron_runs.csv": "nanotron-3.57B-tp[248]",
    "nemo_runs.csv": "nemo8b*",
    "nemo_2025.csv": "gb200-405b*",
    "own_runs.csv": "*8x1024",
    "simumax_b200.csv": "*405b*mbc4",
}
"""The tables, each with the cases of a quick run."""
STEP, MEMORY = 10.0, 2.0
"""The percentages within which a step of a stack that no run was fitted to should be predicted, and a peak."""


def rows(quick: bool) -> Iterator[Row]:
    """Return the mean errors of steps and of peaks, where these were published; `quick`: of some runs."""
    runs = [
        run
        for name, few in TABLES.items()
        for run in read_rows(FOLDER / name, few if quick else "*")
    ]
    for one in scores([predict(runs[at]) for at in by_model(runs)]).sources:
        source, _, _ = one.name.partition(" and ")
        if one.mean is not None:
            note = f"{one.n} runs; at most {one.most:.1%}" if one.most is not None else ""
            yield Row(
                "accuracy", f"{source}: step", 100 * one.mean, "% mean error", goal=Goal("below", STEP), note=note
            )  # fmt: skip
        if one.memory_mean is not None:
            yield Row(
                "accuracy", f"{source}: peak", 100 * one.memory_mean, "% mean error", goal=Goal("below", MEMORY)
            )  # fmt: skip
