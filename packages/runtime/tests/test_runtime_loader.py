"""A batch function that takes its time is called beside compute: a step ahead at most, with the numbers, the errors and
the memory of the issuing thread, and nothing goes on afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import CODE, batch
from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Plan
from piper_runtime import Job
from piper_runtime.engine.inline import InlineEngine
from piper_runtime.engine.memory import MemoryPoint
from piper_runtime.launch.ground.report import measured_counter
from piper_runtime.launch.running.inline_run import rank_job
from piper_runtime.rank.batches import loader_thread
from piper_runtime.rank.batches.feed import Feed
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.job.job import materialize
from piper_runtime.rank.values.scalars import step_loss

NAP_S = 0.003
LOADER_THREAD = "piper loader"
Batch = Callable[[int, range], Any]


def slow(step: int, rows: range) -> Any:
    time.sleep(NAP_S)
    return batch(step, rows)


class Calls:
    """A batch function that notes its steps and threads."""

    def __init__(self, of: Batch) -> None:
        self._of = of
        self.steps: list[int] = []
        self.threads: dict[int, str] = {}

    def __call__(self, step: int, rows: range) -> Any:
        self.steps.append(step)
        self.threads[step] = threading.current_thread().name
        return self._of(step, rows)


def fed(
    plan: Plan,
    of: Batch,
    loader: str | int,
    steps: int,
    each: Callable[[int], object] = lambda step: None,
) -> list[Any]:
    """Take every tensor of every step from a feed as rank 0 does; return what was taken."""
    feed, taken = Feed(plan, 0, of), []
    with feed.ahead(loader, range(steps)):
        for step in range(steps):
            feed.begin(step)
            taken += [
                feed.take(name, mb).clone()
                for mb in range(plan.microbatches)
                for name in ("inputs", "targets")
            ]
            each(step)
    return taken


def same(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


def trained(
    plan: Plan, job: Job, loader: str | int, steps: int, measured: int = -1, nap_s: float = 0.0
) -> tuple[list[float], list[MemoryPoint]]:
    """Train a plan of one rank in this process, with naps between steps in which its loader gets ahead.

    Return losses, and the memory of one step.
    """
    initial = materialize(job)
    with torch.random.fork_rng():
        rank = Rank(plan, 0, CODE, rank_job(job), initial.params, initial.buffers)
        engine, losses, points = InlineEngine([rank]), [], []
        with rank.feed.ahead(loader, range(steps)):
            for step in range(steps):
                if step == measured:
                    engine.counters = {0: (counter := measured_counter(rank))}
                engine.step(step)
                losses.append(step_loss(plan, [rank.scalars]))
                time.sleep(nap_s)
                if step == measured:
                    points, engine.counters = counter.points, {}
    return losses, points


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    yield
    assert LOADER_THREAD not in [t.name for t in threading.enumerate()]


@pytest.fixture(scope="module")
def one() -> tuple[Plan, Job]:
    return chain(pp=1, microbatches=3)


def test_a_thread_calls_what_is_slow_from_the_third_step_on_and_never_what_is_quick(
    one: tuple[Plan, Job],
) -> None:
    for of, by_thread in ((slow, [2, 3, 4, 5]), (lambda step, rows: READY[step, rows.start], [])):
        calls = Calls(of)
        wanted = fed(one[0], of, "none", 6)
        assert same(fed(one[0], calls, "thread", 6), wanted)
        assert [step for step, name in calls.threads.items() if name == LOADER_THREAD] == by_thread
        assert calls.steps == [step for step in range(6) for _ in range(3)], (
            "once each, in order, and none behind the last"
        )


READY = {(step, row): batch(step, range(row, row + 2)) for step in range(6) for row in (0, 2, 4)}


def test_a_run_that_goes_on_asks_for_its_own_steps_only(one: tuple[Plan, Job]) -> None:
    calls = Calls(slow)
    feed = Feed(one[0], 0, calls)
    with feed.ahead("thread", range(5, 10)):
        for step in range(5, 10):
            feed.begin(step)
            found = [
                feed.take(name, mb).clone() for mb in range(3) for name in ("inputs", "targets")
            ]
            assert same(
                found, [t for mb in range(3) for t in batch(step, range(2 * mb, 2 * mb + 2))]
            )
    assert (
        calls.steps == [step for step in range(5, 10) for _ in range(3)]
        and calls.threads[9] == LOADER_THREAD
    )


def test_without_a_loader_nothing_is_called_beside(one: tuple[Plan, Job]) -> None:
    calls = Calls(slow)
    fed(one[0], calls, "none", 4)
    assert set(calls.threads.values()) == {threading.current_thread().name}


def test_it_is_one_step_ahead_at_most(one: tuple[Plan, Job]) -> None:
    def rests(step: int) -> None:
        until = time.monotonic() + 10
        ahead = min(step + 1, 5)
        while step >= 2 and calls.steps.count(ahead) < 3 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(5 * NAP_S)  # in which a further call would come
        assert max(calls.steps) == (ahead if step >= 2 else step)

    calls = Calls(slow)
    fed(one[0], calls, "thread", 6, rests)


def test_a_refilled_tensor_is_copied_before_the_next_call(one: tuple[Plan, Job]) -> None:
    held = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)

    def refilled(step: int, rows: range) -> Any:
        time.sleep(NAP_S)
        return held[0].fill_(step), held[1].fill_(rows.start)

    taken = fed(
        one[0], refilled, "thread", 6, lambda step: time.sleep(6 * NAP_S)
    )  # in which the loader gets ahead
    assert [float(t[0, 0]) for t in taken] == [
        x for step in range(6) for row in (0, 2, 4) for x in (step, row)
    ]


def failing(step: int, rows: range) -> Any:
    time.sleep(NAP_S)
    if (step, rows.start) == (4, 2):
        raise ValueError("no such file")
    return batch(step, rows)


@pytest.mark.parametrize("loader", ["none", "thread"])
def test_an_error_is_raised_where_its_microbatch_is_loaded(
    loader: str, one: tuple[Plan, Job]
) -> None:
    done: list[int] = []
    with pytest.raises(ValueError, match="no such file") as caught:
        fed(one[0], failing, loader, 6, done.append)
    assert done == [0, 1, 2, 3] and any(entry.name == "failing" for entry in caught.traceback)


def test_an_error_behind_the_end_of_a_run_is_nobodys(one: tuple[Plan, Job]) -> None:
    assert len(fed(one[0], failing, "thread", 4)) == 4 * 6


def test_a_run_that_fails_does_not_wait_for_a_call_that_hangs(
    one: tuple[Plan, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_thread, "JOIN_S", 0.05)
    woken = threading.Event()

    def hanging(step: int, rows: range) -> Any:
        if step == 3:
            woken.wait()
        return slow(step, rows)

    def fails(step: int) -> None:
        if step == 2:
            raise RuntimeError("of the rank")

    with pytest.raises(RuntimeError, match="of the rank"):
        fed(one[0], hanging, "thread", 6, fails)
    woken.set()
    (left,) = [t for t in threading.enumerate() if t.name == LOADER_THREAD]
    left.join(10)


def drawing(late: bool) -> Calls:
    """A batch function that draws from torch's global generator: always, with a seed, or in its fifth step for the
    first time."""

    def draws(step: int, rows: range) -> Any:
        if not late:
            torch.manual_seed(100 * step + rows.start)
        time.sleep(NAP_S)
        if late and step < 4:
            return batch(step, rows)
        return torch.rand(2, len(rows), 4, dtype=torch.float64).unbind()

    return Calls(draws)


@pytest.mark.parametrize("late", [False, True])
def test_a_function_that_draws_from_the_generator_of_dropout_is_not_called_beside_it(
    late: bool,
) -> None:
    plan, job = chain(pp=1, drop=True, batch=drawing(late))
    assert any(c.random for c in plan.chunks)
    losses, _ = trained(plan, job, "thread", 7)
    beside = [step for step, name in job.batch.threads.items() if name == LOADER_THREAD]  # type: ignore[attr-defined]  # a Calls
    assert losses == run(plan, job, steps=7).losses and beside == ([2, 3] if late else [])


@pytest.mark.parametrize("late", [False, True])
def test_negative_control_beside_dropout_it_would_change_the_numbers(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(pp=1, drop=True, batch=drawing(late))
    monkeypatch.setattr(loader_thread, "NoGlobalDraws", nullcontext)
    monkeypatch.setattr(
        torch, "equal", lambda a, b: True
    )  # what a feed asks of two states of the generator
    losses, _ = trained(plan, job, "thread", 7, nap_s=8 * NAP_S)
    assert losses != run(plan, job, steps=7).losses


def test_without_dropout_it_may_draw_beside_compute() -> None:
    plan, job = chain(pp=1, batch=drawing(late=False))
    losses, _ = trained(plan, job, "thread", 7)
    assert job.batch.threads[3] == LOADER_THREAD  # type: ignore[attr-defined]  # a Calls
    assert losses == run(plan, job, steps=7).losses


def test_a_generator_of_its_own_may_draw_beside_dropout() -> None:
    plan, job = chain(pp=1, drop=True, batch=Calls(slow))
    losses, _ = trained(plan, job, "thread", 6)
    assert job.batch.threads[3] == LOADER_THREAD  # type: ignore[attr-defined]  # a Calls
    assert losses == run(plan, job, steps=6).losses


def test_tensors_of_an_accelerator_are_made_when_they_are_loaded(one: tuple[Plan, Job]) -> None:
    """A plan counts the memory of its device; meta stands for one."""

    def elsewhere(step: int, rows: range) -> Any:
        return tuple(t.to("meta") for t in slow(step, rows))

    calls, feed = Calls(elsewhere), Feed(one[0], 0, lambda step, rows: calls(step, rows))
    with feed.ahead("thread", range(5)):
        for step in range(5):
            feed.begin(step)
            for mb in range(3):
                feed.take("inputs", mb)
    assert LOADER_THREAD not in calls.threads.values()


def test_memory_of_a_step_beside_a_loader_is_that_without(one: tuple[Plan, Job]) -> None:
    plan, job = chain(pp=1, microbatches=3, batch=Calls(slow))
    with_loader, without = (
        trained(plan, job, loader, 5, measured=4) for loader in ("thread", "none")
    )
    assert with_loader == without and len(with_loader[1]) > 3


def test_other_words_and_no_process_for_a_loader_are_refused(one: tuple[Plan, Job]) -> None:
    plan, job = one
    for wrong in ("threads", 0, -1, True, 1.5, None):
        with pytest.raises(
            JobError, match=r"execute\(loader=.*\): \"thread\", \"processes\", \"none\" or a number"
        ):
            run(plan, job, loader=wrong)
    for wrong in ("processes", 2):
        with pytest.raises(JobError, match='launcher "inline" runs all ranks in one thread'):
            run(plan, job, loader=wrong)
    assert distance(run(plan, job, loader="none"), plan, job) < TOLERANCE
