"""Make the choices that a search tries first, ordered by how fast they look by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from piper.api.problems.scale import KEPT_OF_LAYER, ROOM, of_policy
from piper.api.problems.space_sizes import KEPT, TILES, SpaceSizes

STAGES_OF_LAYERS = 8
"""The most stages of a device in a first candidate with interleaved ones."""
ROOMY = 3
"""The meshes of a size of tp whose first candidates keep as much as has room: other policies take time to capture."""


def _along(axis: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda start: bool(start[axis] > 1)


WIDENED: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    **dict.fromkeys(("order", "at"), _along("pp")),
    "pieces": _along("tp"),
    "beside": _along("ep"),
    "group": lambda start: start["keep"] != "all",
    **dict.fromkeys(("away_tensors", "away_prefetch"), lambda start: start["away"] > 0),
    "whole_mb": lambda start: start["zero"] == 3,
}
"""The parameters that usually have one value, each with the starts in which another one has an effect."""


@dataclass(frozen=True)
class FirstCandidates:
    """Make the first choices of a space.

    Attributes:
        space: the sizes.
    """

    space: SpaceSizes

    def every(self) -> tuple[dict[str, Any], ...]:
        """Return the choices that a search tries first: published layouts, and each mesh in little memory.

        The ones that look fastest by their sizes come first. Some of them are tried in all of the memory, too, and, for
        each size of tp, one with context parallelism by heads.
        """
        sizes = list(map(self._folded, self._cells()))
        cells = [self._least(at) for at in sizes]
        # compared by the last policy of each mesh: how much more fits is a rough estimate
        ranked = sorted(map(self._roomy, sizes), key=lambda starts: self._step_s(starts[-1]))
        roomy: list[dict[str, Any]] = []
        for tp in self.space.sizes["tp"]:
            own = [starts for starts in ranked if starts[0]["tp"] == tp]
            exchanged = [{**one, "attention": "heads"} for one, *_ in own if one["cp"] > 1]
            roomy += [*chain.from_iterable(own[:ROOMY]), *exchanged[:1]]
        made = [*self.published(cells), *cells, *roomy]
        every = self._widened(sorted(map(self._fitted, made), key=self._step_s))
        return tuple({frozenset(start.items()): start for start in every}.values())

    def _fitted(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return a start with values that are tried: the first ones in place of others, and of several of a name."""
        own = {
            name: values[0]
            for name, values in self.space.tried.items()
            if start.get(name) not in values and (name in start or len(values) > 1)
        }
        return {**start, **own}

    def _widened(self, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the starts, and behind the first one each further value of a parameter that usually has one.

        A value stands in the first start that can have it.
        """
        more = []
        for name, values in self.space.tried.items():
            able = next(filter(WIDENED[name], every), None) if name in WIDENED else None
            more += [{**able, name: value} for value in values[1:] if able is not None]
        return [*every[:1], *more, *every[1:]]

    def _cells(self) -> Iterator[dict[str, int]]:
        """Yield the sizes of the axes that divide."""
        axes = self.space.axes
        every = (dict(zip(axes, at)) for at in product(*(self.space.sizes[axis] for axis in axes)))
        yield from (at for at in every if not self.space.lacking(at, self.space.rows[0]))

    def _folded(self, at: Mapping[str, int]) -> dict[str, Any]:
        """Return sizes with experts along tp and cp, too, where that can be: whole ones take that much more memory."""
        tokens_over = [axis for axis in ("tp", "cp") if at[axis] > 1]
        return {**at, "fold": self.space.may_fold(at, tokens_over)}

    def _step_s(self, start: Mapping[str, Any]) -> float:
        replicas = self.space.replicas(start)
        parts = self.space.global_batch // (replicas * start["rows"])
        return self.space.scale.step_s(start, self.space.layers, parts, replicas)

    def _least(self, at: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choices with which a mesh holds little: states shared, and all of a layer made again.

        Beside stages only the optimizer's states are shared if the others fit: a pipeline with zero=3 gathers all
        parameters for each microbatch, which is slow, and slow to compile.
        """
        own = self.space.scale.own(at)
        zero = 1 if at["pp"] > 1 and self.space.scale.fits_whole(own, self.space.sharing(at)) else 3
        states = {"zero": zero, "resident_mb": 0, "prefetch": 1, "bucket_mb": 100.0}
        rest = {
            "keep": self._policies[-1],
            "schedule": "1f1b",
            "sequence": True,
            "attention": "ring",
        }
        rest |= {"cut": False, "hybrid": False}
        spared = {"graded": False, "away": 0.0}
        if self.space.is_short(at, tiles=1):
            tiles = TILES if self.space.tiled(at) else 1
            spared = {
                "tiles": tiles,
                "graded": False,
                "away": float(self.space.is_short(at, tiles)),
            }
        spared["host"] = self.space.are_large(at)
        return {**at, "rows": self.space.rows[0], **rest, **spared, **states}

    @property
    def _policies(self) -> tuple[str, ...]:
        """Return the policies of recomputation that are tried, by how much of a layer they keep."""
        tried = self.space.tried.get("keep", KEPT)
        return tuple(sorted(tried, key=lambda keep: -of_policy(KEPT_OF_LAYER, keep)))

    def _roomy(self, at: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the choices with which a mesh makes and gathers as little again as its memory has room for.

        The others keep less, policy by policy: the estimate of memory is no bound.
        Stages are interleaved where each device has several, since their bubbles are shorter, and microbatches that
        gather parameters have more rows, if these have room, too.
        """
        whole = self.space.scale.fits_whole(self.space.scale.own(at), self.space.sharing(at))
        how = {**self._least(at), **({"zero": 1} if whole else {}), **self._interleaved(at)}
        policies = self._with_room(at, self.space.rows[0], whole)
        made = [{**how, "keep": keep} for keep in policies[:-1] or policies]
        more = [rows for rows in self.space.rows[1:2] if not self.space.lacking(at, rows)]
        if how["zero"] == 3 and more:
            policies = self._with_room(at, more[0], whole)
            made[:0] = [{**how, "rows": more[0], "keep": keep} for keep in policies[:-1]]
        return made

    def _with_room(self, at: Mapping[str, Any], rows: int, whole: bool) -> tuple[str, ...]:
        """Return the policies whose tensors a mesh has room for, by its sizes; at least the last one."""
        policies = self._policies
        while len(policies) > 1:
            held = self.space.held_bytes(
                at, rows, keep=policies[0], flying=1.0, tiles=1, whole=whole
            )
            if held <= ROOM * self.space.scale.memory_bytes:
                break
            policies = policies[1:]
        return policies

    def _interleaved(self, at: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choice of interleaved stages, as many as divide a device's layers; none without a pipeline."""
        own = self.space.layers // at["pp"]
        chunks = [n for n in range(2, STAGES_OF_LAYERS + 1) if not own % n]
        return {"schedule": "interleaved", "chunks": chunks[-1]} if at["pp"] > 1 and chunks else {}

    def published(self, cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the layouts that people publish, as far as they divide.

        FSDP alone and with tensor parallelism (torchtitan's recipes of Llama 3), and tensor parallelism beside
        interleaved stages with optimizer states shared (Megatron-LM, arXiv 2104.04473).
        """
        for least in (least for least in cells if least["cp"] == 1):
            if least["pp"] == 1 and least["tp"] in (1, max(self.space.sizes["tp"])):
                for keep, rows in product(("inputs", "attention", "products"), self.space.rows[:2]):
                    if not self.space.lacking(least, rows):
                        yield {**least, "keep": keep, "rows": rows}
            how = self._interleaved(least)
            if least["pp"] == 4 and least["tp"] > 1 and how:
                yield {**least, **how, "keep": "attention", "zero": 1}
