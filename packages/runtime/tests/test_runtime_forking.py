"""Workers are forked from one process, and find what a child process of the launcher would find."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import batch
from packages.runtime.tests.instants import pids_alive, server_pid
from piper_ir.ground.errors import ExecutionError
from piper_runtime.launch.processes import forking
from piper_runtime.launch.processes.processes import Pool


@pytest.fixture(autouse=True)
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server of the other tests stays as it is."""
    monkeypatch.setattr(forking, "_server", None)
    yield
    forking._end()


def noting(folder: Path) -> Callable[[int, range], Any]:
    """A batch function that leaves what its process is surrounded by."""

    def noted(step: int, rows: range) -> Any:
        file = folder / f"{os.getpid()}.json"
        if not file.exists():
            found = {
                "folder": os.getcwd(),
                "path": sys.path,
                "mine": os.environ.get("PIPER_TEST_MINE"),
                "threads": torch.get_num_threads(),
                "numpy": float(numpy.random.rand()),
                "session": os.getsid(0) == os.getpid(),
                "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                "cores": sorted(os.sched_getaffinity(0)),
                "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            }
            file.write_text(json.dumps(found))
            os.write(1, b"out of a worker\n")
        return batch(step, rows)

    return noted


def noted_in(folder: Path, threads: int = 1) -> list[dict[str, Any]]:
    plan, job = chain(pp=1, dp=2, batch=noting(folder), microbatches=2)
    with Pool(2, threads=threads) as workers:
        run(plan, job, launcher="processes", pool=workers, steps=1)
    return [json.loads(file.read_text()) for file in folder.iterdir()]


@contextmanager
def fewer_rights() -> Iterator[tuple[int, int]]:
    """One core, fewer files, and new files for nobody else: the core and the number."""
    mask, cores, files = (
        os.umask(0o077),
        os.sched_getaffinity(0),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    core = min(cores)
    os.sched_setaffinity(0, {core})
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    yield core, files[0] - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.sched_setaffinity(0, cores)
    os.umask(mask)


def test_a_worker_finds_the_launchers_surroundings_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    assert [n["mine"] for n in noted_in(first)] == [None, None]
    server, before = server_pid(), capfd.readouterr().out
    heard = (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    )  # a shell's background job ignores it
    monkeypatch.setenv("PIPER_TEST_MINE", "yes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere/at/all")
    with fewer_rights() as (core, files):
        found = noted_in(second)
    assert server_pid() == server, "no second import of torch"
    assert [(n["cores"], n["files"]) for n in found] == [([core], files)] * 2
    assert {file.stat().st_mode & 0o777 for file in second.iterdir()} == {0o600}
    for n in found:
        assert (n["mine"], n["folder"], n["path"][0], n["threads"]) == (
            "yes",
            str(tmp_path),
            "/nowhere/at/all",
            1,
        )
        assert n["session"] and n["interrupt"] == heard
    assert found[0]["numpy"] != found[1]["numpy"], "numpy's numbers would be equal in all forks"
    assert before.count("out of a worker") == capfd.readouterr().out.count("out of a worker") == 2


@pytest.mark.long
def test_what_libraries_read_when_they_are_loaded_needs_another_server(tmp_path: Path) -> None:
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    with Pool(1) as held:
        worker = held.start().workers[0].process
        assert [n["threads"] for n in noted_in(first)] == [1, 1]
        server = server_pid()
        assert [n["threads"] for n in noted_in(second, threads=2)] == [2, 2]
        assert server_pid() != server and pids_alive([server])
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(10) == -signal.SIGTERM, "its server says how it ended"
    assert ended([server])


def ended(pids: list[int]) -> bool:
    """Whether they end within some seconds."""
    until = time.monotonic() + 20
    while pids_alive(pids) and time.monotonic() < until:
        time.sleep(0.01)
    return not pids_alive(pids)


@pytest.mark.long
def test_exit_codes_and_signals_reach_the_launcher() -> None:
    with Pool(2) as workers:
        team = workers.start()
        first, second = (w.process for w in team.workers)
        assert first.poll() is second.poll() is None
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(10) == first.poll() == -signal.SIGTERM
        second.kill()
        assert second.wait(10) == -signal.SIGKILL
        second.kill()  # it has ended, and its number may be another process's


@pytest.mark.long
def test_a_server_that_was_killed_is_started_again() -> None:
    with Pool(1) as workers:
        workers.start()
        (worker,) = workers.pids
        server = server_pid()
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        with Pool(1) as others:
            others.start()
            assert server_pid() != server and pids_alive([worker]), "its workers go on"
        os.kill(worker, signal.SIGTERM)
        assert workers.start().exit_reason(0).startswith("ended; how is not known"), (
            "nobody has reaped it for us"
        )
    assert ended([worker])


@pytest.mark.long
def test_a_server_that_cannot_start_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_SERVER", "raise SystemExit(7)  # {channel}")
    with pytest.raises(
        ExecutionError,
        match=r"the process that forks workers has ended with exit code 7; its output",
    ):
        Pool(1).start()
    monkeypatch.undo()
    monkeypatch.setattr(forking, "_server", None)
    with Pool(1) as workers:
        workers.start()


def test_an_interrupt_while_a_worker_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the request that was interrupted would be taken for that to the next one."""
    servers: list[int] = []

    def interrupted(*of: Any) -> bytes:
        servers.append(server_pid())
        raise KeyboardInterrupt

    monkeypatch.setattr(forking, "_SERVER", "import time; time.sleep(60)  # {channel}")
    monkeypatch.setattr(forking, "receive_exactly", interrupted)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        Pool(1).start()
    assert forking._server is None and servers and not pids_alive(servers)
    assert len(os.listdir("/proc/self/fd")) <= open_files


@pytest.mark.long
def test_the_server_has_one_thread_when_it_forks() -> None:
    with Pool(2) as workers:
        workers.start()
        assert len(list(Path(f"/proc/{server_pid()}/task").iterdir())) == 1
    server = server_pid()
    assert forking._server is not None
    kept = os.dup(forking._server._channel.fileno())  # as a fork of this process has it
    forking._end()
    os.close(kept)
    assert not pids_alive([server])
