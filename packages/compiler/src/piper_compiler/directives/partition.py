"""Define `partition`: choose stages as sets of neighbouring layers.

    before  layer0.F  layer1.F  layer2.F  layer3.F
    after   layer0.F stage=0  layer1.F stage=0  layer2.F stage=1  layer3.F stage=1        partition(stages=2)

Legality
 1. stages is at least 1, and there are at least as many units as stages.
 2. `at` is "even", "cost", or ascending first layers of the stages 1.. , one less than stages, within the layers. A
    number that stands twice makes an empty stage.
 3. The model has layers, unless every node has a stage already.
 4. Stages that are already there agree: all nodes have one, they are 0..stages-1, and no other boundaries are asked
    for.
 5. Nothing is placed yet.
 6. `units` is one of UNITS, and the program has the units that it names.
 7. `layers` are patterns of names of modules; the program is captured for them, and no other partition has others.
 8. The chunks of empty stages are made when a model is captured, for one partition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from piper_compiler.directives.base import Directive, describe, directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.prepare import (
    CaptureRequest,
    Preparation,
    lacks_layers,
    layers_of,
)
from piper_compiler.durations import chunk_seconds
from piper_ir.graph.graph import Graph
from piper_ir.ground.select import EMPTY, LONGEST_CHAIN
from piper_ir.program.costs import Costs
from piper_ir.program.program import Program

Boundaries = Literal["even", "cost"] | tuple[int, ...]
"""The first layers of the stages: chosen by number of layers, by cost, or given for the stages 1, 2, ..."""

UNITS = {
    "layers": (False, False),
    "embedding": (True, False),
    "head": (False, True),
    "all": (True, True),
}
"""The names of sets of units: whether the chunks before the first layer are one, and the chunks after the last."""


@directive
@dataclass(frozen=True)
class Partition:
    """Give every chunk the coordinate stage (0..stages-1).

    Chunks before the first layer join the first, chunks after a layer join that layer, unless `units` makes units of
    them.

    Attributes:
        at: "even" gives the first stages one layer more when layers do not divide; "cost" minimises the slowest stage's
            time; a tuple gives the first layers of the stages 1, 2, ... A stage that begins where the next one does is
            empty: it has a chunk that passes on the values of the stage before, with the coordinate `empty`.
        units: the units that may be stages of their own: "layers"; "embedding": the chunks before the first layer,
            too; "head": the chunks after the last layer (head and loss), too; "all": both. With them `at` counts units,
            from 0.
        layers: patterns of the names of the modules that are the layers; without any, the usual layers.
        site: where the user wrote it.
    """

    stages: int
    at: Boundaries = "even"
    units: str = "layers"
    layers: str | tuple[str, ...] = ()
    site: str = site_field()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the patterns of the names of layers."""
        return (self.layers,) if isinstance(self.layers, str) else self.layers

    def check_form(self) -> None:
        """Raise DirectiveError for an argument that is wrong for any program."""
        if type(self.stages) is not int:
            raise fail(self, 1, f"stages={self.stages!r}; a number of stages is accepted")
        if not isinstance(self.units, str) or self.units not in UNITS:
            raise fail(
                self, 6, f"units={self.units!r}; one of {', '.join(map(repr, UNITS))} is accepted"
            )
        if not isinstance(self.patterns, tuple) or not all(
            isinstance(p, str) and p for p in self.patterns
        ):
            text = 'the pattern of a name of modules, or a tuple of patterns, is accepted, such as "blocks.*"'
            raise fail(self, 7, f"layers={self.layers!r}; {text}")

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
        """Ask for the layers that it names, or for a chain of like modules if the program has too few layers."""
        self.check_form()
        for item in seen.before if self.patterns else ():
            if isinstance(item, Partition) and item.patterns not in ((), self.patterns):
                text = f"{describe(item)} names others; one strategy has one set of layers"
                raise fail(self, 7, text)
        empty = tuple((self.units, first, stage) for stage, first in self._empty())
        if empty and request.empty_stages not in ((), empty):
            raise fail(self, 8, "another partition has other empty stages; one decides")
        request = replace(request, empty_stages=empty or request.empty_stages)
        if self.patterns:
            return replace(request, layers=self.patterns)
        wanted = max(self.stages - len(empty) - sum(UNITS[self.units]), 1)
        if request.layers or not lacks_layers(seen.program, wanted):
            return request
        return replace(request, layers=LONGEST_CHAIN)

    def _empty(self) -> list[tuple[int, int]]:
        """Return the stages that begin where the next one does, each with that number."""
        at = self.at if isinstance(self.at, tuple) else ()
        return [(k + 1, first) for k, (first, behind) in enumerate(pairwise(at)) if first == behind]

    def check(self, graph: Graph) -> None:
        self.check_form()
        if self.stages < 1:
            raise fail(self, 1, "at least one stage is needed")
        if graph.roles:
            raise fail(self, 5, "nodes are placed already; write partition before place")
        present = graph.coordinates().get("stage")
        if present is not None:
            self._check_present(graph, present)
            return
        self._check_layers(graph.program)
        program_units = units_of(graph.program, self.units)
        if len(program_units) < self.stages - len(self._empty()):
            raise fail(self, 1, self._too_few(graph.program, program_units))
        if isinstance(self.at, tuple):
            self._check_boundaries(self.at, program_units, graph.program)
        elif self.at not in ("even", "cost"):
            raise fail(
                self, 2, f'at={self.at!r}; "even", "cost" or a tuple of first layers is accepted'
            )

    def _check_layers(self, program: Program) -> None:
        if self.patterns and program.layers != self.patterns:
            text = f"this program has others ({program.layers or 'the usual ones'})"
            raise fail(
                self,
                7,
                f"layers are chosen when a model is captured, and {text}; compile a job, with one partition",
            )
        if not layers_of(program):
            way_out = (
                "name modules that run one after another with partition(layers=...), or tag stages with `with "
                "piper.region(stage=...)` or piper.tag(model, ...)"
            )
            text = (
                "layers are entries of an nn.ModuleList that forward calls, or a chain of like modules in "
                "nn.Sequential, nn.ModuleDict or numbered attributes; an entry of which forward only reads "
                "parameters, as in F.linear(x, entry.weight), is not called"
            )
            raise fail(self, 3, f"the model has no layers ({text}); {way_out}")
        ends = _ends(program)
        for wanted, there, what in zip(
            UNITS[self.units], ends, ("before the first", "after the last"), strict=True
        ):
            if wanted and not there:
                raise fail(
                    self,
                    6,
                    f"nothing stands {what} layer, so units={self.units!r} has no unit for it; leave it out",
                )

    def _too_few(self, program: Program, found: list[Unit]) -> str:
        layers = len(layers_of(program))
        have = f"the model has {layers} layers"
        if self.units != "layers":
            have += f", and {len(found)} units with units={self.units!r}"
        more = layers + sum(_ends(program))
        hint = (
            f', or units="all", which has {more}'
            if more >= self.stages and self.units != "all"
            else ""
        )
        return f"{have}; use at most {len(found)} stages{hint}"

    def _check_present(self, graph: Graph, present: list[int | str]) -> None:
        chunks = {str(n.coords["chunk"]): n.coords.get("stage") for n in graph.sequence}
        without = [chunk for chunk, stage in chunks.items() if stage is None]
        if without:
            having = [
                f"{chunk} (stage {stage})" for chunk, stage in chunks.items() if stage is not None
            ]
            others = f", nor have {_some(without[1:])}" if without[1:] else ""
            raise fail(
                self,
                4,
                f"some regions have a stage already, {_some(having)}, but {without[0]}.F has none{others}; give "
                f"these one, too: "
                'piper.tag(model, {"...": dict(stage=0)}) means all the rest, and what runs in no '
                "module of the model takes the stage of what it reads",
                tuple(without),
            )
        agrees = present == list(range(self.stages))
        if (agrees and self.at == "even") or any("stage" in c.coords for c in graph.program.chunks):
            earlier = None  # the stages are tags of the model
        else:
            earlier = next((a for a in graph.log if a.text.startswith("partition(")), None)
        if earlier is not None:
            raise fail(
                self,
                4,
                f"{earlier.text} at {earlier.site} has made {len(present)} stages already; give its arguments and these "
                f"to one partition: a recipe that comes after one takes its stages, without at= and for as many",
            )
        if not agrees:
            raise fail(
                self,
                4,
                f"the model is tagged with stages {present}; use partition(stages={len(present)})",
            )
        if self.at != "even":
            raise fail(
                self,
                4,
                f"the model is tagged with stages, so at={self.at!r} would have no effect; leave it out",
            )

    def _check_boundaries(self, at: tuple[int, ...], units: list[Unit], program: Program) -> None:
        if len(at) != self.stages - 1:
            raise fail(
                self, 2, f"{self.stages} stages need {self.stages - 1} boundaries, found {len(at)}"
            )
        names = _names(units, self.units)
        if list(at) != sorted(at) or not set(at) <= set(names[1:]):
            what = "layers" if self.units == "layers" else "units"
            raise fail(
                self, 2, f"boundaries must ascend and be among the {what} {names[1]}..{names[-1]}"
            )
        made = {int(c.coords[EMPTY]) for c in program.chunks if EMPTY in c.coords}
        if other := made.symmetric_difference(stage for stage, _ in self._empty()):
            have = "a" if min(other) in made else "no"
            text = f"this program has {have} chunk for the empty stage {min(other)}"
            raise fail(self, 8, f"{text}; compile a job, with one partition that says its stages")

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided(self)

    def apply(self, graph: Graph) -> Graph:
        if "stage" in graph.coordinates():
            return graph
        stage_of = self._stages(graph)
        edit = graph.edit()
        home = chunk_layers(graph.program, self.units)
        for node in graph.sequence:
            unit = home[str(node.coords["chunk"])]
            stage = node.coords.get(EMPTY, stage_of[unit])
            edit.update(replace(node, coords={**node.coords, "stage": stage}))
        return edit.done()

    def _stages(self, graph: Graph) -> dict[Unit, int]:
        return stage_of_layers(graph.program, self.stages, self.at, graph.costs, self.units)

    def with_fixed_stages(self, graph: Graph) -> Partition:
        """Return the same stages without at="cost", which would cut elsewhere with other costs."""
        if self.at != "cost":
            return self
        stage_of = self._stages(graph)
        names = dict(zip(stage_of, _names(list(stage_of), self.units), strict=True))
        firsts = {stage: names[unit] for unit, stage in reversed(stage_of.items())}
        return replace(self, at=tuple(firsts[s] for s in range(1, self.stages)))


