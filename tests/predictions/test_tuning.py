"""The tuner's front door: a job captured once, confirmed on this machine, and what is refused."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import piper
from piper.api.captures import capturing
from piper.api.running import tuning
from piper_autotune.scoring.evaluators import Processes
from piper_autotune.scoring.scoring import Scored
from piper_autotune.space.problem import Programs
from piper_ir.ground.errors import CompileError, JobError, TuneError
from piper_simulator import cpu_local, load_cluster
from tests.helpers.cases import each_case

ROWS = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0, 1, ROWS * 16).view(ROWS, 16)[rows.start : rows.stop] + step
    return x, x


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


@lru_cache
def job() -> piper.Job:
    return piper.Job(MLP, batch, nn.functional.mse_loss, adam, global_batch=ROWS)


def strategy(trial: Any) -> piper.Strategy:
    pp = trial.suggest_categorical("pp", [1, 2])
    m = trial.suggest_categorical("microbatches", [1, 2, 4, 8])
    return piper.Strategy(piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=m))


def test_a_job_is_captured_once_and_its_candidates_score_as_simulate_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Mock(wraps=capturing._capture)
    monkeypatch.setattr(capturing, "_capture", counted)
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    study = piper.tune(job(), strategy, cluster=cpu_local(), trials=8, workers=0)
    assert counted.call_count == 1 and isinstance(study, piper.Study) and len(study.rows) == 8
    for row in study.table():
        predicted = piper.simulate(
            piper.compile(job(), study.strategies[row["number"]]).plan, cpu_local()
        )
        assert row["period_s"] == pytest.approx(predicted.period_s) and row[
            "step_s"
        ] == pytest.approx(predicted.step_s)
        assert (row["peak_bytes"], row["device_bytes"]) == (
            max(predicted.peak_bytes),
            max(predicted.device_bytes),
        )


def test_the_best_has_the_interval_that_simulate_says() -> None:
    """Every step of the small model waits for its host, so that the stack's own width is too narrow."""
    cluster = load_cluster("a100x8@ampere-torch")
    study = piper.tune(job(), strategy, cluster=cluster, trials=4, workers=0)
    best, plan = study.best_row, piper.compile(job(), study.best).plan
    interval = piper.simulate(plan, cluster).interval
    assert best is not None and best.period_s is not None and interval is not None
    assert (best.low_s, best.high_s) == pytest.approx((interval.low, interval.high))
    assert interval.high / best.period_s > 1.2 * (1 + study.interval_share)
    assert interval.range_text in study.interval_text()


def test_workers_of_a_job_score_alike_without_torch() -> None:
    problem, more = tuning.problem_of(job(), tuning.Conditions(cpu_local()))
    pool = Processes(problem, Programs(problem, more["at_rows"]), 1, 60.0, more["modules"])
    try:
        made = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=8))
        found = pool.result(pool.submit(made))
        assert isinstance(found, Scored)
        assert found.peak_bytes == max(r.peak_bytes for r in piper.compile(job(), made).plan.roles)
        maps = Path(f"/proc/{pool._workers[0].process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text()
    finally:
        pool.close()


def test_the_best_are_confirmed_and_written(tmp_path: Path) -> None:
    study = piper.tune(
        job(),
        strategy,
        cluster=cpu_local(),
        trials=4,
        workers=0,
        confirm=2,
        launcher="inline",
        steps=3,
        out=tmp_path,
    )
    measured = [r for r in study.table() if r["measured_period_s"] is not None]
    assert (
        len(measured) == 2
        and study.best_row is not None
        and study.best_row.measured_period_s is not None
    )
    for row in measured:
        assert row["error"] == pytest.approx(row["period_s"] / row["measured_period_s"] - 1)
        assert row["measured_peak_bytes"] > 0
    (folder,) = tmp_path.iterdir()
    assert piper.load_strategy(folder / "best.json") == study.best == piper.Study.load(folder).best


@pytest.mark.parametrize("cluster", ["h100x8", load_cluster("a100x8")])
def test_another_machine_cannot_be_confirmed_here(cluster: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may be that cluster")
    with pytest.raises(
        TuneError,
        match=r"confirm runs candidates on this machine, which is cpu-local; the cluster is \w100",
    ):
        piper.tune(job(), strategy, cluster=cluster, confirm=1)


def test_a_program_cannot_be_confirmed() -> None:
    program = piper.synthetic(stages=2, F=1, I=1, W=1)
    with pytest.raises(TuneError, match=r"only a piper\.Job can be run"):
        piper.tune(program, strategy, cluster=cpu_local(), confirm=1)


def test_a_program_of_given_durations_needs_no_cluster() -> None:
    program = piper.synthetic(stages=2, F=1, I=1, W=1)

    def own(trial: Any) -> piper.Strategy:
        return piper.Strategy(
            piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=trial.suggest_int("m", 1, 3))
        )

    study = piper.tune(program, own, cluster=None, trials=3, workers=0)
    assert study.best is not None and study.best.params == {"m": 1} and study.memory_limit is None


@each_case(
    ("text", "number"),
    [
        ("20GiB", 20 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512 mib", 512 << 20),
        (7, 7),
        ("99B", 99),
        ("3B", 3),
    ],
)
def test_sizes_are_read(text: int | str, number: int) -> None:
    assert tuning._limit(text, None) == number


@each_case("text", ["much", "", "-1GiB", 0, -5, True, "1 gallon"])
def test_what_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(
        TuneError,
        match="a positive number of bytes, or text such as '20GiB' or '512MiB', is accepted",
    ):
        tuning._limit(text, None)


def test_the_limit_is_the_clusters_unless_said_otherwise() -> None:
    assert tuning._limit(None, load_cluster("h100x8")) == load_cluster("h100x8").device.memory_bytes


def test_other_sources_are_refused() -> None:
    with pytest.raises(CompileError, match="tune: the source is a str"):
        piper.tune("gpt", strategy, cluster=cpu_local())
    with pytest.raises(CompileError, match="global_batch is given with a Program only"):
        piper.tune(job(), strategy, cluster=cpu_local(), global_batch=3)
    with pytest.raises(JobError, match="at least 2 steps"):
        piper.tune(job(), strategy, cluster=cpu_local(), confirm=1, steps=1)
