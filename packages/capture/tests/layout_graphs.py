"""Joint graphs whose indexes are known: attention and feed-forward parts as people write them, and chunks of captured
models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.indexes import Indexed, LoopIndex, indexed
from piper_capture.steps.joint import JointInput, trace_joint
from tests.helpers.models import captured

ROWS, T, HEADS, KV, E, WIDTH, HIDDEN = 3, 5, 4, 2, 6, 10, 14


@dataclass(frozen=True)
class Graph:
    """A joint graph with its indexes; `names` are those of its inputs."""

    joint: Joint
    names: tuple[str, ...]
    indexes: Indexed

    def dims(self, name: str) -> tuple[tuple[LoopIndex, ...], ...]:
        """Return the indexes of each dimension of an input."""
        return self.indexes.tensors[self.joint.inputs[self.names.index(name)], 0]

    def sizes(self, name: str) -> list[list[int]]:
        return [[i.size for i in dim] for dim in self.dims(name)]

    def blockers(self, index: LoopIndex) -> set[str]:
        """Return the ops that cannot be computed in parts of an index that they have."""
        ops = self.indexes.ops.values()
        having = [
            op
            for op in ops
            if any(index in dim for dims in (*op.tensors, *op.results) for dim in dims)
        ]
        return {str(op.call.op) for op in having if op.parts(index) is None}

    def unknown(self) -> set[str]:
        return {str(op.call.op) for op in self.indexes.ops.values() if not op.known}


def analysed(joint: Joint, names: Iterable[str]) -> Graph:
    return Graph(joint, tuple(names), indexed(joint))


@cache
def chunk_of(model: str, chunk: str, rows: int = 3) -> Graph:
    """Return the graph of a chunk of a model of `tests.helpers.models`; inputs are named without "layers.0." and
    ".weight"."""
    store = captured(model)
    found = next(c for c in store.program.chunks if c.id == chunk)
    joint = store.code._recipes[found.code].joint(rows)
    return analysed(
        joint, (i.ref.rpartition("layers.0.")[2].removesuffix(".weight") for i in found.inputs)
    )


@cache
def spelled(name: str) -> Graph:
    """Return the graph of a way to write a layer; the input x and the weights have gradients."""
    function, shapes = SPELLINGS[name]
    inputs = [JointInput("value", torch.empty(ROWS, T, WIDTH, dtype=torch.float64), True)]
    inputs += [
        JointInput("param", torch.empty(*shape, dtype=torch.float64), True)
        for shape in shapes.values()
    ]
    return analysed(trace_joint(fx.symbolic_trace(function), inputs, [True]), ("x", *shapes))


def _softmax(scores: Tensor) -> Tensor:
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)


def repeated(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Heads of keys are repeated by expand and reshape; a column of the mask is added."""
    queries = (x @ q).view(ROWS, T, HEADS, E).transpose(1, 2)
    keys, values = ((x @ w).view(ROWS, T, KV, E).transpose(1, 2) for w in (k, v))
    keys, values = (
        t[:, :, None].expand(ROWS, KV, HEADS // KV, T, E).reshape(ROWS, HEADS, T, E)
        for t in (keys, values)
    )
    mixed = _softmax(torch.matmul(queries, keys.transpose(2, 3)) * E**-0.5) @ values
    return mixed.transpose(1, 2).reshape(ROWS, T, HEADS * E) @ out


def one_key(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """All queries share one head of keys; products are written as einsum."""
    queries, keys, values = (x @ q).view(ROWS, T, HEADS, E), x @ k, x @ v
    shares = _softmax(torch.einsum("bthe,bse->bhts", queries, keys))
    return torch.einsum("bhts,bse->bthe", shares, values).reshape(ROWS, T, HEADS * E) @ out


def interleaved(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Query, key and value of a head lie beside each other."""
    q, k, v = (x @ qkv).view(ROWS, T, HEADS, 3, E).unbind(3)
    shares = _softmax(torch.einsum("bthe,bshe->bhts", q, k))
    return torch.einsum("bhts,bshe->bthe", shares, v).reshape(ROWS, T, HEADS * E) @ out


def alibi(x: Tensor, qkv: Tensor, slope: Tensor, out: Tensor) -> Tensor:
    """One projection for all queries, keys and values; a bias by distance and head is added by baddbmm."""
    q, k, v = (x @ qkv).chunk(3, dim=-1)
    q, k, v = (
        t.view(ROWS, T, HEADS, E).transpose(1, 2).reshape(ROWS * HEADS, T, E) for t in (q, k, v)
    )
    distance = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    bias = (slope[:, None, None] * distance).expand(ROWS, HEADS, T, T).reshape(ROWS * HEADS, T, T)
    shares = _softmax(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=E**-0.5))
    return (
        torch.bmm(shares, v).view(ROWS, HEADS, T, E).transpose(1, 2).reshape(ROWS, T, HEADS * E)
        @ out
    )


def buckets(x: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """A learned bias by distance and head, looked up in a table."""
    queries, keys, values = ((x @ w).view(ROWS, T, HEADS, E).transpose(1, 2) for w in (q, k, v))
    distance = (torch.arange(T)[None, :] - torch.arange(T)[:, None]).abs()
    bias = F.embedding(distance, table).permute(2, 0, 1).unsqueeze(0)
    return ((queries @ keys.transpose(-1, -2) + bias).softmax(-1) @ values).transpose(1, 2).flatten(
        2
    ) @ out


def gated(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    """One projection for gate and up."""
    gate, up = (x @ both).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down


def uneven(x: Tensor, all_of_it: Tensor, out: Tensor) -> Tensor:
    """One projection for queries and a feed-forward part of another size."""
    q, h = (x @ all_of_it).split([HEADS * E, HIDDEN], dim=-1)
    return torch.cat([q.sin(), h.cos()], dim=-1) @ out


def normed(x: Tensor, q: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Each head is normalised by itself."""
    heads = (x @ q).view(ROWS, T, HEADS, E)
    heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-5) * scale
    return heads.flatten(2) @ out


FULL, ONE = (WIDTH, HEADS * E), (WIDTH, E)
OUT = (HEADS * E, WIDTH)
SPELLINGS: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, tuple[int, ...]]]] = {
    "repeated": (repeated, {"q": FULL, "k": (WIDTH, KV * E), "v": (WIDTH, KV * E), "out": OUT}),
    "one key": (one_key, {"q": FULL, "k": ONE, "v": ONE, "out": OUT}),
    "interleaved": (interleaved, {"qkv": (WIDTH, HEADS * 3 * E), "out": OUT}),
    "alibi": (alibi, {"qkv": (WIDTH, 3 * HEADS * E), "slope": (HEADS,), "out": OUT}),
    "buckets": (buckets, {"q": FULL, "k": FULL, "v": FULL, "table": (T, HEADS), "out": OUT}),
    "gated": (gated, {"both": (WIDTH, 2 * HIDDEN), "down": (HIDDEN, WIDTH)}),
    "uneven": (
        uneven,
        {"all_of_it": (WIDTH, HEADS * E + HIDDEN), "out": (HEADS * E + HIDDEN, WIDTH)},
    ),
    "normed": (normed, {"q": FULL, "scale": (E,), "out": OUT}),
}