Unit = int | str
"""A layer by its number, or BEFORE or AFTER all layers."""
BEFORE, AFTER = "before", "after"


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _names(units: list[Unit], which: str) -> list[int]:
    """Return the numbers that `at` uses for units: the layers' own, or from 0 if there are other units."""
    return (
        [u for u in units if isinstance(u, int)] if which == "layers" else list(range(len(units)))
    )


def _ends(program: Program) -> tuple[bool, bool]:
    """Return whether something stands before the first layer, and after the last."""
    with_layer = ["layer" in c.coords for c in program.chunks]
    return not with_layer[0], not with_layer[-1]


def units_of(program: Program, which: str = "layers") -> list[Unit]:
    """Return the units of a program in order."""
    before, after = UNITS[which]
    return [*[BEFORE] * before, *layers_of(program), *[AFTER] * after]


def chunk_layers(program: Program, which: str = "layers") -> dict[str, Unit]:
    """Return for each chunk the unit whose stage it shares.

    That is its own layer, else the latest chunk's; before all layers and after them it is the nearest layer, or the
    unit that stands there.
    """
    before, after = UNITS[which]
    latest: Unit = BEFORE if before else layers_of(program)[0]
    last = max(k for k, chunk in enumerate(program.chunks) if "layer" in chunk.coords)
    unit_by_chunk: dict[str, Unit] = {}
    for k, chunk in enumerate(program.chunks):
        latest = AFTER if after and k > last else chunk.coords.get("layer", latest)
        unit_by_chunk[chunk.id] = latest
    return unit_by_chunk


