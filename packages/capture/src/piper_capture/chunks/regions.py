"""Find which region each operation of the captured graph belongs to.

An operation's own coordinates come from the regions and tagged modules around it, and from its layer. These rules apply
to the operations in program order:

1. An operation without user coordinates takes over the coordinates of its latest producer: the last one in the latest
   region. Without a producer it takes over the coordinates of the operation before it. Operations before everything
   tagged have none. `opaque`, `experts`, `shared` and `checkpoint` are never taken over.
2. An operation without a layer, between the first and the last operation with one, takes the layer of its latest
   producer if the user coordinates agree. Before the first layer (embedding) and after the last (head, loss) it has
   none.
3. It joins the latest region with its coordinates if everything it needs is in regions up to that one, and if nothing
   that ran since then changes its inputs; otherwise it opens a new visit of its coordinates. An operation that
   changes a tensor in place never joins a region that is not the latest, nor does one without coordinates of its own
   that draws random numbers: a head draws after the layers. An operation without coordinates of its own,
   between the first and the last operation with a layer, joins the latest region instead of opening a new visit,
   unless that is opaque, checkpointed, or one of experts or of shared operations.
4. An operation between layers, without coordinates of its own, moves to the first region that reads it if fewer
   bytes cross then (`sinking`).

Regions are numbered as they are opened and use values of earlier numbers only, so the cut is acyclic by construction.
Views of parameters, buffers and batch tensors, and tensors made of nothing (arange, zeros), belong to no region: every
region that uses one repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from piper_capture.chunks.layers import Layers
from piper_capture.chunks.replay import ReplayFacts
from piper_capture.chunks.sink_operations import Sinking
from piper_capture.module.tags import (
    LAYER,
    OPAQUE,
    PREFIX,
    check_coordinate,
    module_coords,
    rest_coords,
)
from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward
from piper_capture.trace.dynamo_errors import BLOCK_MASK
from piper_capture.values.concrete import DROPPED, is_size, line_of, tensors_of
from piper_ir.ground.errors import CaptureError
from piper_ir.program.layout import EXPERTS, SHARED
from piper_ir.program.ops import CHECKPOINT

Coords = dict[str, int]
ALONE = (EXPERTS, SHARED, OPAQUE, CHECKPOINT)
"""The coordinates that no operation takes over from another one: their regions hold only operations written there."""

TRITON = frozenset({"triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"})


@dataclass(eq=False)
class Region:
    """Hold a run of operations with equal coordinates.

    `id` is "layer3", "stage0_layer3", or "root" without coordinates; ".1" follows for the second visit of the same
    coordinates.
    """

    number: int
    coords: Coords
    visit: int
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def id(self) -> str:
        name = "_".join(f"{k}{v}" for k, v in self.coords.items()) or "root"
        return f"{name}.{self.visit}" if self.visit else name


@dataclass(frozen=True)
class Operations:
    """Hold a graph's operations in program order; `grad_mode[n]` is False for one under torch.no_grad()."""

    nodes: tuple[fx.Node, ...]
    grad_mode: Mapping[fx.Node, bool]
    statements: tuple[fx.Node, ...]


def operations(graph: fx.Graph) -> Operations:
    """Return the tensor operations, without sizes and bookkeeping.

    Raises CaptureError for operations of Piper's own or that are not supported.
    """
    kept: list[fx.Node] = []
    statements: list[fx.Node] = []
    modes: dict[fx.Node, bool] = {}
    enabled = True
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        name = getattr(node.target, "__name__", str(node.target))
        if name in TRITON:
            raise CaptureError(
                f"{line_of(node)}: an unregistered Triton kernel; wrap it with torch.library.triton_op"
            )
        if _torch.is_transform(node.target):
            if "in create_block_mask" in (node.stack_trace or ""):
                raise CaptureError(f"{_line_near(node)}: {BLOCK_MASK[0]}. {BLOCK_MASK[1]}")
            raise CaptureError(
                f"{_line_near(node)}: a transform of torch.func (vmap, grad, jvp, ...) inside a model cannot be "
                f"cut into chunks; put it into a small nn.Module, which then runs by autograd as it is (with "
                f"torch.autograd.grad in the place of torch.func.grad), write it with batched operations, or wrap "
                f"it as an operator (torch.library.custom_op)"
            )
        if node.target is _torch.SET_GRAD:
            enabled = bool(node.args[0])
            statements.append(node)
            continue
        if is_size(node) or name in DROPPED:
            continue
        if node.op != "get_attr" and not tensors_of(node) and not _writes_silently(node):
            raise CaptureError(
                f"{line_of(node)}: {name} has no tensor result and is not supported inside a model"
            )
        modes[node] = enabled
        kept.append(node)
        statements.append(node)
    return Operations(tuple(kept), modes, tuple(statements))


