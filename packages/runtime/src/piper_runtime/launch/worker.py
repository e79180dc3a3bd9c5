"""Perform requests in the worker of a rank, however it was started."""

from __future__ import annotations

import gc
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from piper_ir.errors import ExecutionError, PiperError
from piper_ir.tools import user_line
from piper_runtime.engine.engine import PeerError
from piper_runtime.engine.ranges import named_instructions
from piper_runtime.engine.streams import HEART_SLOTS, LAST_STEP, LOADING, PHASE, RUNNING, STEP, Heartbeat
from piper_runtime.launch.protocol import Failure, Request
from piper_runtime.launch.report import RankReport, measured_counter, measured_step
from piper_runtime.launch.timed_rank import EmulationRequest, emulate_rank
from piper_runtime.profile.profiler import ProfileRequest, profile
from piper_runtime.rank.code import missing_operators
from piper_runtime.rank.rank import Rank
from piper_runtime.rank.rank_state import RankJob
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.transport import connected, take_device


@dataclass(frozen=True)
class WorkerContext:
    """Hold the tools of a rank's worker.

    Attributes:
        communicators: those of this process, kept from run to run.
        heart: where the rank shows its progress.
        tell: sends a message to the launcher and does not wait for it.
        local_rank: the rank's number among those that see the same devices; None: all ranks of the plan do.
        local_world: the most of them on any node; None: all ranks of the plan.
    """

    rank: int
    communicators: GlooCommunicators
    heart: Heartbeat
    tell: Callable[[Any], None]
    local_rank: int | None = None
    local_world: int | None = None


def warm_up() -> None:
    """Make an optimizer, since the first one of a process imports torch._dynamo, which takes seconds."""
    torch.optim.SGD([torch.zeros(())], lr=0.0)


def answer(context: WorkerContext, request: object) -> Any:
    """Return the answer to a request, or a Failure when it cannot be done."""
    try:
        return perform(context, request)
    except PiperError as e:
        details = "" if e.__cause__ is None else "".join(traceback.format_exception(e.__cause__))
        return Failure(type(e).__name__, str(e), details, isinstance(e, PeerError))
    except Exception as e:
        when = (
            "before its first step" if context.heart[PHASE] == LOADING else f"between instructions of step {context.heart[STEP]}"
        )
        message = f"rank {context.rank} failed {when}: {type(e).__name__}: {e}"
        return Failure("ExecutionError", message, "".join(traceback.format_exception(e)), False)
    except (SystemExit, KeyboardInterrupt) as e:  # of the job's own code: who interrupts a run does not interrupt its workers
        said = f": {e}" if str(e) else ""
        message = (
            f"rank {context.rank}, step {context.heart[STEP]}: {type(e).__name__}{said} was raised in the job's code"
            f"{user_line(e)}, and would end the process. Raise an exception such as RuntimeError to end a run"
        )
        return Failure("ExecutionError", message, "".join(traceback.format_exception(e)), False)


def perform(context: WorkerContext, request: object) -> Any:
    """Return the answer to a request, by its class."""
    match request:
        case Request():
            with ExitStack() as ending:
                return run(context, request, ending)
        case ProfileRequest():
            local_rank = context.rank if context.local_rank is None else context.local_rank
            return profile(context.rank, request, context.communicators, context.heart, local_rank, context.local_world)
        case EmulationRequest():
            return emulate_rank(context.rank, request, context.communicators, context.heart)
    raise ExecutionError(f"rank {context.rank} cannot perform a {type(request).__name__}")


def run(context: WorkerContext, request: Request, ending: ExitStack) -> RankReport:
    """Bind the plan and run its steps; `ending` then ends what goes on beside them, however they end."""
    rank, heart, communicators = context.rank, context.heart, context.communicators
    plan = pickle.loads(request.plan)
    parcel = pickle.loads(request.callables)
    batch, optimizer, scheduler = parcel.open()
    if missing_operators(request.code):
        parcel.import_definers()
    report, options = RankReport(), request.options
    job = RankJob(batch, optimizer, scheduler, request.seed)
    device = take_device(request.device, rank if context.local_rank is None else context.local_rank)
    if device.type == "cuda":
        gc.collect()  # an earlier rank and its closures hold each other, and memory of the device
    probe = report.probe if options.gradients else None
    bound = Rank(plan, rank, request.code, job, request.params, request.buffers, probe, device)
    streams = plan.role_of(rank).streams
    if len(streams) > HEART_SLOTS - 4:
        raise ExecutionError(f"rank {rank} has {len(streams)} streams; at most {HEART_SLOTS - 4} are supported")
    local_world = plan.mesh.world if context.local_world is None else context.local_world
    name = named_instructions if options.ranges else None
    backend, engine = connected(bound, communicators, heart, local_world=local_world, trace=options.trace, name=name)
    counter = None
    ending.enter_context(bound.feed.ahead(options.loader, range(options.steps)))
    report.started = time.perf_counter()
    heart[PHASE] = RUNNING
    for step in range(options.steps):
        if step == heart[LAST_STEP] > 0:
            break
        last = step == options.steps - 1
        observed = options.memory and step == measured_step(options.steps)
        if observed:
            counter = measured_counter(bound, alone=True)
        engine.step(step, traced=options.trace and last, counter=counter if observed else None)
        done = report.end_step(bound)
        if options.stream:
            context.tell(done)
    backend.close()
    report.close(bound, engine.spans, counter)
    return report
