"""A step's line says the norm of the gradient, the learning rates and the job's own metrics; the report shows them."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.reference.reference import reference
from piper_ir.ground.errors import JobError, PiperWarning
from piper_report import load, write_report
from piper_report.figures.training_figures import gradient_figure
from piper_report.tables.tables import step_sheet
from tests.helpers.cases import each_case
from tests.parity.test_own_optimizers import M, by_hand, compiled, job


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def columns_of(folder: Path) -> set[str]:
    found = step_sheet(load(folder))
    assert found is not None
    return {*found.frame.columns}


def trained(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines of a run on two stages and two replicas, into a folder that is made."""
    of = job(by_hand, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), **options)
    piper.execute(compiled(of), steps=2, launcher="inline", memory=False, folder=str(folder))
    return lines(folder)


def test_an_interrupted_run_is_measured_and_its_report_says_so(tmp_path: Path) -> None:
    of = job(by_hand)
    with pytest.raises(KeyboardInterrupt):
        piper.execute(
            compiled(of),
            steps=1000,
            launcher="inline",
            folder=str(tmp_path),
            on_step=lambda r: signal.raise_signal(signal.SIGINT) if r.step == 2 else None,
        )
    measured = load(tmp_path).measured
    assert measured is not None and (len(measured.step_s), measured.steps_asked) == (3, 1000)
    assert "3 steps of 1,000, then interrupted" in write_report(tmp_path).html.read_text()


def norms() -> list[float]:
    """Plain PyTorch's norms of the gradient of that run."""
    gradients = reference(
        job(by_hand, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)),
        microbatches=M,
        steps=2,
    )
    return [
        float(torch.stack([g.norm() for g in step.values()]).norm()) for step in gradients.gradients
    ]


def test_steps_log_the_norm_of_the_gradient_and_the_learning_rates(tmp_path: Path) -> None:
    tmp_path /= "new/folder"
    found = trained(tmp_path, clip_norm=math.inf, metrics={"perplexity": math.exp})
    assert [line["gradient_norm"] for line in found] == pytest.approx(norms(), rel=1e-9)
    assert [line["learning_rates"] for line in found] == [[0.05, 0.01], [0.025, 0.005]]
    assert [line["metrics"]["perplexity"] for line in found] == [
        math.exp(line["loss"]) for line in found
    ]
    columns = columns_of(tmp_path)
    assert {"gradient_norm", "learning_rate_0", "learning_rate_1", "perplexity"} <= columns
    drawn = gradient_figure(load(tmp_path))
    assert drawn is not None and drawn.name == "gradient_norm"


def test_without_clipping_there_is_no_norm_and_a_metric_that_fails_ends_nothing(
    tmp_path: Path,
) -> None:
    with pytest.warns(
        PiperWarning, match="metric bad: 2 steps lost, first step 0: ZeroDivisionError"
    ):
        found = trained(tmp_path, metrics={"bad": lambda loss: 1 // 0})
    assert all("gradient_norm" not in line and "metrics" not in line for line in found)
    columns = columns_of(tmp_path)
    assert "gradient_norm" not in columns


@each_case(
    ("metrics", "says"),
    [
        ([math.exp], "got an object of type list: a mapping from names"),
        (
            {"accuracy": lambda loss, output, targets: 1.0},
            r"calls 'accuracy' as accuracy\(loss\) or accuracy\(output, targets\)",
        ),
        ({"x": 3}, "has 'x' with an object of type int"),
    ],
)
def test_metrics_that_are_none(metrics: Any, says: str) -> None:
    with pytest.raises(JobError, match=rf"Job\(metrics=...\) {says}"):
        job(by_hand, metrics=metrics)
