"""Runs whose devices share chunks go on after a loss: from copies where these have every part, else from a
checkpoint."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_ir.ground.errors import PiperWarning
from piper_runtime import Checkpoints, Run, execute
from piper_runtime.launch.running import attempts, survivors
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition

PAIRS = Composition(
    "gpt", dp=2, microbatches=2, optimizer="adamw", clip=0.05, tp=2, stream="tokens"
)
STEPS, NEVER = 5, 1000


def assert_trained(c: Composition, found: Run) -> None:
    """The losses and the model after the last step are those of one device."""
    wanted = compositions.expected(c, STEPS)
    assert found.losses == pytest.approx(wanted.losses, rel=parity.FLOAT64)
    state = found.state_dict()
    for name, tensor in wanted.state_dict.items():
        assert (state[name] - tensor).norm() <= parity.FLOAT64 * tensor.norm(), name


def flaky(job: Any, failing: list[int], step: int, rows: range) -> Any:
    """A batch function that raises once in a step."""
    if step in failing and rows.start == 0:
        failing.remove(step)
        raise OSError(f"the disk went away in step {step}")
    return job.batch(step, rows)


def killing(batch: Any, sign: Path, step: int, rows: range) -> Any:
    """A batch function that ends its process in step 3, once."""
    if step == 3 and rows.start == 0:
        try:
            sign.touch(exist_ok=False)
        except FileExistsError:
            return batch(step, rows)
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(step, rows)


CASES: dict[str, tuple[Composition, tuple[int, ...], int]] = {
    "nobody": (PAIRS, (), 4),
    "one of two with the same part": (PAIRS, (1,), 4),
    "one of each part": (PAIRS, (0, 3), 4),
    "both of a part": (PAIRS, (1, 3), 3),
    "one who alone has its part": (replace(PAIRS, dp=1, stream=""), (1,), 3),
    "states shared too": (replace(PAIRS, zero=3), (3,), 3),
}
"""What dies of tp=2 x dp=2, where ranks 0 and 2 have the same part, and the step with which the run goes on."""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_copies_count_where_the_others_have_every_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, dead, resumed = CASES[name]
    home = tmp_path / "memory"
    home.mkdir()
    monkeypatch.setattr(survivors, "IN_MEMORY", home)
    monkeypatch.setattr(attempts, "lost", lambda error: dead)
    plan, job = compositions.compiled(c).plan, compositions.job_of(c)
    job = replace(job, batch=functools.partial(flaky, job, [4]))
    saved = Checkpoints(tmp_path / "saved", every=3 if resumed == 3 else NEVER, snapshot=1)
    with pytest.warns(PiperWarning, match=f"the run goes on with step {resumed}"):
        found = execute(
            plan, compositions.code_of(c, plan), job, steps=STEPS, launcher="inline", restarts=1, checkpoint=saved
        )  # fmt: skip
    assert found.restarts[0].source.startswith(
        "the host snapshot" if resumed == 4 else "the checkpoint"
    )
    assert_trained(c, found)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["processes", "ray"])
def test_a_killed_worker_is_restarted_from_a_checkpoint(
    launcher: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if launcher == "ray":
        request.getfixturevalue("ray_address")
    plan, job = compositions.compiled(PAIRS).plan, compositions.job_of(PAIRS)
    job = replace(job, batch=functools.partial(killing, job.batch, tmp_path / "sign"))
    with pytest.warns(
        PiperWarning, match=r"rank \d (has died|was killed) .*the run goes on with step 2"
    ):
        found = execute(
            plan, compositions.code_of(PAIRS, plan), job, steps=STEPS, launcher=launcher, restarts=1,
            checkpoint=Checkpoints(tmp_path / "saved", every=2, asynchronous=False), loader="none",
        )  # fmt: skip
    assert found.restarts[0].source.startswith("the checkpoint") and (tmp_path / "sign").exists()
    assert_trained(PAIRS, found)
