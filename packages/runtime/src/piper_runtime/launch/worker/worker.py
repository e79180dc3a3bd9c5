"""Perform requests in the worker of a rank, however it was started."""

from __future__ import annotations

import gc
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from piper_ir.ground.errors import ExecutionError, PiperError
from piper_ir.plan.plan import Plan
from piper_ir.tools import user_line
from piper_runtime.checkpoint.exact_params import keep_exact
from piper_runtime.checkpoint.host_snapshots import SnapshotWriter, announce
from piper_runtime.checkpoint.rank_saver import RankSaver
from piper_runtime.checkpoint.restoring import restore
from piper_runtime.engine.core_shares import core_share
from piper_runtime.engine.core_waits import core_waits, core_waits_of_all
from piper_runtime.engine.engine import PeerError
from piper_runtime.engine.failures import state_allocated
from piper_runtime.engine.ranges import named_instructions, profiled
from piper_runtime.engine.streams import (
    EVALUATES,
    ISSUED,
    LAST_STEP,
    LOADING,
    MOST_STREAMS,
    PHASE,
    RUNNING,
    SAVING,
    STEP,
    Heartbeat,
)
from piper_runtime.launch.ground.protocol import Failure, Notice, Request
from piper_runtime.launch.ground.report import RankReport, measured_counter
from piper_runtime.launch.ground.result import WARMUP_STEPS
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.worker.timed_rank import EmulationRequest, emulate_rank
from piper_runtime.profile.profiler import ProfileRequest, profile
from piper_runtime.rank.binding.evaluation import Evaluated, Evaluation, EvaluationRank, evaluate
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.values.code import missing_operators
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.transport import connected, take_device


@dataclass(frozen=True)
class WorkerContext:
    """Hold the tools of a rank's worker.

    Attributes:
        communicators: the communicators of this process, kept from run to run.
        heart: the slots in which the rank shows its progress.
        tell: sends a message to the launcher and does not wait for it.
        local_rank: the rank's number among the ranks that see the same devices; None: all ranks of the plan do.
        local_world: the most of them on any node; None: all ranks of the plan.
        core_sharers: the ranks that may run on the same cores; None: all ranks of the plan.
    """

    rank: int
    communicators: GlooCommunicators
    heart: Heartbeat
    tell: Callable[[Any], None]
    local_rank: int | None = None
    local_world: int | None = None
    core_sharers: tuple[int, ...] | None = None

    def on_cores(self, world: int) -> tuple[int, int]:
        """Return the number of this rank among the ranks that share its cores, and their count, of `world` ranks."""
        ranks = (
            range(world)
            if self.core_sharers is None
            else [rank for rank in self.core_sharers if rank < world]
        )
        return ranks.index(self.rank), len(ranks)


def warm_up() -> None:
    """Make an optimizer, since the first one of a process imports torch._dynamo, which takes seconds."""
    torch.optim.SGD([torch.zeros(())], lr=0.0)


def answer(context: WorkerContext, request: object) -> Any:
    """Return the answer to a request, or a Failure when it cannot be done."""
    try:
        return perform(context, request)
    except PiperError as e:
        details = "" if e.__cause__ is None else "".join(traceback.format_exception(e.__cause__))
        return Failure(
            type(e).__name__, str(e), details, e.peers if isinstance(e, PeerError) else ()
        )
    except Exception as e:
        when = (
            "before its first step"
            if context.heart[PHASE] == LOADING
            else f"between instructions of step {context.heart[STEP]}"
        )
        message = f"rank {context.rank} failed {when}: {type(e).__name__}: {e}"
        return Failure("ExecutionError", message, "".join(traceback.format_exception(e)))
    except (
        SystemExit,
        KeyboardInterrupt,
    ) as e:  # of the job's own code: who interrupts a run does not interrupt its workers
        said = f": {e}" if str(e) else ""
        message = (
            f"rank {context.rank}, step {context.heart[STEP]}: {type(e).__name__}{said} was raised in the job's "
            f"code{user_line(e)}, and would end the process. Raise an exception such as RuntimeError to end a run"
        )
        return Failure("ExecutionError", message, "".join(traceback.format_exception(e)))


def perform(context: WorkerContext, request: object) -> Any:
    """Return the answer to a request, by its class."""
    match request:
        case Request():
            return run(context, request)
        case ProfileRequest():
            local_rank = context.rank if context.local_rank is None else context.local_rank
            local = local_rank, context.local_world
            return profile(
                context.rank,
                request,
                context.communicators,
                context.heart,
                *local,
                context.on_cores,
            )
        case EmulationRequest():
            return emulate_rank(context.rank, request, context.communicators, context.heart)
    raise ExecutionError(f"rank {context.rank} cannot perform a {type(request).__name__}")


def run(context: WorkerContext, request: Request) -> RankReport:
    """Bind the plan, bring the rank to a saved state if there is one, and run its steps."""
    plan: Plan = pickle.loads(request.plan)
    local_rank = context.rank if context.local_rank is None else context.local_rank
    device = take_device(request.device, local_rank)
    with core_share(device, *context.on_cores(plan.mesh.world)):
        return _run(context, request, plan, device)


