"""Files that are given as the log of a run: a large one is not held, and what is none is refused with one message."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from piper_ir.ground.errors import PlanError
from piper_simulator.durations.expert_loads import Mixture, load_of

MIXTURE = Mixture(experts=8, ranks=4, choices=4096, tokens=2048, padded=True)
NO_TOKENS = "line 1 is no line of a run's metrics: it has no numbers of tokens by layer"
ACCEPTED = "; the metrics.jsonl of a run of this model, or the run's folder, is accepted"


def refused(path: Path, problem: str) -> None:
    with pytest.raises(PlanError) as error:
        load_of(None, path)  # type: ignore[arg-type]  # no plan is asked
    assert str(error.value).startswith(f"load={str(path)!r}: {problem}") and str(
        error.value
    ).endswith(ACCEPTED)


@pytest.fixture(autouse=True)
def mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every plan have the same experts."""
    monkeypatch.setattr("piper_simulator.durations.expert_loads.mixture_of", lambda plan: MIXTURE)


def line(first: str, *others: int) -> str:
    """Return a line of metrics; the tokens of the first expert are JSON, whatever number that is."""
    return json.dumps({"step": 0, "experts": {"layers.0": {"tokens": ["first", *others]}}}).replace(
        '"first"', first
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}\n", "no line has tokens of experts"),
        ("no json", "line 1 is no line of a run's metrics: it is no JSON"),
        (line("1", 2), "layers.0 has 2 experts, those of this plan are 8"),
        ("[1]", NO_TOKENS),
        ('{"experts": 8, "chunks": []}', NO_TOKENS),
        ('{"experts": {"layers.0": [1, 2]}}', NO_TOKENS),
        (line("-1", *[1] * 7), NO_TOKENS),
        (line("NaN", *[1] * 7), NO_TOKENS),
        (line("1" + "0" * 400, *[1] * 7), NO_TOKENS),
        (b"\xb8", "it is not UTF-8 text at byte 0"),
    ],
)
def test_a_file_that_is_no_runs_log(text: str | bytes, problem: str, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(log, problem)


def test_a_log_that_is_missing(tmp_path: Path) -> None:
    refused(tmp_path / "none.jsonl", "there is no such file or folder")
    refused(tmp_path, "this folder has no metrics.jsonl")
    refused(tmp_path / ("x" * 300), "File name too long")


def test_the_log_of_a_long_run_is_not_held_whole(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text((line("1", *[1] * 7) + " " * 1000 + "\n") * 2000)
    tracemalloc.start()
    try:
        found = load_of(None, log)  # type: ignore[arg-type]  # no plan is asked
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None and "2000 steps of 1 layers" in found.text
    assert most < 0.5 * log.stat().st_size


def test_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(line("9", *[1] * 7) + "\n" + line("1", *[1] * 7)[:-9])
    found = load_of(None, log)  # type: ignore[arg-type]  # no plan is asked
    assert found is not None and found.mean == 4 * 10 / 16
