"""Faults of what lies around a job: the state of modules in workers, and the files of checkpoints; mutants.py tries
them.

Each runs a job wrongly and returns the run with what one device computes for the job; None where a case offers no
place.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piper_runtime import Checkpoints
from piper_runtime.launch.running.run import execute
from piper_runtime.rank.sending.shipping import pack
from tests.faults.job_faults import JobFault, Judged, _run, _truth
from tests.helpers import compositions
from tests.helpers.compositions import Composition

NAME = "module_of_a_fault"
SOURCE = "SCALE = 1.0\ndef amount(step):\n    return 1.0\nclass Amount:\n    scale = 1.0\n"


@contextmanager
def _module() -> Iterator[ModuleType]:
    """A module that any process can import."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{NAME}.py").write_text(SOURCE)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield importlib.import_module(NAME)
        finally:
            sys.path.remove(folder)
            sys.modules.pop(NAME, None)


def _left_behind(
    c: Composition, change: Callable[[Any], object], read: Callable[[Any, int], float]
) -> Judged | None:
    """Run with what a worker reads of a module that a script has changed, beside what the script reads."""
    job = compositions.job_of(c)
    if not any(t.is_floating_point() for t in pytree.tree_leaves(job.batch(0, range(1)))):
        return None
    with _module() as module:

        def batch(step: int, rows: range) -> Any:
            return pytree.tree_map(
                lambda t: t * read(module, step) if t.is_floating_point() else t,
                job.batch(step, rows),
            )

        change(module)
        truth = _truth(c, replace(job, batch=batch))
        parcel = pack(batch)
        del sys.modules[NAME]
        return _run(c, replace(job, batch=parcel.open())), truth


def variable_left(c: Composition) -> Judged | None:
    """A worker has the variable of a module as its file says, and not as the script has set it."""
    return _left_behind(c, lambda m: setattr(m, "SCALE", 3.0), lambda m, step: float(m.SCALE))


def function_left(c: Composition) -> Judged | None:
    """A worker calls the function that a module defines, and not the one that the script has put in its place."""
    return _left_behind(
        c, lambda m: setattr(m, "amount", lambda step: 3.0), lambda m, step: float(m.amount(step))
    )


def class_left(c: Composition) -> Judged | None:
    """A worker has the attribute of a class as its file says, and not as the script has set it."""
    return _left_behind(
        c, lambda m: setattr(m.Amount, "scale", 3.0), lambda m, step: float(m.Amount.scale)
    )


def attribute_left(c: Composition) -> Judged | None:
    """A worker calls a function of a module without the attribute that the script has given it."""
    return _left_behind(
        c,
        lambda m: setattr(m.amount, "scale", 3.0),
        lambda m, step: float(getattr(m.amount, "scale", 1.0)),
    )


def _mixed(c: Composition, damage: Callable[[dict[int, Path], Path], object]) -> Judged | None:
    """Begin with the weights of a checkpoint whose files are not all its own, beside those of the good one."""
    job = compositions.job_of(c)
    plan = compositions.compiled(c).plan
    if len(plan.roles) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        kept = Checkpoints(folder, every=1)
        run = execute(
            plan, compositions.code_of(c, plan), job, steps=2, launcher="inline", checkpoint=kept
        )
        saved = {step: Path(folder, f"step-{step:08d}") for step in (1, 2)}
        bad = Path(shutil.copytree(saved[2], Path(folder, "bad")))
        damage(saved, bad)
        good = Path(folder, "good.pt")
        torch.save(run.state_dict(), good)
        return _run(c, replace(job, init=bad)), _truth(c, replace(job, init=good))


def rank_of_another_step(c: Composition) -> Judged | None:
    """The file of one rank in a checkpoint is that of an earlier step."""
    return _mixed(c, lambda saved, bad: shutil.copy(saved[1] / "__0_0.distcp", bad))


def metadata_of_another_step(c: Composition) -> Judged | None:
    """The metadata, the description and the mark of a checkpoint are those of an earlier step, with all ranks' files
    but one."""

    def all_but_one(saved: dict[int, Path], bad: Path) -> None:
        for path in saved[1].iterdir():
            if path.name != "__0_0.distcp":
                shutil.copy(path, bad)

    return _mixed(c, all_but_one)


def stale_capture(c: Composition) -> Judged | None:
    """A kept capture is used although a constant of the model is another one now."""
    job = compositions.job_of(c)
    if c.model != "gpt":
        return None

    def newer() -> nn.Module:
        model = job.model()
        model.register_forward_hook(lambda module, given, out: out * 1.01)
        return model

    return _run(c, job), _truth(c, replace(job, model=newer))


STATES: tuple[JobFault, ...] = (
    variable_left, function_left, class_left, attribute_left, stale_capture, rank_of_another_step, metadata_of_another_step,
)  # fmt: skip
