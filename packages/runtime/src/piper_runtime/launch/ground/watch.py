"""Wait for the workers of a run, however they were started, and find the rank to blame when they do not come back."""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import piper_ir.ground.errors
from piper_ir.ground.errors import ExecutionError, HangError, PiperError, PiperWarning, RankError
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.ops import COMM
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.engine.streams import (
    EVALUATES,
    FIRST_STREAM,
    HEART_SLOTS,
    ISSUED,
    LOADING,
    PHASE,
    RUNNING,
    SAVING,
    STEP,
)
from piper_runtime.launch.ground.progress import Progress
from piper_runtime.launch.ground.protocol import Failure, Notice
from piper_runtime.launch.ground.report import StepDone

STARTUP_S = 120.0
"""The seconds for workers to start and import torch, and again to import the user's code and to bind a plan."""
LINGER_S = 0.5
"""The seconds to wait for other failures after one that may be the cause."""
VICTIMS_S = 5.0
"""The seconds to wait for the cause after a failure of a rank that only lost its peer."""
TICK_S = 0.1
SHOWN = 5
"""The number of instructions per rank in the report of a hang."""
LOADING_HEART = array("q", [LOADING if i == PHASE else 0 for i in range(HEART_SLOTS)])
"""The heart of a rank that has been given a request and is not yet in its first step."""


