"""Make a batch function of streams, which are read in order: each of many virtual shards belongs to one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from math import gcd
from typing import Any

from piper_ir.ground.errors import JobError
from piper_runtime.data.batch_source import BatchSource
from piper_runtime.data.from_dataset import Collate, bound_rows, collate_of, pair_of

MakeStream = Callable[[int], Iterable[Any]]
"""A function of the number of a shard that returns the shard's samples, in the same order in every call."""
_NONE = object()


class ShardLayout:
    """Map each row of each step to its shard of the data, for `rows` rows per step.

    The rows of a period, the least number of steps in which every shard gives equally many rows, are put in order of
    their row and then of their step, and cut into as many blocks as there are shards. So neighbouring rows share a
    shard, and if the number of replicas divides rows and shards, all rows of a shard belong to one replica. Blocks are
    numbered so that row r of step s comes from shard (s * rows + r) mod shards if rows divide shards.
    """

    def __init__(self, rows: int, shards: int) -> None:
        common = gcd(rows, shards)
        self.shards = shards
        self._common, self._period, self._size = common, shards // common, rows // common

    def place(self, step: int, row: int) -> tuple[int, int]:
        """Return (shard, number of its sample) of a row."""
        period, place = divmod(step, self._period)
        at = row * self._period + place
        block = at // self._size
        earlier = self._of_step(block * self._size, at, place)
        shard = block // self._period + self._common * (block % self._period)
        return shard, period * self._size + self._before(block, place) + earlier

    def consumed(self, step: int, shard: int) -> int:
        """Return how many samples a shard has given when `step` steps are done."""
        period, place = divmod(step, self._period)
        block = (shard % self._common) * self._period + shard // self._common
        return period * self._size + self._before(block, place)

    def _before(self, block: int, place: int) -> int:
        """Return how many rows of a block belong to the first `place` steps of a period."""
        start, stop = block * self._size, (block + 1) * self._size
        return self._until(stop, place) - self._until(start, place)

    def _of_step(self, start: int, stop: int, place: int) -> int:
        """Return how many of the rows from start to stop, in order, belong to one step of a period."""
        after, before = (self._until(stop, p) - self._until(start, p) for p in (place + 1, place))
        return after - before

    def _until(self, stop: int, place: int) -> int:
        """Return how many of the rows before `stop`, in order, belong to the first `place` steps of a period."""
        return stop // self._period * place + min(stop % self._period, place)


class StreamShard:
    """Read one shard in order; a sample that lies behind is read again from the start."""

    def __init__(self, make: MakeStream, shard: int) -> None:
        self._make, self._shard = make, shard
        self._samples: Iterator[Any] = iter(())
        self._next = -1
        self._began = 0
        self._kept: dict[int, Any] = {}

    def take(self, number: int, least: int) -> Any:
        """Return a sample by its number; samples from `least` on that are passed over are kept for later calls."""
        self._kept = {n: s for n, s in self._kept.items() if n >= least}
        if number in self._kept:
            return self._kept.pop(number)
        if not 0 <= self._next <= number:
            self._start(number)
        while self._next < number:
            at, sample = self._next, self._read()
            if at >= least:
                self._kept[at] = sample
        return self._read()

    def _start(self, number: int) -> None:
        """Open the stream, by its own `skip` just before the sample if it has one and does not end before."""
        self._kept.clear()
        stream = self._make(self._shard)
        if number and (skip := getattr(stream, "skip", None)) is not None:
            samples = iter(skip(number))
            if (first := next(samples, _NONE)) is not _NONE:
                self._samples, self._next, self._began = chain([first], samples), number, 0
                return
            stream = self._make(self._shard)
        self._samples, self._next, self._began = iter(stream), 0, 0

    def _read(self) -> Any:
        """Return the next sample; a stream that has ended begins again."""
        for _ in range(2):
            if (sample := next(self._samples, _NONE)) is not _NONE:
                self._next += 1
                return sample
            if self._began == self._next:
                break
            self._samples, self._began = iter(self._make(self._shard)), self._next
        raise JobError(
            f"from_stream: the stream of shard {self._shard} gave no sample; give at most as many "
            f"shards as have some"
        )


