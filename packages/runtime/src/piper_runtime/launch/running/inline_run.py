"""Run all ranks of a plan in this process, one step after the other."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from piper_ir.ground.errors import PiperWarning
from piper_runtime.checkpoint.exact_params import keep_exact
from piper_runtime.checkpoint.host_snapshots import SnapshotWriter, announce
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.checkpoint.rank_saver import RankSaver
from piper_runtime.checkpoint.restoring import restore, restore_of
from piper_runtime.engine.failures import state_allocated
from piper_runtime.engine.inline import InlineEngine
from piper_runtime.engine.memory import Counter
from piper_runtime.engine.ranges import name_inline
from piper_runtime.engine.trace import TimedSpan
from piper_runtime.launch.ground.interrupt import at_step_end
from piper_runtime.launch.ground.progress import Progress
from piper_runtime.launch.ground.report import Interrupted, RankReport, measured_counter
from piper_runtime.launch.ground.request import Attempt
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank.binding.evaluation import Evaluated, Evaluation, EvaluationRank, evaluate
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.values import device as devices
from piper_runtime.rank.values.device import choose_device


def rank_job(job: Job, first_step: int = 0) -> RankJob:
    """Return the part of a job that ranks need for a run that begins with this step."""
    return RankJob(
        job.batch, job.make_optimizers, job.scheduler, job.seed, first_step, job.draws, job.precision.scaling,
    )  # fmt: skip


def run_inline(attempt: Attempt, progress: Progress) -> dict[int, RankReport]:
    """Return the results of every rank, but of the steps, which `progress` gets.

    Raises Interrupted after an interrupt.
    """
    plan, options, initial, saved = attempt.plan, attempt.options, attempt.initial, attempt.saved
    reports = {r: RankReport(first_step=options.first) for r in range(plan.mesh.world)}
    device = choose_device(devices.default, 0)  # all ranks on one
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        job_part = rank_job(attempt.job, options.first)
        ranks = []
        state = None if saved is None else restore_of(saved, {*initial.params, *initial.buffers})
        for r, report in reports.items():
            probe = report.probe if options.gradients else None
            with state_allocated(plan, r):
                rank = Rank(
                    plan, r, attempt.code, job_part, initial.params, initial.buffers, probe, device
                )
                if options.checkpoint is not None or state is not None:
                    keep_exact(
                        rank,
                        initial.params,
                        share=attempt.snapshots is None,
                        restored=state is not None,
                    )
                if state is not None:
                    restore(rank, state)
            ranks.append(rank)
        if options.ranges:
            for rank in ranks:
                name_inline(rank)
        saves = _Saves(ranks, attempt, progress)
        try:
            interrupted = _train(ranks, options, progress, reports, saves)
        finally:
            saves.close()
    if interrupted:
        raise Interrupted(reports)
    return reports


def _train(
    ranks: Sequence[Rank],
    options: RunOptions,
    progress: Progress,
    reports: dict[int, RankReport],
    saves: _Saves,
) -> bool:
    """Run the steps, and return whether an interrupt ended them."""
    counters: dict[int, Counter] = {}
    engine = InlineEngine(ranks)
    evaluator = None if options.evaluation is None else _Evaluator(ranks, options.evaluation)
    for report in reports.values():
        report.started = time.perf_counter()
    spans: dict[int, list[TimedSpan]] = {}
    done = options.first
    with at_step_end() as interrupt:
        for step in options.numbers:
            if options.memory and step == options.measured:
                counters = engine.counters = {r.rank: measured_counter(r) for r in ranks}
            spans = engine.step(step)
            ended, evaluations = (
                time.perf_counter(),
                {} if evaluator is None else evaluator.after(step),
            )
            for rank in ranks:
                progress.add(
                    rank.rank, reports[rank.rank].end_step(rank, ended, evaluations.get(rank.rank))
                )
                reports[rank.rank].hand_on()
            engine.counters = {}
            done = step + 1
            saves.step_done(done)
            if interrupt.asked:
                break
    saves.finish(done)
    for rank in ranks:
        reports[rank.rank].close(
            rank, spans.get(rank.rank, []) if options.trace else [], counters.get(rank.rank)
        )
    return interrupt.asked


class _Evaluator:
    """Evaluate the model of all ranks of this process if an evaluation is due."""

    def __init__(self, ranks: Sequence[Rank], evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._ranks = [EvaluationRank(rank, evaluation) for rank in ranks]
        self._engine = InlineEngine(self._ranks)

    def after(self, step: int) -> Mapping[int, Evaluated]:
        """Return the ranks' results of the evaluation after a step; nothing if none is due."""
        if not self._evaluation.due(step):
            return {}
        return evaluate(self._evaluation, self._ranks, lambda: self._engine.step(step))


def _warn(text: str) -> None:
    warnings.warn(text, PiperWarning, stacklevel=2)


class _Saves:
    """Save all ranks of this process, and copy them to memory, if that is asked for."""

    def __init__(self, ranks: Sequence[Rank], attempt: Attempt, progress: Progress):
        self._said: deque[SaveDone] = deque()
        self._progress = progress
        kept = attempt.options.checkpoint
        self._savers = (
            [] if kept is None else [RankSaver(rank, kept, self._said.append) for rank in ranks]
        )
        asked = attempt.snapshots
        self._copiers = (
            []
            if asked is None
            else [SnapshotWriter(r, asked, _warn) for r in ranks if announce(r.rank, asked)]
        )

    def step_done(self, done: int) -> None:
        for copier in self._copiers:
            copier.step_done(done)
        for saver in self._savers:
            saver.step_done(done)
        self._hand_on()

    def finish(self, done: int) -> None:
        for saver in self._savers:
            saver.finish(done)
        self._hand_on()

    def close(self) -> None:
        """Wait for writes that go on, also after a failed step; their files count."""
        for saver in self._savers:
            saver.close()
        self._hand_on()

    def _hand_on(self) -> None:
        while self._said:
            self._progress.saved(self._said.popleft())
