"""Run a worker process, which scores the strategies from its connection until that closes."""

from __future__ import annotations

import pickle
import signal
from multiprocessing.connection import Connection

from piper_autotune.scoring.scoring import Refused, Scored, score
from piper_autotune.space.problem import TuningProblem, Wanted
from piper_ir.program.program import Program
from piper_ir.tools import no_garbage_collection

READY = "ready"


def serve(descriptor: int) -> None:
    """Score the strategies that arrive on the connection with this file descriptor, until it closes.

    The first message is a packed TuningProblem. Each later one is a tuple: a packed strategy, whether the event engine
    scores it, and the programs that this worker has not seen yet. The answer is the result of `score`.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the process that searches; it ends this one
    connection = Connection(descriptor)
    variants: dict[Wanted, Program | str | None] = {}
    known: dict[object, Scored | Refused] = {}
    try:
        problem: TuningProblem = pickle.loads(connection.recv_bytes())
        connection.send(READY)
        while True:
            with no_garbage_collection():
                strategy, engine, more = pickle.loads(connection.recv_bytes())
                variants.update(more)
                answer = score(problem, pickle.loads(strategy), variants, engine, known)
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
