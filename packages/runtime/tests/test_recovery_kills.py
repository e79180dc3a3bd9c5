"""Workers of real processes are killed at many instants: the run goes on, and is equal to one that nobody touched."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE, adamw
from packages.runtime.tests.instants import descendants, pids_alive, server_pid
from packages.runtime.tests.kills import COPYING, Kill, Killer, random_kills, read_all
from piper_ir.ground.errors import PiperWarning
from piper_runtime import Checkpoints, Run, execute
from piper_runtime.launch import Pool, Restart
from piper_runtime.launch.running.survivors import IN_MEMORY, PREFIX

TOLERANCE = 1e-9
PLANS = {
    4: dict(pp=2, dp=2, microbatches=4),
    3: dict(pp=3, microbatches=8),
    2: dict(pp=2, microbatches=8),
    1: dict(pp=1, microbatches=8),
}
"""The strategies of one training of 16 rows, by number of ranks."""


def distance(found: Run, wanted: Run, *without: str) -> float:
    """The largest difference of losses and of tensors, without those that count microbatches."""
    a, b = (
        {n: t for n, t in run.state_dict().items() if n not in without} for run in (found, wanted)
    )
    assert len(found.losses) == len(wanted.losses) and a.keys() == b.keys()
    losses = [abs(x - y) / abs(y) for x, y in zip(found.losses, wanted.losses, strict=True)]
    return max([*losses, *(float((a[n] - b[n]).norm() / (b[n].norm() + 1e-30)) for n in a)])


def survives(
    kills: list[Kill],
    ranks: int,
    steps: int,
    tmp_path: Path,
    monkeypatch: Any,
    *,
    fewer: Any = None,
    **of: Any,
) -> Run:
    """Run with these kills, and check what holds for every run; `fewer` gives the next number of ranks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with Pool(1) as first:  # the process that forks workers stays for the next run
        first.start()
    saved, before = tmp_path / "saved", descendants(os.getpid())
    kept = Checkpoints(saved, every=of.pop("every", 2), snapshot=of.pop("snapshot", None))
    plan, job = chain(**of.pop("fields", PLANS[ranks]), optimizer=adamw)
    killer = Killer(tmp_path / "kills", kills, of.pop("pause_s", 0.0))
    heard: list[int] = []

    def again(restart: Restart) -> None:
        killer.attempt()
        read_all(saved)

    def replan(devices: int) -> Any:
        return chain(**PLANS[fewer(devices)], optimizer=adamw)[0], CODE

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        found = execute(
            plan, CODE, replace(job, batch=killer.batch, optimizer=killer.optimizer), steps=steps, launcher="processes",
            checkpoint=kept, restarts=len(kills), on_restart=again,
            on_step=lambda record: heard.append(record.step), replan=replan if fewer is not None else None, timeout_s=60,
        )  # fmt: skip
    assert [kill for kill, _ in killer.done()] == kills and len(found.restarts) == len(kills)
    whole = execute(plan, CODE, job, steps=steps, launcher="inline")
    assert distance(found, whole, *(["count"] if fewer is not None else [])) < TOLERANCE
    assert heard == list(range(steps)), "no step twice"
    assert 1 <= read_all(saved) <= 3 and all(
        not p.name.endswith(".partial") for p in saved.iterdir()
    )
    assert not pids_alive([p for p in descendants(os.getpid()) if p not in (*before, server_pid())])
    assert not list((tmp_path / "temporary").glob("piper-*")) and not list(
        IN_MEMORY.glob(f"{PREFIX}{os.getpid()}-*")
    )
    return found


def test_a_run_outlives_three_kills_on_fewer_and_fewer_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a step of four ranks, one while two ranks save, one at the start: the third device is gone with it."""
    kills = [Kill(3, "step", 0.05), Kill(1, "save", 1), Kill(0, "start")]
    found = survives(
        kills, 4, 60, tmp_path, monkeypatch, fewer={3: 2, 2: 2, 1: 1}.__getitem__, pause_s=0.001
    )
    assert [(r.lost, r.ranks) for r in found.restarts] == [((3,), 2), ((1,), 2), ((0,), 1)]
    assert [r.resumed <= r.step for r in found.restarts] == [True] * 3 and found.restarts[
        1
    ].resumed > 0
    assert found.peak_bytes == {} and set(found.rank_states) == {0}


KILLS = 100


@pytest.mark.long
def test_a_run_outlives_a_hundred_kills_at_random_instants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = random_kills(1, KILLS, 2, 0.3)
    found = survives(kills, 2, 3000, tmp_path, monkeypatch, pause_s=0.002, every=5)
    seconds = sorted(r.seconds for r in found.restarts if r.seconds is not None)
    print(
        f"{KILLS} kills, {sum(k.instant == 'save' for k in kills)} of them in a save; median "
        f"{seconds[len(seconds) // 2]:.2f} s"
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_losses_of_devices_at_random_instants(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four devices lose one, and three or two of the others go on."""
    kills = random_kills(seed, seed % 6 + 1, 4, 0.3)[-1:]
    found = survives(
        kills, 4, 200, tmp_path, monkeypatch, fewer=lambda _: 2 + seed % 2, pause_s=0.002
    )
    assert [r.ranks for r in found.restarts] == [2 + seed % 2]


WITH_COPIES = {
    "replicas": dict(pp=1, dp=2, microbatches=8),
    "hybrid": dict(pp=1, dp=2, rep=2, zero=3, microbatches=4),
    "stages": dict(pp=2, dp=2, microbatches=4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_COPIES)
def test_kills_at_random_instants_of_ranks_that_copy_their_state(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the kills is in a copy; the run goes on from the copies of the others, which are one step old."""
    fields = WITH_COPIES[name]
    kills = random_kills(2, 24, 2 if name == "replicas" else 4, 0.3, COPYING)
    found = survives(
        kills, 4, 600, tmp_path, monkeypatch, pause_s=0.002, every=50, snapshot=1, fields=fields
    )
    sources = [r.source.partition(" of ")[0] for r in found.restarts]
    print(
        f"{name}: {len(kills)} kills, steps done again {[r.step - r.resumed for r in found.restarts]}, {sources}"
    )
    assert sum(source.startswith("the host snapshot") for source in sources) > len(kills) // 2
