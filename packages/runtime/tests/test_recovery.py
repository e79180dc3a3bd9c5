"""A run that is started again after a failure does what it would have done without; who is started again, and how
often."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import chain
from packages.runtime.tests.chains import run as run_with_gradients
from packages.runtime.tests.handmade import CODE, adamw, batch
from piper_ir.ground.errors import (
    ExecutionError,
    HangError,
    JobError,
    NonFiniteLossError,
    PiperWarning,
    RankError,
)
from piper_runtime import Checkpoints, Run
from piper_runtime.checkpoint import rank_saver
from piper_runtime.launch.ground import report
from piper_runtime.launch.ground.recovery import Recovery
from piper_runtime.launch.ground.report import StepRecord
from piper_runtime.launch.ground.restart import Restart
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.running.beginning import under_torchrun
from piper_runtime.launch.running.launchers import workers_of
from tests.helpers.cases import each_case

LINE = r"\(\S+test_recovery\.py:\d+\)"
"""The place of a batch function's error."""
AGAIN = r"the run goes on with step"


def run(plan: Any, job: Any, **options: Any) -> Run:
    return run_with_gradients(plan, job, **{"gradients": False, "steps": 6, **options})


def failing_in(*steps: int) -> Callable[[int, range], Any]:
    """Return a batch function that raises in each of these steps, once for each time that it is named."""
    left = list(steps)

    def flaky(step: int, rows: range) -> Any:
        if step in left and rows.start == 2:
            left.remove(step)
            raise OSError(f"the disk went away in step {step}")
        return batch(step, rows)

    return flaky


def same(a: Run, b: Run) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return (
        a.losses == b.losses
        and a.first_step == b.first_step
        and all(torch.equal(x[n], y[n]) for n in x)
    )


@pytest.mark.parametrize(
    ("every", "resumed"),
    [(2, (2, 4)), (5, (0, 0)), (None, (0, 0))],
    ids=["saved", "saved too late", "never saved"],
)
def test_a_run_that_was_started_again_has_the_bits_of_one_that_was_not(
    every: int | None, resumed: tuple[int, int], tmp_path: Path
) -> None:
    plan, job = chain(
        dp=2,
        drop=True,
        optimizer=adamw,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )
    heard: list[StepRecord] = []
    told: list[Restart] = []
    saved = None if every is None else Checkpoints(tmp_path, every=every)
    with pytest.warns(
        PiperWarning, match=rf"went away in step 3 {LINE}\. Restart 1 of 2: {AGAIN} {resumed[0]}"
    ):
        found = run(
            plan, replace(job, batch=failing_in(3, 4)), checkpoint=saved, restarts=2, on_step=heard.append,
            on_restart=told.append, memory=True, trace=True,
        )  # fmt: skip
    whole = run(plan, job, memory=True, trace=True)
    assert same(found, whole) and found.peak_bytes == whole.peak_bytes and found.trace.step == 5
    assert [(r.step, r.resumed, r.lost, r.error) for r in found.restarts] == [
        (3, resumed[0], (), "RankError"), (4, resumed[1], (), "RankError"),
    ]  # fmt: skip
    assert [replace(r, seconds=None) for r in found.restarts] == told and all(
        r.seconds for r in found.restarts
    )
    assert [r.step for r in heard] == list(range(6)), "no step twice"
    assert [r.loss for r in heard] == found.losses and [r.step_s for r in heard] == found.step_s
    assert whole.restarts == ()


def test_control_a_run_that_goes_on_with_another_state_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.launch.running import inline_run

    plan, job = chain(optimizer=adamw)
    monkeypatch.setattr(inline_run, "restore", lambda rank, state: None)
    with pytest.warns(PiperWarning, match=AGAIN):
        found = run(
            plan,
            replace(job, batch=failing_in(3)),
            checkpoint=Checkpoints(tmp_path, every=2),
            restarts=1,
        )
    assert not same(found, run(plan, job))


def test_a_resumed_run_goes_on_from_its_own_beginning(tmp_path: Path) -> None:
    """It was resumed from elsewhere, and has saved nothing yet; the folder of its own holds something older."""
    plan, job = chain(optimizer=adamw)
    whole = run(plan, job)
    run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path / "own"))
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path / "other"))
    own = Checkpoints(tmp_path / "own")
    with pytest.warns(PiperWarning, match=rf"{AGAIN} 2, from the checkpoint .*other"):
        found = run(
            plan, replace(job, batch=failing_in(3)), steps=4, checkpoint=own, resume=tmp_path / "other" / "step-00000002",
            restarts=1,
        )  # fmt: skip
    assert found.losses == whole.losses[2:] and (found.first_step, found.restarts[0].resumed) == (
        2,
        2,
    )