class StreamBatch(BatchSource):
    """Give each row of each step the next sample of its shard, see `ShardLayout`.

    With a state the rows per step may change: it has the next sample of each shard.

    Open streams stay in the process that reads them: a copy in another process opens its own where it starts.
    """

    def __init__(
        self, make: MakeStream, shards: int, collate: Collate, global_batch: int | None = None
    ) -> None:
        self.make, self.shards, self.collate, self.global_batch = (
            make,
            shards,
            collate,
            global_batch,
        )
        self._start = 0
        self._given = [0] * shards
        self._open: dict[int, StreamShard] = {}

    def __call__(self, step: int, rows: range) -> tuple[Any, Any]:
        return pair_of(self.collate([self._sample(step, row) for row in rows]), "from_stream")

    def _sample(self, step: int, row: int) -> Any:
        layout = self._layout()
        shard, number = layout.place(step, row)
        offset = self._given[shard] - layout.consumed(self._start, shard)
        if number + offset < 0:
            raise JobError(
                f"from_stream: step {step} lies before step {self._start}, from which this stream was resumed with "
                f"another global batch; its rows are not known"
            )
        stream = self._open.setdefault(shard, StreamShard(self.make, shard))
        return stream.take(number + offset, layout.consumed(step, shard) + offset)

    def _layout(self) -> ShardLayout:
        return ShardLayout(bound_rows(self.global_batch, "from_stream"), self.shards)

    def bound(self, global_batch: int) -> StreamBatch:
        batch = StreamBatch(self.make, self.shards, self.collate, global_batch)
        batch._start, batch._given = self._start, self._given
        return batch

    def check_replicas(self, replicas: int) -> None:
        if self.shards % replicas:
            raise JobError(
                f"from_stream(shards={self.shards}): the {replicas} data-parallel replicas of this strategy do not "
                f"divide the shards, so that two replicas would read one stream; give a multiple of {replicas} as "
                f"shards, or another mesh"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of shards and the rows per step."""
        return {"kind": "stream", "shards": self.shards, "global_batch": self.global_batch}

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return how many samples each shard has given when `step` steps are done."""
        layout = self._layout()
        counts = [
            self._given[k] + layout.consumed(step, k) - layout.consumed(self._start, k)
            for k in range(self.shards)
        ]
        return {"step": step, "consumed": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let step `state["step"]` begin, in every shard, behind the consumed samples."""
        step, consumed = state["step"], list(state["consumed"])
        if len(consumed) != self.shards or min(step, *consumed) < 0:
            raise JobError(
                f"from_stream(shards={self.shards}): the state is that of {len(consumed)} shards at step {step}; "
                f"give the shards with which it was written"
            )
        self._start, self._given = step, consumed
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}


def from_stream(make: MakeStream, shards: int = 64, collate: Collate | None = None) -> StreamBatch:
    """Return a batch function for `piper.Job` that reads streams in order, such as large files line by line.

    `make(k)` returns the samples of virtual shard k of `shards`, for instance of every `shards`-th file. Rows of a step
    are spread evenly over the shards, the same for every strategy. A shard is read by the ranks of one replica only. A
    stream that ends begins again.

    Args:
        make: A function of a shard's number. It returns an iterable of samples, equal in every call. If that has a
            method `skip(n)`, as datasets of Hugging Face have, a resumed run uses it; others are read through.
        shards: Data-parallel replicas must divide it.
        collate: Makes (inputs, targets) of a list of samples. The default is torch's default_collate, for samples that
            are pairs (inputs, targets).

    Raises JobError for other arguments.
    """
    if not callable(make):
        raise JobError(
            f"from_stream got a {type(make).__name__}; give a function of a shard's number that returns the "
            f"shard's samples"
        )
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise JobError(f"from_stream(shards={shards!r}): an integer of at least 1 is needed")
    return StreamBatch(make, shards, collate_of(collate, "from_stream"))
