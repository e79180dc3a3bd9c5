"""examples/gpt_dataset.py: a file, a dataset and a collate function as for torch's DataLoader, trained as on one
device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from typer.testing import CliRunner

import piper
from piper.api.reference.verification import verify_strategy
from piper.cli import app
from piper.cli.loading import JobFile, load_file
from piper_runtime.data import DatasetBatch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt_dataset.py"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobFile]:
    """The example, with its file in a folder of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", os.fspath(tmp_path_factory.mktemp("data")))
        yield load_file(EXAMPLE)


def source(loaded: JobFile) -> DatasetBatch:
    assert isinstance(loaded.job.batch, DatasetBatch)
    return loaded.job.batch


def test_the_file_is_written_once_and_read_line_by_line(loaded: JobFile) -> None:
    dataset = source(loaded).dataset
    lines = dataset._path.read_bytes().split(b"\n")[:-1]
    assert len(dataset) == len(lines) == 4000 and len({len(line) for line in lines}) > 20
    assert [bytes(dataset[i].tolist()) for i in (0, 1, 3999)] == [lines[0], lines[1], lines[3999]]
    written = dataset._path.stat().st_mtime_ns
    assert len(type(dataset)(dataset._path)) == 4000 and dataset._path.stat().st_mtime_ns == written


def test_its_batches_are_those_of_a_dataloader_over_the_same_samples(loaded: JobFile) -> None:
    batch = source(loaded)
    order = [batch.index(step, row) for step in range(3) for row in range(32)]
    loader = DataLoader(Subset(batch.dataset, order), batch_size=32, collate_fn=batch.collate)
    for step, (inputs, targets) in enumerate(loader):
        found = batch(step, range(32))
        assert torch.equal(found[0], inputs) and torch.equal(found[1], targets)
    assert len(set(order)) == 96 and order != sorted(order)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--launcher", "inline", "--loader", "2"), "piper: --loader 2: launcher"),
        (("--launcher", "inline", "--loader", "threads"), "piper: --loader threads: "),
        (("--loader", "0"), "piper: --loader 0: "),
        (
            ("--emulate", "h100x2", "--loader", "none"),
            "piper: --emulate trains nothing: leave out --loader",
        ),
    ],
)
def test_a_loader_that_cannot_be_is_one_message(
    given: tuple[str, ...], says: str, loaded: JobFile, tmp_path: Path
) -> None:
    found = CliRunner().invoke(
        app, ["run", str(EXAMPLE), "--steps", "1", "--out", str(tmp_path / "runs"), *given]
    )
    # on a busy machine lines of progress stand before it
    assert found.exit_code == 2 and re.search(f"^{says}", found.stderr, re.MULTILINE), found.stderr
    assert "Traceback" not in found.output
    assert found.stderr.count("piper: ") == 1


@pytest.mark.long
def test_it_trains_as_on_one_device_and_learns(loaded: JobFile) -> None:
    assert verify_strategy(loaded.job, loaded.strategy, steps=2).equal
    losses = piper.execute(
        piper.compile(loaded.job, loaded.strategy), steps=12, launcher="inline"
    ).losses
    assert losses[-1] < 0.8 * losses[0]
