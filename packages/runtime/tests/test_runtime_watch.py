"""Steps as they finish, and who is to blame: without workers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import piper_runtime.launch.ground.watch
from packages.runtime.tests.chains import chain, run
from piper_ir.ground.errors import ExecutionError, HangError, NonFiniteLossError
from piper_ir.plan.plan import COMPUTE
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.engine.streams import (
    EVALUATES,
    FIRST_STREAM,
    HEART_SLOTS,
    ISSUED,
    LAST_STEP,
    LOADING,
    MOST_STREAMS,
    PHASE,
    RUNNING,
    SAVING,
    STEP,
    WAITING,
    CpuStreams,
)
from piper_runtime.launch.ground.environment import check_environments, environment
from piper_runtime.launch.ground.progress import Progress
from piper_runtime.launch.ground.protocol import Failure
from piper_runtime.launch.ground.report import RankReport, StepDone, StepRecord, aligned
from piper_runtime.launch.ground.watch import Watch
from piper_runtime.launch.processes.processes import _Team
from piper_runtime.rank.values import code


def done(step: int, finished: float, loss: float = 1.0) -> StepDone:
    return StepDone(step, 10.0, finished, {"loss": {0: loss}, "weight": {}})


def test_a_step_is_handed_on_in_order_when_its_last_rank_is_done_with_it() -> None:
    plan, _ = chain(pp=2)
    found: list[StepRecord] = []
    progress = Progress(plan, found.append)
    progress.add(0, done(0, 11.0))
    progress.add(0, done(1, 12.0))
    progress.add(1, done(1, 13.5))
    assert found == []
    progress.add(1, done(0, 11.5))
    progress.add(1, done(0, 99.0))  # said twice
    assert found == [StepRecord(0, 0.5, 1.5), StepRecord(1, 0.5, 2.0)]


def test_a_loss_does_not_depend_on_which_rank_came_first() -> None:
    plan, _ = chain(pp=2)
    said = [
        StepDone(0, 0.0, 1.0, {"loss": {0: a, 1: b}, "weight": {}})
        for a, b in ((1e16, 1.0), (1.0, -1e16))
    ]
    found: list[StepRecord] = []
    for order in ((0, 1), (1, 0)):
        progress = Progress(plan, found.append)
        for rank in order:
            progress.add(rank, said[rank])
    assert found[0] == found[1]


def test_on_step_may_fail_training_may_not() -> None:
    plan, job = chain(pp=2)
    seen: list[int] = []

    def full(record: StepRecord) -> None:
        seen.append(record.step)
        raise OSError(28, "No space left on device")

    with pytest.warns(
        RuntimeWarning,
        match=r"on_step failed in step 0: OSError: .*No space left.*training goes on",
    ) as warned:
        found = run(plan, job, on_step=full)
    assert seen == [0, 1, 2] and len(found.losses) == 3 and len(warned) == 1

    def stop(record: StepRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, job, on_step=stop)


def test_weights_that_add_up_to_nothing_are_an_error_of_their_step() -> None:
    plan, _ = chain(pp=1, masked=True)
    progress = Progress(plan, None)
    with pytest.raises(NonFiniteLossError, match=r"step 0: the sum of loss weights .* is 0"):
        progress.add(0, StepDone(0, 0.0, 1.0, {"loss": {0: 0.0}, "weight": {0: 0.0}}))


def test_times_of_another_clock_are_put_on_ours() -> None:
    report = aligned(RankReport(started=5.0, finished=[6.0], spans=[(0, 5.0, 5.5)]), 2.0, 1e-4)
    assert (report.started, report.finished, report.spans) == (3.0, [4.0], [(0, 3.0, 3.5)])
    assert report.clock_error_s == 1e-4
    assert aligned(done(1, 12.0), 2.0, 1e-4) == StepDone(1, 8.0, 10.0, done(1, 12.0).scalars)
    assert aligned("ready", 2.0, 1e-4) == "ready"


@dataclass
class Dummies:
    """A team whose ranks say what the test wants, all at once, and whose hearts stand still."""

    says: list[tuple[int, Any]]
    hearts: dict[int, list[int]]
    unheard: tuple[int, ...] = ()

    def wait(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        said, self.says = self.says, []
        return said

    def heart(self, rank: int) -> Sequence[int]:
        return self.hearts[rank]

    def exit_reason(self, rank: int) -> str:
        return "was killed by SIGKILL"

    def node(self, rank: int) -> str:
        return f"node n{rank}"

    def silent(self, seconds: float) -> Collection[int]:
        return self.unheard


def heart(step: int = 0, issued: int = 0, phase: int = RUNNING, *streams: int) -> list[int]:
    slots = [0] * HEART_SLOTS
    slots[STEP], slots[ISSUED], slots[PHASE] = step, issued, phase
    slots[FIRST_STREAM : FIRST_STREAM + len(streams)] = streams
    return slots


def watch(says: list[tuple[int, Any]], *hearts: list[int]) -> Watch:
    plan, _ = chain(pp=2)
    return Watch(plan, Dummies(says, dict(enumerate(hearts))), len(hearts), timeout_s=0.2)


def test_the_rank_that_is_gone_is_blamed_before_its_victims() -> None:
    victim = Failure("ExecutionError", "rank 0 lost its peer", "", (1,))
    with pytest.raises(
        ExecutionError,
        match=r"^rank 1 was killed by SIGKILL: rank 1 on .* instruction 3 .*in step 2; rank 0",
    ):
        watch([(0, victim), (1, None)], heart(), heart(2, 3)).collect(progress())
    cause = Failure("NonFiniteLossError", "the loss is nan", "")
    with pytest.raises(NonFiniteLossError, match=r"^the loss is nan \(rank 1 on node n1\)$"):
        watch([(0, victim), (1, cause)], heart(), heart()).collect(progress())


def test_an_error_of_a_communication_names_the_machine_of_the_peer() -> None:
    victim = Failure("ExecutionError", "rank 0 lost its peer", "", (1,))
    watched = watch([(0, victim)], heart(), heart())
    with pytest.raises(ExecutionError, match=r"peer \(rank 0 on node n0, rank 1 on node n1\)$"):
        watched.collect(progress())


def test_a_machine_that_has_fallen_silent_is_named_first() -> None:
    lost = watch([], heart(), heart(2, 3))
    assert isinstance(lost.team, Dummies)
    lost.team.unheard = (1,)
    with pytest.raises(
        HangError,
        match=r"\(timeout_s\); node n1 with rank 1 is not heard from any more: it has ended, or "
        r".*; rank 0",
    ):
        lost.collect(progress())


def test_a_cause_that_comes_late_is_blamed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piper_runtime.launch.ground.watch, "LINGER_S", 0.0)
    victim = Failure("ExecutionError", "rank 0 lost its peer", "", (1,))
    watched = watch([], heart(), heart(2, 3))
    said: Iterator[list[tuple[int, Any]]] = iter([[(0, victim)], [], [], [(1, None)]])
    monkeypatch.setattr(watched.team, "wait", lambda ranks, seconds: next(said))
    with pytest.raises(ExecutionError, match=r"^rank 1 was killed by SIGKILL"):
        watched.collect(progress())


def test_a_hang_shows_the_last_instructions_of_every_rank() -> None:
    plan, _ = chain(pp=2)
    program = plan.role_of(1).program
    receive = next(i for i, instr in enumerate(program) if instr.comm)
    waiting = next(
        i for i, instr in enumerate(program) if instr.waits and not instr.comm and i > receive
    )
    with pytest.raises(HangError) as caught:
        watch([], heart(1, 6, RUNNING), heart(1, waiting, WAITING, receive + 1)).collect(progress())
    short, report = str(caught.value), caught.value.report
    assert re.match(
        r"no rank made progress for 0\.2 s \(timeout_s\); rank 0 on node n0 ran instruction 6 "
        r".*rank 1 on node n1 "
        r"waited",
        short,
    )
    zero, one = report.split("\nrank 1 ")
    assert [int(n) for n in re.findall(r"^  [> ] (\d+) ", zero, re.M)] == [2, 3, 4, 5, 6]
    assert f"  > {waiting} ({program[waiting].name} on compute)" in one
    assert (
        f"  in flight with rank 0: {receive} ({program[receive].name}" in one
        and "  waits for " in one
    )


@pytest.mark.parametrize(("shows", "longest_s"), [(True, 900), (False, 900), (True, 0)])
def test_a_rank_that_compiles_for_longer_than_the_time_out_is_not_hung(
    shows: bool, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls: without signs of progress it is, and so is one that compiles for longer than any compiler."""
    beats = heart(phase=LOADING)
    watched = watch([], beats, beats)
    ended = threading.Event()

    def slow(source: str, specs: object, device: object) -> Callable[[list[Any]], list[Any]]:
        ended.wait(20 * watched.timeout_s)
        return lambda args: args

    def progress() -> None:
        beats[ISSUED] += 1

    monkeypatch.setattr(code, "compiled_fusion", slow)
    monkeypatch.setattr(code, "PROGRESS_S", watched.timeout_s / 10)
    monkeypatch.setattr(code, "COMPILING_S", longest_s)
    monkeypatch.setattr(piper_runtime.launch.ground.watch, "STARTUP_S", watched.timeout_s)
    source = "add = FUSION('', ())\n\n\ndef step(args):\n    return add(args)\n"
    steps = code.LoadedSteps(
        {"chunk": {"F": code.ShippedCode(source)}}, progress=progress if shows else None
    )

    def load() -> None:
        steps("chunk", "F")
        watched.team.says.extend([(0, "answer"), (1, "answer")])

    rank = threading.Thread(target=load)
    rank.start()
    progress_of_run = Progress(watched.plan, None)
    if shows and longest_s:
        assert watched.collect(progress_of_run) == {0: "answer", 1: "answer"}
    else:
        with pytest.raises(HangError, match="was loading the plan"):
            watched.collect(progress_of_run)
    ended.set()
    rank.join()


