"""A run that goes on from a checkpoint does what it would have done without the pause; what differs is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw, batch
from piper_ir.ground.errors import ExecutionError, JobError, PiperWarning
from piper_runtime import Checkpoints, Run
from piper_runtime.checkpoint import commits
from piper_runtime.checkpoint.settings import complete_checkpoints
from piper_runtime.launch.ground.report import StepRecord
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.rank.optimizers.optimizer import RankOptimizer
from piper_runtime.weights.marker import MARKER

Named = list[tuple[str, nn.Parameter]]


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def warm(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedules behind each other; the first one changes the rate relative to what it is."""
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [first, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4]
    )


def damped(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, dampening=0.5)


def plain(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def amsgrad(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, amsgrad=True)


def of_torch(name: str) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: getattr(torch.optim, name)([p for _, p in named], lr=0.01)


CASES: dict[str, dict[str, Any]] = {
    "one rank, momentum": dict(pp=1, microbatches=1, scheduler=halved),
    "tied, adamw in two groups": dict(tied=True, optimizer=adamw, scheduler=warm, clip_norm=0.05),
    "dp and dropout": dict(dp=2, drop=True, optimizer=adamw),
    "masked": dict(masked=True, dp=2, tied=True, scheduler=halved),
    "dampening": dict(optimizer=damped),
    "no state": dict(optimizer=plain),
    "amsgrad": dict(optimizer=amsgrad),
    "adafactor": dict(optimizer=of_torch("Adafactor")),
    "asgd": dict(optimizer=of_torch("ASGD")),
    "nadam": dict(optimizer=of_torch("NAdam"), scheduler=halved),
    "rprop": dict(optimizer=of_torch("Rprop")),
}


def same(a: Run, b: Run) -> bool:
    """Whether `b` is the end of `a`, to the bit."""
    x, y = a.state_dict(), b.state_dict()
    return (
        a.losses[b.first_step :] == b.losses
        and x.keys() == y.keys()
        and all(torch.equal(x[n], y[n]) for n in x)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_has_the_bits_of_one_without_a_pause(name: str, tmp_path: Path) -> None:
    plan, job = chain(**CASES[name])
    whole = run(plan, job, steps=6)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path))
    found = run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path), resume="latest")
    assert found.first_step == 3 and found.trace.step == 5
    assert same(whole, found)
    assert all(
        torch.equal(g[n], whole.gradients[3 + k][n])
        for k, g in enumerate(found.gradients)
        for n in g
    )


def test_steps_carry_their_number(tmp_path: Path) -> None:
    """Rows, random numbers and the schedule are those of the step, also where weights are given by hand."""
    plan, job = chain(pp=2, drop=True, optimizer=plain, scheduler=halved)
    whole, begin = run(plan, job, steps=6), run(plan, job, steps=3)
    torch.save(begin.state_dict(), tmp_path / "weights.pt")
    steps: list[StepRecord] = []
    _, later = chain(
        pp=2, drop=True, optimizer=plain, scheduler=halved, init=tmp_path / "weights.pt"
    )
    found = run(plan, later, steps=3, first_step=3, on_step=steps.append, memory=True)
    assert same(whole, found) and [s.step for s in steps] == [3, 4, 5]
    assert found.peak_bytes == run(plan, job, steps=3, memory=True).peak_bytes, (
        "memory is measured in the second step"
    )
    assert not same(whole, run(plan, later, steps=3, first_step=2)), (
        "control: other rows, masks and rates"
    )


def test_control_a_schedule_or_a_seed_that_is_off_by_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(drop=True, scheduler=halved)
    whole = run(plan, job, steps=6)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path))
    resume = complete_checkpoints(tmp_path)[3]
    assert same(whole, run(plan, job, steps=3, resume=resume))
    made = RankOptimizer.__init__
    with monkeypatch.context() as m:
        m.setattr(RankOptimizer, "__init__", lambda self, *a: made(self, *a[:-1], a[-1] - 1))
        assert not same(whole, run(plan, job, steps=3, resume=resume))
    with monkeypatch.context() as m:
        from piper_runtime.rank.values import rng

        seed = rng.rng_seed
        m.setattr(rng, "rng_seed", lambda s, step, *more: seed(s, step - 1, *more))
        assert not same(whole, run(plan, job, steps=3, resume=resume))