@pytest.mark.parametrize(
    ("steps", "restarts", "kept", "says"),
    [
        (
            (3, 3),
            9,
            1,
            rf"went away in step 3 {LINE}\. It came again in step 3, and no step was finished .* again "
            r"once, .* from step 2$",
        ),
        (
            (3, 4, 5),
            2,
            2,
            rf"in step 5 {LINE}\. No more restarts are allowed \(restarts=2\).* started again 2 times, .* "
            r"from step 4$",
        ),
        ((3,), 0, 0, rf"the disk went away in step 3 {LINE}$"),
    ],
)
def test_a_run_is_not_started_again_for_ever(
    steps: tuple[int, ...], restarts: int, kept: int, says: str, tmp_path: Path
) -> None:
    plan, job = chain()
    told: list[Restart] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        with pytest.raises(ExecutionError, match=says):
            run(
                plan, replace(job, batch=failing_in(*steps)), checkpoint=Checkpoints(tmp_path, every=2), restarts=restarts,
                on_restart=told.append,
            )  # fmt: skip
    assert len(told) == kept


def test_what_would_come_again_is_not_tried_again() -> None:
    def poison(step: int, rows: range) -> Any:
        x, t = batch(step, rows)
        return x * float("inf" if step == 2 else 1), t

    plan, job = chain()
    told: list[Restart] = []
    with pytest.raises(NonFiniteLossError):
        run(plan, replace(job, batch=poison), restarts=3, on_restart=told.append)
    with pytest.raises(JobError, match=r"Job.batch\(.*returned a list"):
        run(plan, replace(job, batch=lambda step, rows: []), restarts=3, on_restart=told.append)
    assert told == []


