"""One Ray actor per rank: equal to inline, placed, quiet; every way to fail ends in time, is named, and leaves nothing
behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import adamw
from packages.runtime.tests.instants import KINDS, descendants, named_and_ended, pids_alive
from piper_ir.ground.errors import ExecutionError
from piper_runtime import Checkpoints
from piper_runtime.checkpoint.settings import complete_checkpoints
from piper_runtime.launch.ground.report import StepRecord
from piper_runtime.launch.ground.request import Attempt, make_requests
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.ray import ray_cluster, ray_placement
from piper_runtime.launch.ray.ray_actor import pack, unpack
from piper_runtime.launch.ray.ray_cluster import connect
from piper_runtime.launch.ray.ray_launcher import RayPool, _variables, gpus_per_rank
from piper_runtime.rank.values import device


@pytest.fixture(scope="module")
def pool(ray_address: str) -> Iterator[RayPool]:
    with RayPool(2, cluster=ray_address) as workers:
        yield workers


def test_actors_compute_what_one_device_computes_and_inline_does(pool: RayPool) -> None:
    plan, job = chain(dp=2, pp=1, tied=True, masked=True, clip_norm=0.01, optimizer=adamw)
    steps: list[StepRecord] = []
    there = run(plan, job, launcher="ray", pool=pool, trace=True, memory=True, on_step=steps.append)
    here = run(plan, job, memory=True)
    assert distance(there, plan, job) < TOLERANCE
    assert (
        there.losses == pytest.approx(here.losses, rel=1e-14)
        and there.peak_bytes == here.peak_bytes
    )
    assert len(there.trace.spans) == sum(len(r.program) * len(r.ranks) for r in plan.roles)
    plain = [replace(s, gradient_norm=None, learning_rates=()) for s in steps]
    assert plain == [
        StepRecord(i, there.losses[i], there.step_s[i], there.batch_s[i]) for i in range(3)
    ]


def test_actors_are_used_again_by_a_next_run_and_sit_side_by_side(pool: RayPool) -> None:
    plan, job = chain(pp=2)
    pids = pool.pids
    assert run(plan, job, launcher="ray", pool=pool).losses == pytest.approx(
        run(plan, job).losses, rel=1e-14
    )
    assert pool.pids == pids and len(set(pids)) == 2
    places = pool.start().places
    assert [p.bundle for p in places] == [0, 1] and all(
        p.here and p.name == socket.gethostname() for p in places
    )


def test_actors_save_and_resume_as_one_process_does(pool: RayPool, tmp_path: Path) -> None:
    plan, job = chain(dp=2, pp=1, tied=True, optimizer=adamw)
    whole = run(plan, job, steps=4)
    run(plan, job, steps=2, launcher="ray", pool=pool, checkpoint=Checkpoints(tmp_path, every=1))
    assert list(complete_checkpoints(tmp_path)) == [1, 2]
    there = run(plan, job, steps=2, launcher="ray", pool=pool, resume=tmp_path / "step-00000002")
    assert there.losses == pytest.approx(whole.losses[2:], rel=1e-14) and there.first_step == 2
    assert all(
        torch.allclose(t, whole.state_dict()[n], rtol=1e-12, atol=0)
        for n, t in there.state_dict().items()
    )


def test_what_ranks_share_is_shipped_once(pool: RayPool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, job = chain(pp=1, dp=2)
    run(plan, job, launcher="ray", pool=pool)  # connects the actors
    puts: list[bytes] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: (puts.append(value), put(value))[1])
    calls: list[str] = []
    remote = ray.actor.ActorMethod.remote
    monkeypatch.setattr(
        ray.actor.ActorMethod,
        "remote",
        lambda self, *a: (calls.append(self._method_name), remote(self, *a))[1],
    )
    run(plan, job, launcher="ray", pool=pool, steps=20)
    assert (
        len(puts) == len(set(map(id, puts))) == 3
    )  # the request of the one role, the plan, and the callables
    assert calls.count("perform") == 2 and set(calls) <= {"perform", "look"}


def test_a_request_survives_the_journey() -> None:
    plan, job = chain(pp=2)
    from piper_runtime.rank.job.job import materialize

    attempt = Attempt(plan, {**_code()}, job, materialize(job), RunOptions(steps=1))
    requests = make_requests(attempt)
    packed = [pack(requests[r]) for r in (0, 1)]
    assert packed[0][1][0] is packed[1][1][0], "both roles ship one plan"
    again = unpack(packed[1][0], tuple(packed[1][1]))
    assert (
        again.plan == requests[1].plan
        and again.code == requests[1].code
        and again.params.keys() == requests[1].params.keys()
    )


def _code() -> Any:
    from packages.runtime.tests.handmade import CODE

    return CODE


def test_more_ranks_than_cpus(
    ray_address: str, pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ExecutionError,
        match=r"8 ranks and needs 8 CPUs, the Ray cluster has 4 on 1 node; .*cluster=\"local\"",
    ):
        RayPool(8, cluster=ray_address).start()
    monkeypatch.setattr(ray_placement, "PLACE_S", 0.5)
    pool.start()
    with pytest.raises(
        ExecutionError, match=r"4 ranks found no room .* within 0\.5 s: 2 CPUs and 0 GPUs are free"
    ):
        RayPool(4, cluster=ray_address).start()


def test_ranks_ask_for_gpus_where_there_are_enough_and_runs_may_take_them() -> None:
    with device.using("auto"):
        assert [gpus_per_rank({"CPU": 8, "GPU": n}, 4) for n in (8, 4, 3, 0)] == [1, 1, 0, 0]
    assert gpus_per_rank({"GPU": 8}, 4) == 0  # the suite takes the CPU
    assert "PIPER_OWN_DEVICE" in _variables(1) and "PIPER_OWN_DEVICE" not in _variables(0)


@pytest.mark.usefixtures("pool")
def test_a_process_is_connected_to_one_cluster() -> None:
    with pytest.raises(
        ExecutionError,
        match=r"already connected to Ray at .*cluster='10\.0\.0\.1:6379' cannot be used",
    ):
        connect("10.0.0.1:6379", 1)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != "kill")) for kind in KINDS]
)
def test_a_fault_at_a_random_instant_is_named_and_leaves_nothing(kind: str, pool: RayPool) -> None:
    named_and_ended(pool, kind, 1, launcher="ray")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 105))
@pytest.mark.parametrize("kind", KINDS)
def test_faults_at_random_instants(kind: str, seed: int, pool: RayPool) -> None:
    named_and_ended(pool, kind, seed, launcher="ray")


ALONE = """
import sys
sys.path[:0] = {path!r}
from packages.runtime.tests.chains import chain, run
from piper_runtime.launch.ray.ray_launcher import RayPool, _variables, gpus_per_rank
plan, job = chain(pp={ranks})
with RayPool({ranks}, cluster="local") as pool:
    run(plan, job, launcher="ray", pool=pool)
    run(plan, job, launcher="ray", pool=pool, steps=10**6, on_step=lambda s: print("up", flush=True) if s.step == 3 else None)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "ranks"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 2)],
)
def test_nothing_is_left_of_our_own_ray_when_its_driver_is_ended(
    how: signal.Signals, ranks: int
) -> None:
    """The interrupt goes to the whole group of processes, as at a terminal."""
    command = [sys.executable, "-c", ALONE.format(path=sys.path, ranks=ranks)]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    driver = subprocess.Popen(command, start_new_session=True, **pipes)
    assert driver.stdout is not None and driver.stdout.readline() == "up\n", driver.communicate()[1]
    family = descendants(driver.pid)
    commands = " ".join(Path(f"/proc/{p}/cmdline").read_text() for p in family)
    folders = set(re.findall(rf"{re.escape(tempfile.gettempdir())}/piper-\w+", commands))
    assert len(family) > 4 and len(folders) == 1 and "raylet" in commands
    os.killpg(driver.pid, how) if how == signal.SIGINT else driver.send_signal(how)
    output = driver.communicate(timeout=60)
    assert (
        "KeyboardInterrupt" in output[1]
        if how == signal.SIGINT
        else (driver.returncode, output[1]) == (-how, "")
    )
    deadline = time.monotonic() + 60  # a shared machine
    while (pids_alive(family) or Path(*folders).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not pids_alive(family) and not Path(*folders).exists()
    assert output[0] == "", "quiet"


OUTLIVED = """
import os, signal, sys
sys.path[:0] = {path!r}
from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.instants import descendants
from pathlib import Path
from piper_ir.ground.errors import ExecutionError
plan, job = chain(pp={ranks})
def fell(step):
    if step.step == 1:
        for pid in descendants(os.getpid()):
            if Path(f"/proc/{{pid}}/cmdline").read_bytes().split(b"\\0")[0].endswith(b"/{victim}"):
                os.kill(pid, signal.SIGKILL)
try:
    run(plan, job, launcher="ray", cluster="local", steps=10**6, on_step=fell, timeout_s=30)
except ExecutionError as e:
    print(e)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "name", "ranks"),
    [
        ("gcs_server", r"head process \(GCS\)", 1),
        ("raylet", r"process on this machine \(raylet\)", 2),
    ],
)
def test_a_process_of_ray_that_dies_is_named_and_no_rank_is_blamed(
    victim: str, name: str, ranks: int
) -> None:
    command = [sys.executable, "-c", OUTLIVED.format(path=sys.path, victim=victim, ranks=ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert re.fullmatch(
        rf"Ray's {name} died, so the run was ended\. .* start the run again\n", done.stdout
    ), done.stdout + done.stderr
    assert done.returncode == 0 and done.stderr == ""


def test_a_head_that_was_joined_counts_as_dead_after_some_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Joined:
        class _private:
            class worker:
                _global_node = None

        @staticmethod
        def get_runtime_context() -> Any:
            return type("Context", (), {"gcs_address": "head:6379"})

    answers = iter(["refused", "refused", None, "refused", "refused", "refused"])
    monkeypatch.setattr(ray_cluster, "_problem", lambda ray, address: next(answers))
    link = ray_cluster.RayLink(Joined, None)
    said = [link.fault() for _ in range(6)]
    assert said == [""] * 5 + ["Ray's head process (GCS) at head:6379 does not answer: refused"]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has no connection to Ray, whatever the tests before have left open."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("apart")
def test_addresses_that_are_not_ray_are_refused_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    closed = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        ExecutionError,
        match=rf"no Ray cluster at {closed}: .*refused.*`ray start --head`.*launcher=\"processes\"",
    ):
        connect(closed, 1)
    monkeypatch.setenv("RAY_ADDRESS", closed)
    with pytest.raises(ExecutionError, match=f"no Ray cluster at {closed}"):
        connect("auto", 1)
    free.listen()
    threading.Thread(
        target=lambda: free.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n"), daemon=True
    ).start()
    with pytest.raises(ExecutionError, match="something else answers there"):
        connect(closed, 1)
    with pytest.raises(ExecutionError, match="HOST:PORT"):
        connect("here", 1)
    with pytest.raises(ExecutionError, match="Ray Client addresses are not supported"):
        connect("ray://head:10001", 1)


def test_without_ray_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    plan, job = chain(pp=2)
    with pytest.raises(
        ExecutionError, match=r'pip install "ray>=2\.60", or use launcher="processes"'
    ):
        run(plan, job, launcher="ray")
