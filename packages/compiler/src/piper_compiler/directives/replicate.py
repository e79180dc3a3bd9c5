"""Define `replicate`: train data-parallel, with gradients summed over replicas.

    before  layer0.B@0 on ranks 0..1, each alone
    after   layer0.B@0 on ranks 0..1 with different rows; its gradient bucket is summed over dp after the last one

Legality
 1. `over` names axes; at least one. (An axis of degree 1 is not an error.)
 2. Whole chunks are selected: parameters belong to a chunk, not to a phase or microbatch.
 3. No selected chunk is replicated already.
 4. The axes are not axes on which the nodes are placed.
 5. bucket_mb is a positive number, and zero is a level that exists (0 to 3).
 6. The streams for reductions and gathers are not the compute stream.
 7. `shard` names states (params, grads, optim) and axes of `over`: the axes of params are all axes of grads or none,
    and the axes of grads are all axes of optim or none.
 8. resident_mb and reduced_mb are numbers from 0, or "step"; prefetch is an integer from 0.
 9. Devices share no chunks (by the directive `shard`) along at least one of the axes, or states are sharded. Devices
    that share chunks have the same rows: along such an axis states can be sharded, and nothing is replicated. A
    parameter whose gradient is no partial sum there has its states sharded along the other axes alone.
10. whole_mb is a finite number from 0.
11. overlap is True or False.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal

from piper_compiler.directives.base import (
    Directive,
    as_names,
    compute_nodes,
    directive,
    fail,
    site_field,
)
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.prepare import CaptureRequest, Preparation, by_layers
from piper_compiler.directives.shard import Shard, shared_axes
from piper_ir.graph.graph import Graph, Node, Replication
from piper_ir.ground.mesh import AXES, Mesh, whole_axis
from piper_ir.ground.select import Where
from piper_ir.ground.shards import Shards
from piper_ir.plan.plan import COMPUTE

STATES = ("params", "grads", "optim")
"""The states that ranks may shard, each only if they shard the next."""
STEP = "step"
"""The limit of buckets that are kept until the step ends."""
MOST_BUCKET_MB = 2**40
"""The largest bucket in MiB that is accepted; no model is larger."""


@directive
@dataclass(frozen=True)
class Replicate:
    """Give each coordinate along `over` all parameters of the selected chunks, and rows of its own.

    Gradients are summed in flat buckets, with one reduction per bucket and step, which starts when the bucket's last
    gradient is ready.

    States need not be replicated along `over` (ZeRO; Rajbhandari et al., 2020). If a state is sharded, each rank keeps
    an equal shard of every bucket: of the optimizer's states, of the gradients too, or of all three. Sharded parameters
    are all-gathered before they are used, and dropped afterwards.

    Attributes:
        over: mesh axes, as a tuple of names; the name of one alone will do. Besides the axes along which rows differ,
            it may name axes along which devices share chunks, such as cp: states are sharded along these, too.
        zero: 0 replicates everything; 1 shards the optimizer's states along `over`, 2 the gradients too, 3 the
            parameters too.
        bucket_mb: MiB of a bucket, in the gradients' dtype.
        reduce: name of the reductions' stream (default: one for all reductions of the role).
        shard: the axes along which states are sharded, by state ("params", "grads", "optim"), in place of `zero`;
            each as a tuple of names, or the name of one alone.
        resident_mb: MiB of gathered parameters that a rank may keep for later uses, beside the ones in use; "step"
            keeps all of them until the step ends.
        reduced_mb: MiB of gradients that a rank may keep before they are scattered, beside the ones in use, or "step".
        prefetch: how many uses ahead of its own the gather of a bucket is issued.
        gather: name of the gathers' stream (default: one for all gathers of the role).
        whole_mb: MiB of a parameter, in the dtype of forward and backward, up to which it is not sharded, while its
            gradient and the optimizer's states are; each rank has all of it during a step (DeepSpeed's
            param_persistence_threshold).
        overlap: whether gathers and reductions run beside compute. If not, gradients are reduced after the last
            backward of a device, and parameters gathered before its first forward; where gradients or parameters are
            sharded, compute waits for each message on its own (Megatron-LM without --overlap-grad-reduce).
        site: where the user wrote it.
    """

    selection: Where
    over: str | tuple[str, ...] = ("dp",)
    zero: Literal[0, 1, 2, 3] = 0
    bucket_mb: float = 25
    reduce: str = ""
    shard: Mapping[str, str | tuple[str, ...]] | None = None
    resident_mb: float | str = 0
    reduced_mb: float | str = 0
    prefetch: int = 1
    gather: str = ""
    whole_mb: float = 0
    overlap: bool = True
    site: str = site_field()

    def __post_init__(self) -> None:
        object.__setattr__(self, "over", as_names(self.over))
        if isinstance(self.shard, Mapping):
            object.__setattr__(
                self, "shard", {state: as_names(axes) for state, axes in self.shard.items()}
            )

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
        """Ask for a chain of like modules as layers if parameters are sharded: they are gathered chunk by chunk."""
        return by_layers(request, seen) if self.shards.params else request

    def check_form(self) -> None:
        """Raise DirectiveError for an argument that is wrong for any program."""
        if (
            not isinstance(self.over, tuple)
            or not self.over
            or any(a not in AXES for a in self.over)
        ):
            raise fail(
                self,
                1,
                f"over={self.over!r}; one or more of {', '.join(sorted(AXES))} are accepted, as a tuple",
            )
        if type(self.zero) is not int or not 0 <= self.zero <= len(STATES):
            raise fail(self, 5, f"zero={self.zero!r}; 0, 1, 2 or 3 is accepted")
        if type(self.bucket_mb) not in (int, float) or not 0 < self.bucket_mb < inf:
            raise fail(self, 5, f"bucket_mb must be positive and finite; it is {self.bucket_mb!r}")
        for name in ("reduce", "gather"):
            stream = getattr(self, name)
            if not isinstance(stream, str):
                raise fail(self, 6, f"{name}={stream!r}; the name of a stream is accepted")
            if stream == COMPUTE:
                raise fail(self, 6, f"the stream {COMPUTE!r} is for compute; choose another name")
        self._check_shard()

    def check(self, graph: Graph) -> None:
        self.check_form()
        taken = shared_axes(graph, self.over)
        if taken and not self.shards.optim and not _rows_differ(graph, self.over):
            raise fail(
                self,
                9,
                f"devices share the chunks over {', '.join(taken)} (by shard), so they have the same rows; use another "
                f"axis, or shard states there by zero=1, 2 or 3",
            )
        for name in ("resident_mb", "reduced_mb"):
            value = getattr(self, name)
            if value != STEP and not (type(value) in (int, float) and 0 <= value < inf):
                raise fail(
                    self, 8, f'{name}={value!r}; a number of MiB from 0 or "{STEP}" is accepted'
                )
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise fail(self, 8, f"prefetch={self.prefetch!r}; an integer from 0 is accepted")
        if type(self.whole_mb) not in (int, float) or not 0 <= self.whole_mb < inf:
            raise fail(self, 10, f"whole_mb={self.whole_mb!r}; a number of MiB from 0 is accepted")
        if type(self.overlap) is not bool:
            raise fail(self, 11, f"overlap={self.overlap!r}; True or False is accepted")
        nodes = compute_nodes(self, graph, self.selection)
        self._check_nodes(graph, nodes)

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        if not isinstance(self.shard, Mapping):
            text = f"axes for {', '.join(STATES)} are accepted, such as dict(params='dp')"
            raise fail(self, 7, f"shard={self.shard!r}; {text}")
        if self.zero:
            raise fail(
                self,
                7,
                f"zero={self.zero} and shard={dict(self.shard)} say the same; leave one of them out",
            )
        axes = {state: tuple(self.shard.get(state, ())) for state in STATES}
        wrong = [s for s in self.shard if s not in STATES] + [
            a for own in axes.values() for a in own if a not in self.over
        ]
        if wrong:
            accepted = f"{', '.join(STATES)} with axes of {', '.join(self.over)}"
            raise fail(
                self,
                7,
                f"shard={dict(self.shard)} names {', '.join(map(str, wrong))}; accepted are {accepted}",
            )
        for inner, outer in pairwise(reversed(STATES)):
            if axes[outer] and set(axes[outer]) != set(axes[inner]):
                text = f"{outer} are shared along {axes[outer]} and {inner} along {axes[inner]}"
                raise fail(self, 7, f"{text}; the axes must be the same, or none for {outer}")

    @property
    def shards(self) -> Shards:
        """Return the axes along which ranks shard each state."""
        if self.shard is not None:
            return Shards(*[tuple(self.shard.get(state, ())) for state in STATES])
        return Shards(
            *[tuple(self.over) if self.zero >= len(STATES) - k else () for k in range(len(STATES))]
        )

    def _check_nodes(self, graph: Graph, nodes: list[Node]) -> None:
        counts: dict[str, int] = {}
        over = set(graph.mesh.axes) & set(self.over)
        for node in nodes:
            chunk = str(node.coords["chunk"])
            counts[chunk] = counts.get(chunk, 0) + len(node.each)
            if chunk in graph.replication:
                raise fail(
                    self,
                    3,
                    f"{chunk} is replicated by {graph.log[graph.replication[chunk].applied]} already",
                )
            if node.role and set(graph.roles[node.role]) & over:
                raise fail(
                    self,
                    4,
                    f"{node.name(node.each[0])} is placed on {node.role}; it cannot be replicated "
                    f"over the same axis",
                )
        for chunk, count in counts.items():
            every = [node for id in graph.index[("chunk", chunk)] for node in graph.families[id]]
            there = sum(len(node.each) for node in every if node.coords["op"] == "compute")
            if there != count:
                raise fail(
                    self,
                    2,
                    f"{count} of {there} nodes of {chunk} are selected; select by region, not by phase or mb",
                )

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided(self)

    def simplest(self) -> Replicate:
        """Return the same without limits for states that are not sharded."""
        shards = self.shards
        simplified = self if shards.params else replace(self, resident_mb=0, prefetch=1, whole_mb=0)
        simplified = simplified if shards.grads else replace(simplified, reduced_mb=0)
        return simplified if shards.optim else replace(simplified, gather="", shard=None)

    def __hash__(self) -> int:
        return hash(
            (
                self.selection,
                self.over,
                self.shards,
                self.bucket_mb,
                self.reduce,
                self.gather,
                self.prefetch,
                self.whole_mb,
                self.overlap,
            )
        )

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        shards = self.shards
        shared = [
            tuple(a for a in graph.mesh.axes if whole_axis(a) in own)
            for own in (shards.params, shards.grads, shards.optim)
        ]
        resident, reduced = (
            None if mb == STEP else _bytes(mb) for mb in (self.resident_mb, self.reduced_mb)
        )
        record = Replication(
            _rows_differ(graph, self.over),
            _bytes(self.bucket_mb),
            self.reduce,
            edit.applied,
            Shards(*shared),
            self.gather,
            resident,
            reduced,
            self.prefetch,
            _bytes(self.whole_mb),
            self.overlap,
        )
        for node in graph.pick(self.selection):
            edit.replication[str(node.coords["chunk"])] = record
        return edit.done()


def _rows_differ(graph: Graph, over: Iterable[str]) -> tuple[str, ...]:
    """Return the mesh's axes, among some, along which devices have rows of their own."""
    axes = [axis for axis in graph.mesh.axes if axis in over]
    shared = shared_axes(graph, axes)
    return tuple(axis for axis in axes if axis not in shared)


def check_rows(mesh: Mesh, directives: Iterable[Directive]) -> None:
    """Raise DirectiveError if experts are to be shared over an axis that neither the mesh nor a replication has."""
    written = tuple(directives)
    replicates = [d for d in written if isinstance(d, Replicate)]
    for one in replicates:
        one.check_form()
    over = {axis for one in replicates for axis in one.over}
    for item in written:
        if (
            isinstance(item, Shard)
            and item.experts
            and not over.intersection(item.axes)
            and not mesh.along(item.joined)
        ):
            named = tuple(dict.fromkeys(("dp", *item.axes)))
            text = (
                f"{mesh} has no {item.over}, so nothing would be shared; give it that axis, "
                f"as in Mesh({item.over}=2), "
            )
            text += f"and name it in replicate, as in data_parallel(over={named!r}); or leave the experts' shard out"
            raise fail(item, 2, text)


def _bytes(mb: float | str) -> int:
    return int(min(float(mb), MOST_BUCKET_MB) * 2**20)
