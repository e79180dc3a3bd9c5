"""One process per rank: equal to inline, and every way to fail ends in time, is named, and leaves nothing behind."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import adamw, batch
from packages.runtime.tests.instants import KINDS, named_and_ended
from piper_ir.ground.errors import ExecutionError, JobError, NonFiniteLossError
from piper_runtime.launch.ground.report import Interrupted, StepRecord
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.running.survivors import IN_MEMORY, PREFIX
from piper_runtime.rank.sending.shipping import RECIPE_MARK, pack
from piper_runtime.rank.values.code import ShippedCode, missing_operators

TIMEOUT_S = 4.0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "case",
    [
        dict(pp=4, layers=7),
        dict(dp=2, tied=True, masked=True, clip_norm=0.01, optimizer=adamw),
        dict(pp=1, dp=2, microbatches=1),
        dict(drop=True, schedule="gpipe", fuse=False),
    ],
)
def test_processes_compute_what_one_device_computes_and_inline_does(
    pool: Pool, case: dict[str, Any]
) -> None:
    plan, job = chain(**case)
    steps: list[StepRecord] = []
    there = run(
        plan, job, launcher="processes", pool=pool, trace=True, memory=True, on_step=steps.append
    )
    here = run(plan, job, memory=True)
    assert distance(there, plan, job) < TOLERANCE
    assert there.losses == pytest.approx(here.losses, rel=1e-14)
    plain = [replace(s, gradient_norm=None, learning_rates=()) for s in steps]
    assert plain == [
        StepRecord(i, there.losses[i], there.step_s[i], there.batch_s[i]) for i in range(3)
    ]
    assert there.peak_bytes == here.peak_bytes
    assert {r: m.points for r, m in there.memory.items()} == {
        r: m.points for r, m in here.memory.items()
    }
    assert len(there.trace.spans) == sum(len(r.program) * len(r.ranks) for r in plan.roles)
    assert all(s.end >= s.start >= 0 for s in there.trace.spans)
    assert there.state_dict().keys() == here.state_dict().keys()


def test_steps_are_told_while_the_run_goes_on(pool: Pool, tmp_path: Path) -> None:
    told = tmp_path / "told"

    def patient(step: int, rows: range) -> Any:
        while step == 2 and not told.exists():
            time.sleep(0.01)
        return batch(step, rows)

    plan, job = chain(batch=patient)
    run(
        plan,
        job,
        launcher="processes",
        pool=pool,
        on_step=lambda record: told.touch() if record.step == 0 else None,
    )
    assert told.exists()


def test_a_worker_collects_garbage_but_not_of_its_imports(pool: Pool) -> None:
    def seen(step: int, rows: range) -> Any:
        assert gc.isenabled() and gc.get_freeze_count() > 100_000
        return batch(step, rows)

    plan, job = chain(batch=seen)
    assert len(run(plan, job, launcher="processes", pool=pool, steps=1).losses) == 1


def test_a_pool_that_is_too_small_says_so() -> None:
    plan, job = chain(dp=2)
    with pytest.raises(ExecutionError, match="4 ranks, this pool has workers for 2"):
        run(plan, job, launcher="processes", pool=Pool(2))


def failing(what: str) -> Any:
    """A batch function that does something bad in step 1, on the rank that loads microbatch 1 first."""

    def bad(step: int, rows: range) -> Any:
        x, t = batch(step, rows)
        if step == 1 and rows.start == 2:
            if what == "poison":
                return x * float("inf"), t
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "exit":
                raise SystemExit("no more data")
            if what == "interrupt":
                raise KeyboardInterrupt
            time.sleep(1000)
        return x, t

    return bad


NAMED = {
    "poison": (NonFiniteLossError, "step 1 on rank 1, microbatch 1"),
    "kill": (
        ExecutionError,
        r"rank 0 was killed by SIGKILL: rank 0 ran instruction \d+ \(load\.inputs@1.* in step 1",
    ),
    "exit": (
        ExecutionError,
        r"rank 0, step 1: SystemExit: no more data was raised in the job's code .*Raise an "
        r"exception",
    ),
    "interrupt": (
        ExecutionError,
        r"rank 0, step 1: KeyboardInterrupt was raised in the job's code",
    ),
    "hang": (
        ExecutionError,
        r"no rank made progress for 4 s.*rank 0 ran instruction \d+ \(load\.inputs@1.*rank 1 .* "
        r"for rank 0 in instr",
    ),
}


LONG = ("interrupt", "exit", "poison")
"""They go the way of "kill"."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what in LONG)) for what in NAMED]
)
def test_every_failure_ends_in_time_and_names_its_rank(what: str) -> None:
    kind, says = NAMED[what]
    plan, job = chain(batch=failing(what))
    with Pool(2) as workers:
        workers.start()
        pids = workers.pids
        start = time.monotonic()
        with pytest.raises(kind, match=says):
            run(plan, job, launcher="processes", pool=workers, timeout_s=TIMEOUT_S)
        assert (
            time.monotonic() - start < TIMEOUT_S + 10
        )  # a shared machine; without a limit it would be 1000 s
        assert len(pids) == 2 and not any(map(alive, pids)) and workers.pids == []


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2) as workers:
        yield workers


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_a_random_instant_is_named_and_leaves_nothing(kind: str, pair: Pool) -> None:
    named_and_ended(pair, kind, 1, launcher="processes")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("kind", KINDS)
