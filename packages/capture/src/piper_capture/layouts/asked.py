"""Check that the indexes that a user names exist and can be shared; errors name the indexes that can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.choice import in_crossing, shareable, taken_apart
from piper_capture.layouts.fitting import uneven
from piper_capture.layouts.indexes import Indexed, LoopIndex
from piper_capture.layouts.names import AskedIndexes, Nested, Spots, names_of, spots_of
from piper_capture.layouts.reasons import obstacle
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import EXPERTS, EXPERTS_SHARED, Sharding

HINTS = {
    "tokens": 'stream="tokens" shares it',
    EXPERTS: f"devices share the experts of a mixture by {EXPERTS_SHARED}",
}
"""The advice about indexes that devices cannot share like others, by the name of the index."""


@dataclass(frozen=True)
class NamedIndexes:
    """Hold the indexes of a chunk with their names.

    Attributes:
        params: for each input, its names in the chunks that are like this one.
    """

    joint: Joint
    indexes: Indexed
    params: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(joint: Joint, params: Sequence[Sequence[str]]) -> NamedIndexes:
        """Return the named indexes of a chunk."""
        return NamedIndexes(*taken_apart(joint), tuple(map(tuple, params)))

    @cached_property
    def names(self) -> Mapping[LoopIndex, str]:
        return names_of(self.joint, self.indexes, [each[0] if each else "" for each in self.params])

    def dims(self, number: int) -> tuple[Nested, ...]:
        """Return the indexes of each dimension of an input."""
        return self.indexes.tensors[self.joint.inputs[number], 0]

    @cached_property
    def spots_by_input(self) -> Spots:
        """Return for each index the inputs that are parameters and have it, each with the dimension."""
        return spots_of(self.joint, self.indexes)

    @cached_property
    def spots(self) -> Mapping[LoopIndex, tuple[str, ...]]:
        """Return for each index the dimensions of parameters that have it, as "layers.0.up.weight:0"."""
        entries = self.spots_by_input.items()
        return {
            index: tuple(f"{self.params[k][0]}:{dim}" for k, dim in where)
            for index, where in entries
        }

    @cached_property
    def nests(self) -> tuple[Nested, ...]:
        """Return the nests of indexes that devices can share."""
        return shareable(self.joint, self.indexes)

    @cached_property
    def crossing(self) -> frozenset[LoopIndex]:
        return frozenset(in_crossing(self.joint, self.indexes))

    def obstacle(self, index: LoopIndex) -> str:
        """Return why devices cannot share an index; "" if they can."""
        return obstacle(self.indexes, self.crossing, index)

    def refusals(self, name: str, degree: int) -> Iterator[str]:
        """Yield why devices cannot share the indexes of a name in this chunk."""
        wanted = AskedIndexes((name,), self.params)
        nests = wanted.among(self.joint, self.indexes, self.nests)
        yield from (problem for nest in nests if (problem := uneven(nest, degree)))
        if not nests:
            named = sorted(wanted.named(self.joint, self.indexes, name), key=lambda i: i.number)
            yield from (
                f"{problem}{_at(self.spots.get(i, ()))}"
                for i in named
                if (problem := self.obstacle(i))
            )

    def has(self, name: str) -> bool:
        return bool(AskedIndexes((name,), self.params).named(self.joint, self.indexes, name))


def _at(spots: Sequence[str]) -> str:
    return (
        f" (parameters {', '.join(spots[:3])}{', ...' if len(spots) > 3 else ''})" if spots else ""
    )


def check_asked(chunks: Mapping[str, NamedIndexes], asked: Sharding) -> None:
    """Raise DirectiveError for a name without an index, or with one that devices cannot share.

    `chunks` are the chunks with code of their own, by id.
    """
    for name in asked.index:
        hint = f"; {HINTS[name]}" if name in HINTS else ""
        having = {id: chunk for id, chunk in chunks.items() if chunk.has(name)}
        if not having:
            raise DirectiveError(
                f"shard(index={name!r}): there is no such index; {_offered(chunks)}{hint}"
            )
        for id, chunk in having.items():
            for problem in chunk.refusals(name, asked.degree):
                raise DirectiveError(
                    f"shard(index={name!r}): devices cannot share it in {id}: {problem}{hint}"
                )


def _offered(chunks: Mapping[str, NamedIndexes]) -> str:
    """Return the names of the indexes that devices can share."""
    offered = dict.fromkeys(c.names[nest[0]] for c in chunks.values() for nest in c.nests)
    named = [n for n in offered if ":" not in n]
    spots = (spot for c in chunks.values() for where in c.spots.values() for spot in where)
    others = next((n for n in offered if ":" in n), None) or next(spots, "")
    also = f"a dimension of a parameter is written {others!r}" if others else ""
    return (
        "; ".join(filter(None, (f"there is {', '.join(named)}" if named else "", also)))
        or "nothing can be shared"
    )
