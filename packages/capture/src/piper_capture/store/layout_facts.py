"""Find the facts in `piper explain` about the indexes of chunks, and about devices that share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

import torch

from piper_capture.layouts import (
    HEADS,
    AskedIndexes,
    NamedIndexes,
    Parted,
    experts_of,
    parted,
    shareable,
    steps_of,
    title,
    uneven,
)
from piper_capture.layouts.indexes import LoopIndex
from piper_capture.steps.kernels import flops_of
from piper_capture.store.assemble import TRACE_ROWS
from piper_capture.store.codestore import CodeStore, TraceSpec
from piper_capture.store.sharding import params_of
from piper_ir.ground.select import EMPTY
from piper_ir.program.layout import Sharding
from piper_ir.program.program import Chunk, Program


@dataclass(frozen=True)
class IndexFacts:
    """Describe the indexes of a chunk that have one name.

    Attributes:
        size: the steps of all of them together; several numbers if they differ from place to place.
        params: the dimensions of parameters that have them, as "layers.*.up.weight:0".
        obstacle: why devices do not share them; "" if they do or could.
        shared: the number of devices that share them; 1 if they are not shared.
        along: the axes of these devices.
        inside: axes along which they are shared in attention alone, which needs all tokens, each with its devices.
    """

    name: str
    size: tuple[int, ...]
    params: tuple[str, ...]
    obstacle: str = ""
    shared: int = 1
    along: tuple[str, ...] = ()
    inside: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkFacts:
    """Describe the work of each device in a chunk.

    Attributes:
        whole: the ops that every device computes whole, each with its FLOPs.
        flops: of all ops of a device.
    """

    whole: Mapping[str, int]
    flops: int

    @property
    def share(self) -> float:
        """Return the share of a device's FLOPs in ops that every device computes whole."""
        return sum(self.whole.values()) / self.flops if self.flops else 0.0


@dataclass(frozen=True)
class ChunkFacts:
    """Describe a chunk and all that are like it.

    Attributes:
        ids: the chunks.
        inputs: input -> the name of the parameter, with "*" for parts that differ among the chunks.
        unknown: the ops without a rule, which are computed whole.
        shardings: how devices share it, along each axis.
        work: the work of each of these devices.
        unshared: parameters that each device has whole, by input, with why.
    """

    ids: tuple[str, ...]
    inputs: Mapping[int, str]
    indexes: tuple[IndexFacts, ...]
    unknown: tuple[str, ...]
    shardings: tuple[Sharding, ...] = ()
    work: WorkFacts | None = None
    unshared: Mapping[int, str] | None = None


def layout_facts(code: CodeStore, program: Program) -> tuple[ChunkFacts, ...]:
    """Return the facts of each chunk with code of its own, without opaque ones and empty stages."""
    having: dict[str, list[Chunk]] = {}
    for chunk in program.chunks:
        if EMPTY not in chunk.coords:
            having.setdefault(chunk.code, []).append(chunk)
    named = params_of(program).items()
    return tuple(_facts(code, having[id], params) for id, params in named if id in having)


def _facts(
    code: CodeStore, chunks: Sequence[Chunk], params: tuple[tuple[str, ...], ...]
) -> ChunkFacts:
    recipe = code.recipe(chunks[0].code)
    rows = TRACE_ROWS[0][0]
    named = NamedIndexes.of(
        code.joint(recipe.base or chunks[0].code, rows), recipe.params or params
    )
    inputs = {
        k: _pattern(each) for k, each in enumerate(params) if chunks[0].inputs[k].kind == "param"
    }
    shared = _Shares.of(named, recipe)
    facts = ChunkFacts(
        tuple(c.id for c in chunks), inputs, tuple(_indexes(named, inputs, shared)), _unknown(named)
    )
    if not recipe.shardings:
        return facts
    layouts = code.layouts(chunks[0].code, rows)
    work = _work(
        parted(code.joint(recipe.base, rows), recipe.shardings, recipe.agreed, recipe.params)
    )
    whole = {k: shared.why_whole(k) for k in inputs if not layouts.layout_of(k)}
    return ChunkFacts(
        facts.ids, inputs, facts.indexes, facts.unknown, recipe.shardings, work, whole
    )


def _pattern(names: Sequence[str]) -> str:
    """Return the pattern of some names, as "layers.*.up.weight"."""
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) != 1:
        return names[0]
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in zip(*parts, strict=True))


def _unknown(named: NamedIndexes) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(title(node) for node, op in named.indexes.ops.items() if not op.known)
    )


def _indexes(
    named: NamedIndexes, inputs: Mapping[int, str], shares: _Shares
) -> Iterator[IndexFacts]:
    groups: dict[str, list[LoopIndex]] = {}
    for index, name in named.names.items():
        groups.setdefault(_renamed(name, named, inputs), []).append(index)
    for name, group in groups.items():
        spots = dict.fromkeys(
            spot for index in group for spot in named.spots_by_input.get(index, ())
        )
        sizes = {prod(i.size for i in named.dims(k)[dim] if i in group): None for k, dim in spots}
        shared = max(shares.devices.get(i, 1) for i in group)
        problem = "" if shared > 1 else next((text for i in group if (text := shares.why(i))), "")
        params = tuple(f"{inputs[k]}:{dim}" for k, dim in spots)
        along = tuple(dict.fromkeys(axis for i in group for axis in shares.along.get(i, ())))
        inside = {axis: n for i in group for axis, n in shares.inside.get(i, {}).items()}
        yield IndexFacts(
            name, tuple(sizes) or (group[0].size,), params, problem, shared, along, inside
        )


