"""A run that failed goes on from what the ranks that are left have in memory, where that is the whole state."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE, adamw, batch
from packages.runtime.tests.kills import Kill, Killer
from piper_ir.ground.errors import JobError, PiperWarning, RankError
from piper_runtime import Checkpoints, Run, execute
from piper_runtime.checkpoint import host_snapshots
from piper_runtime.checkpoint.host_snapshots import SnapshotWriter, copy_states
from piper_runtime.checkpoint.rank_tensors import FlatState, NamedRange
from piper_runtime.checkpoint.snapshot_files import CopiedPiece, CopiedTensor
from piper_runtime.launch import Restart, RunOptions
from piper_runtime.launch.running import attempts, survivors

NEVER = 1000


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of the machine's memory, which is empty after every test."""
    home = tmp_path / "memory"
    home.mkdir()
    monkeypatch.setattr(survivors, "IN_MEMORY", home)
    yield home
    assert not [*home.iterdir()], "something is left behind"


def flaky(*steps: int) -> Any:
    """A batch function that raises in each of these steps, once."""
    left = list(steps)

    def read(step: int, rows: range) -> Any:
        if step in left and rows.start == 0:
            left.remove(step)
            raise OSError(f"the disk went away in step {step}")
        return batch(step, rows)

    return read


def run(plan: Any, job: Any, **options: Any) -> Run:
    return execute(plan, CODE, job, **{"steps": 6, "launcher": "inline", "restarts": 2, **options})


def same(a: Run, b: Run) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return a.losses == b.losses and x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def saved(tmp_path: Path, every: int = NEVER, snapshot: int | None = 1) -> Checkpoints:
    return Checkpoints(tmp_path / "saved", every=every, snapshot=snapshot)


@pytest.mark.parametrize(
    ("every", "snapshot", "resumed", "source"),
    [
        (NEVER, 1, 4, "the host snapshots of ranks 0, 1 after 4 steps"),
        (NEVER, 3, 3, "the host snapshots of ranks 0, 1 after 3 steps"),
        (4, 3, 4, "the checkpoint "),
        (NEVER, 5, 0, "the beginning: there is no checkpoint yet"),
        (2, None, 4, "the checkpoint "),
    ],
)
def test_a_run_goes_on_from_what_is_newest(
    every: int, snapshot: int | None, resumed: int, source: str, tmp_path: Path
) -> None:
    plan, job = chain(
        pp=2,
        drop=True,
        optimizer=adamw,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )
    told: list[Restart] = []
    with pytest.warns(
        PiperWarning,
        match=rf"in step 4 \(.*test_host_snapshots.py:\d+\). Restart 1 of 2: the run goes on with step {resumed}, from {source}",
    ):
        found = run(
            plan,
            replace(job, batch=flaky(4)),
            checkpoint=saved(tmp_path, every, snapshot),
            on_restart=told.append,
        )
    assert (
        same(found, run(plan, job))
        and told[0].source.startswith(source)
        and found.restarts[0].resumed == resumed
    )
    assert found.restarts[0].source == told[0].source


def test_what_was_gone_on_from_counts_until_there_is_something_newer(
    memory: Path, tmp_path: Path
) -> None:
    plan, job = chain(pp=2, optimizer=adamw)
    there: list[list[str]] = []
    with pytest.warns(PiperWarning):
        found = run(
            plan, replace(job, batch=flaky(4, 5)), checkpoint=saved(tmp_path, snapshot=2), steps=8,
            on_restart=lambda restart: there.append(sorted(p.name for p in memory.glob("*/*/*.bytes"))),
        )  # fmt: skip
    assert [r.resumed for r in found.restarts] == [4, 4] and same(found, run(plan, job, steps=8))
    assert there == [["0-1.bytes", "1-1.bytes"]] * 2, "only the copies that are used stay"


CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "replicas": (dict(pp=1, dp=2), (1,), 4),
    "replicas of two stages": (dict(pp=2, dp=2), (0, 3), 4),
    "both replicas of a stage": (dict(pp=2, dp=2), (0, 1), 3),
    "one stage": (dict(pp=2), (0,), 3),
    "zero 1": (dict(pp=1, dp=2, zero=1), (1,), 3),
    "zero 2": (dict(pp=1, dp=2, zero=2), (), 4),
    "zero 3": (dict(pp=1, dp=2, zero=3), (), 4),
    "zero 3, lost": (dict(pp=1, dp=2, zero=3), (0,), 3),
    "hybrid, zero 1": (dict(pp=1, dp=2, rep=2, zero=1, microbatches=2), (0,), 4),
    "hybrid, zero 3": (dict(pp=1, dp=2, rep=2, zero=3, microbatches=2), (0, 3), 4),
    "hybrid, both of a part": (dict(pp=1, dp=2, rep=2, zero=3, microbatches=2), (0, 2), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_died_do_not_count(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the others have the whole state the run goes on from them, else from the checkpoint of step 3."""
    fields, dead, resumed = CASES[name]
    plan, job = chain(**fields, optimizer=adamw)
    monkeypatch.setattr(attempts, "lost", lambda error: dead)
    alive = [rank for rank in range(plan.mesh.world) if rank not in dead]
    with pytest.warns(PiperWarning, match=f"the run goes on with step {resumed}"):
        found = run(
            plan,
            replace(job, batch=flaky(4)),
            checkpoint=saved(tmp_path, 3 if resumed == 3 else NEVER, 1),
            steps=5,
        )
    if resumed == 4:
        assert found.restarts[0].source.endswith(f"{', '.join(map(str, alive))} after 4 steps")
    assert same(found, run(plan, job, steps=5))


def test_a_strategy_for_fewer_devices_reads_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(pp=1, dp=2, zero=3, optimizer=adamw)
    other, _ = chain(pp=2, microbatches=8, optimizer=adamw)
    monkeypatch.setattr(attempts.Recovery, "replanned", lambda self, error, *more: (other, CODE))
    with pytest.warns(PiperWarning, match="from the host snapshots of ranks 0, 1 after 4 steps"):
        found = run(plan, replace(job, batch=flaky(4)), checkpoint=saved(tmp_path))
    whole = run(plan, job)
    assert found.losses == pytest.approx(whole.losses, rel=1e-12)
    assert all(
        torch.allclose(t, whole.state_dict()[n], rtol=1e-12)
        for n, t in found.state_dict().items()
        if n != "count"
    )


def dies_in_the_copy(call: int, seal: bool) -> Any:
    """A copy that stops in its middle the n-th time; with `seal`, a state that is half there counts all the same."""
    calls: list[int] = []
    take = SnapshotWriter._take

    def torn(slots: Sequence[torch.Tensor], states: Sequence[FlatState]) -> None:
        calls.append(1)
        half = len(slots) // 2 if len(calls) == call else len(slots)
        copy_states(slots[:half], states[:half])
        if len(calls) == call:
            raise RankError("rank 1 was ended while it copied")

    def sealed(self: SnapshotWriter, done: int) -> None:
        try:
            take(self, done)
        except RankError:
            host_snapshots.write_index(
                Path(self._options.folder, host_snapshots.place_name(1, self._turn)),
                self._index(done, list(host_snapshots.rank_tensors(self._rank, self._portion))),
            )
            raise

    return torn, sealed if seal else take


@pytest.mark.parametrize("seal", [False, True], ids=["", "control"])
def test_a_copy_that_is_not_complete_is_never_used(
    seal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(pp=2, optimizer=adamw)
    whole = run(plan, job)
    torn, take = dies_in_the_copy(8, seal)  # of rank 1, after step 4
    monkeypatch.setattr(host_snapshots, "copy_states", torn)
    monkeypatch.setattr(SnapshotWriter, "_take", take)
    with pytest.warns(
        PiperWarning,
        match=f"goes on with step {4 if seal else 3}, from the host snapshots of ranks 0, 1",
    ):
        found = run(plan, job, checkpoint=saved(tmp_path))
    assert same(found, whole) is not seal


def test_steps_of_which_nothing_is_known_are_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may die before it says that a step is done which another one has copied."""
    plan, job = chain(pp=1, dp=2, optimizer=adamw)
    found = run(plan, job)
    known = survivors.Survivors.newest
    monkeypatch.setattr(
        survivors.Survivors,
        "newest",
        lambda self, plan, lost, most, least: known(self, plan, lost, 3, least),
    )
    with pytest.warns(PiperWarning, match="goes on with step 3, from the host snap"):
        assert same(found, run(plan, replace(job, batch=flaky(4)), checkpoint=saved(tmp_path)))


def test_without_room_the_run_goes_on_from_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    plan, job = chain(pp=1, optimizer=adamw)
    with pytest.warns(PiperWarning) as caught:
        found = run(plan, replace(job, batch=flaky(3)), checkpoint=saved(tmp_path, 2))
    said = [str(w.message) for w in caught]
    assert (
        "rank 0 keeps no host snapshots:" in said[0]
        and said[0].endswith("No space left on device")
        and len(said) == 3
    )
    assert "the run goes on with step 2, from the checkpoint" in said[1] and same(
        found, run(plan, job)
    )


def test_a_rank_elsewhere_makes_all_copies_useless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = host_snapshots.announce
    from piper_runtime.launch.running import inline_run

    monkeypatch.setattr(
        inline_run, "announce", lambda rank, options: rank == 0 and announce(rank, options)
    )
    plan, job = chain(pp=1, dp=2, optimizer=adamw)
    with pytest.warns(PiperWarning, match="goes on with step 2, from the checkpoint"):
        assert same(
            run(plan, replace(job, batch=flaky(3)), checkpoint=saved(tmp_path, 2)), run(plan, job)
        )


class Counted:
    """Data whose state says where they go on."""

    def __init__(self) -> None:
        self.flaky, self.loaded = flaky(4), list[Any]()

    def __call__(self, step: int, rows: range) -> Any:
        return self.flaky(step, rows)

    def state_dict(self, step: int) -> dict[str, int]:
        return {"rows": 8 * step}

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def test_the_state_of_the_data_is_that_of_the_step(tmp_path: Path) -> None:
    data = Counted()
    plan, job = chain(pp=1, batch=data)
    with pytest.warns(PiperWarning, match="goes on with step 4, from the host snapshot of rank 0"):
        run(plan, job, checkpoint=saved(tmp_path))
    assert data.loaded == [{"rows": 32}]


def test_folders_that_nobody_uses_are_deleted(memory: Path, tmp_path: Path) -> None:
    left, used = memory / "piper-snapshots-1-left", memory / "piper-snapshots-2-used"
    for folder in (left, used):
        folder.mkdir()
        (folder / "0-0.bytes").touch()
    lock = FileLock(memory / f"{used.name}.lock")
    lock.acquire()
    wanted = RunOptions(steps=1, checkpoint=saved(tmp_path), restarts=1)
    with survivors.survivors(wanted.snapshot_every) as kept:
        assert kept.options() is not None and not left.exists() and used.exists()
        assert [p.name.split("-")[2] for p in memory.iterdir() if p.is_dir() and p != used] == [
            str(os.getpid())
        ]
    lock.release()
    with survivors.survivors(wanted.snapshot_every):
        assert not used.exists()
    for options in (
        replace(wanted, restarts=0),
        replace(wanted, checkpoint=saved(tmp_path, snapshot=None)),
        replace(wanted, checkpoint=None),
    ):
        with survivors.survivors(options.snapshot_every) as kept:
            assert kept.options() is None and not [*memory.iterdir()], "nobody asked for it"


def test_pieces_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(20, dtype=torch.float32)
    (tmp_path / "a").write_bytes(whole[:12].numpy().tobytes())
    (tmp_path / "b").write_bytes(b"8 bytes." + whole[8:].numpy().tobytes())
    a, b = CopiedPiece(str(tmp_path / "a"), 0, 0, 12), CopiedPiece(str(tmp_path / "b"), 8, 8, 12)
    tensor = CopiedTensor(torch.float32, (4, 5), (b, a))
    assert tensor.missing() == 0 and CopiedTensor(torch.float32, (4, 5), (a,)).missing() == 8
    assert CopiedTensor(torch.float32, (4, 5), (b,)).missing() == 8
    for start, stop in ((0, 20), (3, 10), (9, 20), (15, 15)):
        assert torch.equal(tensor.flats([(start, stop)]), whole[start:stop])
    assert torch.equal(tensor.flats([(3, 10), (15, 17)]), torch.cat([whole[3:10], whole[15:17]]))
    assert (
        NamedRange("x", (0,), 0, 0, 0).numel == CopiedTensor(torch.float32, (0,), ()).missing() == 0
    )


def test_a_killed_replica_costs_no_step(tmp_path: Path, memory: Path) -> None:
    """Of two processes one dies; the other's copy is at most one step old, and there is no checkpoint."""
    plan, job = chain(pp=1, dp=2, optimizer=adamw)
    killer = Killer(tmp_path / "kills", [Kill(1, "step", 0.1)], 0.002)
    with pytest.warns(
        PiperWarning, match="rank 1 was killed .* from the host snapshot of rank 0 after"
    ):
        found = execute(
            plan, CODE, replace(job, batch=killer.batch, optimizer=killer.optimizer), steps=60, launcher="processes",
            checkpoint=saved(tmp_path), restarts=1, on_restart=killer.attempt,
        )  # fmt: skip
    (restart,) = found.restarts
    assert restart.step > 0 and restart.resumed >= restart.step - 1 and restart.lost == (1,)
    assert same(found, execute(plan, CODE, job, steps=60, launcher="inline"))


def test_a_number_of_steps_is_needed() -> None:
    with pytest.raises(
        JobError,
        match=r"Checkpoints\(snapshot=0\): an integer of at least 1 is needed, or None for no snap",
    ):
        Checkpoints("x", snapshot=0)
