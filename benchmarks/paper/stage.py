"""Run the backward of a pipeline stage with experts.

Its all-to-alls meet the reduction of its gradients on the same links.

One role stands for the ranks of a stage: the same two ranks, a node each, exchange tokens (expert parallelism) and add
up the gradients of what they both hold (data parallelism). A layer's backward is

    all-to-all of the gradients of its experts' outputs, the experts, all-to-all of those of their inputs, attention

and the gradients of its attention are reduced from then on; those of the head, before all layers. Of m microbatches
only the last one's backward is followed by reductions. The program goes through the engine, the messages through the
simulator's demands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import Literal, get_args

from piper import models
from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import IssueOrder, Times, prepare_orders
from piper_ir.plan.plan import COMPUTE, Channel
from piper_ir.program.program import Cost, Kernel
from piper_simulator import (
    Cluster,
    Message,
    by_formula,
    demands,
    rank_group,
    run_engine,
    step_seconds,
    wiring,
)

DTYPE, ITEM = "bfloat16", 2
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Say what a stage computes and sends.

    Attributes:
        members: the ranks that exchange and reduce.
        rows: sequences per microbatch, of `length` tokens.
        layers: the layers of the stage, the last of the pipeline, which has the head as well.
        bucket_mb: MiB of a piece where buckets are partitioned.
        reached: the part of its link's rate that an all-to-all reaches alone; None for what the formula gives.
    """

    cluster: Cluster
    members: tuple[int, ...] = (0, 2)
    model: str = "qwen3-moe-9b"
    layers: int = 12
    rows: int = 4
    length: int = 512
    microbatches: int = 4
    bucket_mb: int = 25
    reached: float | None = None

    @property
    def config(self) -> models.DecoderConfig:
        return models.PRESETS[self.model]

    @property
    def experts(self) -> models.Experts:
        """Return the sizes of the model's mixtures."""
        assert self.config.experts is not None
        return self.config.experts

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def exchanged(self) -> int:
        """Return the bytes of an all-to-all on each rank: each token goes to `top_k` experts."""
        return self.tokens * self.experts.top_k * self.config.width * ITEM

    @property
    def kv_width(self) -> int:
        return self.config.width * self.config.key_heads // self.config.heads

    @property
    def dense(self) -> int:
        """Return the bytes of the gradients of a layer that both ranks hold: attention and router."""
        c = self.config
        return ITEM * c.width * (2 * c.width + 2 * self.kv_width + self.experts.number)

    @property
    def head(self) -> int:
        """Return the bytes of the gradients of the head."""
        return ITEM * self.config.vocab * self.config.width

    def seconds(self, op: str, nbytes: float) -> float:
        """Return the seconds of a message alone."""
        found = by_formula(self.cluster, op, nbytes, rank_group(self.cluster, self.members))
        if op != "all_to_all" or self.reached is None:
            return found
        latency = by_formula(self.cluster, op, 0, rank_group(self.cluster, self.members))
        return (found - latency) / self.reached

    @cached_property
    def part_s(self) -> Mapping[str, tuple[float, float]]:
        """Return the seconds forward and backward of what is computed."""
        c, t = self.config, self.tokens
        square, narrow = self._matmul(t, c.width, c.width), self._matmul(t, self.kv_width, c.width)
        core = self._attention()
        # a rank computes as many tokens as it sends: its own experts' share of everybody's
        taken, hidden = t * self.experts.top_k, self.experts.hidden
        experts = (self._matmul(taken, hidden, c.width),) * 2 + (
            self._matmul(taken, c.width, hidden),
        )
        head = (self._matmul(t, c.vocab, c.width),)
        return {
            "attention": self._both((square, square, narrow, narrow), core),
            "experts": self._both(experts),
            "head": self._both(head),
        }

    def _both(self, products: Sequence[Kernel], core: Sequence[Kernel] = ()) -> tuple[float, float]:
        """Return FLOPs forward and backward.

        A product has two of its size in its backward, for its input and its weight; attention has 2.5 times its FLOPs.
        """
        forward = step_seconds(self.cluster.device, Cost((*products, *core)), "F")
        twice = tuple(Kernel(k.kind, k.dims, k.dtype, k.flops, k.bytes, 2) for k in products)
        longer = tuple(
            Kernel(k.kind, k.dims, k.dtype, int(2.5 * int(str(k.flops))), k.bytes) for k in core
        )
        return forward, step_seconds(self.cluster.device, Cost((*twice, *longer)), "I")

    @staticmethod
    def _matmul(m: int, n: int, k: int) -> Kernel:
        return Kernel("matmul", (m, n, k), DTYPE, 2 * m * n * k, ITEM * (m * n + n * k + m * k))

    def _attention(self) -> tuple[Kernel, ...]:
        """Return 4 s^2 FLOPs per row and channel, half of them because it is causal."""
        c = self.config
        dims = (self.rows, c.heads, self.length, self.length, c.width // c.heads)
        flops = 4 * self.rows * self.length**2 * c.width // 2
        return (Kernel("attention", dims, DTYPE, flops, 4 * ITEM * self.tokens * c.width),)


@dataclass(frozen=True)
class Item:
    """Hold an instruction of the role: compute, or a message of a kind; `after` names those that it waits for."""

    name: str
    kind: Literal["compute", "exchange", "reduce"]
    seconds: float
    nbytes: int = 0
    after: tuple[str, ...] = ()


@dataclass
class Program:
    """Hold the instructions in the order of issue; `streams` are those of each kind."""

    setting: Setting
    streams: Mapping[str, str]
    items: list[Item] = field(default_factory=list)

    def run(self) -> Ran:
        """Run a program through the engine, on one role."""
        streams = [self.streams[x.kind] for x in self.items]
        place, count = {}, dict.fromkeys(streams, 0)
        for x, stream in zip(self.items, streams):
            count[stream] += 1
            place[x.name] = (stream, count[stream])
        waits = [tuple(place[name] for name in x.after) for x in self.items]
        uses = ["" if x.kind == "compute" else x.kind for x in self.items]
        channels = [
            Channel(kind, "group", ("stage",), (self.streams[kind],))
            for kind in ("exchange", "reduce")
            if kind in uses
        ]
        prepared = prepare_orders(
            [IssueOrder("stage", streams, uses, lambda k: self.items[k].name, waits)], channels
        )
        s = self.setting
        messages = [self._message(self.items[members[0]]) for members in prepared.groups]
        found = demands(messages, wiring(s.cluster))
        durations = [x.seconds for x in self.items]
        issue = issue_times(prepared.offsets, s.cluster.device.host_issue_s)
        (times,) = run_engine(prepared, durations, issue=issue, flows=found)
        return Ran(tuple(self.items), times)

    def _message(self, item: Item) -> Message:
        op = "all_to_all" if item.kind == "exchange" else "all_reduce"
        return Message(item.kind, op, item.nbytes, item.seconds, (self.setting.members,), {0: None})


@dataclass(frozen=True)
class Ran:
    """Hold what the engine found."""

    items: tuple[Item, ...]
    times: Times

    def spans(self, kind: str) -> Iterator[tuple[str, float, float, float]]:
        """Return name, when it was ready, start and end."""
        for k, x in enumerate(self.items):
            if x.kind == kind:
                yield x.name, self.times.ready[k], self.times.start[k], self.times.end[k]

    def exchange_s(self, prefix: str) -> float:
        """Return the mean seconds from ready to end of the all-to-alls whose names begin so."""
        return mean(
            end - ready for name, ready, _, end in self.spans("exchange") if name.startswith(prefix)
        )

    def until(self, name: str) -> float:
        """When an instruction has ended."""
        return next(self.times.end[k] for k, x in enumerate(self.items) if x.name == name)

    @property
    def step_s(self) -> float:
        return self.times.makespan


Option = Literal[
    "alone",
    "one stream",
    "separate streams",
    "partitioned, one stream",
    "partitioned, separate streams",
]
OPTIONS: tuple[Option, ...] = get_args(Option)
"""How the reductions of a stage are issued.

alone: nothing is reduced. one stream: the message that is ready first goes first, so an all-to-all waits for the bucket
before it. separate: both share the links. partitioned: buckets go in pieces; a piece is issued only where no all-to-all
is ready, and on a stream of its own it waits for the all-to-all before it.
"""


def pair(setting: Setting, option: Option) -> Ran:
    """Return one all-to-all and the reduction of the head's gradients, which is issued first.

    Both are ready at once.
    """
    exchange = Item(
        "B.exchange",
        "exchange",
        setting.seconds("all_to_all", setting.exchanged),
        setting.exchanged,
    )
    pieces = [] if option == "alone" else _pieces(setting, option, "head", setting.head, ())
    rest = pieces[1:]
    if option == "partitioned, separate streams":
        rest = [replace(x, after=(exchange.name,)) for x in rest]
    return Program(setting, _streams(option), [*pieces[:1], exchange, *rest]).run()


def step(setting: Setting, option: Option) -> Ran:
    """Return all microbatches of a step of the stage, each forward and then backward."""
    build = _Step(setting, option)
    for mb in range(setting.microbatches):
        build.microbatch(mb)
    return build.done().run()


def _streams(option: Option) -> dict[str, str]:
    apart = option in ("alone", "separate streams", "partitioned, separate streams")
    return {
        "compute": COMPUTE,
        "exchange": "exchange" if apart else "comm",
        "reduce": "reduce" if apart else "comm",
    }


def _pieces(
    setting: Setting, option: Option, name: str, nbytes: int, after: tuple[str, ...]
) -> list[Item]:
    """Return the pieces of the reduction of a bucket."""
    size = setting.bucket_mb * MIB if option.startswith("partitioned") else nbytes
    sizes = [min(size, nbytes - begin) for begin in range(0, nbytes, size)]
    return [
        Item(f"reduce.{name}.{k}", "reduce", setting.seconds("all_reduce", n), n, after)
        for k, n in enumerate(sizes)
    ]


class _Step:
    """Issue a step.

    `now` is when the compute issued so far would be done if nothing slowed it down; `free` is when the messages on one
    stream would be.
    """

    def __init__(self, setting: Setting, option: Option) -> None:
        self.setting, self.option = setting, option
        self.program = Program(setting, _streams(option))
        self.last = ""
        self.exchanged = self.before = ""
        self.now = self.free = 0.0
        self.pending: deque[tuple[float, Item]] = deque()

    def microbatch(self, mb: int) -> None:
        part, layers = self.setting.part_s, range(self.setting.layers)
        for k in layers:
            self.compute(f"F{mb}.{k}.attention", part["attention"][0])
            self.exchange(f"F{mb}.{k}.dispatch")
            self.compute(f"F{mb}.{k}.experts", part["experts"][0])
            self.exchange(f"F{mb}.{k}.combine")
        self.compute(f"B{mb}.head", sum(part["head"]))
        self.reduce(mb, "head", self.setting.head)
        for k in reversed(layers):
            self.exchange(f"B{mb}.{k}.combine")
            self.compute(f"B{mb}.{k}.experts", part["experts"][1])
            self.exchange(f"B{mb}.{k}.dispatch")
            self.compute(f"B{mb}.{k}.attention", part["attention"][1])
            self.reduce(mb, str(k), self.setting.dense)

    def compute(self, name: str, seconds: float) -> None:
        self._issue(
            Item(name, "compute", seconds, after=(self.exchanged,) if self.exchanged else ())
        )
        self.now += seconds
        self.last, self.exchanged = name, ""

    def exchange(self, name: str) -> None:
        """Pieces that would have begun before it go first."""
        while self.pending and max(self.free, self.pending[0][0]) < self.now:
            self._piece()
        seconds = self.setting.seconds("all_to_all", self.setting.exchanged)
        self._issue(Item(name, "exchange", seconds, self.setting.exchanged, (self.last,)))
        self.now = self.free = max(self.now, self.free) + seconds
        self.exchanged = self.before = name

    def reduce(self, mb: int, name: str, nbytes: int) -> None:
        """Of the last microbatch."""
        if self.option == "alone" or mb < self.setting.microbatches - 1:
            return
        for item in _pieces(self.setting, self.option, name, nbytes, (self.last,)):
            if self.option.startswith("partitioned"):
                self.pending.append((self.now, item))
            else:
                self._issue(item)

    def done(self) -> Program:
        while self.pending:
            self._piece()
        return self.program

    def _piece(self) -> None:
        ready, item = self.pending.popleft()
        self.free = max(self.free, ready) + item.seconds
        yields = (self.before,) if "separate" in self.option else ()
        self._issue(replace(item, after=item.after + yields))

    def _issue(self, item: Item) -> None:
        self.program.items.append(item)
