"""Name the random operations of a model by the modules that draw, and find how the drawn numbers lie in rows.

A dimension of tokens x rows in that order is followed from the operation that makes it. Draws in it are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from piper_capture.chunks.replay import ReplayFacts
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import concrete_shape, line_of, tensors_of
from piper_ir.ground.draws import ANY_NUMBER, Draw
from piper_ops import as_written


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

    def of(
        self, draws: Sequence[Draw], first: Iterable[fx.Node], own: Iterable[fx.Node]
    ) -> tuple[Draw, ...]:
        """Return the draws of a piece with nodes `own`, whose code was made of the alike nodes `first`."""
        nodes = {a.name: b for a, b in zip(first, own, strict=True)}
        seen: dict[str, int] = {}
        placed = []
        for draw in draws:
            number = seen.setdefault(draw.place, 0)
            seen[draw.place] += 1
            placed.append(self._placed(draw, nodes.get(draw.place), number))
        return tuple(placed)

    def _placed(self, draw: Draw, node: fx.Node | None, number: int) -> Draw:
        if node is None:
            return replace(draw, refused=UNSHOWN)
        path, first = self._first.get(
            node, (self._path(node), 0)
        )  # dropout of all elements draws nothing in plain PyTorch
        refused = draw.refused
        if node.target is as_written:
            refused = "a module that runs as it is draws numbers for as many elements as values of tensors say"
            return Draw(f"{path}{ANY_NUMBER}", (), f"{line_of(node)}: {refused}")
        if self._tangled.keys() & {node, *node.all_input_nodes} or _read_otherwise(
            node, self._tangled
        ):
            refused = (
                refused
                or "a dimension of what is drawn has the rows inside of another one, [tokens * rows, ...]"
            )
        return Draw(
            f"{path}#{first + number}", draw.rows, f"{line_of(node)}: {refused}" if refused else ""
        )


def _tangled(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Return the tensors with a dimension whose rows are not outermost, as far as the graph shows.

    Flattening [tokens, rows] makes such a dimension, and unflattening ends it; rows that are concatenated with
    themselves make another one, [copies, rows]. Each has the number of entries around its rows, or `UNKNOWN`.
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
    "an operation within another one, such as a torch.autograd.Function, draws, where the graph does not show its "
    "module (draw the numbers before it, and pass them to it)"
)
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
JOINS = frozenset({"cat", "concat", "concatenate", "hstack", "vstack", "repeat", "tile"})
PARTS = frozenset({"chunk", "split", "tensor_split", "narrow", "getitem"})
UNKNOWN = -1


def _outside(node: fx.Node, source: fx.Node, outside: int) -> int:
    """Return the number of entries around the rows in a result's dimension, from the number in a source's."""
    (result_entries, shape), (source_entries, sizes), name = (
        _entries(node),
        _entries(source),
        str(getattr(node.target, "__name__", node.target)),
    )
    if name in RESHAPES:
        before, after = outside * _before(source_entries, sizes), _before(result_entries, shape)
        return before // after if before % after == 0 else UNKNOWN
    many, few = max(*result_entries, *source_entries), min(max(result_entries), max(source_entries))
    if many == few:
        return outside
    if name in JOINS and max(result_entries) == many and many % few == 0:
        return outside * (many // few)
    if name in PARTS and max(source_entries) == many and not _steps(node):
        return outside // (many // few) if outside % (many // few) == 0 else UNKNOWN
    return 1 if outside == 1 else UNKNOWN


def _steps(node: fx.Node) -> bool:
    """Return whether an index takes entries by a tensor, a list or a slice with a step."""
    if getattr(node.target, "__name__", "") != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return any(
        isinstance(part, fx.Node | list) or (isinstance(part, slice) and part.step not in (None, 1))
        for part in index
    )


def _read_otherwise(drawn: fx.Node, tangled: Mapping[fx.Node, int]) -> bool:
    """Return whether a drawn tensor with several entries per row is used as [entries, rows] further on.

    Only its use shows how a new tensor lies: torch.rand(tokens * rows) may be either.
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
