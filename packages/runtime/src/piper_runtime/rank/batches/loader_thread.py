"""Call a batch function in a thread beside compute, so that its microbatches are there when a step begins."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piper_runtime.rank.batches.batch_call import BatchCall

JOIN_S = 1.0
"""The seconds to wait at the end of a run for a call that goes on; the thread ends behind that call at the latest."""

Microbatch = dict[str, torch.Tensor]


class Loader(Protocol):
    """Prepare the microbatches of steps that are asked for, in the order that the rank takes them in."""

    def ask(self, step: int) -> None:
        """Ask for all microbatches of a step, behind the earlier requests; return at once."""

    def take(self, step: int, mb: int) -> Microbatch:
        """Return the next microbatch, once it is ready; raise the batch function's exception for it."""

    def close(self) -> None:
        """End the thread or processes that this has started."""


class GlobalDraw(BaseException):
    """Report that a batch function was about to draw from torch's global generator, which the model draws from, too.

    It is not an Exception: no handler in the function is meant for it.
    """


class NoGlobalDraws(TorchDispatchMode):
    """Raise GlobalDraw before an operator of this thread draws from torch's global generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            own = [
                a
                for a in (*args, *kwargs.values())
                if isinstance(a, torch.Generator) and a is not torch.default_generator
            ]
            if not own:
                raise GlobalDraw
        return func(*args, **kwargs)


class LoaderThread:
    """Call a batch function in a thread of its own, one call at a time.

    A function may refill the tensors that it returned before, so they are copied before the next call. With `guarded`,
    a call that would draw from torch's global generator ends with GlobalDraw, and the thread with it.
    """

    def __init__(self, call: BatchCall, *, guarded: bool) -> None:
        self._call, self._guarded = call, guarded
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._made: SimpleQueue[Microbatch | BaseException] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._serve, name="piper loader", daemon=True)
        self._thread.start()

    def ask(self, step: int) -> None:
        self._asked.put(step)

    def take(self, step: int, mb: int) -> Microbatch:
        item = self._made.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed = True
        self._asked.put(None)
        self._thread.join(JOIN_S)

    def _serve(self) -> None:
        while (step := self._asked.get()) is not None:
            for mb in self._call.rows:
                if self._closed:
                    return
                try:
                    self._made.put(self._prepared(step, mb))
                except (
                    BaseException
                ) as e:  # the issuing thread raises it when it loads the microbatch
                    self._made.put(e)
                    return

    def _prepared(self, step: int, mb: int) -> Microbatch:
        if self._guarded:
            with NoGlobalDraws():  # type: ignore[no-untyped-call]  # torch does not type it
                tensors = self._call(step, mb)
        else:
            tensors = self._call(step, mb)
        return {name: kept(tensor) for name, tensor in tensors.items()}


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return the copy of a user's tensor that is held until it is loaded."""
    return tensor.detach().clone()
