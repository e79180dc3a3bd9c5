"""Let work wait in its middle for others of the same process, while they run: only one of them runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from piper_ir.program.collectives import law_of


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """Ask for a collective with the devices along an axis.

    Attributes:
        kind: the kind of the collective.
        axis: the axis.
        given: the device's operand.
    """

    kind: str
    axis: str
    given: torch.Tensor


class _Cancelled(BaseException):
    """End work whose request nobody will answer any more."""


class Fiber:
    """Run work in a thread of its own, up to its end or to its next request.

    Whoever calls `start` or `go_on` waits meanwhile. The default generator of random numbers is as the work left it
    when it goes on, whatever others have drawn.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.request: ExchangeRequest | None = None
        self.done = False
        self._work = work
        self._result: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._go, self._back = (
            threading.Lock(),
            threading.Lock(),
        )  # each is taken by who waits, and released by the other
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="piper fiber", daemon=True)

    def start(self) -> None:
        """Run the work up to its end or first request; raise its errors."""
        self._thread.start()
        self._wait()

    @property
    def answered(self) -> bool:
        """Return whether the result of the request is there."""
        return self._result is not None

    def answer(self, result: torch.Tensor) -> None:
        """Give the result of the request; the work takes a copy when it goes on."""
        self._result = result

    def go_on(self) -> None:
        """Run the work, whose request is answered, up to its end or next request; raise its errors."""
        self.request = None
        self._go.release()
        self._wait()

    def cancel(self) -> None:
        """End the work at its request."""
        if not self.done:
            self._cancelled = True
            self._go.release()
            self._thread.join()

    def exchange(
        self, kind: str, axis: str, given: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Wait for a collective; the work calls it, with memory for the result if it has some.

        As in other engines, an all-reduce works in place.
        """
        into = given if law_of(kind).in_place else into
        drawn = torch.random.get_rng_state()
        self.request = ExchangeRequest(kind, axis, given)
        del given
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled
        torch.random.set_rng_state(drawn)
        assert self._result is not None
        # made here, so that who observes this work counts it
        result = self._result.clone() if into is None else into.copy_(self._result)
        self._result = None
        return result

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # grad mode is per thread
        try:
            self._work()
        except _Cancelled:
            return
        except BaseException as e:  # raised by whoever waits
            self._error = e
        self.done = True
        self._back.release()

    def _wait(self) -> None:
        self._back.acquire()
        if self.done:
            self._thread.join()
        if self._error is not None:
            raise self._error