def test_faults_at_random_instants(kind: str, seed: int, pair: Pool) -> None:
    named_and_ended(pair, kind, seed, launcher="processes")


def test_an_interrupt_ends_all_processes(pair: Pool) -> None:
    plan, job = chain(batch=failing("hang"))
    pair.start()
    pids = pair.pids
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(plan, job, launcher="processes", pool=pair)
    assert len(pids) == 2 and not any(map(alive, pids))


@pytest.mark.parametrize("launcher", ["processes", "inline"])
def test_an_interrupted_run_brings_back_what_all_ranks_have(launcher: Any) -> None:
    """All ranks end after one step: the states are those of a run of that many steps."""

    def interrupt(record: StepRecord) -> None:
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    plan, job = chain(pp=2, dp=2)
    with Pool(4) as workers:
        pool = workers if launcher == "processes" else None
        with pytest.raises(Interrupted) as caught:
            run(plan, job, launcher=launcher, pool=pool, steps=10**6, on_step=interrupt)
        assert workers.pids == []
    steps = len(caught.value.run.losses)
    found, wanted = caught.value.run.state_dict(), run(plan, job, steps=steps).state_dict()
    assert 4 <= steps < 10**6 and all(torch.equal(t, wanted[n]) for n, t in found.items())


ORPHAN = """
import os, signal, sys
sys.path[:0] = {path!r}
from packages.runtime.tests.chains import chain, run
from piper_runtime.rank.values.code import ShippedCode, missing_operators
from piper_runtime import Checkpoints
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.running.survivors import IN_MEMORY, PREFIX
plan, job = chain(pp=1)
pool = Pool(1)
run(plan, job, launcher="processes", pool=pool)
def kill(record):
    if record.step == 9:
        copies = list(IN_MEMORY.glob(PREFIX + str(os.getpid()) + "-*/0/*.bytes"))
        print(os.getpid(), len(copies), *pool.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
saved = Checkpoints(sys.argv[1], every=10**6, snapshot=1)
run(plan, job, launcher="processes", pool=pool, steps=10**6, checkpoint=saved, restarts=1, on_step=kill, gradients=False)
"""


@pytest.mark.long
def test_workers_end_and_clear_up_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """They have copied their state to memory, which would stay."""
    command = [sys.executable, "-c", ORPHAN.format(path=sys.path), str(tmp_path / "saved")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, env=environment)
    launcher, copies, *pids = [int(p) for p in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 1 and copies == 2
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids)) and not list(tmp_path.glob("piper-*"))
    assert not list(IN_MEMORY.glob(f"{PREFIX}{launcher}-*"))


OPERATOR = """
import torch
@torch.library.custom_op("piper_runtime_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
def model():
    return None
"""


def test_the_file_that_defines_the_model_is_run_where_an_operator_is_missing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "my_operator.py"
    file.write_text(OPERATOR)
    code = {"c": {"F": ShippedCode("_double = torch.ops.piper_runtime_test.double.default\n")}}
    assert missing_operators(code) == {"piper_runtime_test.double"}
    module = load(file, "operator_of_test", **{RECIPE_MARK: str(file)})
    parcel = pack(batch, [module.model])
    assert parcel.recipes == {"operator_of_test": str(file)} and parcel.definers == (
        "operator_of_test",
    )
    assert missing_operators(code) == set()
    del sys.modules["operator_of_test"]


def test_what_cannot_be_sent_is_refused_with_a_way_out() -> None:
    lock = threading.Lock()
    with pytest.raises(JobError, match="cannot be sent to worker processes"):
        pack(lambda step, rows: lock)


def load(path: Path, name: str, **marks: str) -> ModuleType:
    """A module that no other process can import by its name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(marks)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("marked", [True, False])
def test_functions_of_a_file_travel_by_its_path_if_it_is_marked_and_else_by_value(
    tmp_path: Path, marked: bool
) -> None:
    file = tmp_path / "my_recipe.py"
    file.write_text(
        "DATA = list(range(10_000))\nLOADED = []\ndef batch(step, rows):\n    return DATA[rows.start], step\n"
    )
    module = load(file, "recipe_of_test", **({RECIPE_MARK: str(file)} if marked else {}))
    parcel = pack(module.batch)
    del sys.modules["recipe_of_test"]
    assert parcel.open()(7, range(5, 6)) == (5, 7)
    assert ("recipe_of_test" in sys.modules) == marked and (len(parcel.body) < 1000) == marked
    sys.modules.pop("recipe_of_test", None)
