"""Complete checkpoints in the launcher: when every rank has written its share, and only then, it counts."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from piper_ir.ground.codec import dumps
from piper_ir.ground.errors import ExecutionError, JobError, PiperError, PiperWarning
from piper_ir.plan.plan import Plan
from piper_runtime.checkpoint.dcp_metadata import metadata_bytes
from piper_runtime.checkpoint.meta import CheckpointMeta, about_run, data_of
from piper_runtime.checkpoint.rank_file import SaveDone, rank_file, write_boxes
from piper_runtime.checkpoint.rank_tensors import NamedRange, left_out, model_key
from piper_runtime.checkpoint.settings import (
    Checkpoints,
    complete_checkpoints,
    drop_partial,
    partial_folder,
    step_folder,
)
from piper_runtime.rank.job.job import InitialState, Job
from piper_runtime.weights.dcp_tensors import DCP_HOME, DCP_METADATA, SavedBox
from piper_runtime.weights.marker import MARKER, META, marker_text


class CheckpointCommits:
    """Collect the ranks' reports on their files, and complete or drop a checkpoint after the last report.

    A checkpoint that cannot be written is a warning, and the run goes on; older ones stay until a newer one is durable.
    """

    def __init__(self, checkpoint: Checkpoints, plan: Plan, job: Job, initial: InitialState):
        self._checkpoint, self._world = checkpoint, plan.mesh.world
        self._about, self._job = about_run(plan, job), job
        self._names = [
            model_key(n) for n in (*(p.name for p in plan.params), *(b.name for b in plan.buffers))
        ]
        params, buffers = left_out(plan)
        self._unheld = {model_key(n): initial.tensor(initial.params, n) for n in params}
        self._unheld |= {model_key(n): initial.tensor(initial.buffers, n) for n in buffers}
        self._found: dict[int, dict[int, SaveDone]] = {}
        import_module(DCP_HOME)  # which takes a second, and is not to do so in the middle of a run

    def add(self, done: SaveDone) -> None:
        """Add the report of one rank."""
        reports = self._found.setdefault(done.step, {})
        reports[done.rank] = done
        if len(reports) == self._world:
            self._finish(done.step, [reports[rank] for rank in sorted(reports)])

    def _finish(self, step: int, reports: list[SaveDone]) -> None:
        self._found.pop(step, None)
        partial = self._checkpoint.path / partial_folder(step)
        problem = "; ".join(r.problem for r in reports if r.problem) or _invisible(partial, reports)
        try:
            if not problem:
                self._commit(step, partial, reports)
        except PiperError:
            raise
        except (OSError, RuntimeError) as e:  # torch has its own class for a disk that is full
            problem = str(e)
        if problem:
            shutil.rmtree(partial, ignore_errors=True)
            warnings.warn(
                f"the checkpoint of step {step} could not be written: {problem}; training goes on",
                PiperWarning,
                stacklevel=2,
            )
        else:
            self._prune(step)

    def _prune(self, step: int) -> None:
        try:
            prune(self._checkpoint)
        except (OSError, JobError) as e:
            warnings.warn(
                f"the checkpoint of step {step} is complete, but an older one could not be deleted: {e}; training "
                f"goes on",
                PiperWarning,
                stacklevel=2,
            )

    def _commit(self, step: int, partial: Path, reports: list[SaveDone]) -> None:
        boxes = [box for r in reports for box in r.boxes]
        unheld = [
            (t.reshape(-1), [NamedRange(key, tuple(t.shape), 0, 0, t.numel())])
            for key, t in self._unheld.items()
        ]
        boxes += write_boxes(partial / rank_file("unused"), unheld)[0]
        if key := unwritten(boxes, self._names):
            raise ExecutionError(
                f"the ranks together have not written all of {key} after step {step}: a mistake of Piper's"
            )
        complete(
            partial,
            self._checkpoint.path / step_folder(step),
            _described(self._about, step, reports, data_of(self._job, step)),
            boxes,
        )

    def close(self) -> None:
        """Drop an incomplete checkpoint when the run is over."""
        self._found.clear()
        with suppress(OSError):  # the next run clears up, too
            drop_partial(self._checkpoint.path)


def unwritten(boxes: Iterable[SavedBox], names: Iterable[str]) -> str:
    """Return the first tensor, by `names` or with a box, whose boxes do not hold all of its elements; else ""."""
    missing: dict[str, int] = {}
    for box in boxes:
        missing[box.key] = missing.get(box.key, prod(box.shape)) - box.box.numel
    return next((key for key in (*names, *missing) if missing.get(key, 1)), "")


def _invisible(partial: Path, reports: list[SaveDone]) -> str:
    """Return which rank's file the launcher does not see as it was written; an empty text when it sees all."""
    for report in reports:
        path = partial / rank_file(report.rank)
        if report.nbytes and (not path.is_file() or path.stat().st_size != report.nbytes):
            return f"the file of rank {report.rank} is not in {partial} here; all machines must share the folder"
    return ""


def _described(
    about: CheckpointMeta, step: int, reports: list[SaveDone], data: Mapping[str, Any]
) -> CheckpointMeta:
    counters = {name: n for r in reports for name, n in r.counters.items()}
    numbers = {name: n for r in reports for name, n in r.numbers.items()}
    kind, schedule = reports[0].optimizer
    return replace(
        about,
        step=step,
        optimizer=kind,
        schedule=schedule,
        groups=tuple(reports[0].groups),
        schedule_state=reports[0].schedule,
        counters=counters,
        loss_scale=reports[0].loss_scale,
        numbers=numbers,
        data=data,
    )


def complete(partial: Path, folder: Path, meta: CheckpointMeta, boxes: list[SavedBox]) -> None:
    """Turn a folder with files of boxes into a complete checkpoint: describe it, rename it, and mark it at last.

    Each step is durable before the next one. Raises OSError when that fails; then the folder has no marker.
    """
    aliases = {model_key(other): model_key(first) for other, first in meta.tied.items()}
    described = {META: dumps(meta, indent=1).encode(), DCP_METADATA: metadata_bytes(boxes, aliases)}
    for name, content in described.items():
        _write(partial / name, content)
    _sync(partial)
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    if folder.exists():
        delete(folder)
    partial.rename(folder)
    _sync(folder.parent)
    _write(folder / MARKER, marker_text(meta.run, meta.step, sizes, described, boxes).encode())
    _sync(folder)


def prune(checkpoint: Checkpoints) -> None:
    """Delete the oldest complete checkpoints beyond the number to keep."""
    if checkpoint.keep is None:
        return
    folders = complete_checkpoints(checkpoint.path)
    for step in sorted(folders)[: -checkpoint.keep]:
        delete(folders[step])


def delete(folder: Path) -> None:
    """Delete a checkpoint: first its marker, so that half of it is none."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _write(path: Path, data: bytes) -> None:
    """Write a file under another name, make it durable, and give it its name."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
