"""The checks of what ranks keep on a device, on the CPU: their rows, and that they see what they are for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import piper
from benchmarks import gpu_check, gpu_graphs, gpu_offload, gpu_states, step_model
from benchmarks.measure import Row
from piper import models

TINY = {"gpt": models.GPTConfig(layers=2, width=32, heads=2, vocab=64, length=16)}


@pytest.mark.long
def test_a_buffer_that_is_kept_beyond_the_plan_is_seen() -> None:
    """Two ranks in this process share parameters, gradients and optimizer states."""
    work = replace(step_model.job(step_model.TINY, 4), precision=piper.Precision(params="float64"))
    strategy = gpu_states.shared_strategies(4)["dp=2 zero=3"]
    alone = piper.execute(
        piper.compile(work, piper.Strategy(piper.Mesh(pp=1), strategy.directives[:1])),
        steps=3,
        launcher="inline",
    )
    compiled = piper.compile(work, strategy)
    run = piper.execute(compiled, steps=3, launcher="inline")
    rows = list(gpu_states.sharded_rows("here", compiled.plan, run, alone, "cpu"))
    assert [row.met for row in rows] == [True, True, True] and rows[1].value == rows[2].value == 0
    record = run.memory[1]
    point = record.points[5]
    kept = replace(
        record,
        points=(*record.points[:5], replace(point, after=point.after + 8192), *record.points[6:]),
    )
    found = gpu_states.kept_beyond(compiled.plan, {**run.memory, 1: kept})
    assert found == (8192, f"{compiled.plan.role_of(1).program[point.instr].name} on rank 1")
    row = gpu_states.peak_row(
        "memory",
        "here",
        compiled.plan,
        {rank: 2 * nbytes for rank, nbytes in run.peak_bytes.items()},
    )
    assert row.value == -50 and not row.met


def test_every_section_of_the_check_is_listed() -> None:
    names = {"sharded", "mixed", "peaks", "saved"}
    assert {section.func.__name__ for section in gpu_states.sections()} == names
    others = 5 + len([*gpu_offload.sections(), *gpu_graphs.sections()])
    assert len(list(gpu_check.sections())) == len(names) + others
    assert {"sharded", "mixed"} <= set(gpu_check.PROVES)


@pytest.mark.long
def test_the_checks_are_read_without_ray_and_optuna() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('ray', 'optuna')))"
    names = (
        "benchmarks.gpu_check, tests.runs.test_cuda, tests.runs.test_cuda_states, "
        "packages.runtime.tests.test_runtime_on_cuda"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}; import {names}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_sections_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_states, "BUCKET_MB", 0.01)
    rows: list[Row] = [
        *gpu_states.sharded("cpu", ("gloo",), step_model.TINY),
        *gpu_states.mixed("cpu", TINY, 8, 3),
    ]
    rows += [*gpu_states.peaks("cpu", TINY, 8), *gpu_states.saved("cpu", 12 * 3 * 64 * 64, 64, 64)]
    assert [row.section for row in rows].count("sharded") == 26 and all(
        row.met for row in rows if row.section in gpu_check.PROVES
    )
    assert [row.unit for row in rows if row.section == "checkpoint"] == ["ms", "ratio"]
