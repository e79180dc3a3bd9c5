"""Give a rank its batch: call the user's function once per microbatch, and hand its tensors out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute, Load
from piper_runtime.rank.batches.batch_call import batch_call
from piper_runtime.rank.batches.batch_totals import BatchTotals, Counters
from piper_runtime.rank.batches.loader_process import LoaderProcesses
from piper_runtime.rank.batches.loader_thread import (
    GlobalDraw,
    Loader,
    LoaderThread,
    Microbatch,
    kept,
)
from piper_runtime.rank.job.job import Batch
from piper_runtime.rank.values.device import CPU
from piper_runtime.rank.values.rng import generator

LEAST_S, LEAST_SHARE = 1e-3, 0.01
"""The seconds of Job.batch in a step, and their share of the step, above which a thread is started for it.

To hand a microbatch over costs two wake-ups of a thread and a copy, tens of microseconds. A function that takes less
than this stays on the issuing thread, and costs its own time only.
"""


def upload(
    rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a copy of rows on a CUDA device, in this dtype, without making the host wait.

    The user's tensors are copied to pinned memory first, which torch's pool takes back when the device has read it.
    """
    value = torch.empty(shape, dtype=dtype, device=device)
    if rows.is_cuda:
        return value.copy_(rows)
    staged = torch.empty(shape, dtype=dtype, pin_memory=True).copy_(rows)
    return value.copy_(staged, non_blocking=True)


class Feed:
    """Hand out the rows that one rank computes, a tensor at a time.

    The batch function is called on the issuing thread when its microbatch is loaded, or by a loader in a thread or in
    processes, at most one step ahead. A thread is started if the function takes at least LEAST_SHARE of a step, unless
    it returns tensors of an accelerator, whose memory a plan counts, or draws from the generator that the plan's own
    chunks draw from.

    A batch function may refill the tensors that it returned before. So tensors for later are copied at once, and no
    tensor of the user's is held between two calls. The copies count as host memory of the input pipeline, not as memory
    of the plan. `waits` has, per microbatch of this step, when the rank began to wait for the function and when it had
    its tensors, by time.perf_counter.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        batch: Batch,
        device: torch.device = CPU,
        counters: Counters | None = None,
    ):
        self._call = batch_call(plan, rank, batch)
        self.totals = BatchTotals(plan, rank, counters, self._call.looks)
        self._rank = rank
        ops = [(p.mb, p.op) for i in plan.role_of(rank).program for p in i.parts]
        self._uses = Counter(
            (mb, name)
            for mb, op in ops
            if isinstance(op, Load)
            for name in self.totals.counts.get(op.tensor, (op.tensor,))
        )
        chunks = {op.chunk for _, op in ops if isinstance(op, Compute) and op.step == "F"}
        self._generator = (
            generator(device) if any(c.random for c in plan.chunks if c.id in chunks) else None
        )
        self._left: Counter[tuple[int, str]] = Counter()
        self._staged: dict[int, Microbatch] = {}
        self._fetched_mbs: set[int] = set()
        self._loader: Loader | None = None
        self._may_start = self._watched = False
        self._began = 0.0
        self._last = self._asked = -1
        self.waits: list[tuple[int, float, float]] = []
        self.step = 0

    @contextmanager
    def ahead(self, loader: str | int, steps: range) -> Iterator[None]:
        """Let a loader prepare these steps inside of the block; it ends with the block."""
        self._last, self._asked, self._began = steps.stop - 1, steps.start - 1, time.perf_counter()
        self._may_start = loader == "thread"
        try:
            if self._call.rows and loader not in ("thread", "none"):
                self._loader = LoaderProcesses(
                    self._call, self._rank, 1 if isinstance(loader, str) else loader
                )
            yield
        finally:
            self._may_start = False
            self._end_loader()

    def begin(self, step: int) -> None:
        """Start an optimizer step."""
        if self._may_start:
            self._consider()
        self.step = step
        self._left = self._uses.copy()
        self._staged.clear()
        self._fetched_mbs.clear()
        self.totals.begin()
        self.waits.clear()
        while self._loader is not None and self._asked < min(step + 1, self._last):
            self._asked = max(self._asked + 1, step)
            self._loader.ask(self._asked)
        if self.totals.early:
            self.count()

    def take(self, name: str, mb: int) -> torch.Tensor:
        """Return a microbatch's rows of one batch tensor, of the planned shape.

        The caller copies it before it takes another. Raises JobError when the batch does not fit. If the loss reads
        numbers of the whole batch, all microbatches of the step are fetched at once, and counted.
        """
        self.count()
        if name in self.totals.counts:
            return self.totals.of(name)
        self._left[mb, name] -= 1
        staged = self._staged.setdefault(mb, {})
        if name in staged:
            tensor = staged[name]
        else:
            fresh = self._fetched(mb)
            tensor = fresh[name]
            staged.update({n: self.kept(t) for n, t in fresh.items() if self._left[mb, n] > 0})
        if self._left[mb, name] <= 0:
            staged.pop(name, None)
        return tensor

    def count(self) -> torch.Tensor:
        """Count in the microbatches of this step, unless that is done; return the numbers of this rank."""
        if self.totals.open:
            self.totals.give(self._counted_in)
        return self.totals.counted

    def _counted_in(self) -> Iterator[tuple[int, Microbatch]]:
        """Yield each microbatch of this step with its tensors that the loss's numbers are counted in."""
        counted = {name for names in self.totals.counts.values() for name in names}
        for mb in self._call.rows:
            if mb not in self._fetched_mbs:
                fresh = self._fetched(mb)
                self._staged.setdefault(mb, {}).update({n: self.kept(t) for n, t in fresh.items()})
            if counted <= set(self._staged[mb]):
                yield mb, {name: self._staged[mb][name] for name in counted}
            for name in counted & set(self._staged[mb]):
                self._left[mb, name] -= 1
                if self._left[mb, name] <= 0:
                    del self._staged[mb][name]

    kept = staticmethod(kept)

    def _fetched(self, mb: int) -> Microbatch:
        """Return the tensors of a microbatch that this rank loads."""
        self._fetched_mbs.add(mb)
        start = time.perf_counter()
        if self._loader is None:
            microbatch = self._called(mb)
        else:
            try:
                microbatch = self._loader.take(self.step, mb)
            except (
                GlobalDraw
            ):  # nothing was drawn: the same call, here, draws between chunks as it always did
                self._end_loader()
                microbatch = self._called(mb)
        self.waits.append((mb, start, time.perf_counter()))
        return microbatch

    def _called(self, mb: int) -> Microbatch:
        """Call the function here; while it is watched, check whether it may run in a thread beside compute."""
        if not self._watched:
            return self._call(self.step, mb)
        before = None if self._generator is None else self._generator.get_state()
        microbatch = self._call(self.step, mb)
        drew = (
            before is not None
            and self._generator is not None
            and not torch.equal(before, self._generator.get_state())
        )
        if drew or any(t.device.type != "cpu" for t in microbatch.values()):
            self._may_start = self._watched = False
        return microbatch

    def _consider(self) -> None:
        """Start a thread when the function took long in two steps, and was watched in the second."""
        now = time.perf_counter()
        inside, step_s, self._began = (
            sum(end - start for _, start, end in self.waits),
            now - self._began,
            now,
        )
        slow = inside > max(LEAST_S, LEAST_SHARE * step_s)
        if slow and self._watched:
            self._loader, self._may_start = (
                LoaderThread(self._call, guarded=self._generator is torch.default_generator),
                False,
            )
        self._watched = slow and self._may_start

    def _end_loader(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
