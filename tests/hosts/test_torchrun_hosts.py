"""The line that `piper launch` prints for torchrun, on machines that fail in each way that machines do."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_line import command
from tests.helpers.hosts import Hosts, some_hosts, why_not
from tests.hosts.jobs import assert_trained, await_files, recipe

NO_HOSTS = why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)]

TIMEOUT_S = 8.0
ENDED_S = 60.0
"""The most seconds from a failure to the end of all processes, on a busy machine."""


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with some_hosts(getattr(request, "param", "ab")) as made:
        yield made


def start(
    hosts: Hosts, path: Path, timeout_s: float = TIMEOUT_S
) -> dict[str, subprocess.Popen[str]]:
    """Run the printed line on each machine; what its processes print is one text."""
    options = ["--timeout-s", timeout_s, "--out", path.parent / "runs"]
    printed = command("launch", path, "--nodes", len(hosts.names), *options, "--json").stdout
    line = json.loads(printed)["torchrun-nodes"].replace("HEAD", hosts.names[0])
    return {host: hosts.start(host, shlex.split(line), {}) for host in hosts.names}


def begun(
    hosts: Hosts, path: Path, timeout_s: float = TIMEOUT_S
) -> dict[str, subprocess.Popen[str]]:
    """Run a recipe of two ranks, and wait until both are in a step."""
    processes = start(hosts, path, timeout_s)
    await_files(*(path.with_name(f"at-{rank}") for rank in range(2)))
    return processes


def texts(processes: dict[str, subprocess.Popen[str]], seconds: float) -> dict[str, str]:
    """Return the output of each machine's torchrun, all of which end within some seconds."""
    begun, said = time.monotonic(), {}
    for host, process in processes.items():
        said[host] = process.communicate(timeout=max(1.0, begun + seconds - time.monotonic()))[0]
        print(
            f"{host} ended after {time.monotonic() - begun:.0f} s, exit code {process.returncode}"
        )
    return said


@pytest.mark.parametrize("hosts", ["ab", "abcd"], indirect=True)
def test_machines_train_what_one_device_trains(hosts: Hosts, tmp_path: Path) -> None:
    path = recipe(tmp_path, ranks=4)
    processes = start(hosts, path, 120)
    said = texts(processes, 280)
    assert not any(p.returncode for p in processes.values()), said
    assert_trained(path, tmp_path / "runs" / "recipe-001", ranks=4)
    assert not hosts.left(ENDED_S)


@pytest.mark.parametrize(
    ("failing", "named"),
    [("b", "rank 1 on node b (10.213.7.2)"), ("a", "The connection to the C10d store has failed")],
)
def test_a_machine_that_loses_power_is_named(
    failing: str, named: str, hosts: Hosts, tmp_path: Path
) -> None:
    """The first machine has torchrun's store: without it, torchrun on the other ends its ranks."""
    processes = begun(hosts, recipe(tmp_path, 0.05, steps=100_000))
    hosts.kill(failing)
    other = "b" if failing == "a" else "a"
    said = texts(processes, ENDED_S)[other]
    assert processes[other].returncode == 1 and named in said, said  # torchrun's own code
    assert not hosts.left(ENDED_S)


def test_a_machine_that_is_cut_off_is_named_by_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    """The ranks end on both sides; torchrun on the far side waits for its store until the network is back."""
    processes = begun(hosts, recipe(tmp_path, 0.05, steps=100_000))
    torchrun = processes["b"].pid
    hosts.cut("b")
    near = texts({"a": processes["a"]}, ENDED_S + TIMEOUT_S)["a"]
    assert "node b (10.213.7.2) with rank 1 is not heard from any more" in near, near
    end = time.monotonic() + ENDED_S
    while left := set(hosts.running("b")) - {torchrun}:
        assert time.monotonic() < end, left
        time.sleep(0.2)
    hosts.heal("b")
    far = texts({"b": processes["b"]}, ENDED_S)["b"]
    assert "rank 1 on node b (10.213.7.2) gave up" in far, far
    assert not hosts.left(ENDED_S)


@pytest.mark.parametrize("fault", ["cut and healed", "slow"])
def test_a_run_outlives_trouble_that_is_shorter_than_its_timeout(
    fault: str, hosts: Hosts, tmp_path: Path
) -> None:
    path = recipe(tmp_path, 1.0)
    processes = begun(hosts, path, 120)
    if fault == "slow":
        if not hosts.slow("b"):
            pytest.skip("the kernel has neither netem nor tbf to slow messages down")
    else:
        hosts.cut("b")
        time.sleep(3)
        hosts.heal("b")
    said = texts(processes, 280)
    assert not any(p.returncode for p in processes.values()), said
    assert_trained(path, tmp_path / "runs" / "recipe-001")
    assert not hosts.left(ENDED_S)


def test_a_request_to_end_ends_torchrun_on_both_machines(hosts: Hosts, tmp_path: Path) -> None:
    """torchrun hands SIGTERM on to its ranks, which end at once: no abort, no rank that stays."""
    processes = begun(hosts, recipe(tmp_path, 0.05, steps=100_000), 3600)
    for process in processes.values():
        process.send_signal(signal.SIGTERM)
    said = "".join(texts(processes, ENDED_S).values())
    assert "SIGABRT" not in said and "ended by SIGTERM" in said, said
    assert not hosts.left(ENDED_S)
