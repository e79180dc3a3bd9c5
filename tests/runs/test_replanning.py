"""Fewer devices: which strategies are tried, which one is taken, and that the training stays the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.compiling.compiling import Compiled
from piper.api.problems.other_meshes import on_devices, used_recipe
from piper.api.running.replanning import Replanner
from piper_compiler import Strategy
from piper_ir.ground.errors import JobError, MissingPackageError, PiperWarning
from piper_report import write_report
from tests.helpers.cases import each_case
from tests.helpers.parity import FLOAT64

ROWS = 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[
        rows.start : rows.stop
    ]
    return x, x.roll(1, dims=1)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


JOB = piper.Job(
    Net,
    batch,
    nn.functional.mse_loss,
    adamw,
    global_batch=ROWS,
    precision=piper.Precision(params="float64"),
    clip_norm=0.5,
)
DP = piper.recipes.data_parallel()


def strategy(
    pp: int = 2, dp: int = 2, m: int = 4, recipe: Any = piper.recipes.one_f_one_b, **more: Any
) -> Strategy:
    made = (
        recipe(pp=pp, microbatches=m, **more)
        if pp > 1
        else (piper.split(piper.where(), microbatches=m),)
    )
    return Strategy(piper.Mesh(pp=pp, dp=dp), (*made, *(DP if dp > 1 else ())))


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return piper.compile(JOB, strategy())


def test_the_recipe_of_a_strategy_is_recognised() -> None:
    known = used_recipe(strategy())
    assert known is not None and known.recipe.name == "one_f_one_b" and known.more == {"at": "even"}
    assert (
        known.made(3, 8)
        == Strategy(piper.Mesh(pp=3), piper.recipes.one_f_one_b(pp=3, microbatches=8)).directives
    )
    known = used_recipe(strategy(pp=2, m=4, recipe=piper.recipes.interleaved, chunks=2))
    assert known is not None and (known.recipe.name, known.more["chunks"]) == ("interleaved", 2)
    known = used_recipe(strategy(recipe=piper.recipes.zbv, at=(1, 2, 3)))
    assert known is not None and known.recipe.name == "zbv" and "at" not in known.more, (
        "boundaries are for four stages"
    )
    assert used_recipe(strategy(pp=1)) is None
    by_hand = Strategy(
        piper.Mesh(pp=2), [d for d in strategy(dp=1).directives if not isinstance(d, piper.order)]
    )
    assert used_recipe(by_hand) is None, "control: without its orders it is another schedule"


def test_the_same_strategy_on_other_meshes() -> None:
    found = {str(s.mesh): s for s in on_devices(strategy(), 3, ROWS)}
    assert found.keys() == {"Mesh(pp=3)", "Mesh(dp=3)"}
    first = next(iter(on_devices(strategy(), 2, ROWS)))
    assert first.mesh == piper.Mesh(dp=2), "pp=1 is tried, too"
    rows = [
        s.directives[0] if s.mesh.size("pp") == 1 else s.directives[1]
        for s in on_devices(strategy(), 3, ROWS)
    ]
    assert [d.microbatches for d in rows] == [2, 4, 8, 6, 4, 12], (
        "a replica's 8 rows do not divide into microbatches of 3, 24 rows do"
    )
    assert next(iter(on_devices(strategy(), 5, 8))).mesh == piper.Mesh(pp=5), (
        "8 rows do not divide over 5 replicas"
    )
    by_hand = Strategy(
        piper.Mesh(pp=2, dp=2), [d for d in strategy().directives if not isinstance(d, piper.order)]
    )
    assert {str(s.mesh) for s in on_devices(by_hand, 2, ROWS)} == {"Mesh(pp=2)"}
    assert [*on_devices(by_hand, 3, ROWS)] == []


def test_one_device_shares_no_experts() -> None:
    experts, rows = piper.recipes.expert_parallel(), piper.recipes.data_parallel(over=("dp", "ep"))
    shared = Strategy(piper.Mesh(dp=2), [*experts, *rows])
    assert {s.directives for s in on_devices(shared, 1, ROWS)} == {()}
    both = Strategy(piper.Mesh(ep=2, dp=2), [*experts, *rows])
    assert next(iter(on_devices(both, 2, ROWS))).directives == both.directives, (
        "along ep there are two"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [3, 2, 1])
def test_a_run_goes_on_with_fewer_devices(devices: int, compiled: Compiled, tmp_path: Path) -> None:
    whole = piper.execute(compiled, steps=4, launcher="inline")
    piper.execute(compiled, steps=2, launcher="inline", checkpoint=piper.Checkpoints(tmp_path))
    replan = Replanner(compiled, JOB)
    plan, _ = replan(devices)
    assert plan.mesh.world == devices and plan.global_batch == ROWS and replan.compiled.plan is plan
    rest = piper.execute(
        replan.compiled, steps=2, launcher="inline", resume=tmp_path / "step-00000002"
    )
    assert rest.losses == pytest.approx(whole.losses[2:], rel=FLOAT64)
    ours, theirs = rest.state_dict(), whole.state_dict()
    assert all(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) < FLOAT64 for n in theirs)


def searched(trial: Any) -> Strategy:
    pp = trial.suggest_categorical("pp", (1, 2, 4))
    dp = trial.suggest_categorical("dp", (1, 2))
    return strategy(pp, dp, trial.suggest_categorical("m", (2, 4)))


def test_the_strategies_of_the_caller(compiled: Compiled) -> None:
    listed = [strategy(4, 1), strategy(1, 5), strategy(2, 1), strategy(1, 1)]
    replan = Replanner(compiled, JOB, listed)
    assert replan(3)[0].mesh == piper.Mesh(pp=2) and replan.strategy is listed[2], (
        "24 rows do not divide over 5 replicas"
    )
    assert replan(1)[0].mesh.world == 1
    with pytest.raises(JobError, match=r"none of the strategies is legal for this job on 1 device"):
        Replanner(compiled, JOB, listed[:2])(1)
    replan = Replanner(compiled, JOB, searched)
    assert (
        replan(3)[0].mesh.world <= 2
        and replan.strategy is not None
        and set(replan.strategy.params) == {"pp", "dp", "m"}
    )


def test_a_strategy_that_no_smaller_mesh_takes(compiled: Compiled) -> None:
    by_hand = [d for d in strategy(dp=1).directives if not isinstance(d, piper.order)]
    odd = piper.compile(JOB, Strategy(piper.Mesh(pp=2), by_hand))
    with pytest.raises(
        JobError,
        match=r"the strategy of this run, on Mesh\(pp=2\), is not legal on 1 device or fewer; give "
        r"strat",
    ):
        Replanner(odd, JOB)(1)
    with pytest.raises(JobError, match="nothing says which strategy this was compiled from"):
        Replanner(replace(compiled, strategy=None), JOB)


def test_a_search_without_a_tuner_is_refused_before_the_run(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "piper_autotune", None)
    with pytest.raises(
        MissingPackageError,
        match=r"searches the function of a trial with the tuner, .* give a list",
    ):
        Replanner(compiled, JOB, searched)
    assert Replanner(compiled, JOB, [strategy(2, 1)])(2)[0].mesh.world == 2


@each_case(
    ("options", "says"),
    [
        (dict(on_loss="ignore"), 'on_loss=\'ignore\': "restart" or "replan" is accepted'),
        (
            dict(on_loss="replan", launcher="processes"),
            'on_loss="replan": a run that may not be started again',
        ),
        (
            dict(on_loss="replan", restarts=1),
            'on_loss="replan": launcher "inline" has no devices to lose',
        ),
        (
            dict(strategy=searched, restarts=1),
            r"execute\(strategy=...\): it is for the devices that are left",
        ),
        (
            dict(strategy=3, on_loss="replan", restarts=1, launcher="processes"),
            r"a function of a trial, or a list of",
        ),
        (dict(restarts=-1), "restarts=-1: an integer of at least 0"),
        (
            dict(restarts=1, launcher="emulated", cluster="h100x8"),
            "nothing is trained, so there is nothing for .* restarts",
        ),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], says: str, compiled: Compiled) -> None:
    with pytest.raises(JobError, match=says):
        piper.execute(compiled, **{"steps": 1, "launcher": "inline", **options})


def flaky(*steps: int) -> Callable[[int, range], Any]:
    left = list(steps)

    def read(step: int, rows: range) -> Any:
        if step in left:
            left.remove(step)
            raise OSError("the file server is away")
        return batch(step, rows)

    return read


def test_the_folder_of_a_run_has_each_step_once_and_says_what_failed(
    compiled: Compiled, tmp_path: Path
) -> None:
    saved = piper.Checkpoints(tmp_path / "saved", every=2)
    with pytest.warns(
        PiperWarning, match="Restart 1 of 2: the run goes on with step 2, from the checkpoint"
    ):
        run = piper.execute(
            compiled, replace(JOB, batch=flaky(3, 4)), steps=6, launcher="inline", checkpoint=saved, restarts=2,
            out=tmp_path / "out",
        )  # fmt: skip
    assert run.losses == piper.execute(compiled, steps=6, launcher="inline").losses
    folder = tmp_path / "out" / "run-001"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6)) and [
        line["loss"] for line in lines
    ] == run.losses
    noted = [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]
    assert [(n["step"], n["resumed"], n["ranks"]) for n in noted] == [(3, 2, 4), (4, 4, 4)]
    measured = json.loads((folder / "measured.json").read_text())
    assert (
        measured["restarts"][0]["message"] == run.restarts[0].message
        and measured["restarts"][0]["seconds"] > 0
    )
    report = write_report(folder)
    assert "the file server is away" in report.html.read_text() and "restarts" in {
        p.stem for p in report.tables
    }
