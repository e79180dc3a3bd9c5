"""A checkpoint that was put together from two is refused, and the file that does not belong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from packages.runtime.tests.chains import chain, run
from piper_ir.ground.errors import FormatError
from piper_runtime import Checkpoints
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.weights.dcp_tensors import DCP_METADATA, read_range
from piper_runtime.weights.marker import MARKER, META
from tests.helpers.cases import each_case

STEP, EARLIER = "step-00000004", "step-00000002"
RANK, OTHER_RANK = "__1_0.distcp", "__2_0.distcp"
"""The files of two ranks, of equal size."""


def momentum(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


FIELDS = dict(layers=4, pp=2, dp=2, zero=3, microbatches=2, optimizer=momentum)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one job whose batches differ, each with checkpoints of two steps."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    plan, job = chain(**FIELDS)  # type: ignore[arg-type]  # fields of several types
    for folder, scale in zip(folders, (1.0, 2.0), strict=True):
        scaled = replace(
            job,
            batch=lambda step, rows, scale=scale: tuple(
                scale * part for part in job.batch(step, rows)
            ),
        )
        run(plan, scaled, steps=4, checkpoint=Checkpoints(folder, every=2))
    return folders


Damage = Callable[[Path, Path, Path], object]
"""Changes a folder; the others are of the same run's earlier step, and of the same step of another run."""


def put(name: str, source: int, target: str = "") -> Damage:
    """Copy one file of the earlier step (0) or of the other run (1) into the folder."""
    return lambda here, *others: shutil.copy(others[source] / name, here / (target or name))


def exchanged(here: Path, *others: Path) -> None:
    first, second = (here / name for name in (RANK, OTHER_RANK))
    contents = first.read_bytes(), second.read_bytes()
    assert len(contents[0]) == len(contents[1])
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def renamed(here: Path, earlier: Path, other: Path) -> None:
    shutil.rmtree(here)
    shutil.copytree(earlier, here)


def older_marker_and_sizes(here: Path, earlier: Path, other: Path) -> None:
    """Replace all but the tensors by the files of another step."""
    for name in (MARKER, META, DCP_METADATA):
        shutil.copy(earlier / name, here / name)


def cut(here: Path, *others: Path) -> None:
    content = (here / RANK).read_bytes()
    (here / RANK).write_bytes(content[:-7])


DAMAGE: dict[str, tuple[Damage, str]] = {
    "a rank's file of an earlier step": (
        put(RANK, 0),
        rf"{RANK} does not hold .* of another step, rank or run .* copy the whole",
    ),
    "a rank's file of another run": (
        put(RANK, 1),
        rf"{RANK} does not hold .* of another step, rank or run .* copy the whole",
    ),
    "files of two ranks exchanged": (
        exchanged,
        r"__\d_0.distcp does not hold .* of another step, rank or run",
    ),
    "a file twice": (
        lambda here, *_: shutil.copy(here / OTHER_RANK, here / RANK),
        rf"{RANK} does not hold .* of another step, rank or run",
    ),
    "metadata of another run": (
        put(META, 1),
        rf"{META} does not belong to {MARKER}: that is of step 4 of run \w{{8}}, and",
    ),
    "metadata of an earlier step": (
        put(META, 0),
        rf"{META} .*bytes were written|{META} does not belong to .*{META} of step 2 of run",
    ),
    "another mark": (
        put(MARKER, 0),
        rf"{META} .*bytes were written|{META} does not belong to {MARKER}: that is of step 2 of "
        rf"run",
    ),
    "a mark of another run": (put(MARKER, 1), rf"{META} does not belong to {MARKER}"),
    "all but the tensors of an earlier step": (
        older_marker_and_sizes,
        r"holds step 2, and not the one of its name; rename",
    ),
    "a folder with another name": (
        renamed,
        r"holds step 2, and not the one of its name; rename the folder",
    ),
    "a file that is cut": (
        cut,
        rf"{RANK} has \d+ bytes, \d+ bytes were written; copy the whole folder again",
    ),
    "a missing file": (
        lambda here, *_: (here / RANK).unlink(),
        rf"{RANK} is missing, \d+ bytes were written",
    ),
}


@each_case("name", DAMAGE)
def test_what_does_not_belong_is_named(name: str, runs: tuple[Path, Path], tmp_path: Path) -> None:
    here = Path(shutil.copytree(runs[0] / STEP, tmp_path / STEP))
    damage, says = DAMAGE[name]
    damage(here, runs[0] / EARLIER, runs[1] / STEP)
    plan, job = chain(**FIELDS)  # type: ignore[arg-type]  # fields of several types
    with pytest.raises(FormatError, match=says):
        run(plan, job, steps=1, resume=here)


@pytest.mark.long
def test_it_is_refused_in_processes_and_by_other_strategies(
    runs: tuple[Path, Path], tmp_path: Path, pool: Pool
) -> None:
    here = Path(shutil.copytree(runs[0] / STEP, tmp_path / STEP))
    exchanged(here)
    plan, job = chain(**FIELDS | dict(pp=1, dp=1, zero=0, microbatches=4))  # type: ignore[arg-type]  # fields of several types
    for how in (dict(launcher="inline"), dict(launcher="processes", pool=pool)):
        with pytest.raises(FormatError, match=r"__\d_0.distcp does not hold"):
            run(plan, job, steps=1, resume=here, **how)


def test_a_copy_and_checkpoints_of_earlier_versions_are_read(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    here = Path(shutil.copytree(runs[0] / STEP, tmp_path / STEP))
    (here / "notes.txt").write_text("the best one")
    plan, job = chain(**FIELDS)  # type: ignore[arg-type]  # fields of several types
    after = run(plan, job, steps=1, resume=here).state_dict()
    marker = json.loads((here / MARKER).read_text())
    (here / MARKER).write_text(
        json.dumps({name: marker[name] for name in ("format", "version", "step", "files")})
    )
    again = run(plan, job, steps=1, resume=here).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in after.items())


def test_every_box_of_a_checkpoint_has_a_checksum(runs: tuple[Path, Path]) -> None:
    opened = open_checkpoint(runs[0] / STEP)
    assert all(
        box.checksum is not None for tensor in opened.tensors.values() for box in tensor.boxes
    )
    assert opened.meta.run and opened.meta.run != open_checkpoint(runs[1] / STEP).meta.run
    assert read_range(opened.path, opened.tensors["model.head"], 0, 4).numel() == 4