def _run(context: WorkerContext, request: Request, plan: Plan, device: torch.device) -> RankReport:
    rank, heart = context.rank, context.heart
    parcel = pickle.loads(request.callables)
    batch, optimizer, scheduler, measured = parcel.open()
    asked = request.evaluation
    evaluation = None
    if asked is not None:
        evaluation = Evaluation(
            pickle.loads(asked.plan), asked.code, measured, asked.every, asked.batches
        )
    if missing_operators(request.code) or (asked is not None and missing_operators(asked.code)):
        parcel.import_definers()
    options = request.options
    report = RankReport(first_step=options.first)

    def progress() -> None:
        heart[ISSUED] += 1

    job = RankJob(
        batch, optimizer, scheduler, request.seed, options.first, request.draws, request.loss_scale, progress,
    )  # fmt: skip
    if device.type == "cuda":
        gc.collect()  # an earlier rank and its closures hold each other, and memory of the device
    probe = report.probe if options.gradients else None
    snapshots = request.snapshots
    if snapshots is not None and not announce(rank, snapshots):
        context.tell(
            Notice(
                f"rank {rank} is on another machine than the launcher: no host snapshots are used"
            )
        )
        snapshots = None
    with state_allocated(plan, rank):
        bound = Rank(plan, rank, request.code, job, request.params, request.buffers, probe, device)
        if options.checkpoint is not None or request.restore is not None:
            keep_exact(
                bound,
                request.params,
                share=snapshots is None,
                restored=request.restore is not None,
            )
        if request.restore is not None:
            restore(bound, request.restore, lambda n: heart.__setitem__(ISSUED, n))
    streams = plan.role_of(rank).streams
    if len(streams) > MOST_STREAMS:
        raise ExecutionError(
            f"rank {rank} has {len(streams)} streams; at most {MOST_STREAMS} are supported"
        )
    with bound.feed.ahead(options.loader, options.numbers):
        _train(context, bound, replace(request, snapshots=snapshots), report, evaluation)
    return report


def _train(
    context: WorkerContext,
    bound: Rank,
    request: Request,
    report: RankReport,
    evaluation: Evaluation | None,
) -> None:
    """Run the steps of a bound rank, and save its state if a checkpoint is due."""
    options = request.options
    heart, world = context.heart, bound.plan.mesh.world
    local_world = world if context.local_world is None else context.local_world
    name = named_instructions if options.named else None
    backend, engine = connected(
        bound, context.communicators, heart, local_world=local_world, trace=options.trace, name=name
    )
    evaluator = None if evaluation is None else _Evaluator(context, bound, evaluation, local_world)
    saves = _RankSaves(context, bound, request)
    counter, waited, warm = None, core_waits(), 0.0
    report.started = time.perf_counter()
    heart[PHASE] = RUNNING
    for step in options.numbers:
        if step == heart[LAST_STEP] > 0:
            break
        observed = options.memory and step == options.measured
        if observed:
            counter = measured_counter(bound, alone=True)
        if len(report.core_s) == WARMUP_STEPS:
            warm = core_waits_of_all()
        before = waited()
        with _observation(options, bound, step):
            engine.step(
                step,
                traced=options.trace and step == options.numbers[-1],
                counter=counter if observed else None,
            )
        ended = time.perf_counter()
        report.core_s.append(waited() - before)
        done = report.end_step(bound, ended, None if evaluator is None else evaluator.after(step))
        if request.reports_steps:
            context.tell(done)
        saves.step_done(step + 1)
    if (steps := len(report.core_s) - WARMUP_STEPS) > 0:
        report.threads_s = (core_waits_of_all() - warm) / steps
    saves.finish(options.first + len(report.finished))
    if evaluator is not None:
        evaluator.close()
    engine.close()
    backend.close()
    report.close(bound, engine.spans, counter)


def _observation(options: RunOptions, bound: Rank, step: int) -> AbstractContextManager[None]:
    """Return the profiler for the last step, if it is asked for."""
    if options.profiler is None or step != options.numbers[-1]:
        return nullcontext()
    return profiled(Path(options.profiler), bound.rank, step, bound.plan.program_key)


class _Evaluator:
    """Evaluate the model on a rank if an evaluation is due, with streams of its own."""

    def __init__(
        self, context: WorkerContext, bound: Rank, evaluation: Evaluation, local_world: int
    ) -> None:
        self._evaluation, self._heart = evaluation, context.heart
        self._rank = EvaluationRank(bound, evaluation)
        self._backend, self._engine = connected(
            self._rank, context.communicators, context.heart, local_world=local_world, trace=False
        )

    def after(self, step: int) -> Evaluated | None:
        """Return the rank's results of the evaluation after a step; None if none is due."""
        if not self._evaluation.due(step):
            return None
        self._heart[EVALUATES] = 1
        results = evaluate(self._evaluation, [self._rank], lambda: self._engine.step(step))
        self._heart[EVALUATES] = 0
        return results[self._rank.rank]

    def close(self) -> None:
        """End the threads of its streams."""
        self._backend.close()


class _RankSaves:
    """Save a rank, and copy its state to memory, if that is asked for."""

    def __init__(self, context: WorkerContext, bound: Rank, request: Request) -> None:
        kept, copied = request.options.checkpoint, request.snapshots
        self._heart = heart = context.heart
        self._saver = None if kept is None else RankSaver(bound, kept, context.tell, _saving(heart))
        self._copier = None
        if copied is not None:
            self._copier = SnapshotWriter(bound, copied, lambda text: context.tell(Notice(text)))

    def step_done(self, done: int) -> None:
        """Save and copy the rank if that is due after so many steps."""
        if self._copier is not None:
            self._copier.step_done(done)
        if self._saver is not None:
            self._saver.step_done(done)
            self._heart[PHASE] = RUNNING

    def finish(self, done: int) -> None:
        """Save the rank after its last step."""
        if self._saver is not None:
            self._saver.finish(done)


def _saving(heart: Heartbeat) -> Callable[[int], None]:
    """Return a function that shows in the heart that the rank waits for a checkpoint, and how far that is."""

    def beat(written: int) -> None:
        heart[PHASE], heart[ISSUED] = SAVING, written

    return beat
