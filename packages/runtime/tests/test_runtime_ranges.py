"""Instructions as ranges: a profiler shows the names that the plan prints, in this process and in a worker's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import batch
from piper_ir.plan.plan import Plan
from piper_runtime.engine.ranges import ranged
from piper_runtime.launch.processes.processes import Pool

RESULT = "PIPER_TEST_RANGES"


def names(plan: Plan, rank: int | None = None) -> set[str]:
    roles = plan.roles if rank is None else [plan.role_of(rank)]
    return {instr.name for role in roles for instr in role.program}


def profiled(**options: Any) -> tuple[Plan, set[str]]:
    plan, job = chain()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(plan, job, steps=1, **options)
    return plan, {event.name for event in profiler.events()}


def test_every_instruction_has_a_range_with_its_name() -> None:
    plan, found = profiled(ranges=True)
    assert names(plan) <= found


def test_negative_control_there_are_none_when_nobody_asks() -> None:
    plan, found = profiled()
    assert not names(plan) & found


def test_ranges_change_nothing() -> None:
    plan, job = chain(dp=2)
    assert run(plan, job, ranges=True).losses == run(plan, job).losses


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(2) as workers:
        yield workers


RUNNING: list[profile] = []


def spying(step: int, rows: range) -> Any:
    """A batch function that profiles its process from the first batch of step 0 to the first of step 1."""
    if step == 0 and not RUNNING:
        RUNNING.append(profile(activities=[ProfilerActivity.CPU]))
        RUNNING[0].start()
    if step == 1 and RUNNING:
        profiler = RUNNING.pop()
        profiler.stop()
        Path(os.environ[RESULT], f"{os.getpid()}.txt").write_text(
            "\n".join({event.name for event in profiler.events()})
        )
    return batch(step, rows)


@pytest.mark.long
def test_a_worker_has_them_too(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its compute: torch.profiler sees the thread that has started it. Of the range that is open when it
    starts, that of the first load, torch 2.13 tells and 2.11 does not."""
    monkeypatch.setenv(RESULT, str(tmp_path))
    plan, job = chain(batch=spying)
    run(plan, job, steps=2, launcher="processes", pool=pool, ranges=True)
    found = (tmp_path / f"{pool.pids[0]}.txt").read_text().splitlines()
    first, *others = (instr.name for instr in plan.role_of(0).program if not instr.comm)
    assert first == "load.inputs@0#pp0+2" and set(others) <= set(found)


def test_nvtx_ranges_are_pushed_and_popped_where_cuda_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faked: the two calls of torch.cuda.nvtx, which need a CUDA build."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))

    def fail() -> None:
        raise ValueError("as instructions may")

    assert ranged("layer0.F@1", lambda: 7, nvtx=True)() == 7
    with pytest.raises(ValueError, match="as instructions may"):
        ranged("layer0.B@1", fail, nvtx=True)()
    assert calls == ["layer0.F@1", "pop", "layer0.B@1", "pop"]
