"""Faults of a worker at random instants: it is killed, raises or hangs while a plan runs."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE
from piper_ir.ground.errors import ExecutionError, HangError
from piper_runtime import execute
from piper_runtime.launch.processes import forking
from piper_runtime.rank.values.code import ShippedCode

KINDS = ("kill", "raise", "hang")
TIMEOUT_S = 2.0
_ACTIONS = {
    # Anywhere from here on: in another instruction, in a communication, between two steps.
    "kill": "threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()",
    "raise": "raise ValueError('a fault')",
    "hang": "time.sleep(1000)",
}
_PRELUDE = """
import os, signal, threading, time
CALLS = []
def fault():
    CALLS.append(0)
    if len(CALLS) == {call}:
        {action}
def step(args):
    fault()
"""
# Step functions of which one rank of a pipeline of two has all calls, with that rank.
_VICTIMS = [
    ("plain.first", "F", 0),
    ("plain.first", "W", 0),
    ("head.mean", "F", 1),
    ("head.mean", "I", 1),
    ("head.mean", "W", 1),
]


def faulty_code(kind: str, seed: int) -> tuple[dict[str, dict[str, ShippedCode]], int]:
    """Code in which one call of one function goes wrong, and the rank that makes this call."""
    chance = random.Random(f"{kind} {seed}")
    code_id, step, rank = chance.choice(_VICTIMS)
    action = _ACTIONS[kind].format(delay=chance.uniform(0, 0.05))
    prelude = _PRELUDE.format(call=chance.randint(1, 40), action=action)
    source = CODE[code_id][step].source.replace("def step(args):", prelude, 1)
    return {**CODE, code_id: {**CODE[code_id], step: ShippedCode(source)}}, rank


def server_pid() -> int:
    """The process that forks workers, which outlives their runs."""
    assert forking._server is not None
    return forking._server._process.pid


def pids_alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    return [p for p in pids if _state(p) not in ("", "Z")]


def descendants(pid: int) -> list[int]:
    """A process's children, their children and so on, from /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found, new = [], [pid]
    while new := [child for child, parent in parents.items() if parent in new]:
        found += new
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def named_and_ended(workers: Any, kind: str, seed: int, launcher: Any) -> None:
    """Run until the fault: the error names rank and instruction, and no worker is left."""
    plan, job = chain(pp=2)
    code, rank = faulty_code(kind, seed)
    workers.start()
    pids = workers.pids
    with pytest.raises(ExecutionError) as caught:
        execute(
            plan,
            code,
            job,
            steps=1000,
            launcher=launcher,
            pool=workers,
            timeout_s=TIMEOUT_S if kind == "hang" else 60,
        )
    says = {
        "kill": rf"^rank {rank} (was killed by SIGKILL|has died .*): rank {rank}.* instruction \d+ "
        rf"\(.* in step \d+",
        "raise": rf"^rank {rank}, step \d+, instruction \d+ \(.* on compute\): ValueError: a fault",
        "hang": rf"^no rank made progress for 2 s \(timeout_s\); rank {rank}( on node \S+)? ran "
        rf"instruction .*rank "
        rf"{1 - rank}",
    }
    assert re.search(says[kind], str(caught.value)), caught.value
    if kind == "hang":
        assert isinstance(caught.value, HangError) and caught.value.report.count("\n  > ") == 2
    assert len(pids) == 2 and not pids_alive(pids) and workers.pids == []