def test_a_run_that_fails_behind_its_last_step_brings_its_state_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is done and saved; only the reports of the ranks are lost."""
    plan, job = chain(optimizer=adamw)
    close, calls = report.RankReport.close, list[int]()

    def lost_once(self: Any, *of: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RankError("rank 0 was killed", (0,))
        close(self, *of)

    monkeypatch.setattr(report.RankReport, "close", lost_once)
    saved = Checkpoints(tmp_path, every=2)
    with pytest.warns(PiperWarning, match=f"{AGAIN} 6"):
        found = run(plan, job, checkpoint=saved, restarts=1, trace=True, memory=True)
    assert (
        same(found, run(plan, job)) and found.restarts[0].seconds is None and not found.trace.spans
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (2, 4, 6)]


def test_a_save_that_a_failure_cuts_off_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(optimizer=adamw)
    write, calls = rank_saver.write_boxes, list[int]()

    def broken_once(path: Path, *more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # of the second checkpoint's two files one is there
            raise OSError("Input/output error")
        return write(path, *more)

    monkeypatch.setattr(rank_saver, "write_boxes", broken_once)
    with pytest.warns(PiperWarning, match=f"{AGAIN} 2"):
        found = run(
            plan,
            replace(job, batch=failing_in(5)),
            checkpoint=Checkpoints(tmp_path, every=2),
            restarts=1,
        )
    assert same(found, run(plan, job))


def test_a_run_that_finds_nothing_to_go_on_from_says_what_had_failed(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    def losing(step: int, rows: range) -> Any:
        if (
            step == 5
        ):  # the checkpoint of step 2 is complete: one is finished while others are written
            saved.rename(tmp_path / "gone")  # at once, while a later one is being written
            saved.write_text("a file")
            raise OSError("the disk went away")
        return batch(step, rows)

    plan, job = chain()
    with pytest.raises(
        RankError,
        match=rf"the disk went away {LINE}\. The run cannot go on: the checkpoints in .* cannot be read",
    ):
        run(plan, replace(job, batch=losing), checkpoint=Checkpoints(saved, every=2), restarts=1)


def test_a_pool_has_its_size_again_when_a_run_ended_on_fewer_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    workers = Pool(3)
    monkeypatch.setattr(workers, "close", lambda: closed.append(workers.world))
    options = RunOptions(steps=1, launcher="processes", pool=workers)
    with workers_of(options, 2) as used:
        assert used is workers
    assert closed == [], "they are kept for the next run"
    with pytest.raises(RankError), workers_of(options, 2):
        workers.world = 1
        raise RankError("rank 0 was killed", (0,))
    assert (closed, workers.world) == ([1], 3)


KILLED, RAISED, HUNG = (
    RankError("rank 1 was killed", (1,)),
    RankError("rank 1 raised"),
    HangError("no rank made progress"),
)
NO_ROOM = ExecutionError("no room")


def policy(restarts: int = 9, replan: Any = None, devices: int = 4) -> Recovery:
    return Recovery(RunOptions(steps=9, restarts=restarts, replan=replan), devices)


def tries(recovery: Recovery, *events: ExecutionError | int) -> str:
    """Return the end of the message with which a run ends, "" if it goes on; a number is a step that is done."""
    plan, _ = chain()
    for event in events:
        if isinstance(event, int):
            recovery.heard(StepRecord(event, 0.0, 0.0))
            continue
        try:
            recovery.check(
                type(event)(*event.args, *([event.lost] if isinstance(event, RankError) else []))
            )
        except ExecutionError as e:
            return str(e)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PiperWarning)
            recovery.goes_on(event, 0, plan, "nowhere")
    return ""


def test_who_is_started_again() -> None:
    assert tries(policy(), KILLED, KILLED, KILLED) == "", (
        "machines may fail at one place; the number of restarts is the limit"
    )
    assert "No more restarts" in tries(policy(2), KILLED, KILLED, KILLED)
    assert tries(policy(), RAISED, 0, RAISED, KILLED, RAISED) == ""
    assert "It came again in step 1" in tries(policy(), 0, RAISED, HUNG)
    assert "It came again in step 1" in tries(policy(), 0, RAISED, 0, RAISED), (
        "a step that is done again is no progress"
    )
    assert tries(policy(), NO_ROOM) == "no room", "it has never run"
    assert tries(policy(), KILLED, NO_ROOM) == ""


def test_devices_are_lost_with_their_ranks() -> None:
    asked: list[int] = []
    plan, _ = chain(pp=2)
    smaller, _ = chain(pp=1)

    def replan(devices: int) -> Any:
        asked.append(devices)
        return smaller, CODE

    recovery, infinite = policy(replan=replan, devices=4), lambda: float("inf")
    assert recovery.replanned(RankError("", (0, 1)), plan, CODE, infinite)[0] is plan, (
        "two of four are left, for two ranks"
    )
    assert recovery.replanned(RAISED, plan, CODE, infinite)[0] is plan, "nobody died"
    assert recovery.replanned(KILLED, plan, CODE, infinite)[0] is smaller and asked == [1]
    with pytest.raises(RankError, match=r"On 0 devices the run cannot go on: no device is left"):
        recovery.replanned(KILLED, smaller, CODE, infinite)
    cramped = policy(replan=replan, devices=4)
    assert cramped.replanned(KILLED, plan, CODE, lambda: 1.0)[0] is smaller, (
        "the cluster has room for one rank only"
    )
    crowded = policy(replan=replan, devices=8)
    assert crowded.replanned(NO_ROOM, plan, CODE, lambda: 2.0)[0] is plan, (
        "Ray knows its room, and none is taken off for a guess"
    )
    guessed = policy(replan=replan, devices=2)
    assert guessed.replanned(NO_ROOM, plan, CODE, infinite)[0] is smaller, (
        "nobody knows: one fewer is tried"
    )
    assert policy(devices=2).replanned(KILLED, plan, CODE, lambda: 1.0)[0] is plan, (
        "on_loss='restart': the device is taken to be there"
    )


def test_torchrun_starts_ranks_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = RunOptions(steps=6, checkpoint=Checkpoints(tmp_path))
    options = replace(alone, restarts=3)
    assert under_torchrun(options) == alone, "they have been started for the first time"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert under_torchrun(options) == alone, "nothing is saved yet"
    plan, job = chain()
    run(plan, job, steps=4, checkpoint=alone.checkpoint)
    newest = replace(alone, resume=tmp_path / "step-00000004", steps=2)
    assert under_torchrun(options) == newest
    assert under_torchrun(alone) == alone, "nobody asked for it"
    with pytest.raises(JobError, match=r'on_loss="replan": torchrun has started the ranks'):
        under_torchrun(replace(options, replan=lambda n: (plan, CODE)))


@each_case(
    ("options", "says"),
    [
        (dict(restarts=-1), "restarts=-1: an integer of at least 0 is needed"),
        (dict(restarts=True), "restarts=True: an integer"),
        (
            dict(restarts=1, gradients=True),
            "restarts=1 and gradients=True: the gradients of the steps before",
        ),
        (dict(spares=1), 'spares=1: launcher "inline" runs on this machine'),
        (dict(spares=-1, launcher="ray"), "spares=-1: an integer of at least 0"),
        (dict(restarts=1, on_restart=3), "on_restart=3: a function is needed"),
        (dict(restarts=1, replan="no"), "replan='no': a function is needed"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    plan, job = chain()
    with pytest.raises(JobError, match=says):
        run(plan, job, **options)