def test_a_hang_while_loading_is_said_as_it_is() -> None:
    watched = watch([], heart(phase=LOADING), heart())
    assert watched._patience([0]) > 100 > watched._patience([1])
    assert "rank 0 on node n0 was loading the plan" in str(watched._hung([0, 1]))


def test_a_hang_while_a_checkpoint_is_written_is_said_as_it_is() -> None:
    error = watch([], heart(4, 7, SAVING), heart())._hung([0, 1])
    assert "rank 0 on node n0 was writing a checkpoint after step 4" in str(error)
    assert "  was writing a checkpoint after step 4" in error.report


def test_what_ranks_have_saved_is_handed_on_before_their_answers() -> None:
    found: list[SaveDone] = []
    said = [SaveDone(0, 3), SaveDone(1, 3)]
    watched = watch([(0, said[0]), (1, said[1]), (0, "answer"), (1, "answer")], heart(), heart())
    assert (
        watched.collect(Progress(chain(pp=2)[0], None, found.append)) == {0: "answer", 1: "answer"}
        and found == said
    )


def test_steps_are_counted_from_the_first_of_the_run() -> None:
    found: list[StepRecord] = []
    counted = Progress(chain(pp=2)[0], found.append, first_step=7)
    for step, rank in ((7, 0), (8, 0), (7, 1), (8, 1)):
        counted.add(rank, done(step, 11.0 + step))
    assert [r.step for r in found] == [7, 8]