def test_processes_save_and_resume_as_one_process_does(pool: Pool, tmp_path: Path) -> None:
    plan, job = chain(pp=2, dp=2, optimizer=adamw, scheduler=halved)
    options: dict[str, Any] = dict(launcher="processes", pool=pool)
    whole = run(plan, job, steps=5, **options)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path, every=2), **options)
    assert list(complete_checkpoints(tmp_path)) == [2, 3]
    steps: list[StepRecord] = []
    found = run(
        plan,
        job,
        steps=2,
        checkpoint=Checkpoints(tmp_path, every=2),
        resume="latest",
        on_step=steps.append,
        memory=True,
        **options,
    )
    assert same(whole, found) and [s.step for s in steps] == [3, 4] and found.peak_bytes
    assert list(complete_checkpoints(tmp_path)) == [3, 4, 5]
    again = run(plan, job, steps=1, resume=tmp_path / "step-00000004")
    assert again.losses == pytest.approx(whole.losses[4:], rel=1e-12)
    run(
        plan,
        job,
        steps=6,
        checkpoint=Checkpoints(tmp_path / "sync", every=4, asynchronous=False),
        **options,
    )
    assert list(complete_checkpoints(tmp_path / "sync")) == [4, 6]


def test_checkpoints_are_made_where_they_are_due_and_old_ones_go(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    run(plan, job, steps=9, checkpoint=Checkpoints(tmp_path, every=2, keep=3))
    assert list(complete_checkpoints(tmp_path)) == [6, 8, 9] and len(list(tmp_path.iterdir())) == 3
    run(
        plan,
        job,
        steps=5,
        checkpoint=Checkpoints(tmp_path / "all", every=1, keep=None, asynchronous=False),
    )
    assert list(complete_checkpoints(tmp_path / "all")) == [1, 2, 3, 4, 5]


def test_what_has_no_marker_is_not_resumed_from(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    run(plan, job, steps=4, checkpoint=Checkpoints(tmp_path, every=2))
    (tmp_path / "step-00000004" / MARKER).unlink()
    found = run(
        plan,
        job,
        steps=1,
        checkpoint=Checkpoints(tmp_path / "new"),
        resume=tmp_path / "step-00000002",
    )
    assert found.first_step == 2
    with pytest.raises(
        JobError,
        match=r"step-00000004 is a checkpoint that was not completed: it has no complete.json",
    ):
        run(plan, job, resume=tmp_path / "step-00000004")
    assert (
        run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path), resume="latest").first_step == 2
    )
    for folder in complete_checkpoints(tmp_path).values():
        (folder / MARKER).unlink()
    with pytest.raises(
        JobError,
        match=r"no complete checkpoint, only incomplete ones \(step-00000002, .*leave resume out",
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path), resume="latest")


def test_a_run_that_fails_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    def broken(step: int, rows: range) -> Any:
        if step == 2:
            raise ValueError("no more data")
        return batch(step, rows)

    plan, job = chain(pp=2, batch=broken)
    with pytest.raises(Exception, match="no more data"):
        run(plan, job, steps=4, checkpoint=Checkpoints(tmp_path, every=1))
    assert [p.name for p in sorted(tmp_path.iterdir())][:1] == ["step-00000001"]
    assert all((p / MARKER).is_file() for p in tmp_path.iterdir())