def before_empty(
    program: Program, empty: Iterable[tuple[str, int, int]]
) -> dict[int, tuple[str, ...]]:
    """Return for each empty stage of a request the chunks of the unit before it; see `CaptureRequest`.

    A boundary that is no unit has none: `check` refuses it.
    """
    chunks: dict[int, tuple[str, ...]] = {}
    for units, first, stage in empty:
        if not layers_of(program) or not all(
            there for wanted, there in zip(UNITS[units], _ends(program), strict=True) if wanted
        ):
            continue
        every, home = units_of(program, units), chunk_layers(program, units)
        numbers = _names(every, units)
        if first in numbers[1:]:
            before = every[numbers.index(first) - 1]
            chunks[stage] = tuple(id for id, unit in home.items() if unit == before)
    return chunks


def stage_of_layers(
    program: Program, stages: int, at: Boundaries, costs: Costs | None = None, which: str = "layers"
) -> dict[Unit, int]:
    """Return the stage of each unit."""
    units = units_of(program, which)
    if isinstance(at, tuple):
        firsts = [_names(units, which).index(b) for b in at]
    elif at == "even":
        short, long = divmod(len(units), stages)
        firsts = list(accumulate([short + (s < long) for s in range(stages)]))[:-1]
    else:
        firsts = _balanced(_unit_seconds(program, units, costs, which), stages)
    return {unit: sum(i >= f for f in firsts) for i, unit in enumerate(units)}


def _unit_seconds(
    program: Program, units: list[Unit], costs: Costs | None, which: str
) -> list[float]:
    home = chunk_layers(program, which)
    total = dict.fromkeys(units, 0.0)
    for chunk in program.bound(1):
        total[home[chunk.id]] += sum(chunk_seconds(chunk, step, costs) for step in chunk.steps)
    return list(total.values())


def _balanced(seconds: list[float], stages: int) -> list[int]:
    """Return the first layers of the stages 1, 2, ... such that the slowest stage is as fast as possible.

    Ties go to the earliest boundaries. A dynamic programme over (stage, first layer) takes O(stages * layers^2).
    """
    n = len(seconds)
    prefix = [0.0, *accumulate(seconds)]
    best = [prefix[n] - prefix[i] for i in range(n)]  # one stage from layer i to the end
    choice: list[list[int]] = []
    for left in range(2, stages + 1):
        nxt, cut = [float("inf")] * n, [0] * n
        for i in range(n - left + 1):
            nxt[i], cut[i] = min(
                (max(prefix[j] - prefix[i], best[j]), j) for j in range(i + 1, n - left + 2)
            )
        best, choice = nxt, [cut, *choice]
    firsts, i = [], 0
    for cut in choice:
        i = cut[i]
        firsts.append(i)
    return firsts


def stages_of(directives: Iterable[Directive]) -> int | None:
    """Return the number of stages that the `partition` among directives makes; None without one."""
    return next((d.stages for d in directives if isinstance(d, Partition)), None)
