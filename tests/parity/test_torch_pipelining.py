"""Schedules that we export run in torch's own pipeline runtime, with the gradients of one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import piper
from benchmarks.gathers import order_of, plan_of
from tests.helpers.cases import each_case

SCRIPT = Path(__file__).parents[1] / "helpers" / "torch_pipeline.py"
RECIPES = {
    "interleaved": piper.recipes.interleaved(pp=2, microbatches=4, chunks=2),
    "zb_h1": piper.recipes.zb_h1(pp=2, microbatches=4),
    "zbv": piper.recipes.zbv(pp=2, microbatches=4),
    "dualpipe_v": piper.recipes.dualpipe_v(pp=2, microbatches=4),
}
ONCE = 120
"""Seconds after which a rank counts as hung."""


def written(folder: Path) -> list[Path]:
    """Compute-only, lowered as torch does, and lowered as our plan communicates; one that gathers, and one that forgets
    to reduce."""
    paths = []
    for name, directives in RECIPES.items():
        strategy = piper.Strategy(piper.Mesh(pp=2), directives)
        stages = 2 if name == "zb_h1" else 4
        plan = piper.compile(piper.synthetic(stages=stages, F=1, I=1, W=1), strategy)
        for kind, source, lowered in (
            ("", strategy, False),
            ("-lowered", strategy, True),
            ("-plan-lowered", plan, True),
        ):
            paths.append(folder / f"{name}{kind}.csv")
            piper.write_schedule_csv(source, paths[-1], lowered=lowered)
    paths.append(folder / "gathered-lowered.csv")
    piper.write_schedule_csv(
        plan_of(order_of("interleaved, v=2", 2, 4), 1, 0), paths[-1], lowered=True
    )
    text = (folder / "zb_h1-lowered.csv").read_text()
    paths.append(folder / "unreduced-lowered.csv")
    paths[-1].write_text(re.sub(r",\d+REDUCE_GRAD", "", text))
    return paths


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Per file the largest difference of a gradient on each rank; both ranks run all files in one go."""
    folder = tmp_path_factory.mktemp("schedules")
    command = [
        sys.executable,
        str(SCRIPT),
        "{rank}",
        str(folder / "store"),
        *map(str, written(folder)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [a.format(rank=r) for a in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for r in range(2)
    ]
    found: dict[str, list[float]] = {}
    try:
        for process in ranks:
            out, err = process.communicate(timeout=ONCE)
            assert process.returncode == 0, err[-3000:]
            for line in out.splitlines():
                path, difference = line.split()
                found.setdefault(Path(path).stem, []).append(float(difference))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found


@pytest.mark.long
@each_case("name", RECIPES)
@each_case("kind", ["", "-lowered", "-plan-lowered"])
def test_gradients_are_those_of_one_device(
    differences: dict[str, list[float]], name: str, kind: str
) -> None:
    first, second = differences[name + kind]
    assert max(first, second) < 1e-12


@pytest.mark.long
def test_a_table_with_gathers_of_whole_stages_runs(differences: dict[str, list[float]]) -> None:
    assert max(differences["gathered-lowered"]) < 1e-12


@pytest.mark.long
def test_negative_control_a_schedule_without_reductions_is_seen(
    differences: dict[str, list[float]],
) -> None:
    """torch divides by the number of microbatches at REDUCE_GRAD."""
    assert min(differences["unreduced-lowered"]) > 1e-3
