"""Processes that torchrun starts again go on from the newest checkpoint, up to the step that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE, adamw
from packages.runtime.tests.kills import read_all
from piper_runtime import execute

FILE = """
import dataclasses, json, os, signal, sys, time
sys.path[:0] = {path!r}
from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE, adamw, batch
from piper_runtime import Checkpoints, execute
def killing(step, rows):
    time.sleep(0.05)
    if step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(step, rows)
plan, job = chain(pp=2, optimizer=adamw)
saved = Checkpoints(os.path.join({out!r}, "saved"), every=2)
job = dataclasses.replace(job, batch=killing)
found = execute(plan, CODE, job, steps=8, launcher="processes", checkpoint=saved, restarts=1)
with open(os.path.join({out!r}, os.environ["RANK"]), "w") as file:
    json.dump([found.first_step, found.losses], file)
"""


@pytest.mark.long
def test_torchrun_starts_killed_ranks_again(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILE.format(path=sys.path, out=str(tmp_path)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "1",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, str(file)], capture_output=True, text=True, timeout=400, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    plan, job = chain(pp=2, optimizer=adamw)
    whole = execute(plan, CODE, job, steps=8, launcher="inline").losses
    for rank in "01":
        first, losses = json.loads((tmp_path / rank).read_text())
        assert first in (2, 4) and losses == pytest.approx(whole[first:], rel=1e-9)
    assert read_all(tmp_path / "saved") == 3
