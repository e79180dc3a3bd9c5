"""Run a plan until its steps are done, again after failures if that is allowed, and return one result of it all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from piper_ir.ground.errors import PiperError
from piper_ir.ground.trace import BUSY_MACHINE
from piper_ir.plan.plan import Plan
from piper_ir.tools import time_text
from piper_runtime.engine.trace import StepMeasurements, executed_trace
from piper_runtime.launch.ground.progress import Progress, evaluated
from piper_runtime.launch.ground.recovery import Recovery, lost
from piper_runtime.launch.ground.report import MEASURED, Interrupted, RankReport, StepRecord
from piper_runtime.launch.ground.request import Attempt, make_requests
from piper_runtime.launch.ground.result import WARMUP_STEPS, Run
from piper_runtime.launch.ground.workers import Workers
from piper_runtime.launch.running.beginning import Beginning, committing, next_beginning
from piper_runtime.launch.running.inline_run import run_inline
from piper_runtime.launch.running.survivors import Survivors
from piper_runtime.launch.torchrun.joined import joined_gradients, joined_states
from piper_runtime.rank.job.job import InitialState, Job
from piper_runtime.rank.values.code import ExportedCode

TRACED = (
    "to see when a communication ends, a thread waits for it in the traced step of processes on CPUs, and wakes "
    "who needs it, some 30 us each, which other steps do not"
)


MUCH, MUCH_OF_ALL = 0.1, 0.5
"""The shares of a step above which waits for a core are noted: of the issuing thread, and of all threads of a rank.

Threads that carry messages wait behind threads that compute, which took a third of a step on two cores with nothing
beside them, and half to nine tenths beside other programs (examples/moe_text.py, 24 November).
"""


def busy_note(reports: Mapping[int, RankReport], period_s: float | None) -> dict[str, str]:
    """Return a note on how long ranks waited for a core in a step, if that is much of its time."""
    waited = [median(of) for r in reports.values() if (of := r.core_s[WARMUP_STEPS:])]
    if period_s is None or not waited:
        return {}
    together = max(r.threads_s for r in reports.values())
    if max(waited) < MUCH * period_s and together < MUCH_OF_ALL * period_s:
        return {}
    least, most, of_all = map(time_text, (min(waited), max(waited), together))
    return {
        BUSY_MACHINE: f"in a step, ranks waited {least} to {most} for a core that others had; with the threads "
        f"that carry messages, up to {of_all}. An exchange waits for the latest of all these. None "
        f"of it is predicted"
    }


@dataclass(frozen=True)
class Attempts:
    """Run one job with the same workers, as often as is needed.

    Attributes:
        first: the beginning of the first attempt.
        workers: None if ranks run in this process.
        survivors: keeps the ranks' copies in memory.
    """

    job: Job
    initial: InitialState
    first: Beginning
    workers: Workers | None
    survivors: Survivors

    def run(self, plan: Plan, code: ExportedCode, recovery: Recovery) -> Run:
        """Return the result of all steps; raise the error of an attempt after which the run does not go on."""
        begin = self.first
        while True:
            try:
                reports = self._attempt(plan, code, begin, recovery)
            except Interrupted as e:
                e.run = self._result(plan, e.reports, recovery)
                raise
            except PiperError as e:
                recovery.check(e)
                failed = plan
                plan, code = recovery.replanned(
                    e, plan, code, (lambda: math.inf) if self.workers is None else self.workers.room
                )
                if self.workers is not None and recovery.replans:
                    self.workers.world = plan.mesh.world
                newest = partial(self.survivors.newest, failed, lost(e), recovery.next)
                with recovery.ending(e):
                    begin = next_beginning(self.first, plan, self.job, newest)
                recovery.goes_on(e, begin.step, plan, begin.state_text)
            else:
                return self._result(plan, reports, recovery)

    def _attempt(
        self, plan: Plan, code: ExportedCode, begin: Beginning, recovery: Recovery
    ) -> Mapping[int, RankReport]:
        """Return the results of every rank; raise Interrupted when ranks could end an interrupted run together."""
        options = begin.options
        attempt = Attempt(
            plan,
            code,
            self.job,
            self.initial,
            options,
            begin.copied or begin.saved,
            self.survivors.options(),
        )
        with committing(options.checkpoint, plan, self.job, self.initial) as on_save:
            if self.workers is None:
                return run_inline(attempt, Progress(plan, recovery.heard, on_save, options.first))
            on_step = recovery.heard if options.reports_steps else None
            return self.workers.run(
                plan, make_requests(attempt), options.timeout_s, on_step, on_save
            )

    def _result(self, plan: Plan, reports: Mapping[int, RankReport], recovery: Recovery) -> Run:
        step_records: list[StepRecord] = []
        first = min(r.first_step for r in reports.values())
        Progress(plan, step_records.append, first_step=first).finish(reports)
        records = recovery.records(step_records)
        last = [*records[-1:], *step_records[-1:]]  # of the last attempt, if its ranks have kept it
        losses, step_s = [r.loss for r in records], [r.step_s for r in records]
        notes = {"peak_bytes": MEASURED} if self.first.options.memory else {}
        if any(r.spans for r in reports.values()):
            notes["traced step"] = f"{last[-1].step_s:.6g} s; {TRACED}"
        if error := max(r.clock_error_s for r in reports.values()):
            notes["clock_error_s"] = f"{error:.2e}: between nodes, half of the quickest round trip"
        period_s = median(step_s[WARMUP_STEPS:]) if step_s[WARMUP_STEPS:] else None
        notes |= busy_note(reports, period_s)
        spans = {r: rep.spans for r, rep in reports.items()}
        points = {r: rep.memory.points for r, rep in reports.items() if rep.memory is not None}
        waits = {r: rep.waits for r, rep in reports.items() if rep.spans}
        trace = executed_trace(
            plan,
            last[-1].step if last else first - 1,
            StepMeasurements(spans, points, waits),
            losses,
            notes,
        )
        return Run(
            losses, step_s, period_s,
            {r: rep.memory.peak for r, rep in sorted(reports.items()) if rep.memory is not None}, trace,
            joined_states(plan, reports), joined_gradients(plan, reports),
            {r: rep.memory for r, rep in reports.items() if rep.memory is not None}, self.initial, [r.batch_s for r in records],
            records[0].step if records else first, tuple(recovery.failures), [r.metrics for r in records],
            {r.step: evaluated(r, self.job.metrics) for r in records if r.evaluation},
        )  # fmt: skip
