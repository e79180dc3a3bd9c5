"""Explain the indexes of a model's chunks, and the compute and messages of the devices that share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from textwrap import wrap
from typing import TYPE_CHECKING

from piper.api.compiling.compiling import Compiled
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.program.layout import Sharding
from piper_ir.program.program import Chunk, Cost
from piper_ir.tools import size_text

if TYPE_CHECKING:
    from piper_capture import ChunkFacts, IndexFacts, WorkFacts

MOST = 4
"""The number of names of one kind that are listed."""
WAYS = {
    "heads": "tokens are exchanged for heads",
    "ring": "keys and values go from device to device",
    "gather": "each device gathers all keys and values",
}
"""The ways in which devices that share tokens compute attention."""
WIDEST, HANGING = 118, " " * 10
"""The letters of a line, and the indentation of its continuation."""


def layouts(compiled: Compiled) -> str:
    """Return the indexes of each chunk with code of its own, and how devices share them; "" without code."""
    if compiled.code is None:
        return ""
    from piper_capture import layout_facts

    chunk_facts = layout_facts(compiled.code, compiled.program)
    if not any(facts.shardings for facts in chunk_facts):
        return "\n".join(
            [
                "indexes, which devices can share by `shard`",
                *(f"  {_short(facts)}" for facts in chunk_facts),
            ]
        )
    total = sum(
        facts.work.flops * len(facts.ids) for facts in chunk_facts if facts.work is not None
    )
    lines = (
        line
        for facts in chunk_facts
        for line in (*_indexes(facts), *_shared(compiled.plan, facts, total))
    )
    return "\n".join(
        [
            "indexes, and what devices share",
            *(wrapped for line in lines for wrapped in _wrapped(f"  {line}")),
        ]
    )


def index_facts(compiled: Compiled) -> list[dict[str, object]]:
    """Return the indexes of each chunk with code of its own, for programs."""
    if compiled.code is None:
        return []
    from piper_capture import layout_facts

    return [
        {
            "chunks": list(facts.ids),
            "indexes": [
                {
                    "name": i.name,
                    "size": list(i.size),
                    "params": list(i.params),
                    "shared": i.shared,
                    "along": list(i.along),
                    "in_attention": dict(i.inside),
                    "obstacle": i.obstacle,
                }
                for i in facts.indexes
            ],
        }
        for facts in layout_facts(compiled.code, compiled.program)
    ]


def _wrapped(line: str) -> list[str]:
    return wrap(
        line, WIDEST, subsequent_indent=HANGING, break_long_words=False, break_on_hyphens=False
    )


def _ids(ids: Sequence[str]) -> str:
    return ", ".join(ids) if len(ids) <= MOST else f"{ids[0]} .. {ids[-1]} ({len(ids)} alike)"


def _short(facts: ChunkFacts) -> str:
    can = [f"{i.name} {_size(i)}" for i in facts.indexes if not i.obstacle and i.params]
    return f"{_ids(facts.ids)}: {', '.join(can) or 'none'}{_without_rules(facts)}"


def _without_rules(facts: ChunkFacts) -> str:
    return f"; ops without a rule: {_listed(facts.unknown)}" if facts.unknown else ""


def _size(index: IndexFacts) -> str:
    return "/".join(map(str, index.size))


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:MOST]) + (f", {len(unique) - MOST} more" if len(unique) > MOST else "")


def _indexes(facts: ChunkFacts) -> Iterator[str]:
    """Yield a line for each index but the rows: its size, whether devices share it, and where it stands."""
    prefix = _prefix(facts.inputs.values())
    yield f"{_ids(facts.ids)}{f', parameters of {prefix[:-1]}' if prefix else ''}"
    known = sorted(
        (i for i in facts.indexes if i.name != "rows"),
        key=lambda i: (i.shared == 1, bool(i.obstacle)),
    )
    shown = [(f"{i.name.removeprefix(prefix)} {_size(i)}", i) for i in known]
    width = max((len(name) for name, _ in shown), default=0)
    for name, index in shown:
        where = _places(p.removeprefix(prefix) for p in index.params)
        yield f"  {name:{width}}  {'; '.join(filter(None, (_verdict(index), where)))}"
    if facts.unknown:
        yield f"  computed whole, without a rule: {_listed(facts.unknown)}"


def _prefix(names: Iterable[str]) -> str:
    """Return the folders, so to speak, that all names have in common, with the dot."""
    split = [name.split(".")[:-1] for name in names]
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return "".join(f"{parts[0]}." for parts in same)


def _places(spots: Iterable[str]) -> str:
    """Return dimensions of parameters, with equal ones together: "q, k:0, out:1"."""
    by_dim: dict[str, list[str]] = {}
    for spot in spots:
        name, _, dim = spot.rpartition(":")
        by_dim.setdefault(dim, []).append(name.removesuffix(".weight"))
    return ", ".join(f"{_listed(names)} :{dim}" for dim, names in by_dim.items())


def _verdict(index: IndexFacts) -> str:
    inside = ", ".join(f"in attention by {n} ({axis})" for axis, n in index.inside.items())
    if index.shared > 1:
        return ", ".join(
            filter(None, (f"shared by {index.shared} ({', '.join(index.along)})", inside))
        )
    whole = f"whole: {index.obstacle}" if index.obstacle else "whole"
    return f"shared {inside}, else {whole}" if inside else whole


def _asked(sharding: Sharding) -> str:
    """Return an axis, or the axes that it is split into, with the indexes that its devices share."""
    axes = ", ".join(f"{name}={size}" for name, size in sharding.axes)
    shared = [] if sharding.context else list(sharding.index) or ["weights"]
    return f"{axes} ({', '.join([*shared, *['tokens'] * (sharding.stream == 'tokens' or sharding.context)])})"


def _shared(plan: Plan, facts: ChunkFacts, total: int) -> Iterator[str]:
    """Yield the shards, the whole compute and the messages of each device; `total` are the FLOPs of all chunks."""
    if facts.work is None or facts.unshared is None:
        return
    prefix = _prefix(facts.inputs.values())
    axes = ", ".join(_asked(each) for each in facts.shardings)
    yield f"  {axes}: {_parameters(plan.chunk(facts.ids[0]), facts)}"
    for why in dict.fromkeys(facts.unshared.values()):
        names = (
            facts.inputs[k].removeprefix(prefix)
            for k, reason in facts.unshared.items()
            if reason == why
        )
        yield f"    not shared: {_listed(names)}: {why}"
    yield (
        f"    computed whole on each device: {_work(facts.work, len(facts.ids) / total if total else 0.0)}"
    )
    yield from _attention(plan.chunk(facts.ids[0]), facts.shardings)
    yield from _collectives(plan.chunk(facts.ids[0]))
    yield from _tokens(plan, plan.chunk(facts.ids[0]))
    yield from _summed(plan, facts, prefix)


def _parameters(chunk: Chunk, facts: ChunkFacts) -> str:
    sizes = {k: bind(chunk.inputs[k].spec.nbytes, 0) for k in facts.inputs}
    total, whole = sum(sizes.values()), sum(sizes[k] for k in facts.unshared or ())
    if not total:
        return "no parameters"
    return f"{size_text(total)} of parameters on each device, {whole / total:.1%} of them whole"


def _work(work: WorkFacts, each: float) -> str:
    """Return the work that every device computes whole; `each` FLOP is that share of all."""
    if not work.whole:
        return "nothing that counts FLOPs"
    return f"{work.share:.2%} of its FLOPs, {sum(work.whole.values()) * each:.2%} of all: {_listed(work.whole)}"


def _attention(chunk: Chunk, shardings: Sequence[Sharding]) -> Iterator[str]:
    """Yield how attention is computed if devices share its tokens."""
    if any(kernel.kind == "attention" for kernel in chunk.steps["F"].cost.kernels):
        for asked in (s for s in shardings if s.context):
            order = "in zigzag order" if asked.order == "zigzag" else "in blocks"
            yield f"    attention over {asked.over}: {WAYS[asked.attention]}; tokens {order}"


def _collectives(chunk: Chunk) -> Iterator[str]:
    """Yield a line for each collective of the steps; equal ones next to each other are one line.

    So are all equal messages of a ring. Messages that are under way while the step computes are said to be beside its
    operations.
    """
    for step, signature in chunk.steps.items():
        every = [(c.kind, bind(c.nbytes, 0), c.axis, c.why) for c in signature.collectives]
        beside = {o.number: o.beside for o in signature.overlaps}
        ring = Counter(c for c in every if c[0] == "shift")
        for (kind, nbytes, axis, why), same in groupby(enumerate(every), key=itemgetter(1)):
            numbers = [number for number, _ in same]
            count = ring.pop((kind, nbytes, axis, why), 0) if kind == "shift" else len(numbers)
            if not count:
                continue  # said already
            times = f"{count}x" if count > 1 else ""
            hidden = _beside([beside[k] for k in numbers if k in beside])
            yield f"    {step}  {kind:14} {f'{times} {size_text(nbytes)}':>10} over {axis} {why}{hidden}"


def _beside(costs: Sequence[Cost]) -> str:
    """Return beside which operations some messages are under way; the products, if there are some."""
    kernels = [k for cost in costs for k in cost.kernels]
    kernels = [k for k in kernels if k.kind == "matmul"] or kernels
    ops = ", ".join(dict.fromkeys(k.op for k in kernels))
    return f"; {len(costs)} beside {ops}" if costs else ""


def _tokens(plan: Plan, chunk: Chunk) -> Iterator[str]:
    """Yield the bytes that come from other devices to experts, and go back to them, in a microbatch."""
    if chunk.trades:
        in_bytes = sum(bind(i.spec.nbytes, plan.rows) for i in chunk.inputs if i.kind == "value")
        out_bytes = sum(bind(o.spec.nbytes, plan.rows) for o in chunk.outputs)
        devices = f"{plan.mesh.size(chunk.experts)} devices along {chunk.experts}"
        yield (
            f"    tokens of {devices} come and go by AllToAll: {size_text(in_bytes)} in, "
            f"{size_text(out_bytes)} out, and gradients"
        )


def _summed(plan: Plan, facts: ChunkFacts, prefix: str) -> Iterator[str]:
    """Yield the parameters whose gradients buckets add up over the devices."""
    chunk = plan.chunk(facts.ids[0])
    params = {p.name: p for p in plan.params}
    buckets: Mapping[str, str] = {name: b.id for b in plan.buckets for name in b.params}
    inputs_by_axes: dict[tuple[str, ...], list[int]] = {}
    for k in facts.inputs:
        if along := params[chunk.inputs[k].ref].summed:
            inputs_by_axes.setdefault(along, []).append(k)
    for along, numbers in inputs_by_axes.items():
        names = _listed(facts.inputs[k].removeprefix(prefix) for k in numbers)
        where = dict.fromkeys(
            buckets[chunk.inputs[k].ref] for k in numbers if chunk.inputs[k].ref in buckets
        )
        yield f"    gradients summed over {', '.join(along)} with {_listed(where)}: {names}"
