"""Protect that the files of published jobs are short, load, fit their clusters, and stand in the table."""

from __future__ import annotations

from pathlib import Path

from piper.api.ground.clusters import cluster_named
from piper.cli.loading import load_file
from tests.helpers.cases import each_case

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "examples" / "published").glob("*.py"))}
TABLE = (ROOT / "docs" / "interop.md").read_text().partition("## Published jobs")[2]


@each_case("name", FILES)
def test_a_published_job_is_at_most_25_lines(name: str) -> None:
    text = FILES[name].read_text()
    assert text.count("\n") <= 25
    file = load_file(FILES[name])
    assert file.job.global_batch % file.strategy.replicas == 0
    cluster = text.partition('cluster = "')[2].partition('"')[0]
    assert cluster_named(cluster).devices == file.strategy.mesh.world
    assert f"[{name}](../examples/published/{name}.py)" in TABLE


def test_all_25_configurations_stand_in_the_table() -> None:
    said = [line for line in TABLE.splitlines() if line.startswith("| [")]
    others = [line for line in TABLE.splitlines() if line.startswith("| no: ")]
    assert len(said) == len(FILES) and len(said) + len(others) == 25
