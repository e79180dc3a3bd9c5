"""Sum up the load of experts while the steps of a run are read, since all tokens of a long run are too many to keep."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from operator import add
from typing import Any

from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan
from piper_report.facts.reading import a_mapping

RECENT = 10
"""The last steps of a run, over which the newest loads are means."""


@dataclass(slots=True)
class LoadHistory:
    """Hold a load over the mean in each step: nan in steps without tokens."""

    values: array[float] = field(default_factory=lambda: array("d"))

    def known(self) -> list[float]:
        """Return the loads of the steps that have one."""
        return [v for v in self.values if not isnan(v)]

    @property
    def mean(self) -> float | None:
        """Return the mean over steps."""
        return _mean(self.known())

    @property
    def recent(self) -> float | None:
        """Return the mean over the last steps."""
        return _mean([v for v in self.values[-RECENT:] if not isnan(v)])

    def worst(self) -> tuple[float, int] | None:
        """Return the highest load with the index of its step, the first of several."""
        loads = [(v, -k) for k, v in enumerate(self.values) if not isnan(v)]
        return (max(loads)[0], -max(loads)[1]) if loads else None


@dataclass(slots=True)
class RankTally:
    """Hold the mean and the worst load of each of several ranks, without all of their steps.

    Attributes:
        totals: the sum of each rank's loads over steps.
        worst: the highest load of each.
        at: the index of the step of that, for each.
        steps: how many steps are summed up.
    """

    totals: list[float]
    worst: list[float]
    at: list[int]
    steps: int = 0

    def add(self, loads: Sequence[float], at: int) -> None:
        """Add the loads of a step."""
        self.steps += 1
        self.totals = list(map(add, self.totals, loads))
        for rank, load in enumerate(loads):
            if load > self.worst[rank]:
                self.worst[rank], self.at[rank] = load, at


@dataclass(slots=True)
class LayerLoad:
    """Hold the load of one layer's experts.

    Attributes:
        module: its name.
        ranks: how many ranks share the experts; 1 if each has all.
        tokens: of each expert, over all steps.
        by_rank: the tokens of each rank's experts over the mean of all, summed up.
        expert: the tokens of the fullest expert over the mean of all, by step.
        rank: likewise of the fullest rank, with its experts in their order; empty if each has all.
        recent: of each expert in each of the last steps.
        overflow: how many choices of tokens found no place, over all steps.
        dropped: likewise how many rows found no place on a device; None if none may be left out.
    """

    module: str
    ranks: int
    tokens: list[int]
    by_rank: RankTally
    expert: LoadHistory = field(default_factory=LoadHistory)
    rank: LoadHistory = field(default_factory=LoadHistory)
    recent: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    overflow: int = 0
    dropped: int | None = None

    def recent_tokens(self) -> list[int]:
        """Return the tokens of each expert over the last steps."""
        return [sum(of) for of in zip(*self.recent, strict=True)]

    def add(self, tokens: Sequence[int]) -> None:
        """Add a step."""
        total = sum(tokens)
        self.tokens = list(map(add, self.tokens, tokens))
        self.recent.append(tokens)
        self.expert.values.append(max(tokens) * len(tokens) / total if total else nan)
        if self.ranks > 1:
            loads = ranks_over_mean(tokens, self.ranks)
            self.rank.values.append(max(loads, default=nan))
            if loads:
                self.by_rank.add(loads, len(self.rank.values) - 1)

    def skip(self, steps: int) -> None:
        """Add steps in which the layer has no tokens."""
        for loads in (self.expert, self.rank) if self.ranks > 1 else (self.expert,):
            loads.values.extend([nan] * steps)


def over_mean(tokens: Sequence[int]) -> list[float]:
    """Return the tokens of each over the mean of all; nothing if there are none."""
    total = sum(tokens)
    return [n * len(tokens) / total for n in tokens] if total else []


def ranks_over_mean(tokens: Sequence[int], ranks: int) -> list[float]:
    """Return the tokens of each rank over the mean of all, if each has as many experts, in their order."""
    size = len(tokens) // ranks
    return over_mean([sum(tokens[k : k + size]) for k in range(0, len(tokens), size)])


class ExpertHistory:
    """Collect the load of the experts of a run.

    Attributes:
        steps: the numbers of the steps that have tokens of experts.
        layers: the load of each layer, by module.
        rank_of_step: the mean over layers of the fullest rank's load, by step; a prediction takes this one.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.steps = array("q")
        self.layers: dict[str, LayerLoad] = {}
        self.rank_of_step = LoadHistory()
        self._plan = plan

    def add(self, step: int, found: Any, where: str) -> None:
        """Add the load that a step logged; raise FormatError if it is not in the form that runs log."""
        for module, of in a_mapping(found, where).items():
            tokens, overflow, dropped = _logged(of, f"{where}.{module}")
            layer = self.layers.get(module)
            if layer is None:
                layer = self.layers[module] = self._new(module, len(tokens), where)
            if len(tokens) != len(layer.tokens):
                raise FormatError(
                    f"{where}.{module}: it has {len(tokens)} experts, and had {len(layer.tokens)} before; put the "
                    f"metrics of different models into different folders"
                )
            layer.add(tokens)
            layer.overflow += overflow
            layer.dropped = layer.dropped if dropped is None else (layer.dropped or 0) + dropped
        self.steps.append(step)
        for layer in self.layers.values():
            layer.skip(len(self.steps) - len(layer.expert.values))
        loads = [
            v
            for layer in self.layers.values()
            if layer.ranks > 1 and not isnan(v := layer.rank.values[-1])
        ]
        self.rank_of_step.values.append(sum(loads) / len(loads) if loads else nan)

    def _new(self, module: str, experts: int, where: str) -> LayerLoad:
        ranks = (
            self._plan.mesh.degree(expert_axes(self._plan, module)) if self._plan is not None else 1
        )
        if experts % ranks:
            raise FormatError(
                f"{where}.{module}: its {experts} experts cannot be those of {ranks} ranks, as plan.json says"
            )
        layer = LayerLoad(
            module, ranks, [0] * experts, RankTally([0.0] * ranks, [0.0] * ranks, [0] * ranks)
        )
        layer.skip(len(self.steps))
        return layer


def expert_axes(plan: Plan, module: str) -> tuple[str, ...]:
    """Return the axes along which ranks have different experts of a module; empty if each has all.

    If the module that counts the tokens has no parameters of its own, these are the plan's axes of experts.
    """
    own = [p for p in plan.params if p.name.startswith(f"{module}.")]
    if not own:
        return plan.experts
    taken = {part.axis for p in own for part in p.layout}
    return tuple(axis for axis in plan.experts if axis in taken)


def _logged(of: Any, where: str) -> tuple[list[int], int, int | None]:
    """Return the tokens of each expert, the choices without a place, and the rows that were left out."""
    record: Mapping[str, Any] = a_mapping(of, where)
    tokens, overflow, dropped = record.get("tokens"), record.get("overflow"), record.get("dropped")
    if not isinstance(tokens, list) or not _counts(tokens) or not _counts([overflow, dropped or 0]):
        raise FormatError(
            f"{where}: the tokens of each expert, overflow and dropped are expected, as integers from 0 on"
        )
    return tokens, int(record["overflow"]), dropped


def _counts(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
