"""Ranks under torchrun end when they are told to, and when a machine is cut off; what went wrong is said once.

Two machines are network namespaces on a switch. A torchrun there would add ways of its own to wait, so ranks are
started with its variables.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import GOOD, RECIPE
from tests.helpers.hosts import ADDRESSES, Hosts, some_hosts, why_not

SLOW = """
import os, pathlib, time
def _slowly(step, rows, whole=batch):
    if step == {slow_from}:
        pathlib.Path(__file__).with_name(f"at-{{os.environ.get('RANK', 0)}}").touch()
    if step >= {slow_from}:
        {what}
    return whole(step, rows)
job = dataclasses.replace(job, batch=_slowly)
steps = 100_000
"""
NO_HOSTS = why_not()
PORT = "29777"


def recipe(folder: Path, what: str, slow_from: int = 2) -> Path:
    path = folder / "recipe.py"
    path.write_text(
        "import dataclasses\n" + RECIPE + GOOD + SLOW.format(what=what, slow_from=slow_from)
    )
    return path


def command(path: Path, timeout_s: float) -> list[str]:
    options = [
        "--launcher",
        "processes",
        "--timeout-s",
        f"{timeout_s:g}",
        "--out",
        str(path.parent / "runs"),
    ]
    return [sys.executable, "-m", "piper", "run", str(path), *options]


def await_files(*paths: Path) -> None:
    end = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, paths
        time.sleep(0.05)


@pytest.fixture
def cut_hosts() -> Iterator[Hosts]:
    with some_hosts() as hosts:
        yield hosts


def run_on(hosts: Hosts, path: Path, timeout_s: float) -> list[subprocess.Popen[str]]:
    """Rank 0 on machine a, rank 1 on machine b, both in a run that goes on."""
    meet = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": ADDRESSES["a"],
        "MASTER_PORT": PORT,
    }
    ranks = [
        hosts.start(host, command(path, timeout_s), meet | {"RANK": str(r)})
        for r, host in enumerate("ab")
    ]
    await_files(*(path.with_name(f"at-{r}") for r in range(2)))
    return ranks


@pytest.mark.long
@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)
def test_both_sides_of_a_cut_end_and_name_the_machine(cut_hosts: Hosts, tmp_path: Path) -> None:
    ranks = run_on(cut_hosts, recipe(tmp_path, "time.sleep(0.05)"), 4)
    cut_hosts.cut("b")
    first, second = (rank.communicate(timeout=60)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], first + second
    assert re.search(
        r"piper: no rank made progress for 4 s .*node b \(10\.213\.7\.2\) with rank 1 is not heard "
        r"from any more",
        first,
    )
    gave_up = rf"piper: rank 1 on node b \(10\.213\.7\.2\) gave up: 10\.213\.7\.1:{PORT}, where the ranks meet .* does not answer"
    assert re.search(gave_up, second), second


@pytest.mark.long
@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)
def test_a_rank_that_is_cut_off_hears_that_it_is_to_end(cut_hosts: Hosts, tmp_path: Path) -> None:
    ranks = run_on(cut_hosts, recipe(tmp_path, "time.sleep(0.05)"), 3600)
    cut_hosts.cut("b")
    time.sleep(1)  # until calls of the store wait for their answers
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], said
    assert "Traceback" not in "".join(said) and "ended by SIGTERM" in said[0]


@pytest.mark.long
def test_a_request_to_end_reaches_all_ranks(tmp_path: Path) -> None:
    path = recipe(tmp_path, "time.sleep(0.05)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    same = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = [
        subprocess.Popen(
            command(path, 60), env=os.environ | same | {"RANK": r, "LOCAL_RANK": r}, **pipes
        )
        for r in "01"
    ]
    await_files(*(path.with_name(f"at-{r}") for r in range(2)))
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], said
    assert "piper: ended by SIGTERM" in said[0] and said[1] == "", "it is said once"


@pytest.mark.long
def test_torchrun_says_one_error_once(tmp_path: Path) -> None:
    path = recipe(tmp_path, "raise OSError('the disk is away')")
    way = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "piper"]
    said = [
        subprocess.run(
            [sys.executable, *way, *command(file, 60)[3:]],
            capture_output=True,
            text=True,
            timeout=200,
        ).stderr
        for file in (path, path.with_name("missing.py"))
    ]
    counts = said[0].count("the disk is away"), said[1].count("missing.py: there is no such file")
    assert counts == (1, 1), said
    assert "SIGABRT" not in said[0] + said[1]