def test_a_killed_rank_leaves_checkpoints_that_another_strategy_goes_on_from(
    tmp_path: Path,
) -> None:
    """Rank 1 is killed as it gets step 3's rows, in step 3 or one ahead; what was completed is good, and nothing else
    is left."""
    once = tmp_path / "killed"

    def deadly(step: int, rows: range) -> Any:
        if step == 3 and rows.start == 4 and not once.exists():
            once.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step, rows)

    plan, job = chain(pp=1, dp=2, microbatches=2, batch=deadly, optimizer=adamw)
    settings = Checkpoints(tmp_path / "saved", every=1, keep=None)
    with pytest.raises(ExecutionError, match=r"rank 1 was killed by SIGKILL.* in step [23]"):
        run(plan, job, steps=6, launcher="processes", checkpoint=settings)
    done = [*complete_checkpoints(tmp_path / "saved")]
    assert once.exists() and done in ([1], [1, 2], [1, 2, 3])
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {f"step-0000000{n}" for n in done}
    other, same_job = chain(pp=2, microbatches=4, optimizer=adamw)
    whole = run(other, same_job, steps=6)
    found = run(other, same_job, steps=6 - done[-1], checkpoint=settings, resume="latest")
    assert found.losses == pytest.approx(whole.losses[done[-1] :], rel=1e-12)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    plan, job = chain()
    saved = Checkpoints(tmp_path, every=1, asynchronous=False)

    def another(record: StepRecord) -> None:
        with pytest.raises(
            JobError,
            match=r"another run is writing its checkpoints to .*give each run a folder of its own",
        ):
            run(plan, job, steps=1, checkpoint=saved, resume="latest" if record.step else None)
        tried.append(record.step)

    tried: list[int] = []
    run(plan, job, steps=2, checkpoint=saved, on_step=another)
    assert tried == [0, 1] and list(complete_checkpoints(tmp_path)) == [1, 2]
    assert run(plan, job, steps=1, checkpoint=saved, resume="latest").first_step == 2, (
        "it is free again"
    )


def test_a_killed_runs_rests_are_cleared_up(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    (tmp_path / "step-00000007.partial").mkdir(parents=True)
    (tmp_path / "step-00000007.partial" / "__0_0.distcp").write_bytes(b"half")
    run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_write_that_fails_is_a_warning_and_older_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.checkpoint import rank_saver

    plan, job = chain(pp=2)
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path, keep=1))
    monkeypatch.setattr(rank_saver, "write_boxes", _full_disk)
    with pytest.warns(
        PiperWarning,
        match=r"checkpoint of step 4 could not be written: rank 0: .*No space left.*training goes "
        r"on",
    ):
        found = run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path, keep=1), resume="latest")
    assert len(found.losses) == 2 and [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_not_a_new_one_that_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(folder: Path) -> None:
        raise OSError(f"{folder.name} is in use")

    plan, job = chain(pp=2)
    monkeypatch.setattr(commits, "delete", held)
    with pytest.warns(PiperWarning) as caught:
        run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path, every=1, keep=1))
    assert [str(w.message) for w in caught] == [
        "the checkpoint of step 2 is complete, but an older one could not be deleted: step-00000001 is in use; "
        "training goes on"
    ]
    assert list(complete_checkpoints(tmp_path)) == [1, 2]
    assert (
        run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path), resume="latest").first_step == 2
    )


def test_control_a_checkpoint_that_lacks_a_part_is_never_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.checkpoint import rank_saver

    plan, job = chain(pp=2)
    shares = rank_saver.saved_portion
    monkeypatch.setattr(
        rank_saver,
        "saved_portion",
        lambda plan, rank: replace(shares(plan, rank), buffers=frozenset()),
    )
    with pytest.raises(
        ExecutionError, match=r"the ranks together have not written all of model.count after step 3"
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_saves_the_step_that_it_ends_with(tmp_path: Path) -> None:
    plan, job = chain(pp=2, optimizer=adamw)
    settings = Checkpoints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(
            plan,
            job,
            steps=5,
            checkpoint=settings,
            on_step=lambda r: signal.raise_signal(signal.SIGINT) if r.step == 2 else None,
        )
    assert list(complete_checkpoints(tmp_path)) == [3]
    assert same(
        run(plan, job, steps=5), run(plan, job, steps=2, checkpoint=settings, resume="latest")
    )


def _full_disk(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_mistake_in_the_thread_that_writes_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.checkpoint import rank_saver

    monkeypatch.setattr(rank_saver, "write_boxes", lambda *_: 1 / 0)
    plan, job = chain(pp=1, microbatches=1)
    with pytest.raises(ZeroDivisionError):
        run(plan, job, checkpoint=Checkpoints(tmp_path))
    assert list(tmp_path.iterdir()) == []