def _renamed(name: str, named: NamedIndexes, inputs: Mapping[int, str]) -> str:
    """Return a name that is a parameter's dimension with the parameter as all chunks call it."""
    param, colon, dim = name.rpartition(":")
    shared_name = next(
        (inputs[k] for k, names in enumerate(named.params) if k in inputs and param in names), param
    )
    return f"{shared_name}{colon}{dim}" if colon else name


@dataclass(frozen=True)
class _Shares:
    """Hold among how many devices each index of a chunk is shared, along which axes, and which in attention alone."""

    named: NamedIndexes
    recipe: TraceSpec
    devices: dict[LoopIndex, int] = field(default_factory=dict)
    along: dict[LoopIndex, tuple[str, ...]] = field(default_factory=dict)
    inside: dict[LoopIndex, dict[str, int]] = field(default_factory=dict)
    reasons: dict[LoopIndex, str] = field(default_factory=dict)

    @staticmethod
    def of(named: NamedIndexes, recipe: TraceSpec) -> _Shares:
        shares = _Shares(named, recipe)
        for asked in recipe.shardings:
            if asked.experts:
                experts = experts_of(named.joint, named.indexes, asked, recipe.params)
                shares._add({i: asked.degree for nest in experts for i in nest}, asked.over)
                continue
            if asked.stream == "tokens" or asked.context:
                shares._add(
                    {i: asked.degree for i, name in named.names.items() if name == "tokens"},
                    asked.over,
                )
            if asked.context:
                if asked.attention == "heads":
                    shares._add_inside(asked)
            else:
                shares._add_weights(asked)
        return shares

    def _add(self, devices: Mapping[LoopIndex, int], axis: str) -> None:
        for index, degree in devices.items():
            self.devices[index] = degree * self.devices.get(index, 1)
            if degree > 1:
                self.along[index] = (*self.along.get(index, ()), axis)

    def _add_weights(self, asked: Sharding) -> None:
        named = self.named
        wanted = _wanted(named, asked)
        for nest in named.nests:
            self.reasons.update(dict.fromkeys(nest, _reason(named, nest, wanted, asked.degree)))
        shared: dict[LoopIndex, int] = {}
        for nest in shareable(named.joint, named.indexes, self.recipe.agreed.whole):
            if any(set(nest) & set(w) and steps_of(w, asked.degree) for w in wanted):
                shared |= _devices(next(w for w in wanted if set(nest) & set(w)), asked.degree)
        self._add(shared, asked.over)

    def _add_inside(self, asked: Sharding) -> None:
        """Add the heads that devices along a context axis share in attention, beside those along tensor axes."""
        tensor = prod(s.degree for s in self.recipe.shardings if not s.context)
        for op in self.named.indexes.ops.values():
            if op.call.op is not torch.ops.piper.attention.default:
                continue
            nest = op.tensors[op.call.number("q")][HEADS]
            if steps_of(nest, tensor * asked.degree) is not None:
                before, all = _devices(nest, tensor), _devices(nest, tensor * asked.degree)
                self.inside.update(
                    {i: {asked.over: all[i] // before[i]} for i in nest if all[i] > before[i]}
                )

    def why(self, index: LoopIndex) -> str:
        """Return why devices do not share an index."""
        problem = self.named.obstacle(index)
        hint = '; stream="tokens" shares it' if self.named.names[index] == "tokens" else ""
        return f"{problem}{hint}" if problem else self.reasons.get(index, "")

    def why_whole(self, number: int) -> str:
        """Return why every device has a parameter whole."""
        if number in self.recipe.agreed.whole:
            return "not all chunks that have it can share it alike"
        having = [i for dim in self.named.dims(number) for i in dim]
        reasons = [
            *(self.reasons.get(i, "") for i in having),
            *(self.named.obstacle(i) for i in having),
        ]
        return next(filter(None, reasons), "it has one element")


def _wanted(named: NamedIndexes, asked: Sharding) -> tuple[tuple[LoopIndex, ...], ...]:
    return AskedIndexes(asked.index, named.params).among(named.joint, named.indexes, named.nests)


def _devices(nest: Sequence[LoopIndex], degree: int) -> dict[LoopIndex, int]:
    """Return among how many devices each index of a nest is shared."""
    devices_by_index: dict[LoopIndex, int] = {}
    for index in nest:
        devices_by_index[index] = gcd(degree, index.size)
        degree //= devices_by_index[index]
    return devices_by_index


def _reason(
    named: NamedIndexes,
    nest: Sequence[LoopIndex],
    wanted: Iterable[Sequence[LoopIndex]],
    degree: int,
) -> str:
    """Return why an index of a nest is not shared, if it is not."""
    asked = next((w for w in wanted if set(w) & set(nest)), None)
    if asked is None:
        return "not asked for"
    return uneven(tuple(asked), degree) or f"{named.names[asked[0]]} has a step for each device"


def _work(found: Parted) -> WorkFacts:
    """Return the work of a device in a chunk."""
    whole: dict[str, int] = {}
    flops = 0
    for node in found.ops:
        degree = found.degree(node)
        each = flops_of(node) // degree
        flops += each
        if degree == 1 and each:
            whole[title(node)] = whole.get(title(node), 0) + each
    return WorkFacts(dict(sorted(whole.items(), key=lambda x: -x[1])), flops)
