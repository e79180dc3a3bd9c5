"""compile and execute: one capture for all strategies of a model, and clear refusals of what does not fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import piper
from piper.api.captures import capturing
from piper.api.ground.results import hang_report
from piper_ir.ground.errors import CompileError, ExecutionError, HangError, JobError
from tests.helpers.capture_jobs import sgd


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0, 1, 96).view(24, 4)[rows.start : rows.stop] + step
    return x, x


@lru_cache
def job() -> piper.Job:
    return piper.Job(MLP, batch, nn.functional.mse_loss, sgd, global_batch=24)


def strategies() -> list[piper.Strategy]:
    out = []
    for recipe in (piper.recipes.gpipe, piper.recipes.one_f_one_b):
        for pp in (2, 4):
            for dp in (1, 2):
                for m in (1, 2, 3, 4, 6, 12):
                    directives = [recipe(pp=pp, microbatches=m), piper.recipes.data_parallel()]
                    out.append(piper.Strategy(piper.Mesh(pp=pp, dp=dp), directives))
    return out


@pytest.mark.long
def test_a_hundred_strategies_are_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(wraps=capturing._capture)
    monkeypatch.setattr(capturing, "_capture", counted)
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    plans = {piper.compile(job(), strategy).plan.key for strategy in strategies() * 2}
    plans |= {
        piper.compile(replace(job(), global_batch=48, clip_norm=1.0), s).plan.key
        for s in strategies()[:4]
    }
    equal = 4  # with one microbatch GPipe and 1F1B are the same plan
    assert len(plans) == len(strategies()) - equal + 4
    assert counted.call_count == 1


@pytest.mark.long
def test_another_precision_is_another_capture() -> None:
    wide = replace(job(), precision=piper.Precision(params="float64"))
    strategy = strategies()[0]
    ours, theirs = piper.compile(job(), strategy).plan, piper.compile(wide, strategy).plan
    assert ({p.spec.dtype for p in ours.params}, {p.spec.dtype for p in theirs.params}) == (
        {"float32"},
        {"float64"},
    )
    for narrow, wide_role in zip(ours.roles, theirs.roles, strict=True):
        assert 2 * narrow.peak_by_category["activation"] == wide_role.peak_by_category["activation"]


def test_a_program_has_no_code_and_needs_no_job() -> None:
    program = piper.synthetic(stages=2, F=1, I=1, W=1)
    compiled = piper.compile(
        program,
        piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2)),
        global_batch=6,
    )
    assert (compiled.job, compiled.code, compiled.plan.rows) == (None, None, 3)
    with pytest.raises(JobError, match=r"compile a piper\.Job"):
        piper.execute(compiled, steps=1, launcher="inline")


def test_refusals() -> None:
    strategy = strategies()[0]
    with pytest.raises(CompileError, match=r"a piper\.Strategy is needed"):
        piper.compile(job(), lambda trial: strategy)
    with pytest.raises(CompileError, match=r"a piper\.Job or a Program"):
        piper.compile(MLP(), strategy)
    with pytest.raises(CompileError, match="a Job has its own"):
        piper.compile(job(), strategy, global_batch=8)
    for size in ({"rows": 2}, {"microbatches": 2}):
        told = piper.Strategy(piper.Mesh(), piper.recipes.gpipe(**size), global_batch=12)
        with pytest.raises(CompileError, match=r"Strategy\(global_batch=12\): a step has 24 rows"):
            piper.compile(job(), told)
    compiled = piper.compile(job(), strategy)
    with pytest.raises(ExecutionError, match=r"'mpi' is not known; use \"ray\".*\"processes\""):
        piper.execute(compiled, steps=1, launcher="mpi")
    with pytest.raises(JobError, match="cluster"):
        piper.execute(compiled, steps=1, launcher="inline", cluster="here")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        piper.no_such_name  # noqa: B018 - reading it is the test


def test_a_job_given_to_execute_replaces_the_compiled_one() -> None:
    compiled = piper.compile(job(), strategies()[0])
    ours = piper.execute(compiled, steps=1, launcher="inline")
    theirs = piper.execute(compiled, replace(job(), seed=7), steps=1, launcher="inline")
    assert ours.losses != theirs.losses
    for change in ({"clip_norm": 1.0}, {"loss": nn.functional.l1_loss}, {"tokens_per_row": 3}):
        with pytest.raises(JobError, match=f"{next(iter(change))} is .* compile it with this job"):
            piper.execute(compiled, replace(job(), **change), steps=1, launcher="inline")


def test_callables_need_not_be_hashable() -> None:
    @dataclass
    class Maker:
        width: int

        def __call__(self) -> nn.Module:
            return MLP()

    made = replace(job(), model=Maker(4))
    assert piper.compile(made, strategies()[0]).plan.roles


def test_results_go_to_a_folder_of_their_own(tmp_path) -> None:
    compiled = piper.compile(job(), strategies()[0])
    for _ in range(2):
        piper.execute(compiled, steps=1, launcher="inline", trace=True, out=tmp_path)
    folders = sorted(p.name for p in tmp_path.iterdir())
    assert folders == ["run-001", "run-002"]
    files = {"measured.json", "spans-measured.json", "trace-measured.json", "metrics.jsonl"}
    assert {p.name for p in (tmp_path / "run-002").iterdir()} == files


class Coupled(torch.optim.SGD):
    """A subclass may do anything, such as divide by a norm over all parameters."""


def test_optimizers_that_may_couple_parameters_need_all_of_them_on_every_rank() -> None:
    coupled = replace(job(), optimizer=lambda named: Coupled([p for _, p in named], lr=0.1))
    with pytest.raises(
        JobError, match=r"Coupled, which is not known to update each parameter by itself.*2 roles"
    ):
        piper.compile(coupled, strategies()[0])
    piper.compile(coupled, piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel()))


def test_step_hooks_are_refused() -> None:
    def hooked(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made = sgd(named)
        made.register_step_pre_hook(lambda optimizer, args, kwargs: None)
        return made

    with pytest.raises(JobError, match=r"step hooks.*clip_norm"):
        piper.compile(replace(job(), optimizer=hooked), strategies()[0])


def test_a_hang_leaves_a_report_of_every_rank(tmp_path: Path) -> None:
    says = r"^rank 0 waits; every rank's last instructions are in .*hang\.txt$"
    with pytest.raises(HangError, match=says) as caught, hang_report(tmp_path):
        raise HangError("rank 0 waits", "rank 0\nrank 1\n")
    assert (tmp_path / "hang.txt").read_text() == caught.value.report == "rank 0\nrank 1\n"
    with pytest.raises(HangError, match=r"^rank 0 waits$"), hang_report(None):
        raise HangError("rank 0 waits")
