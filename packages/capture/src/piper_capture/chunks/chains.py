"""Find chains of like modules in a captured graph: the layers of a model, under whatever names they stand.

Modules stand in a *series* if they are entries of one nn.Sequential, nn.ModuleDict or nn.ModuleList, or attributes of
one module whose names differ in their last number (layer1, layer2). They are alike if they are of one class. A module
that runs several times is a series of its own: its visits. A series is a *chain* if each of its members reads the
output of the one before it, directly or through other operations. So parallel heads and experts are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

CONTAINERS = (nn.Sequential, nn.ModuleDict, nn.ModuleList)

MOSTLY = 0.6
"""The share of a module's parameters that a chain inside of it must have, for the module to count as made of it.

A stage of blocks is (its downsampling is a small part), a transformer's layer with two attentions is not.
"""

Visit = tuple[int, str]
"""A module by its id, and which of its runs: its path, and the suffix of its key, in nn_module_stack."""


@dataclass(frozen=True)
class Chain:
    """Hold like modules that run one after another.

    Attributes:
        kind: the name of their class.
        visits: the runs of the modules, in order.
        names: the module of each visit, by its dotted name.
        leaf: whether they are single operations of torch.nn, such as nn.Linear.
    """

    kind: str
    visits: tuple[Visit, ...]
    names: tuple[str, ...]
    leaf: bool

    @property
    def text(self) -> str:
        return f"{names_text(self.names)} ({len(self.names)} {self.kind})"


def names_text(names: Sequence[str]) -> str:
    """Return the names of layers as a short text."""
    if len(names) > 1 and len(set(names)) == 1:
        return f"{names[0]}, {len(names)} visits"
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ... {names[-1]}"


class Visits:
    """Say which runs of modules an operation belongs to."""

    def __init__(self, model: nn.Module, nodes: Sequence[fx.Node]) -> None:
        self.model, self.nodes = model, nodes
        self.names = {
            id(m): name for name, m in reversed(list(model.named_modules(remove_duplicate=False)))
        }
        self.stacks = {
            n: [_visit(*item) for item in (n.meta.get("nn_module_stack") or {}).items()]
            for n in nodes
        }
        self.runs: dict[int, dict[str, None]] = {}
        self.inside: dict[int, list[int]] = {}
        for position, stack in enumerate(self.stacks.values()):
            for module, run in stack:
                self.runs.setdefault(module, {})[run] = None
                self.inside.setdefault(module, []).append(position)

    def numbered(self, entries: Sequence[nn.Module]) -> dict[fx.Node, Visit]:
        """Return for each operation inside of one of these modules the entry and which of its runs."""
        home: dict[int, int] = {}
        for entry in entries:
            for inner in entry.modules():
                home.setdefault(id(inner), id(entry))
        visit_of: dict[fx.Node, Visit] = {}
        for position in sorted({p for module in home for p in self.inside.get(module, ())}):
            node = self.nodes[position]
            visit_of[node] = next((home[m], run) for m, run in self.stacks[node] if m in home)
        return visit_of


def _visit(key: str, called: tuple[str, type]) -> Visit:
    """Return the module and the run that an entry of nn_module_stack names.

    Dynamo numbers the runs under one path; a module that stands in a list several times runs under several.
    """
    module, at, run = key.partition("@")
    return int(module), f"{called[0]}{at}{run}"


def in_order(visits: Mapping[fx.Node, Visit]) -> tuple[Visit, ...]:
    """Return runs in the order of their first operations."""
    return tuple(dict.fromkeys(visits.values()))


def feeds_on(nodes: Sequence[fx.Node], home: Mapping[fx.Node, Visit]) -> bool:
    """Return whether each run reads the output of the run before it."""
    return len(fed(nodes, home)) == len(in_order(home)) - 1


def mostly_fed(nodes: Sequence[fx.Node], home: Mapping[fx.Node, Visit]) -> bool:
    """Return whether at least two thirds of the runs read the output of the run before them."""
    return 3 * len(fed(nodes, home)) >= 2 * (len(in_order(home)) - 1)


def fed(nodes: Sequence[fx.Node], home: Mapping[fx.Node, Visit]) -> set[int]:
    """Return the runs, by their places in order, that read the output of the run before them."""
    number = {visit: k for k, visit in enumerate(in_order(home))}
    latest: dict[fx.Node, int] = {}
    fed_runs: set[int] = set()
    for node in nodes:
        read = max((latest.get(n, -1) for n in node.all_input_nodes), default=-1)
        own = number[home[node]] if node in home else -1
        if own > 0 and read == own - 1:
            fed_runs.add(own)
        latest[node] = max(read, own)
        target = (
            node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        )
        if (
            node.args
            and isinstance(node.args[0], fx.Node)
            and (target == "setitem" or re.fullmatch(r"[a-z]\w*[a-z0-9]_", target))
        ):
            latest[node.args[0]] = latest[node]  # changed in place
    return fed_runs


@dataclass(frozen=True)
class _Series:
    parent: nn.Module
    entries: tuple[nn.Module, ...]
    chain: Chain


def chains(visits: Visits) -> list[Chain]:
    """Return the chains that may be the layers of a model, the best one first.

    The longest is the best, and chains of single operations come last. A series inside of the members of another one
    counts only if it is longer and has most of their parameters; a series of single operations there never counts.
    """
    every = list(_series(visits))
    kept = [s for s in every if not any(_belongs_to(s, outer, every) for outer in every)]
    chain_by_kind: dict[str, Chain] = {}
    for one in kept:
        kind = f"{one.chain.kind} {_kind(one.entries[0])}"
        before = chain_by_kind.get(kind)
        chain_by_kind[kind] = one.chain if before is None else _merged(before, one.chain, visits)
    chained = [
        chain for chain in chain_by_kind.values() if len(chain.visits) > 1 and _feed(chain, visits)
    ]
    return sorted(chained, key=lambda chain: (chain.leaf, -len(chain.visits)))


def _feed(chain: Chain, visits: Visits) -> bool:
    """Return whether most visits read the output of the visit before: series beside each other are no chain."""
    known = set(chain.visits)
    home = {
        n: v
        for n, stack in visits.stacks.items()
        if (v := next((s for s in stack if s in known), None))
    }
    return mostly_fed(visits.nodes, home)


def _merged(first: Chain, other: Chain, visits: Visits) -> Chain:
    names = {
        **dict(zip(first.visits, first.names, strict=True)),
        **dict(zip(other.visits, other.names, strict=True)),
    }
    runs = in_order(
        {
            n: v
            for n, stack in visits.stacks.items()
            if (v := next((s for s in stack if s in names), None))
        }
    )
    return Chain(first.kind, runs, tuple(names[v] for v in runs), first.leaf)


def _belongs_to(inner: _Series, outer: _Series, every: Sequence[_Series]) -> bool:
    """Return whether a series is a part of another one's members, so that these count in its place."""
    inside = {id(m) for entry in outer.entries for m in entry.modules()} - {
        id(entry) for entry in outer.entries
    }
    if inner is outer or not all(id(entry) in inside for entry in inner.entries):
        return False
    if outer.chain.leaf:
        return False
    if inner.chain.leaf:
        return True
    alike = [
        s
        for s in every
        if _kind(s.entries[0]) == _kind(inner.entries[0])
        and all(id(e) in inside for e in s.entries)
    ]
    length = len({visit for s in alike for visit in s.chain.visits})
    share = _numel(e for s in alike for e in s.entries) / _numel(outer.entries)
    return share < MOSTLY or length <= len(outer.chain.visits)


