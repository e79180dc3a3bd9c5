"""A search over jobs and plans at once, and what a search minimises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.cli.loading import load_file
from piper_autotune.space.objective import value_text, weight
from piper_ir.ground.errors import JobError, TuneError
from piper_simulator import Cluster, load_cluster
from tests.helpers.cases import each_case

LENGTH = 8
DOLLARS: Any = "dollars_per_token"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(16, 8)[rows.start : rows.stop]
    return x, x


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def job(trial: Any) -> piper.Job:
    """One model, captured once, with batches of two sizes."""
    rows = trial.suggest_categorical("global_batch", [8, 16])
    return piper.Job(
        Layers, batch, nn.functional.mse_loss, optimizer, global_batch=rows, tokens_per_row=LENGTH
    )


def strategy(trial: Any) -> piper.Strategy:
    pp = trial.suggest_categorical("pp", [1, 2])
    return piper.Strategy(piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=4))


def priced(price: float) -> Cluster:
    return load_cluster("h100x8").each_device(lambda device: replace(device, price_per_hour=price))


@pytest.fixture(scope="module")
def found() -> piper.Study:
    return piper.tune(job, strategy, cluster="h100x8", trials=8, workers=0)


def test_a_search_chooses_jobs_and_ranks_by_tokens_per_device(found: piper.Study) -> None:
    rows = found.table()
    points = {(r["params"]["global_batch"], r["params"]["pp"]) for r in rows}
    assert (
        points == {(8, 1), (8, 2), (16, 1), (16, 2)}
        and found.objective == "tokens_per_s_per_device"
    )
    for row in rows:
        batch, pp = row["params"]["global_batch"], row["params"]["pp"]
        made = piper.compile(job(Answers(row["params"])), found.strategies[row["number"]])
        assert made.plan.global_batch == batch
        assert row["period_s"] == pytest.approx(piper.simulate(made.plan, "h100x8").period_s)
        assert row["value"] == pytest.approx(row["period_s"] * pp / (batch * LENGTH))
    assert [r["value"] for r in rows] == sorted(r["value"] for r in rows)
    assert [r["period_s"] for r in rows] != sorted(r["period_s"] for r in rows), (
        "the shortest step is not the best"
    )
    assert (
        found.best_row is not None
        and found.best_row.params["global_batch"] == 16
        and "tokens/s per device" in repr(found)
    )


class Answers:
    def __init__(self, params: Any) -> None:
        self.params = params

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.params[name]


def test_the_study_is_written_and_read(found: piper.Study, tmp_path: Path) -> None:
    found.save(tmp_path)
    again = piper.Study.load(tmp_path)
    assert (
        again.objective == found.objective and again.rows == found.rows and again.best == found.best
    )
    assert (
        json.loads((tmp_path / "study.json").read_text())["objective"] == "tokens_per_s_per_device"
    )


def test_dollars_per_token_are_those_of_the_cluster() -> None:
    made = strategy(Answers({"pp": 2}))
    assert weight("dollars_per_token", made, priced(3.6), 128) == pytest.approx(
        2 * 3.6 / 3600 / 128
    )
    assert (
        weight("tokens_per_s_per_device", made, None, 128) == 2 / 128
        and weight("period", made, None, None) == 1
    )
    assert value_text("dollars_per_token", 2e-6) == "2 dollars per million tokens"
    one = piper.tune(
        job(Answers({"global_batch": 8})),
        strategy,
        cluster=priced(3.6),
        trials=2,
        workers=0,
        objective="dollars_per_token",
    )
    assert one.best_row is not None and one.best_row.params == {"pp": 1}, (
        "two devices are never twice as fast"
    )
    row = one.best_row
    assert row.value == pytest.approx((row.period_s or 0) * 3.6 / 3600 / 64)


def test_a_cluster_file_may_have_prices(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(
        '[device]\nbase = "h100-80g-sxm"\nprice_per_hour = 2.5\n[nodes]\ncount = 1\ndevices = 8\n'
    )
    assert (
        load_cluster(str(file)).device.price_per_hour == 2.5
        and load_cluster("h100x8").device.price_per_hour == 0
    )
    file.write_text(file.read_text().replace("2.5", "-1"))
    with pytest.raises(piper.PiperError, match="price_per_hour"):
        load_cluster(str(file))


@each_case(
    ("more", "message"),
    [
        ({"objective": "period"}, "the steps of different jobs hold different numbers of tokens"),
        (
            {"objective": "speed"},
            "objective='speed'.: one of 'period', 'tokens_per_s_per_device', 'dollars_per_token'",
        ),
        (
            {"objective": "dollars_per_token"},
            "h100-80g-sxm has no price; give dollars per device and hour in the cluster file",
        ),
        ({"storage": "sqlite:///x.db"}, "a search over jobs is kept in memory only"),
        ({"global_batch": 8}, "a job has its own"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        piper.tune(job, strategy, cluster="h100x8", trials=1, workers=0, **more)


def test_tokens_must_be_known() -> None:
    without = replace(job(Answers({"global_batch": 8})), tokens_per_row=None)
    with pytest.raises(
        TuneError, match=r"the tokens of a row are not known; give Job\(tokens_per_row=\.\.\.\)"
    ):
        piper.tune(
            without,
            strategy,
            cluster="h100x8",
            trials=1,
            workers=0,
            objective="tokens_per_s_per_device",
        )


def test_a_function_that_makes_no_job_is_refused() -> None:
    with pytest.raises(JobError, match=r"job\(trial\) returned a int; a piper.Job is needed"):
        piper.tune(lambda trial: 3, strategy, cluster="h100x8", trials=1, workers=0)  # type: ignore[arg-type, return-value]  # refused


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        dict(workers=0, launcher="processes"),
        dict(workers="local", confirm=0),
        dict(workers=0, launcher="ray"),
    ],
    ids=str,
)
def test_jobs_are_scored_and_confirmed_by_other_processes(how: dict[str, Any]) -> None:
    """Each confirming run is of the job that its candidate has chosen: the bytes that it holds are those of its
    plan."""
    study = piper.tune(
        job, strategy, cluster="cpu-local", trials=4, seed=1, steps=2, **{"confirm": 2, **how}
    )
    alone = piper.tune(job, strategy, cluster="cpu-local", trials=4, seed=1, workers=0)
    assert {str(r["params"]): r["value"] for r in study.table()} == {
        str(r["params"]): r["value"] for r in alone.table()
    }
    confirmed = [r for r in study.rows if r.measured_period_s is not None]
    assert len(confirmed) == how.get("confirm", 2) and all(
        r.measured_peak_bytes == r.peak_bytes for r in confirmed
    )


FILE = """
import torch
import piper

def job(trial):
    rows = trial.suggest_int("rows", 4, 8)
    def batch(step, which):
        x = torch.zeros(rows, 2)[which.start : which.stop]
        return x, x
    return piper.Job(lambda: torch.nn.Linear(2, 2), batch, torch.nn.functional.mse_loss,
                     lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), global_batch=rows)

def strategy(trial):
    return piper.Strategy(piper.Mesh(dp=trial.suggest_int("dp", 1, 2)), piper.recipes.data_parallel())

params = {"rows": 4, "dp": 1}
"""


def test_a_file_may_define_a_function_that_makes_its_job(tmp_path: Path) -> None:
    file = tmp_path / "space.py"
    file.write_text(FILE)
    assert load_file(file).job.global_batch == 4
    changed = load_file(file, {"rows": "8"})
    assert changed.job.global_batch == 8 and changed.strategy.params == {"rows": 8, "dp": 1}
    piper.save_strategy(changed.strategy, tmp_path / "best.json")
    assert load_file(file, strategy=tmp_path / "best.json").job.global_batch == 8
    with pytest.raises(JobError, match=r"rows=9: an integer in 4\.\.8"):
        load_file(file, {"rows": "9"})