class WatchedTeam(Protocol):
    """Show a watch the workers that have been given one request each."""

    def wait(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        """Return the messages of these ranks as (rank, message), at least one unless `seconds` pass first.

        A message is a StepDone, a SaveDone, a Notice, a Failure, None when the worker has ended, or the answer to its
        request; after the last three a rank says no more.
        """

    def heart(self, rank: int) -> Sequence[int]:
        """Return a rank's heart (`piper_runtime.engine.streams`), as fresh as possible."""

    def exit_reason(self, rank: int) -> str:
        """Return how a worker has ended: "was killed by SIGKILL"."""

    def node(self, rank: int) -> str:
        """Return the name of the machine that a rank runs on; empty when there is only this one."""

    def silent(self, seconds: float) -> Collection[int]:
        """Return the ranks on other machines that sent nothing for so long, not even that they wait."""


@dataclass
class Watch:
    """Wait for the answers of all ranks of one run; `plan` gives instructions their names."""

    plan: Plan
    team: WatchedTeam
    world: int
    timeout_s: float

    def collect(self, progress: Progress) -> dict[int, Any]:
        """Return all answers, and pass steps to `progress` as they finish.

        Otherwise it raises HangError, ExecutionError or the PiperError of a rank.
        """
        waiting = set(range(self.world))
        answers: dict[int, Any] = {}
        failures: dict[int, Failure | None] = {}
        before, moved, end = self._hearts(), time.monotonic(), float("inf")
        while waiting and (left := end - time.monotonic()) > 0:
            for rank, message in self.team.wait(waiting, min(TICK_S, self.timeout_s / 4, left)):
                if isinstance(message, StepDone):
                    progress.add(rank, message)
                    continue
                if isinstance(message, SaveDone):
                    progress.saved(message)
                    continue
                if isinstance(message, Notice):
                    warnings.warn(message.text, PiperWarning, stacklevel=2)
                    continue
                waiting.discard(rank)
                if message is None or isinstance(message, Failure):
                    failures[rank] = message
                    end = min(end, time.monotonic() + (VICTIMS_S if _peer(message) else LINGER_S))
                else:
                    answers[rank] = message
            now = self._hearts()
            if now != before:
                before, moved = now, time.monotonic()
            if not failures and waiting and time.monotonic() > moved + self._patience(waiting):
                raise self._hung(sorted(waiting))
        if failures:
            raise self._blame(failures)
        return answers

    def _hearts(self) -> list[list[int]]:
        return [list(self.team.heart(rank)) for rank in range(self.world)]

    def _patience(self, ranks: Collection[int]) -> float:
        """Return the accepted seconds without progress, more while a rank imports user code and binds the plan."""
        loading = any(self.team.heart(r)[PHASE] == LOADING for r in ranks)
        return max(self.timeout_s, STARTUP_S) if loading else self.timeout_s

    def _blame(self, failures: Mapping[int, Failure | None]) -> PiperError:
        """Return the error of a rank that failed by itself, or without one, the error of a rank that lost its peer."""
        order = sorted(failures, key=lambda r: (_peer(failures[r]), failures[r] is not None, r))
        first, others = order[0], order[1:]
        failure = failures[first]
        if failure is None:
            seen = "".join(f"; {self._place(r)}" for r in others)
            lost = tuple(r for r in order if failures[r] is None)
            return RankError(
                f"rank {first} {self.team.exit_reason(first)}: {self._place(first)}{seen}", lost
            )
        kind = getattr(piper_ir.ground.errors, failure.kind, RankError)
        node = self.team.node(first)
        where = (
            [f"rank {r} on {self.team.node(r)}" for r in (first, *failure.peers)] if node else []
        )
        message = f"{failure.message} ({', '.join(where)})" if where else failure.message
        error: PiperError = RankError(message) if kind is ExecutionError else kind(message)
        if failure.details:
            error.add_note(f"on rank {first}:\n{failure.details}")
        return error

    def _hung(self, ranks: Sequence[int]) -> HangError:
        """Return the error of a hang; ranks in no communication come first, since nobody keeps them waiting."""
        first = [
            r for r in ranks if not RankPosition(self.plan, r, self.team.heart(r)).communications
        ]
        message = (
            f"no rank made progress for {self.timeout_s:g} s (timeout_s); "
            + self._unheard()
            + "; ".join(self._place(r) for r in [*first, *(r for r in ranks if r not in first)])
            + ". If an instruction may take that long, give a larger timeout_s"
        )
        report = [
            f"no rank made progress for {self.timeout_s:g} s; per rank its last {SHOWN} instructions, > the one it "
            f"is at"
        ]
        for rank in range(self.world):
            answered = "" if rank in ranks else ": has ended its run"
            node = self.team.node(rank)
            report += ["", f"rank {rank}{f' on {node}' if node else ''}{answered}"]
            report += (
                [] if answered else RankPosition(self.plan, rank, self.team.heart(rank)).lines()
            )
        error = HangError(message, "\n".join(report) + "\n")
        error.add_note(error.report)
        return error

    def _unheard(self) -> str:
        """Return which machines have fallen silent, which is the cause of all else; an empty text when none has."""
        by_node: dict[str, list[int]] = {}
        for rank in sorted(self.team.silent(self.timeout_s / 2)):
            by_node.setdefault(self.team.node(rank), []).append(rank)
        return "".join(
            f"{node or 'nothing'} with rank {', '.join(map(str, ranks))} is not heard from any more: it has ended, "
            f"or the network between is cut; "
            for node, ranks in by_node.items()
        )

    def _place(self, rank: int) -> str:
        return RankPosition(self.plan, rank, self.team.heart(rank), self.team.node(rank)).text()


class RankPosition:
    """Describe a rank's position in its program, from its heart."""

    def __init__(self, plan: Plan, rank: int, heart: Sequence[int], node: str = ""):
        self._plan, self._rank, self._name = (
            plan,
            rank,
            f"rank {rank}{f' on {node}' if node else ''}",
        )
        self._program = plan.role_of(rank).program
        self._step, self._phase, self._evaluates = heart[STEP], heart[PHASE], bool(heart[EVALUATES])
        self._index = min(max(heart[ISSUED], 0), len(self._program) - 1)
        running = [i - 1 for i in heart[FIRST_STREAM:EVALUATES] if i and not heart[EVALUATES]]
        self.communications = [
            i for i in running if i < len(self._program) and self._program[i].stream != COMPUTE
        ]
        """The indices of the communications that the rank is in."""

    def text(self) -> str:
        """Return step, instruction, stream, and the ranks that the rank waits for, in one line."""
        if self._phase == LOADING:
            return f"{self._name} was loading the plan"
        if self._phase == SAVING:
            return f"{self._name} was writing a checkpoint after step {self._step}"
        if self._evaluates:
            return f"{self._name} was evaluating after step {self._step}"
        doing = "ran" if self._phase == RUNNING else "waited before"
        what = f"instruction {self._instr(self._index)}" if self._program else "an empty program"
        text = f"{self._name} {doing} {what} in step {self._step}"
        for i in self.communications:
            text += f" and waited for rank {self._peers(i)} in instruction {self._instr(i)}"
        return text

    def lines(self) -> list[str]:
        """Return the last instructions that the rank has issued and its communications in flight, with their waits."""
        if self._phase == LOADING or not self._program:
            return [
                "  was loading the plan" if self._phase == LOADING else "  has an empty program"
            ]
        if self._phase == SAVING:
            return [f"  was writing a checkpoint after step {self._step}"]
        if self._evaluates:
            return [f"  was evaluating after step {self._step}"]
        first = max(self._index - SHOWN + 1, 0)
        text_lines = [f"  step {self._step}"]
        text_lines += [
            f"  {'>' if i == self._index else ' '} {self._instr(i)}"
            for i in range(first, self._index + 1)
        ]
        if self._phase != RUNNING:
            awaited = [
                self._instr(self._nth(stream, n)) for stream, n in self._program[self._index].waits
            ]
            last = self._index == len(self._program) - 1
            text_lines += [f"  waits for {text}" for text in awaited]
            text_lines += ["  waits for the end of all its streams"] if last else []
        text_lines += [
            f"  in flight with rank {self._peers(i)}: {self._instr(i)}" for i in self.communications
        ]
        return text_lines

    def _instr(self, index: int) -> str:
        return f"{index} ({self._program[index].name} on {self._program[index].stream})"

    def _nth(self, stream: str, n: int) -> int:
        return [i for i, instr in enumerate(self._program) if instr.stream == stream][n - 1]

    def _peers(self, index: int) -> str:
        op = self._program[index].parts[0].op
        assert isinstance(op, COMM)
        return ", ".join(
            str(p)
            for p in self._plan.peers(self._plan.channel(op.channel), self._rank)
            if p != self._rank
        )


def _peer(failure: Failure | None) -> bool:
    return failure is not None and bool(failure.peers)