def _line_near(node: fx.Node) -> str:
    """Return the user's line of a node, or of the next node that has one: nodes that enter a transform have none."""
    traced = node
    while traced.op not in ("root", "output") and not traced.meta.get("stack_trace"):
        traced = traced.next
    return line_of(node if traced.op in ("root", "output") else traced)


def _writes_silently(node: fx.Node) -> bool:
    """Return whether an operation writes without a result: index assignment and custom ops that return nothing."""
    return getattr(node.target, "__name__", "") == "setitem" or isinstance(
        node.target, _torch.OpOverload
    )


def has_experts(forward: Forward) -> bool:
    """Return whether a region or a tagged module of the model has the coordinate experts."""
    written = PREFIX + EXPERTS
    return any(written in (n.meta.get("custom") or {}) for n in forward.graph.nodes) or any(
        EXPERTS in module_coords(module) for module in forward.modules.values()
    )


def own_coords(
    forward: Forward,
    nodes: Sequence[fx.Node],
    layers: Layers,
    random: Collection[fx.Node],
    *,
    experts: bool,
    shared: frozenset[fx.Node],
) -> dict[fx.Node, Coords]:
    """Return each operation's coordinates from regions, tagged modules and layers; inner ones come first.

    Without `experts` they lack that coordinate, as if nobody had given it. The operations `shared` have the coordinate
    of that name. The operations `random` draw random numbers.
    """
    coords_by_node, elsewhere = (
        dict[fx.Node, Coords](),
        _drawn_elsewhere(forward, nodes, layers, random),
    )
    for node in nodes:
        stack = [
            forward.modules.get(key.split("@")[0]) for key in node.meta.get("nn_module_stack") or {}
        ]
        tagged: Coords = {}
        rest: Coords = {}
        for module in filter(None, stack):
            own = module_coords(module)
            rest |= rest_coords(module)
            tagged |= {
                name: value for name, value in own.items() if name not in rest_coords(module)
            }
        custom = node.meta.get("custom") or {}
        written = {k.removeprefix(PREFIX): v for k, v in custom.items() if k.startswith(PREFIX)}
        for name, value in written.items():
            check_coordinate(name, value, line_of(node))
            if tagged.get(name, value) != value:
                raise CaptureError(
                    f"{line_of(node)}: region says {name}={value}, tag says {name}={tagged[name]}; give the "
                    f"coordinate once"
                )
        coords = rest | tagged | written
        layer = None if node in elsewhere else layers.of(node, stack)
        if layer is not None:
            coords.setdefault(LAYER, layer)
        if not experts:
            coords.pop(EXPERTS, None)
        if node in shared:
            coords[SHARED] = 0
        coords_by_node[node] = coords
    return coords_by_node


