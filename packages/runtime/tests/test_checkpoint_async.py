"""A checkpoint is written while training goes on: what is written is the state of its step, whatever comes after it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import CODE, adamw
from piper_runtime import Checkpoints
from piper_runtime.checkpoint import rank_saver
from piper_runtime.checkpoint.host_copies import HostCopies
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.checkpoint.rank_saver import RankSaver
from piper_runtime.checkpoint.rank_tensors import FlatState
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.checkpoint.settings import complete_checkpoints
from piper_runtime.launch.running.inline_run import rank_job
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.job.job import materialize
from piper_runtime.weights.dcp_tensors import read_range

WRITE = rank_saver.write_boxes


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of step 1 is held up until step 3 is done; what it writes is the state after step 1 all the same."""
    plan, job = chain(pp=2, optimizer=adamw)
    first = run(plan, job, steps=1)
    gate = threading.Event()
    steps: list[int] = []

    def held_up(path: Path, *more: Any) -> Any:
        assert gate.wait(60)
        return WRITE(path, *more)

    def done(record: Any) -> None:
        steps.append(record.step)
        if record.step == 2:
            gate.set()

    monkeypatch.setattr(rank_saver, "write_boxes", held_up)
    # The steps 2 and 3 make no checkpoint, or they would wait for that of step 1.
    monkeypatch.setattr(Checkpoints, "due", lambda self, done: done == 1)
    run(plan, job, steps=4, checkpoint=Checkpoints(tmp_path), on_step=done)
    assert steps == [0, 1, 2, 3] and list(complete_checkpoints(tmp_path)) == [1, 4]
    saved = open_checkpoint(tmp_path / "step-00000001")
    for name, tensor in first.state_dict().items():
        found = read_range(saved.path, saved.tensors[f"model.{name}"], 0, tensor.numel())
        assert torch.equal(found.view(tensor.shape), tensor), name


def test_control_without_a_copy_the_later_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(pp=1, microbatches=1, optimizer=adamw)
    first = run(plan, job, steps=1).state_dict()
    gate = threading.Event()

    def held_up(path: Path, *more: Any) -> Any:
        assert gate.wait(60)
        return WRITE(path, *more)

    monkeypatch.setattr(rank_saver, "write_boxes", held_up)
    monkeypatch.setattr(HostCopies, "copy", lambda self, states: [s.tensor for s in states])
    monkeypatch.setattr(Checkpoints, "due", lambda self, done: done == 1)
    run(
        plan,
        job,
        steps=3,
        checkpoint=Checkpoints(tmp_path),
        on_step=lambda r: gate.set() if r.step == 2 else None,
    )
    saved = open_checkpoint(tmp_path / "step-00000001")
    found = read_range(saved.path, saved.tensors["model.head"], 0, 16).view(4, 4)
    assert not torch.equal(found, first["head"])


def test_a_checkpoint_waits_for_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the copies is used again: never while it is still written."""
    writing: list[int] = []
    most = 0

    def counted(path: Path, *more: Any) -> Any:
        nonlocal most
        writing.append(1)
        most = max(most, len(writing))
        time.sleep(0.01)
        found = WRITE(path, *more)
        writing.pop()
        return found

    monkeypatch.setattr(rank_saver, "write_boxes", counted)
    plan, job = chain(pp=1, microbatches=1)
    run(plan, job, steps=6, checkpoint=Checkpoints(tmp_path, every=1, keep=None))
    assert most == 1 and list(complete_checkpoints(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_synchronous_save_ends_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(path: Path, *more: Any) -> Any:
        time.sleep(0.01)
        order.append(f"written {path.parent.name[5:13].lstrip('0')}")
        return WRITE(path, *more)

    monkeypatch.setattr(rank_saver, "write_boxes", noted)
    plan, job = chain(pp=1, microbatches=1)
    settings = Checkpoints(tmp_path, every=1, asynchronous=False)
    run(plan, job, steps=3, checkpoint=settings, on_step=lambda r: order.append(f"step {r.step}"))
    assert order == ["step 0", "written 1", "step 1", "written 2", "step 2", "written 3"]


def test_a_rank_that_waits_for_its_write_shows_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher takes a rank that shows no progress for one that hangs."""

    beats: list[int] = []

    def slow(path: Path, contents: Any, wrote: Any) -> Any:
        for _ in range(
            400
        ):  # until the rank has looked three times, which takes longer on a busy machine
            time.sleep(rank_saver.LOOK_S)
            wrote()
            if len(set(beats)) >= 3:
                break
        return [], 0

    monkeypatch.setattr(rank_saver, "write_boxes", slow)
    plan, job = chain(pp=1, microbatches=1)
    initial = materialize(job)
    rank = Rank(plan, 0, CODE, rank_job(job), initial.params, initial.buffers)
    said: list[SaveDone] = []
    saver = RankSaver(rank, Checkpoints(tmp_path, every=2), said.append, beats.append)
    saver.step_done(1)
    assert not said and not beats
    saver.finish(1)
    assert [s.step for s in said] == [1] and beats == sorted(beats) and len(set(beats)) >= 3


def test_the_memory_of_copies_is_made_once() -> None:
    copies = HostCopies(torch.device("cpu"))
    states = [FlatState(torch.arange(4.0), ()), FlatState(torch.ones(2, dtype=torch.int64), ())]
    first = copies.copy(states)
    states[0].tensor.add_(1)
    again = copies.copy(states)
    assert [a.data_ptr() for a in first] == [a.data_ptr() for a in again] and again[0].tolist() == [
        1,
        2,
        3,
        4,
    ]
    grown = copies.copy([FlatState(torch.zeros(9), ()), states[1]])
    assert grown[0].numel() == 9 and grown[1].data_ptr() == again[1].data_ptr()


class FakeEvent:
    """Say in a list what is recorded and who waits."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"{stream.name} records")

    def wait(self, stream: FakeStream) -> None:
        self.log.append(f"{stream.name} waits for the event")

    def synchronize(self) -> None:
        self.log.append("host waits for the event")


class FakeStream:
    """Say in a list what runs on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append("back")


class Slot:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def copy_(self, tensor: Any, non_blocking: bool) -> None:
        self.log.append(f"copy {self.name}{' beside' if non_blocking else ''}")


def test_on_a_device_only_the_next_update_waits_for_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buffers are copied in order with compute, which writes them first in the next step; the rest on a stream beside
    it."""
    log: list[str] = []
    compute, beside = FakeStream("compute", log), FakeStream("copies", log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    copies = HostCopies(torch.device("cuda", 0))
    monkeypatch.setattr(
        HostCopies, "_slot", lambda self, k, tensor: Slot("buffer" if k else "weight", log)
    )
    copies.hold()
    assert log == []
    copies.copy([FlatState(torch.zeros(1), ()), FlatState(torch.zeros(1), (), early=True)])
    assert log == [
        "copy buffer beside", "copies waits for compute", "on copies", "copy weight beside", "copies records", "back",
    ]  # fmt: skip
    log.clear()
    copies.hold()
    copies.hold()
    copies.settle()
    assert log == ["compute waits for the event", "host waits for the event"]
