"""Define `partition`: choose stages as sets of neighbouring layers.

    before  layer0.F  layer1.F  layer2.F  layer3.F
    after   layer0.F stage=0  layer1.F stage=0  layer2.F stage=1  layer3.F stage=1        partition(stages=2)

Legality
 1. stages is at least 1, and there are at least as many layers as stages.
 2. `at` is "even", "cost", or ascending first layers of the stages 1.. , one less than stages, within the layers.
 3. The model has layers (an nn.ModuleList or regions with layer=), unless every node has a stage already.
 4. Stages that are already there agree: all nodes have one, they are 0..stages-1, and no other boundaries are asked
    for.
 5. Nothing is placed yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from piper_compiler.directives.base import directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_compiler.durations import chunk_seconds
from piper_ir.costs import Costs
from piper_ir.graph import Graph
from piper_ir.program import Program

Boundaries = Literal["even", "cost"] | tuple[int, ...]
"""The first layers of the stages: by number of layers, by cost, or those of the stages 1, 2, ... themselves."""


@directive
@dataclass(frozen=True)
class Partition:
    """Give every chunk the coordinate stage (0..stages-1).

    What runs before the first layer joins the first, what runs after a layer joins that layer.

    Attributes:
        at: "even" gives the first stages one layer more when layers do not divide; "cost" minimises the slowest stage's
            time; a tuple gives the first layers of the stages 1, 2, ...
        site: where the user wrote it.
    """

    stages: int
    at: Boundaries = "even"
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if self.stages < 1:
            raise fail(self, 1, "at least one stage is needed")
        if graph.roles:
            raise fail(self, 5, "nodes are placed already; write partition before place")
        present = graph.coordinates().get("stage")
        if present is not None:
            self._check_present(graph, present)
            return
        layers = layers_of(graph.program)
        if not layers:
            way_out = "tag stages with `with piper.region(stage=...)` or piper.tag(model, ...)"
            raise fail(self, 3, f"the model has no layers (no nn.ModuleList); {way_out}")
        if len(layers) < self.stages:
            raise fail(self, 1, f"the model has {len(layers)} layers; use at most {len(layers)} stages")
        if isinstance(self.at, tuple):
            self._check_boundaries(self.at, layers)
        elif self.at not in ("even", "cost"):
            raise fail(self, 2, f'at={self.at!r}; "even", "cost" or a tuple of first layers is accepted')

    def _check_present(self, graph: Graph, present: list[int | str]) -> None:
        without = [n.name(n.each[0]) for n in graph.sequence if "stage" not in n.coords]
        if without:
            raise fail(self, 4, f"some regions have a stage already but {without[0]} has none; tag all regions or none")
        if present != list(range(self.stages)):
            raise fail(self, 4, f"the model is tagged with stages {present}; use partition(stages={len(present)})")
        if self.at != "even":
            raise fail(self, 4, f"the model is tagged with stages, so at={self.at!r} would have no effect; leave it out")

    def _check_boundaries(self, at: tuple[int, ...], layers: list[int]) -> None:
        if len(at) != self.stages - 1:
            raise fail(self, 2, f"{self.stages} stages need {self.stages - 1} boundaries, found {len(at)}")
        if list(at) != sorted(set(at)) or not set(at) <= set(layers[1:]):
            raise fail(self, 2, f"boundaries must ascend and be among the layers {layers[1]}..{layers[-1]}")

    def decided(self) -> Decided | None:
        """Return what it decides before it is compiled."""
        return Decided(self)

    def apply(self, graph: Graph) -> Graph:
        if "stage" in graph.coordinates():
            return graph
        stage_of = stage_of_layers(graph.program, self.stages, self.at, graph.costs)
        edit = graph.edit()
        home = chunk_layers(graph.program)
        for node in graph.sequence:
            layer = home[str(node.coords["chunk"])]
            edit.update(replace(node, coords={**node.coords, "stage": stage_of[layer]}))
        return edit.done()

    def with_fixed_stages(self, graph: Graph) -> Partition:
        """Return the same stages without at="cost", which would cut elsewhere with other costs."""
        if self.at != "cost":
            return self
        stage_of = stage_of_layers(graph.program, self.stages, self.at, graph.costs)
        firsts = {stage: layer for layer, stage in reversed(stage_of.items())}
        return replace(self, at=tuple(firsts[s] for s in range(1, self.stages)))


def layers_of(program: Program) -> list[int]:
    """Return the layer coordinates in order of first appearance."""
    return list(dict.fromkeys(c.coords["layer"] for c in program.chunks if "layer" in c.coords))


def chunk_layers(program: Program) -> dict[str, int]:
    """Return for each chunk the layer whose stage it shares: its own, else the latest chunk's, else the first."""
    latest = layers_of(program)[0]
    out = {}
    for chunk in program.chunks:
        latest = chunk.coords.get("layer", latest)
        out[chunk.id] = latest
    return out


def stage_of_layers(program: Program, stages: int, at: Boundaries, costs: Costs | None = None) -> dict[int, int]:
    """Return the stage of each layer."""
    layers = layers_of(program)
    if isinstance(at, tuple):
        firsts = [layers.index(b) for b in at]
    elif at == "even":
        short, long = divmod(len(layers), stages)
        firsts = list(accumulate([short + (s < long) for s in range(stages)]))[:-1]
    else:
        firsts = _balanced(_layer_seconds(program, layers, costs), stages)
    return {layer: sum(i >= f for f in firsts) for i, layer in enumerate(layers)}


def _layer_seconds(program: Program, layers: list[int], costs: Costs | None) -> list[float]:
    home = chunk_layers(program)
    total = dict.fromkeys(layers, 0.0)
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
            nxt[i], cut[i] = min((max(prefix[j] - prefix[i], best[j]), j) for j in range(i + 1, n - left + 2))
        best, choice = nxt, [cut, *choice]
    firsts, i = [], 0
    for cut in choice:
        i = cut[i]
        firsts.append(i)
    return firsts
