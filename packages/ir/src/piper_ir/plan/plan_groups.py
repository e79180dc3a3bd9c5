"""Describe the buckets of parameters and the channels for communication that several ranks of a plan share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_ir.ground.bucket_dtypes import BucketDtypes
from piper_ir.ground.shards import UNSHARDED, Shards


@dataclass(frozen=True, slots=True)
class Bucket(BucketDtypes):
    """Describe a flat buffer for parameters and their gradients, which is the same for every role that holds it.

    Attributes:
        params: the parameters whose gradients it holds, in order.
        offsets: where the gradients start, in elements; 256-byte aligned.
        numel: the number of elements; `dtype` is the one in which the optimizer updates its parameters.
        over: the mesh axes along which it is replicated.
        group: the index of the optimizer's parameter group.
        channel: the channel that all-reduces it, or a rank's shard of it; "" when no other rank has the same.
        shard: the axes along which ranks share its states.
        gather: the channel on each of `roles` that gathers its parameters; empty when the optimizer's states are whole.
        scatter: likewise the channel that reduces its gradients and scatters them.
        compute: the dtype of its parameters in forward and backward; "" for `dtype`. If they differ, or with `host`
            and not `away`, holders have a state "master", which is updated, and from which "param" is written.
        reduce: the dtype in which gradients are reduced over ranks; "" for `dtype`.
        parts: the axes along which each rank holds another part of its parameters.
        host: whether its masters and the optimizer's states are in the memory of the host, where it is updated.
        away: whether its parameters are there, too; chunks read copies, or gather them from copies of shards.
        accumulate: the dtype in which a rank sums gradients over microbatches; "" for that of reductions.
        newton_schulz: iterations by which an update makes each matrix [..., rows, columns] orthogonal; 0 for none.
    """

    id: str
    params: tuple[str, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str
    roles: tuple[str, ...]
    over: tuple[str, ...] = ()
    group: int = 0
    channel: str = ""
    shard: Shards = UNSHARDED
    gather: tuple[str, ...] = ()
    scatter: tuple[str, ...] = ()
    compute: str = ""
    reduce: str = ""
    parts: tuple[str, ...] = ()
    host: bool = False
    away: bool = False
    accumulate: str = ""
    newton_schulz: int = 0

    @property
    def lent(self) -> bool:
        """Return whether chunks read its parameters from values: gathered from shards, or copied from the host."""
        return self.away or bool(self.shard.params)


@dataclass(frozen=True, slots=True)
class Channel:
    """Describe who communicates with whom.

    Attributes:
        kind: "p2p" for transfers from rank to rank that agree on all axes that are not placed. "group" for all ranks of
            the roles that agree on the axes that are neither placed nor in `over`.
        roles: the roles that it joins; (source, destination) for "p2p".
        streams: the stream that uses it on each of the roles.
        over: the mesh axes along which the ranks of a group differ.
        purpose: the kind of data that it carries; "tensor" for collectives inside of steps, "expert" for the tokens of
            experts on their way to them and back, "terms" for values between chunks that are partial sums on the
            devices that share the chunks, "host" for copies to the memory of the host and back.
        sms: the SMs that communication on each of these streams takes from compute, if a strategy says so; 0 when copy
            engines move it. Only simulations read it.
    """

    id: str
    kind: Literal["p2p", "group"]
    roles: tuple[str, ...]
    streams: tuple[str, ...]
    over: tuple[str, ...] = ()
    purpose: Literal[
        "activation",
        "gradient",
        "reduce",
        "gather",
        "scatter",
        "weight",
        "norm",
        "tensor",
        "expert",
        "terms",
        "host",
    ] = "activation"
    sms: tuple[int | None, ...] = ()

    def stream_on(self, role: str) -> str:
        """Return the stream that uses the channel on a role."""
        return self.streams[self.roles.index(role)]