def progress() -> Progress:
    return Progress(chain(pp=2)[0], None)


def test_nodes_that_differ_are_named_with_both_versions() -> None:
    ours = environment()
    check_environments(ours, "here", {"node a": dict(ours)})
    with pytest.raises(
        ExecutionError,
        match=rf"node b has torch 1\.0, here has {re.escape(ours['torch'])}; node b has NCCL 9",
    ):
        check_environments(
            ours, "here", {"node a": dict(ours), "node b": {**ours, "torch": "1.0", "NCCL": "9"}}
        )


def test_a_rank_that_evaluates_is_named_so_and_its_streams_are_of_another_plan() -> None:
    evaluating = heart(4, 7, RUNNING, 10_000)
    evaluating[EVALUATES] = 1
    error = watch([], evaluating, heart())._hung([0, 1])
    assert "rank 0 on node n0 was evaluating after step 4" in str(error)
    assert "  was evaluating after step 4" in error.report


def test_no_stream_has_a_slot_of_another_meaning() -> None:
    slots = [0] * HEART_SLOTS
    streams = CpuStreams([COMPUTE, *(f"comm{k}" for k in range(MOST_STREAMS - 1))], slots)
    places = {
        name: progress.place for name, progress in streams._progress.items() if name != COMPUTE
    }
    assert (
        min(places.values()) == FIRST_STREAM
        and max(places.values()) + 1 == EVALUATES == LAST_STEP - 1
    )


class Hearts(list[int]):
    """The hearts of ranks that go on by `jump` steps while their last step is first written."""

    def __init__(self, steps: Sequence[int], jump: int = 0) -> None:
        super().__init__([0] * (HEART_SLOTS * len(steps)))
        for rank, step in enumerate(steps):
            self[rank * HEART_SLOTS + STEP] = step
        self.jump = jump

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, value)
        if place % HEART_SLOTS == LAST_STEP and self.jump:
            jump, self.jump = self.jump, 0
            for rank in range(len(self) // HEART_SLOTS):
                super().__setitem__(
                    rank * HEART_SLOTS + STEP, self[rank * HEART_SLOTS + STEP] + jump
                )

    @property
    def last(self) -> list[int]:
        return self[LAST_STEP::HEART_SLOTS]


def test_an_interrupted_run_ends_after_its_own_steps_and_not_those_of_an_earlier_one() -> None:
    hearts = Hearts([7, 8, 1000])
    assert _Team("", hearts).finish_early(2, 10)
    assert hearts.last == [18, 18, 0]


def test_ranks_that_pass_their_last_step_while_it_is_written_get_another_one() -> None:
    hearts = Hearts([7, 8], jump=15)
    assert _Team("", hearts).finish_early(2, 10)
    assert hearts.last == [23 + 20] * 2, "both would have gone on to the end of the run"