def _numel(entries: Sequence[nn.Module] | Iterator[nn.Module]) -> int:
    return sum({id(p): p.numel() for entry in entries for p in entry.parameters()}.values())


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Return the key that like modules share: their class, and for a container the classes of its entries."""
    if isinstance(module, CONTAINERS):
        return type(module), frozenset(type(child) for child in module.children())
    return (type(module),)


def _series(visits: Visits) -> Iterator[_Series]:
    """Yield the series of like modules with parameters that are chains, outer ones first."""
    seen: set[int] = set()
    for parent in visits.model.modules():
        for entries in _groups(parent):
            home = visits.numbered(entries)
            if home and feeds_on(_window(visits.nodes, home), home):
                seen.update(map(id, entries))
                yield _Series(parent, entries, _chain(entries, home, visits))
        if (
            len(visits.runs.get(id(parent), ())) > 1
            and id(parent) not in seen
            and _numel((parent,))
        ):
            home = visits.numbered((parent,))
            if feeds_on(_window(visits.nodes, home), home):
                yield _Series(parent, (parent,), _chain((parent,), home, visits))


def _groups(parent: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    groups: dict[tuple[object, ...], dict[int, nn.Module]] = {}
    for name, child in parent.named_children():
        stem = "" if isinstance(parent, CONTAINERS) else re.sub(r"\d+$", "", name)
        if (isinstance(parent, CONTAINERS) or stem != name) and _numel((child,)):
            groups.setdefault((stem, *_kind(child)), {})[id(child)] = child
    least = 1 if isinstance(parent, CONTAINERS) else 2
    yield from (tuple(group.values()) for group in groups.values() if len(group) >= least)


def _window(nodes: Sequence[fx.Node], home: Mapping[fx.Node, Visit]) -> Sequence[fx.Node]:
    """Return the operations from the first to the last of some."""
    at = [k for k, node in enumerate(nodes) if node in home]
    return nodes[at[0] : at[-1] + 1]


def _chain(entries: Sequence[nn.Module], home: Mapping[fx.Node, Visit], visits: Visits) -> Chain:
    runs, first = in_order(home), entries[0]
    leaf = type(first).__module__.startswith("torch.nn") and not any(True for _ in first.children())
    return Chain(
        type(first).__name__, runs, tuple(visits.names[module] for module, _ in runs), leaf
    )
