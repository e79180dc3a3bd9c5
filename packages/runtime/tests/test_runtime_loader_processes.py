"""A batch function in processes of its own, and loaders of real workers: equal, named, and ended with their rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import batch
from packages.runtime.tests.instants import pids_alive
from packages.runtime.tests.test_runtime_loader import drawing, fed, same, slow
from piper_ir.ground.errors import ExecutionError, JobError
from piper_runtime.data import from_stream
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.ray.ray_launcher import RayPool
from piper_runtime.rank.batches.batch_call import batch_call
from piper_runtime.rank.batches.loader_process import LoaderProcesses, _raised

LAST_S = 20.0
"""The longest time for processes to notice that their rank has ended, on a busy machine."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2) as workers:
        yield workers


def noting(folder: Path, of: Callable[[int, range], Any]) -> Callable[[int, range], Any]:
    """A batch function that leaves the id of its process in a folder."""

    def noted(step: int, rows: range) -> Any:
        (folder / str(os.getpid())).touch()
        return of(step, rows)

    return noted


def all_ended(folder: Path) -> bool:
    """Whether every process that called the function ends, soon."""
    pids = [int(p.name) for p in folder.iterdir()]
    until = time.monotonic() + LAST_S
    while (left := pids_alive(pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(pids) and not left


def narrow(step: int, rows: range) -> Any:
    return tuple(t.float() for t in batch(step, rows))


@pytest.mark.long
def test_processes_hand_over_what_the_function_returns_in_the_plans_dtype_and_end(
    tmp_path: Path,
) -> None:
    plan, _ = chain(pp=1, microbatches=3)
    found = fed(plan, noting(tmp_path, narrow), 2, 4)
    assert {t.dtype for t in found} == {torch.float64} and same(
        found, [t.double() for t in fed(plan, narrow, "none", 4)]
    )
    assert len(list(tmp_path.iterdir())) == 2
    assert os.getpid() not in {int(p.name) for p in tmp_path.iterdir()} and all_ended(tmp_path)


@pytest.mark.long
def test_a_stream_is_read_in_a_process() -> None:
    def pairs(shard: int) -> Iterator[Any]:
        return (
            (torch.full((4,), float(shard), dtype=torch.float64), torch.full((4,), float(n)))
            for n in range(100)
        )

    plan, _ = chain(pp=1, microbatches=3)
    stream = from_stream(pairs, shards=3).bound(6)
    assert same(fed(plan, stream, 2, 4), [t.double() for t in fed(plan, stream, "none", 4)])


class OwnError(Exception):
    """Not to be pickled: its arguments are not those of the class."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}")


def raising(step: int, rows: range) -> Any:
    time.sleep(0.003)
    if (step, rows.start) == (4, 2):
        raise OwnError("data.txt", 7)
    return batch(step, rows)


@pytest.mark.long
def test_an_error_is_raised_by_name_where_its_microbatch_is_loaded() -> None:
    plan, _ = chain(pp=1, microbatches=3)
    done: list[int] = []
    with pytest.raises(Exception, match=r"^data\.txt:7\n") as caught:
        fed(plan, raising, 2, 6, done.append)
    assert done == [0, 1, 2, 3] and type(caught.value).__name__ == "OwnError"
    assert "in raising" in caught.value.__notes__[0]


def killed(step: int, rows: range) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_loader_that_is_killed_is_named() -> None:
    plan, _ = chain(pp=1, microbatches=1)
    with pytest.raises(
        ExecutionError,
        match=r"rank 0: a loader process, which calls Job\.batch, was killed by SIGKILL",
    ):
        fed(plan, killed, 1, 2)


@pytest.mark.parametrize("kind", [JobError, SystemExit, KeyboardInterrupt])
def test_errors_with_a_meaning_here_keep_their_class(kind: type[BaseException]) -> None:
    found = _raised(kind("no more data")).exception()
    assert type(found) is kind and str(found) == "no more data"
    assert type(_raised(ValueError("x")).exception()).__mro__[1] is Exception


def test_a_function_that_cannot_be_sent_is_refused_and_no_process_stays() -> None:
    plan, _ = chain(pp=1, microbatches=1)
    lock = threading.Lock()
    with pytest.raises(JobError, match="cannot be sent to worker processes"):
        LoaderProcesses(batch_call(plan, 0, lambda step, rows: lock), 0, 1)


@pytest.mark.parametrize("loader", [pytest.param("thread", marks=pytest.mark.long), 1])
def test_a_run_in_workers_trains_as_one_device_with_the_planned_memory(
    loader: Any, pair: Pool, tmp_path: Path
) -> None:
    plan, job = chain(pp=2, microbatches=3, drop=True, batch=noting(tmp_path, slow))
    there = run(
        plan, job, launcher="processes", pool=pair, loader=loader, steps=6, memory=True, trace=True
    )
    here = run(plan, job, memory=True, steps=6)
    assert distance(there, plan, job) < TOLERANCE and there.losses == pytest.approx(
        here.losses, rel=1e-14
    )
    assert {r: m.points for r, m in there.memory.items()} == {
        r: m.points for r, m in here.memory.items()
    }
    assert len(there.trace.waits) == 2 * 3, "each rank waits for each of its microbatches"
    if loader == 1:
        (mine := tmp_path / str(os.getpid())).unlink()  # of the run here, and of the reference
        assert not {int(p.name) for p in tmp_path.iterdir()} & {
            *pair.pids,
            int(mine.name),
        } and all_ended(tmp_path)


@pytest.mark.long
def test_a_function_that_draws_may_do_so_in_a_process() -> None:
    plan, job = chain(pp=1, drop=True, batch=drawing(late=False)._of)
    with Pool(1) as workers:
        there = run(plan, job, launcher="processes", pool=workers, loader="processes", steps=4)
    assert there.losses == run(plan, job, steps=4).losses


def bad(what: str, folder: Path) -> Callable[[int, range], Any]:
    """A batch function that does something bad in step 4, in whatever thread or process it is."""

    def called(step: int, rows: range) -> Any:
        if step == 4 and rows.start == 2:
            if what == "raise":
                raise ValueError("no such file")
            time.sleep(1000)
        return slow(step, rows)

    return noting(folder, called)


@pytest.mark.long
@pytest.mark.parametrize("loader", ["none", "thread", 1])
def test_an_error_in_a_worker_is_the_same_whoever_called(loader: Any, tmp_path: Path) -> None:
    plan, job = chain(pp=2, batch=bad("raise", tmp_path))
    with Pool(2) as workers:
        with pytest.raises(
            ExecutionError,
            match=r"rank [01], step 4, instruction \d+ \(.*load.*\): ValueError: no such file",
        ):
            run(plan, job, launcher="processes", pool=workers, loader=loader, steps=8)
        assert workers.pids == []
    assert all_ended(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("loader", ["thread", 1])
def test_an_interrupt_ends_workers_and_their_loaders(loader: Any, tmp_path: Path) -> None:
    plan, job = chain(pp=2, batch=bad("hang", tmp_path))
    with Pool(2) as workers:
        workers.start()
        pids = workers.pids

        def when_called() -> None:
            until = time.monotonic() + LAST_S
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=when_called, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run(plan, job, launcher="processes", pool=workers, loader=loader, steps=8)
        assert not pids_alive(pids)
    assert all_ended(tmp_path)


def test_a_loader_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    plan, job = chain(pp=2, batch=bad("hang", tmp_path))
    with Pool(2) as workers:
        workers.start()
        first = workers.pids[0]

        def kill() -> None:
            until = time.monotonic() + LAST_S
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(first, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(ExecutionError, match="rank 0 was killed by SIGKILL"):
            run(plan, job, launcher="processes", pool=workers, loader=1, steps=8)
    assert all_ended(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("loader", ["thread", 1])
def test_a_run_on_ray_ends_its_loaders(loader: Any, ray_address: str, tmp_path: Path) -> None:
    plan, job = chain(pp=1, dp=2, microbatches=2, batch=noting(tmp_path, slow))
    with RayPool(2, cluster=ray_address) as workers:
        there = run(plan, job, launcher="ray", pool=workers, loader=loader, steps=5)
    assert there.losses == pytest.approx(run(plan, job, steps=5).losses, rel=1e-14)
    (tmp_path / str(os.getpid())).unlink()
    assert all_ended(tmp_path)


UNDER_TORCHRUN = """
import os, sys
sys.path[:0] = {path!r}
from pathlib import Path
from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.test_runtime_loader import slow
from packages.runtime.tests.test_runtime_loader_processes import noting
plan, job = chain(pp=2, batch=noting(Path({out!r}), slow))
for loader in ("thread", 2):
    losses = run(plan, job, launcher="processes", loader=loader, steps=5).losses
    if os.environ["RANK"] == "0":
        print(*losses)
"""


@pytest.mark.long
def test_loaders_of_torchruns_processes_end_with_the_run(tmp_path: Path) -> None:
    file, out = tmp_path / "train.py", tmp_path / "out"
    out.mkdir()
    file.write_text(UNDER_TORCHRUN.format(path=sys.path, out=str(out)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan, job = chain(pp=2)
    found = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
    assert found == [pytest.approx(run(plan, job, steps=5).losses, rel=1e-14)] * 2
    assert len(list(out.iterdir())) == 2 + 4 and all_ended(out)
