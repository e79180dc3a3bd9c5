"""A worker that dies or raises is noticed at once: by an event, not because a poll or a timeout has run out. How many
seconds that takes, `make bench ARGS=faults` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults import KINDS, TIMEOUT_S, notice
from piper_runtime.launch.ground import watch
from piper_runtime.launch.ray import ray_launcher
from piper_runtime.launch.running.launchers import open_pool

POLL_S = 15.0
"""Instead of a tenth of a second: who waits for the next poll is found out, on a slow machine too."""
MOST_POLLS = 4
"""After the fault: steps that the other rank had finished before, and answers of actors to a look, end polls as
well."""


@pytest.fixture(scope="module", params=["processes", pytest.param("ray", marks=pytest.mark.long)])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    with open_pool(request.param, 2) as workers:
        yield workers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_noticed_without_waiting_for_a_poll(
    pool: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (watch, ray_launcher):
        monkeypatch.setattr(module, "TICK_S", POLL_S)
    found = notice(pool, kind)
    assert found.polls and found.polls[0].seconds == min(POLL_S, TIMEOUT_S / 4)
    assert not any(p.ran_out for p in found.polls) and len(found.polls) <= MOST_POLLS
    assert f"rank {found.rank}" in found.text
