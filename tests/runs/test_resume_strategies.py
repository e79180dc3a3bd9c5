"""A checkpoint of any strategy is resumed by every other one, and the run goes on as one device does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from piper_ir.plan.plan import Plan
from piper_ir.verify import verify
from piper_runtime import Checkpoints, Run
from piper_runtime.checkpoint import restoring
from piper_runtime.checkpoint.rank_tensors import rank_tensors
from piper_runtime.launch.processes.processes import Pool
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition
from tests.helpers.parity import FLOAT64

SAVED, STEPS = 2, 3
"""The steps after which a run is saved, and after which it ends."""


def of(pp: int, dp: int, schedule: str, chunks: int = 0, zero: int = 0) -> Composition:
    """Return a strategy for one and the same training: 16 rows, in microbatches of two rows each."""
    return Composition(
        "deep", pp, dp, 8 // dp, schedule, rows=2, optimizer="adamw", clip=0.05, scheduler=True, bucket_mb=0.003, chunks=chunks,
        zero=zero,
    )  # fmt: skip


STRATEGIES = {
    "one device": of(1, 1, "default"),
    "dp2": of(1, 2, "default"),
    "dp2, zero=3": of(1, 2, "default", zero=3),
    "1f1b": of(2, 1, "1f1b"),
    "zbv, dp2, zero=2": of(2, 2, "zbv", zero=2),
    "interleaved, dp2, zero=1": of(2, 2, "interleaved", chunks=2, zero=1),
    "dualpipe": of(4, 1, "dualpipe"),
}


@cache
def plan_of(name: str) -> Plan:
    plan = compositions.compiled(STRATEGIES[name]).plan
    verify(plan)
    return plan


def go(name: str, steps: int, **options: Any) -> Run:
    """Run a strategy in this process unless told otherwise."""
    return compositions.run(STRATEGIES[name], plan_of(name), steps=steps, **options)


class Whole(dict[str, tuple[Run, Path]]):
    """The run of each strategy without a pause, and the checkpoint that it has left on its way; made when asked for."""

    def __init__(self, temporary: pytest.TempPathFactory) -> None:
        self._temporary = temporary

    def __missing__(self, name: str) -> tuple[Run, Path]:
        folder = self._temporary.mktemp("saved")
        run = go(name, STEPS, checkpoint=Checkpoints(folder, every=SAVED))
        self[name] = run, folder / f"step-{SAVED:08d}"
        return self[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory)


def distance(found: Run, wanted: Run) -> float:
    """Return the largest difference of losses and parameters between a resumed run and the end of one without a
    pause."""
    a, b = wanted.state_dict(), found.state_dict()
    losses = [
        abs(x - y) / abs(x)
        for x, y in zip(wanted.losses[found.first_step :], found.losses, strict=True)
    ]
    return max([*losses, *(float((a[n] - b[n]).norm() / (a[n].norm() + 1e-30)) for n in a)])


@pytest.mark.long
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_goes_on_from_the_checkpoints_of_all_others(name: str, whole: Whole) -> None:
    others = [(other, *whole[other]) for other in STRATEGIES if other != name]
    for other, run, path in others:
        found = go(name, STEPS - SAVED, resume=path)
        assert found.first_step == SAVED
        assert distance(found, run) <= FLOAT64, f"{other} resumed as {name}, beside {other}"
        assert distance(found, whole[name][0]) <= FLOAT64, (
            f"{other} resumed as {name}, beside {name}"
        )
    assert len(others) == 6


@pytest.mark.long
def test_what_they_go_on_to_is_what_one_device_does(whole: Whole) -> None:
    for name in STRATEGIES:
        run, _ = whole[name]
        parity.assert_parity(run, compositions.expected(STRATEGIES[name], STEPS), label=name)


def test_control_what_is_lost_is_seen(whole: Whole) -> None:
    """A run that begins anew with the step of then, and one that lacks the optimizer's state, are far beyond the
    bound."""
    run, path = whole["1f1b"]
    assert distance(go("1f1b", 1, first_step=SAVED), run) > 1e3 * FLOAT64
    with pytest.MonkeyPatch.context() as m:
        m.setattr(
            restoring,
            "rank_tensors",
            lambda rank: (s for s in rank_tensors(rank) if s.ranges[0].key.startswith("model.")),
        )
        assert distance(go("1f1b", 1, resume=path), run) > 1e3 * FLOAT64


def test_processes_resume_what_this_process_has_saved_and_the_other_way(
    whole: Whole, pool: Pool, tmp_path: Path
) -> None:
    settings = Checkpoints(tmp_path)
    found = go(
        "dualpipe", 1, resume=whole["dp2"][1], launcher="processes", pool=pool, checkpoint=settings
    )
    assert distance(found, whole["one device"][0]) <= FLOAT64
    expected = compositions.expected(STRATEGIES["one device"], STEPS + 1)
    end = go("zbv, dp2, zero=2", 1, checkpoint=settings, resume="latest")
    assert end.first_step == STEPS and end.losses == pytest.approx(
        expected.losses[STEPS:], rel=FLOAT64
    )
