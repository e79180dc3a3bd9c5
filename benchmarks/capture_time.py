"""Show where the time goes of capturing a tiny model of four layers: `python -m benchmarks.capture_time`.

Each model is captured in a process of its own, after torch and Piper are imported. The table has CPU seconds, without
a profiler: the first capture, which also imports what torch imports when it first traces, and a later one, of which
Dynamo and AOTAutograd are parts. A last capture runs under the profiler, which says in whose files the time is spent.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import piper

ROOT = Path(__file__).resolve().parent.parent
TINY = {"layers": 4, "width": 16, "heads": 2, "vocab": 32, "length": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "GPT": lambda: piper.models.GPTConfig(**TINY),
    "Llama": lambda: piper.models.LlamaConfig(**TINY, kv_heads=1, hidden=16),
}
LATER = 3
"""How many later captures there are, of which the fastest counts."""


def measure(name: str) -> dict[str, float]:
    """Return CPU seconds of captures of a tiny model, and whose they are."""
    import torch  # noqa: F401  # the first capture begins after these imports

    from piper.api.captures.capturing import _CAPTURES
    from piper_capture.torch_api import _torch_joint
    from piper_capture.trace import tracing

    job = piper.models.job(MODELS[name](), global_batch=4)
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2))

    def capture() -> None:
        _CAPTURES.clear()
        piper.compile(job, strategy)

    first, parts = seconds(capture), {"Dynamo": 0.0, "AOTAutograd": 0.0}
    found = []
    with ExitStack() as stack:
        stack.enter_context(counted(tracing, "_traced", parts, "Dynamo"))
        stack.enter_context(counted(_torch_joint, "export_joint", parts, "AOTAutograd"))
        for _ in range(LATER):
            parts.update(dict.fromkeys(parts, 0.0))
            found.append({"later": seconds(capture), **parts})
    return {
        "first": first,
        **min(found, key=lambda times: times["later"]),
        "own": own_share(capture),
    }


def seconds(run: Callable[[], None]) -> float:
    """Return the CPU seconds of a call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


@contextmanager
def counted(owner: Any, name: str, parts: dict[str, float], part: str) -> Iterator[None]:
    """Add the CPU seconds of a function's calls to a part."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            parts[part] += time.process_time() - begin

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, function)


def own_share(run: Callable[[], None]) -> float:
    """Return the share of a call's time that the profiler sees in functions of Piper's files themselves."""
    profile = cProfile.Profile()
    profile.runcall(run)
    spent: dict[bool, float] = {True: 0.0, False: 0.0}
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]  # it has no types
        spent["piper" in Path(file).parent.as_posix().removeprefix(ROOT.as_posix())] += own
    return spent[True] / (spent[True] + spent[False])


def main() -> None:
    """Measure each model in a process of its own, and print a table."""
    table = Table(
        "model",
        "first capture",
        "a later one",
        "Dynamo",
        "AOTAutograd",
        "the rest",
        "self time in Piper's files",
    )
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.capture_time", name]
        env = {**os.environ, "PIPER_CACHE": ""}  # no capture that is kept in a file
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, env=env
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        rest = found["later"] - found["Dynamo"] - found["AOTAutograd"]
        times = (found["first"], found["later"], found["Dynamo"], found["AOTAutograd"], rest)
        table.add_row(name, *(f"{t:.2f} s" for t in times), f"{found['own']:.0%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
