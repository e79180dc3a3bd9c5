"""Published runs on clusters and software of their own: NICs, blocking launches, stages of nanotron; public tables."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from piper.published import plans
from piper.published.convert import row
from piper.published.run_cluster import cluster_of
from piper.published.scoring import predict
from piper.published.table import PublishedRow, read_row, read_rows, write_rows
from piper_simulator import DEVICES

FOLDER = Path(__file__).parents[2] / "benchmarks/published"


def one_of(table: str, case: str) -> PublishedRow:
    (found,) = read_rows(FOLDER / table, case)
    return found


def test_a_note_gives_the_nics_of_a_node_and_says_that_launches_block() -> None:
    """Eight devices share four NICs of 100 Gb/s, and reach 94 % of that rate, times the stack's constant `inter`."""
    run = one_of("bigscience_runs.csv", "*14336x70-tp4pp12-2-2048*")
    cluster = cluster_of(run)
    stack = cluster.device.stack
    assert stack is not None and stack.name == "ampere-megatron"
    part = stack.number["inter"]
    assert cluster.links.inter_bandwidth == pytest.approx(0.94 * 4 * 12.5e9 / 8 * part)
    assert cluster.device.launch_s == 0
    own = DEVICES["a100-80g-sxm"].device
    assert cluster.device.kernel_s == pytest.approx(own.kernel_s + stack.number["launch_s"])


def test_the_four_devices_of_a_node_share_its_nics_where_nvlink_joins_more() -> None:
    fields = {
        "case": "a",
        "arch": "llama",
        "hw": "gb200",
        "hidden": "512",
        "heads": "8",
        "layers": "2",
    }
    fields |= {"seq": "256", "gpus": "144", "tp": "1", "pp": "1", "cp": "1", "dp": "144"}
    fields |= {"global_batch": "144", "micro_batch": "1", "note": "4 NICs of 400 Gb/s"}
    cluster = cluster_of(read_row(fields), "")
    assert (cluster.per_node, cluster.links.inter_bandwidth) == (72, pytest.approx(0.94 * 50e9))
    few = row(read_row({**fields, "gpus": "146", "dp": "146", "global_batch": "146"}))
    assert "NVLink joins 2 devices, since 146 fill no larger domains" in few.notes
    stages = {"pp": "2", "dp": "72", "zero": "3", "schedule": "1f1b"}
    assert any("whole during a step" in note for note in row(read_row(fields | stages)).notes)


def test_a_scored_table_without_measured_steps_is_read_again(tmp_path: Path) -> None:
    """Its column low_step_s, which `--out` adds, is no misspelt step_s."""
    one = read_rows(FOLDER / "simumax_b200.csv")[0].fields
    scored = {name: text for name, text in one.items() if name not in ("step_s", "peak_gib")}
    write_rows(tmp_path / "scored.csv", [scored | {"low_step_s": "1", "high_step_s": "2"}])
    (again,) = read_rows(tmp_path / "scored.csv")
    assert again.step_s is None and not again.unread


@pytest.mark.parametrize(
    ("case", "starts"),
    [
        ("nanotron-8.86B-1x8", (9, 18, 26)),  # the head has as many products as 2.2 layers
        ("nanotron-3.57B-1x8", (16,)),
        ("nanotron-1.34B-1x8", (11,)),  # ten are just half, so that a stage takes one more
    ],
)
def test_nanotron_cuts_stages_by_products(case: str, starts: tuple[int, ...]) -> None:
    assert row(one_of("nanotron_runs.csv", case)).boundaries == starts


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("table", "cases", "most"),
    [
        ("nanotron_runs.csv", "nanotron-3.57B-tp[248]", 0.05),
        ("bigscience_runs.csv", "*13312x82-tp4pp12-*", 0.11),
        ("automodel_runs.csv", "*kimi*", 0.08),
    ],
)
def test_tables_that_nothing_is_fitted_to(
    monkeypatch: pytest.MonkeyPatch, table: str, cases: str, most: float
) -> None:
    monkeypatch.setenv("PIPER_CACHE", "")
    plans._PLANS.clear()
    found = [predict(run, memory=False) for run in read_rows(FOLDER / table, cases)]
    assert found and all(not one.refused for one in found)
    assert mean(abs(one.error or 1.0) for one in found) < most
