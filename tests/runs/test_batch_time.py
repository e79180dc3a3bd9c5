"""Waiting for Job.batch is shown as what it is: a row of its own, and no compute."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import piper
from packages.report.tests.chrome_documents import problems
from piper import Mesh, Run, Strategy, recipes
from piper_ir.ground.trace import BATCH
from piper_ir.plan.plan import COMPUTE
from piper_report.facts.phases import kinds
from piper_report.facts.summary import WAITING, beside_table, compute_seconds
from piper_report.figures.gantt import timelines
from piper_report.pages.chrome import chrome_trace
from tests.helpers import models

WAIT_S, MICROBATCHES, STEPS = 0.02, 2, 2


def slow(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    time.sleep(WAIT_S)
    return models.token_batch(step, rows)


JOB = piper.Job(
    model=models.TinyGPT,
    batch=slow,
    loss=models.cross_entropy,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    global_batch=2 * MICROBATCHES,
)
STRATEGY = Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=MICROBATCHES))


@pytest.fixture(scope="module")
def compiled() -> piper.Compiled:
    return piper.compile(JOB, STRATEGY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(compiled: piper.Compiled, folder: Path) -> Run:
    return piper.execute(
        compiled, steps=STEPS, launcher="inline", memory=False, trace=True, folder=folder
    )


def test_the_time_is_a_row_of_the_trace_and_not_of_compute(
    run: Run, compiled: piper.Compiled
) -> None:
    assert [(s.rank, s.name, s.stream) for s in run.trace.waits] == [
        (r, f"batch@{i}", BATCH) for r in range(2) for i in range(2)
    ]
    spans = [s for s in run.trace.spans if s.stream == COMPUTE]
    assert len(spans) == sum(sum(not i.comm for i in r.program) for r in compiled.plan.roles)
    waited = [s.end - s.start for s in run.trace.waits]
    assert min(waited) >= WAIT_S
    assert (
        sum(compute_seconds(run.trace).values()) + sum(waited) <= run.step_s[-1]
    )  # ranks take turns in one thread
    for batch in run.trace.waits:
        (of,) = [s for s in spans if (s.rank, s.instr) == (batch.rank, batch.instr)]
        assert of.end - of.start <= run.step_s[-1] - WAIT_S and batch.start <= of.start <= of.end
        assert (
            kinds(run.trace, compiled.plan)[batch].phase == kinds(run.trace)[batch].phase == "batch"
        )


def test_steps_say_how_long_they_waited(run: Run, folder: Path) -> None:
    assert len(run.batch_s) == STEPS and all(
        MICROBATCHES * WAIT_S <= s <= run.step_s[i] for i, s in enumerate(run.batch_s)
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch_s"] for line in lines] == run.batch_s
    assert json.loads((folder / "measured.json").read_text())["batch_s"] == run.batch_s


def test_tables_and_figures_show_it(run: Run, compiled: piper.Compiled) -> None:
    prediction = piper.simulate(compiled.plan, "cpu-local")
    assert WAITING in beside_table(prediction, run, title="").plain()
    document = chrome_trace(run.trace)
    assert problems(document) == [] and any(
        e.get("cat") == "batch" for e in document["traceEvents"]
    )
    assert timelines([prediction.trace, run.trace], compiled.plan)
