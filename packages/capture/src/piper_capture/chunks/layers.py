"""Decide which modules are the layers of a model.

They are the entries of its outermost nn.ModuleLists, unless a strategy asks for others: for the longest chain of like
modules (`chains`), or for modules by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx, nn

from piper_capture.chunks.chains import (
    Visit,
    Visits,
    chains,
    in_order,
    mostly_fed,
    names_text,
)
from piper_capture.module.tags import (
    LAYER,
    PREFIX,
    examples,
    layer_indexes,
    matches,
    module_coords,
    outermost_entries,
)
from piper_capture.trace.dynamo import Forward
from piper_ir.ground.errors import SelectorError
from piper_ir.ground.select import LONGEST_CHAIN

STAGE = "stage"
MOST_NAMED = 3
"""The number of other chains that are named beside the one that was taken."""


@dataclass(frozen=True)
class Layers:
    """Say which modules are the layers of a program.

    Attributes:
        names: the module of each layer, by its dotted name; a module whose visits are layers stands there for each.
        how: how they were found.
        others: other chains of like modules, as texts.
        chained: whether most of them read the output of the layer before.
        modules: id of a module -> the number of its layer; empty if `numbers` has the layer of each operation.
        numbers: operation -> the number of its layer.
        visited: whether each run of a module is a layer, if `numbers` was left out with the graph.
    """

    names: tuple[str, ...] = ()
    how: str = ""
    others: tuple[str, ...] = ()
    chained: bool = True
    modules: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    numbers: dict[fx.Node, int] = field(default_factory=dict, repr=False, compare=False)
    visited: bool = field(default=False, repr=False, compare=False)

    def without_graph(self) -> Layers:
        """Return a copy without references to the graph and its modules."""
        return replace(self, modules={}, numbers={}, visited=bool(self.runs))

    def of(self, node: fx.Node, stack: Sequence[nn.Module | None]) -> int | None:
        """Return the layer of an operation, whose modules are `stack`; None if it is in no layer."""
        if node in self.numbers:
            return self.numbers[node]
        return next((self.modules[id(m)] for m in stack if id(m) in self.modules), None)

    @property
    def runs(self) -> tuple[str, ...]:
        """Return the names if each run of a module is a layer; empty if each entry of a nn.ModuleList is one."""
        return self.names if self.numbers or self.visited else ()

    @property
    def text(self) -> str:
        """Return the layers and the other chains, in a line; "" without layers."""
        if not self.names:
            return ""
        also = f"; others: {', '.join(self.others)}" if self.others else ""
        return f"layers: {len(self.names)}, {names_text(self.names)} ({self.how}){also}"


def listed_layers(visits: Visits, forward: Forward) -> Layers:
    """Return the entries of the outermost nn.ModuleLists; of one that stands there several times, each run."""
    entries = list(outermost_entries(visits.model, set()))
    if len({*map(id, entries)}) < len(entries):
        runs = in_order(visits.numbered(entries))
        return _numbered(runs, visits, forward, "entries of nn.ModuleList", ())
    home = {node: (module, "") for node, (module, _) in visits.numbered(entries).items()}
    names = tuple(visits.names[id(e)] for e in entries)
    return Layers(
        names,
        "entries of nn.ModuleList",
        (),
        mostly_fed(visits.nodes, home),
        modules=layer_indexes(visits.model),
    )


def chosen_layers(forward: Forward, nodes: Sequence[fx.Node], asked: tuple[str, ...]) -> Layers:
    """Return the layers that a strategy asks for: patterns of names, LONGEST_CHAIN, or none for the usual ones."""
    visits = Visits(forward.model, nodes)
    if not asked:
        return listed_layers(visits, forward)
    if asked != LONGEST_CHAIN:
        written = repr(asked[0] if len(asked) == 1 else asked)
        return _numbered(
            _named(visits, asked, written),
            visits,
            forward,
            f"named by partition(layers={written})",
            (),
        )
    listed = listed_layers(visits, forward)
    candidates = [] if _has_own(forward, nodes) else chains(visits)
    if not candidates or (
        set(candidates[0].names) <= set(listed.names)
        and len(candidates[0].names) <= len(listed.names)
    ):
        return listed
    others = tuple(chain.text for chain in candidates[1 : 1 + MOST_NAMED])
    how = f"the longest chain of like modules, {candidates[0].kind}"
    return _numbered(candidates[0].visits, visits, forward, how, others)


def _has_own(forward: Forward, nodes: Sequence[fx.Node]) -> bool:
    """Return whether the user has given layers or stages, by regions or tags."""
    if any(not {LAYER, STAGE}.isdisjoint(module_coords(m)) for m in forward.model.modules()):
        return True
    return any(
        PREFIX + name in (node.meta.get("custom") or {})
        for node in nodes
        for name in (LAYER, STAGE)
    )


def _named(visits: Visits, patterns: Sequence[str], written: str) -> tuple[Visit, ...]:
    """Return the runs of the outermost modules whose names match."""
    every = {name: m for name, m in visits.model.named_modules() if name}
    entries: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {name: m for name, m in every.items() if matches(pattern, name)}
        if not matching:
            raise SelectorError(
                f"partition(layers={written}): no module matches {pattern!r}; the model has "
                f"{examples(list(every))}. Names are "
                'matched as those of files: "blocks.*" means blocks.0, blocks.1 and so on'
            )
        entries |= matching
    outermost = [
        m
        for name, m in entries.items()
        if not any(name.startswith(f"{other}.") for other in entries)
    ]
    runs = in_order(visits.numbered(outermost))
    if not runs:
        raise SelectorError(
            f"partition(layers={written}): none of the modules that match runs any operation on the way to the "
            f"loss; name modules that do: "
            f"{', '.join(c.text for c in chains(visits)) or 'there is no chain of like modules'}"
        )
    return runs


def _numbered(
    runs: Sequence[Visit], visits: Visits, forward: Forward, how: str, others: tuple[str, ...]
) -> Layers:
    number = {visit: k for k, visit in enumerate(runs)}
    entries = [
        forward.modules[str(module)] for module in dict.fromkeys(module for module, _ in runs)
    ]
    numbers = {node: number[v] for node, v in visits.numbered(entries).items() if v in number}
    return Layers(tuple(visits.names[module] for module, _ in runs), how, others, numbers=numbers)
