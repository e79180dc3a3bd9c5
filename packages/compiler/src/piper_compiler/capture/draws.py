"""Name the random operations of a graph by the modules that draw, and find how what they draw lies in rows.

What one device draws for the whole batch can be drawn in parts where a row has as many elements as any other, one
behind the other or at equal distances: [rows, ...], [rows * tokens, ...], [tokens, rows, ...]. A dimension of tokens x
rows in that order is followed from where it is made, and refused where it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from piper_compiler.capture.concrete import concrete_shape, line_of, tensors_of
from piper_compiler.capture.dynamo import Forward
from piper_compiler.capture.replay import ReplayFacts
from piper_ir.draws import ANY_NUMBER, Draw
from piper_ops import as_written, is_draw, refusal_of_draw

DRAW = "piper_draw"
"""The key of a node's meta for the number of a random operation in its chunk."""
WHOLE = frozenset({"randperm"})
"""The ops whose results are no elements of their own, so that none of them is drawn for a part of the rows."""


@dataclass(frozen=True)
class Drawn:
    """Describe a random operation of a trace at one number of rows.

    Attributes:
        origin: the name of the operation of the captured graph that draws.
        op: the name of the op of aten.
        shape: of what is drawn.
        refused: why it cannot be drawn by row; "" where it can.
    """

    origin: str
    op: str
    shape: tuple[int, ...]
    refused: str = ""

    @staticmethod
    def of(origin: str, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Drawn:
        """Return the description of a call of a random operation, whose arguments may be nodes."""
        value = result[0] if isinstance(result, tuple | list) else result
        return Drawn(origin, op._schema.name.split("::")[1], tuple(value.shape), refusal_of_draw(op, args, kwargs, value.dtype))


def number_draws(graph: fx.Graph) -> None:
    """Give each random operation of a joint graph its number, in the order of the program."""
    for number, node in enumerate(n for n in graph.nodes if is_draw(n.target, n.args, n.kwargs)):
        node.meta[DRAW] = number


def drawn_in(graph: fx.Graph) -> tuple[Drawn, ...]:
    """Return the random operations of a joint graph."""
    nodes = [n for n in graph.nodes if is_draw(n.target, n.args, n.kwargs)]
    return tuple(Drawn.of(origin_of(n), n.target, n.args, n.kwargs, n.meta["val"]) for n in nodes)


def origin_of(node: fx.Node) -> str:
    """Return the name of the operation of the captured graph that made a node of a joint graph; "" for none."""
    sources = node.meta.get("from_node") or ()
    return str(sources[0].name) if sources else ""


def draws_of(rows: Sequence[int], traces: Sequence[Sequence[Drawn]]) -> tuple[Draw, ...]:
    """Return the draws of a code, each with the name of its origin for its place, from traces at numbers of rows."""
    return tuple(_fitted(rows, same) for same in zip(*traces, strict=True))


def _fitted(rows: Sequence[int], same: Sequence[Drawn]) -> Draw:
    first, second = same[:2]
    entries = tuple((b - a) // (rows[1] - rows[0]) for a, b in zip(first.shape, second.shape, strict=True))
    refused = first.refused
    if any(e and size != e * rows[0] for e, size in zip(entries, first.shape)) or len([e for e in entries if e]) > 1:
        refused = refused or "the number of elements of what is drawn is no multiple of the rows"
    if any(entries) and first.op in WHOLE:
        refused = refused or "an order of the rows would be another one for each microbatch"
    return Draw(first.origin, entries, refused)


class Places:
    """Know the places of the random operations of a captured graph."""

    def __init__(self, forward: Forward, facts: ReplayFacts) -> None:
        self._names = {str(id(module)): name for name, module in forward.model.named_modules()}
        self._facts = facts
        counts: dict[str, int] = {}
        self._first: dict[fx.Node, tuple[str, int]] = {}
        for node in forward.graph.nodes:
            if node in facts.random:
                path = self._path(node)
                self._first[node] = path, counts.get(path, 0)
                counts[path] = counts.get(path, 0) + facts.random[node]
        self._tangled = _tangled(forward.graph.nodes) if facts.random else {}

    def _path(self, node: fx.Node) -> str:
        """Return the first name of the innermost module of the model around an operation; "" for the model itself."""
        keys = [key.split("@")[0] for key in node.meta.get("nn_module_stack") or {}]
        return next((self._names[key] for key in reversed(keys) if key in self._names), "")

    def of(self, draws: Sequence[Draw], first: Iterable[fx.Node], own: Iterable[fx.Node]) -> tuple[Draw, ...]:
        """Return the draws of a piece with nodes `own`, whose code was made of the alike nodes `first`."""
        nodes = {a.name: b for a, b in zip(first, own, strict=True)}
        seen: dict[str, int] = {}
        made = []
        for draw in draws:
            number = seen.setdefault(draw.place, 0)
            seen[draw.place] += 1
            made.append(self._placed(draw, nodes.get(draw.place), number))
        return tuple(made)

    def _placed(self, draw: Draw, node: fx.Node | None, number: int) -> Draw:
        if node is None:
            return replace(draw, refused=UNSHOWN)
        path, first = self._first.get(node, (self._path(node), 0))  # dropout of all elements draws nothing in plain PyTorch
        refused = draw.refused
        if node.target is as_written:
            refused = "a module that runs as it is draws numbers for as many elements as values of tensors say"
            return Draw(f"{path}{ANY_NUMBER}", (), f"{line_of(node)}: {refused}")
        if self._tangled.keys() & {node, *node.all_input_nodes} or _read_otherwise(node, self._tangled):
            refused = refused or "a dimension of what is drawn has the rows inside of another one, [tokens * rows, ...]"
        return Draw(f"{path}#{first + number}", draw.rows, f"{line_of(node)}: {refused}" if refused else "")


def _tangled(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Return the tensors with a dimension in which rows lie within something else, as far as the graph shows.

    [tokens, rows] makes such a dimension where it becomes one, and may be made of it again; rows that are joined to
    themselves make another one, [copies, rows]. Each has how many entries lie around its rows, or `UNKNOWN`.
    """
    around: dict[fx.Node, int] = {}
    for node in nodes:
        if not node.op.startswith("call") or not tensors_of(node) or not any(_entries(node)[0]):
            continue
        for source in node.all_input_nodes:
            if not tensors_of(source) or not any(_entries(source)[0]):
                continue
            outside = _outside(node, source, around.get(source, 1))
            if outside != 1:
                around[node] = outside
    return around


UNSHOWN = (
    "an operation within another one, such as a torch.autograd.Function, draws, where the graph does not show its module (draw "
    "the numbers before it, and pass them to it)"
)
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
JOINS = frozenset({"cat", "concat", "concatenate", "hstack", "vstack", "repeat", "tile"})
PARTS = frozenset({"chunk", "split", "tensor_split", "narrow", "getitem"})
UNKNOWN = -1


def _outside(node: fx.Node, source: fx.Node, outside: int) -> int:
    """Return how many entries lie around the rows in their dimension of a result, from those in a source's."""
    (made, shape), (given, sizes), name = _entries(node), _entries(source), str(getattr(node.target, "__name__", node.target))
    if name in RESHAPES:
        before, after = outside * _before(given, sizes), _before(made, shape)
        return before // after if before % after == 0 else UNKNOWN
    many, few = max(*made, *given), min(max(made), max(given))
    if many == few:
        return outside
    if name in JOINS and max(made) == many and many % few == 0:
        return outside * (many // few)
    if name in PARTS and max(given) == many and not _steps(node):
        return outside // (many // few) if outside % (many // few) == 0 else UNKNOWN
    return 1 if outside == 1 else UNKNOWN


def _steps(node: fx.Node) -> bool:
    """Return whether an index takes entries by something else than a range of all of them."""
    if getattr(node.target, "__name__", "") != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return any(isinstance(part, fx.Node | list) or (isinstance(part, slice) and part.step not in (None, 1)) for part in index)


def _read_otherwise(drawn: fx.Node, tangled: Mapping[fx.Node, int]) -> bool:
    """Return whether what a row has several entries of is taken for [entries, rows] further on.

    Nothing but that says how a new tensor lies: torch.rand(tokens * rows) may be either.
    """
    if not tensors_of(drawn) or (entries := max(_entries(drawn)[0], default=0)) < 2:
        return False
    seen, todo = {drawn}, [drawn]
    while todo:
        for user in todo.pop().users:
            if user in seen or not tensors_of(user):
                continue
            seen.add(user)
            same = max(_entries(user)[0], default=0) == entries
            if tangled.get(user, 1) < 0 or (same and user in tangled):
                return True
            if same:
                todo.append(user)
    return False


def _entries(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many entries a row has in each dimension of a first result, and its shape at two rows."""
    at2, at3 = (concrete_shape(tensors_of(node)[0], rows, node) for rows in (2, 3))
    return tuple(b - a for a, b in zip(at2, at3, strict=True)), at2


def _before(entries: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of elements of the dimensions before the first one that has the rows."""
    return math.prod(shape[: next(d for d, e in enumerate(entries) if e)])
