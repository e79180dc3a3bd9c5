"""Exchange the messages of ranks through torch's store, which may never answer: its host can be cut off in any call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

from piper_ir.ground.errors import ExecutionError, HangError
from piper_runtime.launch.worker.wire import decode, encode

BEAT = 8
"""The bytes in front of a heart in the store: a count, which shows that its rank can still be heard."""
LAST_WORDS_S = 2.0
"""The seconds that a rank which ends takes to tell the others why."""
_T = TypeVar("_T")


class Patient:
    """Make calls that may block in native code in a thread of its own, one after the other.

    While such a call blocks, Python runs no handler of a signal in the thread that makes it and no deadline is looked
    at. Here the caller waits for a queue instead, hears signals, and gives up a call that takes too long.
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _T], seconds: float, silence: str) -> _T:
        """Return the result of a call, or raise its exception; raise HangError with `silence` after so many seconds."""
        answer: queue.SimpleQueue[
            tuple[Literal["found"], _T] | tuple[Literal["raised"], BaseException]
        ] = queue.SimpleQueue()
        self._asked.put((function, answer))
        try:
            said = answer.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise HangError(f"{silence} (waited {seconds:g} s)") from None
        if said[0] == "raised":
            raise said[1]
        return said[1]

    def close(self) -> None:
        """End the thread, which has no call left to make."""
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            function, answer = asked
            try:
                answer.put(("found", function()))
            except BaseException as e:  # the caller's to handle
                answer.put(("raised", e))
            del asked, function, answer  # they hold tensors and groups


@dataclass
class Mail:
    """Hold the messages of one run in the store: every rank has a box that rank 0 empties, and one for its heart.

    Attributes:
        store: a connection that nobody else uses: a call of the store waits until the one before has its answer.
        place: the place of the store, in words, for the message when it does not answer.
        patience_s: how long it may take to answer.
    """

    store: Any
    run: int
    patient: Patient
    place: str
    patience_s: float
    sent: int = 0
    beats: int = 0
    read: dict[int, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def ask(self, function: Callable[[], _T], seconds: float | None = None) -> _T:
        """Return the result of calls of the store; raise HangError or ExecutionError if it does not answer."""
        gone = "that machine has ended, or the network between is cut"
        try:
            return self.patient.call(
                function,
                self.patience_s if seconds is None else seconds,
                f"{self.place} does not answer: {gone}",
            )
        except RuntimeError as e:
            if isinstance(e, ExecutionError):
                raise
            raise ExecutionError(
                f"{self.place} has closed the connection: the process there that holds torch's store has ended, or "
                f"{gone}"
            ) from e

    def tell(
        self, rank: int, messages: Collection[Any], heart: bytes
    ) -> tuple[bytes | None, bytes | None]:
        """Post this rank's messages and heart; return rank 0's pulse, and its last word, as far as they are there."""
        self.beats += 1
        encoded = [encode(message) for message in messages]

        def told() -> tuple[bytes | None, bytes | None]:
            for message in encoded:
                self.store.set(f"{self.run}/{rank}/{self.sent}", message)
                self.sent += 1
            self.store.set(f"{self.run}/heart/{rank}", self.beats.to_bytes(BEAT, "little") + heart)
            return self._value("pulse"), self._value("end")

        return self.ask(told)

    def visit(
        self, ranks: Collection[int], others: Collection[int]
    ) -> tuple[list[tuple[int, Any]], dict[int, bytes]]:
        """Return the messages of these ranks, and the hearts of the `others`; show them that rank 0 is there."""

        def visited() -> tuple[list[tuple[int, Any]], dict[int, bytes]]:
            self.store.set(f"{self.run}/pulse", str(time.monotonic()).encode())
            messages = [(rank, message) for rank in ranks for message in self._collect(rank)]
            hearts = {rank: self._value(f"heart/{rank}") for rank in others}
            return messages, {rank: heart for rank, heart in hearts.items() if heart is not None}

        return self.ask(visited)

    def _collect(self, rank: int) -> list[Any]:
        messages = []
        while self.store.check([key := f"{self.run}/{rank}/{self.read.get(rank, 0)}"]):
            messages.append(decode(self.store.get(key)))
            self.store.delete_key(key)
            self.read[rank] = self.read.get(rank, 0) + 1
        return messages

    def put(self, what: str, value: bytes, seconds: float | None = None) -> None:
        """Set a value of this run."""
        self.ask(lambda: self.store.set(f"{self.run}/{what}", value), seconds)

    def get(self, what: str) -> bytes | None:
        """Return a value of this run, None if nobody has set it."""
        return self.ask(lambda: self._value(what))

    def _value(self, what: str) -> bytes | None:
        key = f"{self.run}/{what}"
        if key not in self.seen and not self.store.check([key]):
            return None
        self.seen.add(key)
        value: bytes = self.store.get(key)
        return value

    def last_word(self, value: bytes, listeners: Collection[int]) -> None:
        """Tell the other ranks how the run has ended; wait a moment for `listeners`, who lose the store with us."""
        heard = [f"{self.run}/heard/{rank}" for rank in listeners]
        with suppress(
            ExecutionError
        ):  # who is cut off finds out alone, and why we end is worth more
            self.put("end", value, LAST_WORDS_S)
            if heard:
                self.ask(
                    lambda: self.store.wait(heard, timedelta(seconds=LAST_WORDS_S)),
                    2 * LAST_WORDS_S,
                )