def _drawn_elsewhere(
    forward: Forward, nodes: Sequence[fx.Node], layers: Layers, random: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the operations of a layer's modules that run outside of the layer, if they draw random numbers.

    A head that embeds by a module of the first layer draws in the state of the head, not again in that of the layer.
    """
    entries = [forward.model.get_submodule(name) for name in layers.names] if random else []
    whose = {id(inner): id(entry) for entry in entries for inner in entry.modules()}
    runs: dict[str, tuple[int, list[fx.Node]]] = {}
    called: set[int] = set()
    for node in nodes:
        stack = [(key, int(key.split("@")[0])) for key in node.meta.get("nn_module_stack") or {}]
        key, outermost = next(((key, module) for key, module in stack if module in whose), ("", 0))
        if outermost in whose.values():
            called.add(outermost)
        elif key:
            runs.setdefault(key, (whose[outermost], []))[1].append(node)
    drawing = (
        run for entry, run in runs.values() if entry in called and not set(random).isdisjoint(run)
    )
    return {node for run in drawing for node in run}


def free_nodes(nodes: Sequence[fx.Node], forward: Forward, facts: ReplayFacts) -> set[fx.Node]:
    """Return the operations that every region may repeat: constants, and views of parameters, buffers and the batch."""
    written = frozenset().union(*facts.writes.values())
    readable = set(forward.origins)
    free: set[fx.Node] = set()
    for node in nodes:
        sources = [n for n in node.all_input_nodes if n in facts.storages]
        storages = facts.storages[node]
        if node.op == "get_attr":
            free.add(node)
        if facts.writes[node] or storages & written or node in facts.random or not tensors_of(node):
            continue
        inherited = frozenset().union(*(facts.storages[n] for n in sources))
        if all(n in readable or n in free for n in sources) and (
            not sources or storages <= inherited
        ):
            free.add(node)
    return free


def spread_nodes(nodes: Iterable[fx.Node], facts: ReplayFacts) -> set[fx.Node]:
    """Return the views that repeat the elements of smaller tensors and are not changed in place.

    A region that reads one from another region repeats it.
    """
    written = frozenset().union(*facts.writes.values())
    spread: set[fx.Node] = set()
    for node in nodes:
        sources = [n for n in node.all_input_nodes if n in facts.storages]
        if (
            len(sources) == 1
            and facts.storages[node] == facts.storages[sources[0]]
            and not facts.storages[node] & written
        ):
            value, base = node.meta["example_value"], sources[0].meta["example_value"]
            if (
                isinstance(value, torch.Tensor)
                and isinstance(base, torch.Tensor)
                and _repeats(value)
                and not _repeats(base)
            ):
                spread.add(node)
    return spread


def _repeats(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor are one and the same in memory, because it was expanded."""
    return any(isinstance(s, int) and s == 0 for s in tensor.stride())


def live_nodes(nodes: Sequence[fx.Node], forward: Forward, facts: ReplayFacts) -> list[fx.Node]:
    """Return the operations that the loss, its weight, a metric or the new content of a buffer depends on.

    A draw of random numbers stays if others follow it: these would be other numbers without it.
    """
    roots = [*forward.results, *forward.rewrites.values()]
    needed = set(roots)
    storages = set().union(*(facts.storages[n] for n in roots if n in facts.storages))
    storages.update(*(facts.storages[n] for n, o in forward.origins.items() if o.kind != "batch"))
    kept: list[fx.Node] = []
    drawn = False
    for node in reversed(nodes):
        random = node in facts.random
        if node in needed or not storages.isdisjoint(facts.writes[node]) or (random and drawn):
            drawn |= random
            kept.append(node)
            needed.update(node.all_input_nodes)
            storages.update(
                *(facts.storages[n] for n in node.all_input_nodes if n in facts.storages)
            )
    return kept[::-1]


class _Assigner:
    """Open regions and put operations into them, in program order."""

    def __init__(
        self, nodes: Sequence[fx.Node], coords: Mapping[fx.Node, Coords], facts: ReplayFacts
    ) -> None:
        self.regions: list[Region] = []
        self.home: dict[fx.Node, Region] = {}
        self._facts = facts
        self._own = coords
        self._position = {n: i for i, n in enumerate(nodes)}
        layered = [i for i, n in enumerate(nodes) if LAYER in coords[n]]
        self._layered = (layered[0], layered[-1]) if layered else (len(nodes), -1)
        self._written: dict[int, tuple[fx.Node, Region]] = {}
        self._latest: dict[tuple[tuple[str, int], ...], Region] = {}

    def add(self, node: fx.Node) -> None:
        producer = self._producer(node)
        first = node.args[0] if node.args else None
        if (
            isinstance(first, fx.Node)
            and first in self.home
            and not isinstance(first.meta["example_value"], torch.Tensor)
        ):
            region = self.home[
                first
            ]  # an item of a tuple lives with the operation that made the tuple
        else:
            region = self._region(node, self._coords(node, producer))
        region.nodes.append(node)
        self.home[node] = region
        for storage in self._facts.writes[node]:
            self._written[storage] = (node, region)

    def _producer(self, node: fx.Node) -> fx.Node | None:
        """Return the latest operation that made or changed something that `node` reads."""
        read = [n for n in node.all_input_nodes if n in self._facts.storages]
        makers = [n for n in read if n in self.home]
        makers += [
            self._written[s][0] for n in read for s in self._facts.storages[n] if s in self._written
        ]
        return max(makers, key=lambda n: (self.home[n].number, self._position[n]), default=None)

    def _coords(self, node: fx.Node, producer: fx.Node | None) -> Coords:
        own = self._own[node]
        before = self.home[producer].coords if producer is not None else None
        if before is None:
            before = self.regions[-1].coords if self.regions else {}
        user = _user(own) or _user(before)
        layer = own.get(LAYER)
        first, last = self._layered
        if layer is None and first < self._position[node] < last and _user(before) == user:
            layer = before.get(LAYER)
        alone = {name: own[name] for name in ALONE if name in own}
        return dict(sorted(user.items())) | ({LAYER: layer} if layer is not None else {}) | alone

    def _region(self, node: fx.Node, coords: Coords) -> Region:
        key = tuple(coords.items())
        latest = self._latest.get(key)
        if latest is not None and self._may_join(node, latest):
            return latest
        if latest is not None and self.is_between(node) and not _alone(self.regions[-1].coords):
            return self.regions[-1]
        region = Region(len(self.regions), coords, latest.visit + 1 if latest else 0)
        self.regions.append(region)
        self._latest[key] = region
        return region

    def is_between(self, node: fx.Node) -> bool:
        """Return whether an operation without its own coordinates stands between layers; without any layers, all do."""
        first, last = self._layered
        return not self._own[node] and (last < 0 or first < self._position[node] < last)

    def sink(self) -> None:
        """Move operations between layers to the region that reads them."""
        nodes = list(self._position)
        movable = [
            n
            for n in nodes
            if self.is_between(n) and self.home[n].coords and OPAQUE not in self.home[n].coords
        ]
        if not movable:
            return
        sinking = Sinking(nodes, {n: r.number for n, r in self.home.items()}, movable, self._facts)
        for region in reversed(self.regions):
            own = [self._position[n] for n in region.nodes if self._own[n]]
            if (
                own
                and not _alone(region.coords)
                and (LAYER in region.coords or self._layered[1] < 0)
            ):
                sinking.into(region.number, region.nodes, min(own))
        for region in self.regions:
            region.nodes.clear()
        for node in nodes:
            self.regions[sinking.home[node]].nodes.append(node)
        self.regions = [r for r in self.regions if r.nodes]

    def _may_join(self, node: fx.Node, region: Region) -> bool:
        if region is self.regions[-1]:
            return True
        read = [n for n in node.all_input_nodes if n in self._facts.storages]
        storages = frozenset().union(*(self._facts.storages[n] for n in read))
        written_later = any(
            s in self._written and self._written[s][1].number > region.number for s in storages
        )
        made_later = any(n in self.home and self.home[n].number > region.number for n in read)
        draws = node in self._facts.random and not self._own[node]
        return not (self._facts.writes[node] or draws or written_later or made_later)


def _alone(coords: Mapping[str, int]) -> bool:
    """Return whether a region has only the operations that were written in it."""
    return any(name in coords for name in ALONE)


def _user(coords: Mapping[str, int]) -> Coords:
    return {k: v for k, v in coords.items() if k not in (LAYER, *ALONE)}


def assign(
    nodes: Sequence[fx.Node], coords: Mapping[fx.Node, Coords], facts: ReplayFacts
) -> list[Region]:
    """Return the regions of the graph in topological order: each uses values of earlier ones only."""
    assigner = _Assigner(nodes, coords, facts)
    for node in nodes:
        assigner.add(node)
    assigner.sink()
    seen: dict[str, Region] = {}
    for region in assigner.regions:
        other = seen.setdefault(region.id, region)
        if other is not region:
            raise CaptureError(
                f"coordinates {other.coords} and {region.coords} give the same chunk name {region.id!r}; rename one"
            )
    return assigner.regions
