"""What `piper simulate` says of memory: where it is gone, whether it fits, and snapshots; and what a search says of the
same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import piper as front
from piper.cli.loading import load_file
from piper_autotune import NothingFoundError
from piper_ir.fold.memory import on_device
from piper_report.facts.results import load
from piper_simulator import load_cluster, simulate
from piper_simulator.memory.footprint import BESIDE, LINES
from tests.cli.test_cli import RECIPE, fails, piper

SMALL = 'name = "small"\nnodes = { count = 1, devices = 2 }\n[device]\nbase = "h100-80g-sxm"\nmemory_bytes = %d\n'
DEEP = (
    RECIPE
    + "strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))\n"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "recipe.py"
    path.write_text(DEEP)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Devices with less memory than a context and a communicator take."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL % 600_000_000)
    return path


def test_memory_by_line(file: Path) -> None:
    done = piper("simulate", file, "--cluster", "h100x8")
    assert done.exit_code == 0 and "DOES NOT FIT" not in done.stdout
    for line in (
        "memory of the fullest device at its peak",
        "\nparameters ",
        "\nactivations ",
        "\nCUDA context ",
        "\nallocated ",
    ):
        assert line in done.stdout, line
    numbers = json.loads(piper("simulate", file, "--cluster", "h100x8", "--json").stdout)
    assert (
        tuple(numbers["memory"]) == (*LINES, *BESIDE)
        and sum(numbers["memory"].values()) == numbers["device_bytes"]
    )
    assert (
        sum(numbers["memory"][line] for line in LINES) == numbers["peak_bytes"]
        and numbers["oom"] is None
    )


def test_a_plan_that_does_not_fit_is_a_result(file: Path, small: Path, tmp_path: Path) -> None:
    """Exit code 0: the prediction is what was asked for."""
    done = piper("simulate", file, "--cluster", small, "--out", tmp_path / "runs")
    assert done.exit_code == 0
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("DOES NOT FIT: ")]
    for part in (
        "out of memory before the step begins: ",
        "rank 0 (pp0) needs ",
        "more than the limit of 572.2 MiB",
        "fullest in ",
    ):
        assert part in line, part
    found = load(next((tmp_path / "runs").iterdir())).predicted
    assert (
        found is not None
        and found.oom is not None
        and found.oom.text == line.removeprefix("DOES NOT FIT: ")
    )
    numbers = json.loads(piper("simulate", file, "--cluster", small, "--json").stdout)
    oom = numbers["oom"]
    assert (
        oom["over_bytes"] == oom["needs_bytes"] - 600_000_000 > 0
        and {"owner", "category", "bytes"} <= oom["owners"][0].keys()
    )


def test_a_search_rejects_with_the_same_words(file: Path, small: Path) -> None:
    recipe, cluster = load_file(file), load_cluster(str(small))
    verdicts = simulate(front.compile(recipe.job, recipe.strategy).plan, cluster).ooms
    with pytest.raises(NothingFoundError) as caught:
        front.tune(recipe.job, lambda trial: recipe.strategy, cluster=cluster, trials=1, workers=0)
    (row,) = caught.value.study.rows
    most = max(verdicts, key=lambda v: v.needs)
    assert row.device_bytes == most.needs and row.reason is not None
    words = re.compile(
        r"rank \d \(pp\d\) needs .*, .* more than the limit of 572\.2 MiB; fullest in instruction "
        r"\d+ [^:]+"
    )
    (said,), (reason,) = (
        words.findall(most.text.replace("@0", "")),
        words.findall(row.reason.replace("@0", "")),
    )
    assert said.partition(" load")[0] == reason.partition(" load")[0]


def test_a_search_counts_the_kernels_of_its_cluster(file: Path) -> None:
    recipe = load_file(file)
    study = front.tune(
        recipe.job, lambda trial: recipe.strategy, cluster="h100x8", trials=1, workers=0
    )
    plan = on_device(front.compile(recipe.job, recipe.strategy).plan, "cuda")
    assert study.best_row is not None and study.best_row.peak_bytes == max(
        r.peak_bytes for r in plan.roles
    )
    assert max(simulate(plan, "h100x8").peak_bytes) == study.best_row.peak_bytes


def test_snapshots(file: Path, tmp_path: Path) -> None:
    done = piper("simulate", file, "--cluster", "h100x8", "--memory-snapshot", tmp_path / "m")
    assert done.exit_code == 0 and sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "rank0.pickle",
        "rank1.pickle",
    ]
    assert "pytorch.org/memory_viz" in done.stderr
    (tmp_path / "taken").write_text("")
    fails(
        piper("simulate", file, "--memory-snapshot", tmp_path / "taken"),
        "cannot write results to",
        "--memory-snapshot",
    )
    fails(
        piper("simulate", file, file, "--memory-snapshot", tmp_path / "m"),
        "--memory-snapshot",
        "one strategy",
    )
