"""Ray over machines that fail: a run goes on, or starts again on the devices that are left, and trains what one trains."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.helpers.hosts import ADDRESSES, Hosts, some_hosts, why_not
from tests.hosts.jobs import assert_trained, recipe

NO_HOSTS = why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)]

HEAD = f"{ADDRESSES['a']}:6388"
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
CPUS = f"import ray; ray.init('{HEAD}'); print('CPUS', ray.cluster_resources()['CPU'])"
READY_S, RUN_S = 180.0, 280.0
"""The most seconds until all machines have joined Ray, and of a run, on a busy machine."""


class RayMachines:
    """Machines of one Ray, whose head is on the first.

    Ray records in a folder which cluster the next program of a computer joins, so they have one of their own.
    """

    def __init__(self, hosts: Hosts, folder: str, cpus: int) -> None:
        self.hosts = hosts
        self._quiet = {"RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
        first = [*RAY, "--num-cpus", str(cpus), "--node-ip-address", ADDRESSES["a"]]
        hosts.start(
            "a", [*first, "--head", "--port", "6388", "--include-dashboard", "false"], self._quiet
        )
        time.sleep(5)
        for k, name in enumerate(hosts.names[1:], 2):  # one after the other: they share a folder
            own = ["--num-cpus", str(cpus), "--node-ip-address", ADDRESSES[name]]
            hosts.start(name, [*RAY, *own, "--address", HEAD], self._quiet)
            end = time.monotonic() + READY_S
            while f"CPUS {float(cpus * k)}" not in (said := self._cpus()):
                assert time.monotonic() < end, said

    def _cpus(self) -> str:
        return self._go([sys.executable, "-c", CPUS]).communicate()[0]

    def _go(self, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        return self.hosts.start("a", [*command], self._quiet, **more)

    def train(self, path: Path, *options: object) -> subprocess.Popen[str]:
        """Run a file of the command line on the first machine, over all of them."""
        words = ["run", path, "--launcher", "ray", "--address", HEAD, "--out", path.parent / "runs"]
        return self._go([sys.executable, "-m", "piper", *(str(w) for w in (*words, *options))])


def begun(driver: subprocess.Popen[str], path: Path) -> None:
    """Wait until a run of a recipe is in a step whose batches take a pause."""
    end = time.monotonic() + READY_S
    while not path.with_name("at-0").exists():
        assert driver.poll() is None and time.monotonic() < end, driver.communicate()[0]
        time.sleep(0.05)


@pytest.fixture
def ray(request: pytest.FixtureRequest) -> Iterator[RayMachines]:
    """Four CPUs on two machines, or on as many as a test names."""
    with (
        some_hosts(getattr(request, "param", "ab")) as hosts,
        TemporaryDirectory(prefix="r") as own,
    ):
        yield RayMachines(hosts, own, 4 // len(hosts.names))


def ends_well(driver: subprocess.Popen[str]) -> str:
    """Return the output of a run that ends with exit code 0."""
    said = driver.communicate(timeout=RUN_S)[0]
    assert driver.returncode == 0, said
    return said


@pytest.mark.parametrize("ray", ["ab", "abcd"], indirect=True)
def test_machines_train_what_one_device_trains(ray: RayMachines, tmp_path: Path) -> None:
    path = recipe(tmp_path, ranks=4)
    ends_well(ray.train(path))
    assert_trained(path, tmp_path / "runs" / "recipe-001", ranks=4)


@pytest.mark.parametrize("fault", ["cut and healed", "slow"])
def test_a_run_outlives_trouble_that_is_shorter_than_its_timeout(
    fault: str, ray: RayMachines, tmp_path: Path
) -> None:
    path = recipe(tmp_path, 1.0, ranks=4)
    driver = ray.train(path, "--timeout-s", 120)
    begun(driver, path)
    if fault == "slow":
        if not ray.hosts.slow("b"):
            pytest.skip("the kernel has neither netem nor tbf to slow messages down")
    else:
        ray.hosts.cut("b")
        time.sleep(3)
        ray.hosts.heal("b")
    ends_well(driver)
    results = tmp_path / "runs" / "recipe-001"
    assert "restarts" not in json.loads((results / "measured.json").read_text())
    assert_trained(path, results, ranks=4)


@pytest.mark.parametrize("fault", ["loses power", "is cut off"])
def test_a_machine_that_is_gone_costs_one_restart(
    fault: str, ray: RayMachines, tmp_path: Path
) -> None:
    """The CPUs that are left say at once with how many ranks the run goes on: no guess fails and is a restart of its
    own."""
    path = recipe(tmp_path, 0.3, ranks=4, steps=30)
    saved = ["--checkpoint", tmp_path / "saved", "--every", 2]
    driver = ray.train(path, "--timeout-s", 20, "--restarts", 4, "--on-loss", "replan", *saved)
    begun(driver, path)
    (ray.hosts.kill if fault == "loses power" else ray.hosts.cut)("b")
    ends_well(driver)
    results = tmp_path / "runs" / "recipe-001"
    (restart,) = json.loads((results / "measured.json").read_text())["restarts"]
    assert restart["ranks"] == 2 and "node b" in restart["message"], restart
    assert_trained(path, results, ranks=4, steps=30)
