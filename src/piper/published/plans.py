"""Compile the plans of published runs, and keep them on disk: constants change, and plans do not depend on them.

A plan is named by its job, its strategy and the source of the packages that make plans. The folder is `plans` in
`PIPER_CACHE`, or in the user's own for caches; with `PIPER_CACHE=""` nothing is kept. Files are pickles, so the folder
must be the user's alone, as that of captures (`piper.api.captures.kept_captures`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import tempfile
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import piper
from piper.api.captures.kept_captures import kept_base
from piper.published.convert import PublishedRun, row
from piper.published.table import PublishedRow
from piper_compiler import Options
from piper_ir.ground.errors import PiperWarning
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute, Send
from piper_simulator import DeviceModel, Stack, device_type, work_of

SOURCES = (
    "piper_ir",
    "piper_ops",
    "piper_capture",
    "piper_compiler",
    "piper.models",
    "piper.api.compiling",
)
"""The packages whose source makes plans."""
TIMED_SOURCES = ("piper_simulator", "piper.published")
"""The packages whose source decides the order of a zero-bubble plan beside, since it follows from predicted times."""
MOST_PLANS = 300
"""The plans that a process keeps in memory."""
_PLANS: dict[str, Plan] = {}


@functools.cache
def version(sources: tuple[str, ...] = SOURCES) -> str:
    """Return a digest of torch's version and the source of packages, which decide a plan beside job and strategy."""
    import torch

    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=8)
    for name in sources:
        for path in sorted(Path(import_module(name).__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def folder() -> Path | None:
    """Return the folder of this version's plans; None if none are kept."""
    return kept_base("plans", version())


def plan_of(published: PublishedRow, stack: Stack | str | None = None) -> tuple[PublishedRun, Plan]:
    """Return a row without open fields as Piper says it, with its plan: from disk, or compiled and kept.

    Raises PiperError if the row cannot be said, or its strategy is not legal.
    """
    run = row(published, stack=stack)
    name, place = _name(run), folder()
    if name in _PLANS:
        return run, _PLANS[name]
    file = None if place is None else place / f"{name}.pickle"
    plan = None if file is None else _read(file)
    if plan is None:
        made = run
        if published.schedule.startswith("zb"):
            times = stage_times(published, believed(run.cluster.device.stack))
            made = row(published, stack=stack, times=times)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PiperWarning)  # the table prints its own notes
            options = Options(device=device_type(run.cluster))
            plan = piper.compile(made.job, made.strategy, options=options).plan
        if file is not None:
            _write(file, plan)
    if len(_PLANS) >= MOST_PLANS:
        _PLANS.clear()
    _PLANS[name] = plan
    return run, plan


def believed(stack: Stack | None) -> Stack | None:
    """Return a stack with its priors as constants, so that what follows from it does not depend on a fit."""
    if stack is None:
        return None
    priors = {
        name: replace(one, value=one.prior, fitted=False, source="prior")
        for name, one in stack.constants.items()
    }
    return replace(stack, constants=priors, seen=0.0)


def stage_times(published: PublishedRow, stack: Stack | None) -> dict[str, Any]:
    """Return F, I and W of each stage and the seconds of a transfer on a stack, for a zero-bubble order.

    They are of a short ZB-H1 plan. A recomputation counts as a part of I.
    """
    microbatches = published.pp
    rows = published.dp * (published.micro_batch or 1)
    short = replace(published, schedule="zb1p", global_batch=rows * microbatches)
    run = row(short, stack=stack or "")
    recipe = piper.recipes.zb_h1(pp=short.pp, microbatches=microbatches, at=run.boundaries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        plan = piper.compile(
            run.job, piper.Strategy(run.strategy.mesh, (*run.sharding, *recipe, *run.rest))
        ).plan
    model = DeviceModel(plan, run.cluster, None)
    works = iter(work_of(model, plan))
    seconds: dict[str, list[float]] = {step: [0.0] * short.pp for step in "FIW"}
    hop = 0.0
    for stage, role in enumerate(plan.roles):
        for instr in role.program:
            done = next(works)
            steps = {part.op.step for part in instr.parts if isinstance(part.op, Compute)} - {"R"}
            if len(steps) == 1:
                seconds[steps.pop()][stage] += done.seconds / microbatches
            elif any(isinstance(part.op, Send) for part in instr.parts):
                hop = max(hop, done.seconds)
    return {**{step: tuple(each) for step, each in seconds.items()}, "hop": hop}


def _name(run: PublishedRun) -> str:
    stack = ""
    if run.row.schedule.startswith("zb"):
        # orders follow from predicted times; in `run` all times are equal
        stack = repr(believed(run.cluster.device.stack)) + version(TIMED_SOURCES)
    said = (run.job_text, run.strategy.dumps(), run.row.schedule, run.cluster.device.name, stack)
    return hashlib.blake2b(repr(said).encode(), digest_size=12).hexdigest()


def _read(file: Path) -> Plan | None:
    try:
        plan = pickle.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError):
        return None  # cut off, or of a process that died: it is made anew and replaced
    return plan if isinstance(plan, Plan) else None


def _write(file: Path, plan: Plan) -> None:
    number, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    with os.fdopen(number, "wb") as part:
        part.write(pickle.dumps(plan))
    os.replace(name, file)
