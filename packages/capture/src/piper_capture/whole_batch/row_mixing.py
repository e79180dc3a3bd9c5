"""Find operations of the model that combine rows of the batch, so that microbatches would train other numbers.

`x - x.mean(0)`, `softmax(dim=0)` or `x.flip(0)` read other rows than their own, and a microbatch has only some of them.
The rows of a chunk's inputs are a loop through its joint graph (`layouts`): an operation keeps rows apart if it can be
computed in parts of that loop. If its rule does not say so, the chunk is tried on numbers: whole, and in parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from piper_capture.chunks.cut import Piece
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.emit import named_arguments
from piper_capture.layouts.indexes import Indexed, LoopIndex, TensorKey, indexed, key_of
from piper_capture.steps.draws import origin_of
from piper_capture.torch_api._torch import OpOverload
from piper_capture.values.concrete import line_of
from piper_capture.whole_batch.row_trial import PARTS, RowsInDim, RowTrial, opaque_same
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import TensorSpec
from piper_ops import STATISTICS, float8_scale, is_draw

aten = torch.ops.aten
WHOLE_ROWS = sum(PARTS)
TRIAL_ROWS = (PARTS[0], WHOLE_ROWS, PARTS[1])
"""The numbers of rows at which a chunk is tried: a part, the whole, and the other part."""
NUMBERS = frozenset(
    {
        aten.arange.start_step,
        aten.arange.start,
        aten.arange.default,
        aten.linspace.default,
        aten.eye.m,
    }
)
"""The ops whose results number the elements of a dimension."""
LIKE = frozenset(
    {
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "empty_like",
        "float8_past_scale",
        "full_like",
        "ones_like",
        "zeros_like",
    }
)
"""The ops that read only the shape or dtype of a tensor."""
SAME_VALUES = frozenset(
    {
        aten.view.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten._to_copy.default,
        aten.reshape.default,
    }
)
BY_FREQUENCY = (
    "divides gradients by how often a token stands in the batch (scale_grad_by_freq=True)"
)
"""The reason to refuse a table whose forward keeps rows apart and whose gradient does not."""
BELIEVED = (
    "{}: whether this keeps the rows of the batch apart is neither known by rule nor could it be tried on numbers at "
    "this size; it is taken to do so. If it does not, microbatches train other numbers than the whole batch: "
    "`piper verify` on the same code with smaller sizes tells"
)
ROUTING = frozenset(
    {
        *(
            aten.sort.default,
            aten.sort.stable,
            aten.argsort.default,
            aten.index.Tensor,
            aten.index_select.default,
        ),
        *(
            aten.index_put.default,
            aten.index_add.default,
            aten.scatter.src,
            aten.scatter_add.default,
            aten.gather.default,
        ),
    }
)
"""The ops that mixtures of experts use to sort tokens and put them back; a chunk too large to try may have them."""


def check_rows_apart(
    joints: Sequence[Joint], specs: Sequence[TensorSpec], captured: fx.Graph, model: Collection[str]
) -> list[str]:
    """Raise CaptureError, with the user's line, for an operation of a chunk's forward that combines rows.

    Returns a warning if the chunk is too large, or cannot run, on numbers, and has an operation that may combine rows.

    Args:
        joints: the chunk at each of TRIAL_ROWS.
        specs: its inputs, affine in the rows.
        captured: the graph of the whole model and its loss.
        model: the names of its operations that make the output of the model; others belong to the loss.
    """
    few, many, _ = joints
    forward = _forward(many)
    judged = [n for n in forward if origin_of(n) in model]
    if not judged:
        return []
    named = {n.name: n for n in captured.nodes}
    if counting := [n for n in judged if named_arguments(n).get("scale_grad_by_freq")]:
        raise _refused(named[origin_of(counting[0])], BY_FREQUENCY)
    varying = _varying(few, many)
    if varying is None:  # the graphs at few and at many rows differ
        return [BELIEVED.format(line_of(named[origin_of(judged[0])]))]
    rows = _Rows(many, specs, varying, dict(zip(many.graph.nodes, few.graph.nodes, strict=True)))
    mixing = [n for n in judged if not rows.keeps_apart(n)]
    unknown = [n for n in mixing if not rows.indexes.ops[n].known]
    if not mixing:
        return []
    ends = {n for after in forward if after not in judged for n in after.all_input_nodes} | set(
        many.outputs
    )
    of_batch = {
        n for n in forward if origin_of(n) in named and STATISTICS in named[origin_of(n)].meta
    }
    apart = RowTrial(joints, rows.parts, [n for n in judged if n in ends], of_batch).same()
    if apart:
        return []
    if apart is None and all(n in unknown or _routes(n) for n in mixing):
        not_ours = [named[origin_of(n)] for n in mixing if not str(n.target).startswith("piper.")]
        return [BELIEVED.format(line_of(not_ours[0]))] if not_ours else []
    raise _refused(named[origin_of(mixing[0])])


def check_opaque_rows(
    modules: Sequence[fx.GraphModule], specs: Sequence[TensorSpec], piece: Piece, *, random: bool
) -> list[str]:
    """Raise CaptureError for an opaque region that computes other values for all rows than for parts of them.

    `modules` are its forward at each of TRIAL_ROWS. One that draws is believed; so is one that is too large, or cannot
    run, on random numbers, with a warning.
    """
    values = [r.kind == "value" for r in piece.results if not r.changed]
    kinds = [slot.kind for slot in piece.slots]
    same = True if random else opaque_same(modules, specs, kinds, values)
    if same is False:
        how = "combines rows of the batch, as a branch may that depends on several rows, or numbers them"
        raise _refused(piece.region.nodes[0], how)
    return [] if same else [BELIEVED.format(line_of(piece.region.nodes[0]))]


def _routes(node: fx.Node) -> bool:
    """Return whether an op may be part of sorting rows by expert and putting them back, as Piper's own ops are."""
    assert isinstance(node.target, OpOverload)
    return node.target in ROUTING or node.target.namespace == "piper"


def _refused(
    node: fx.Node, how: str = "combines rows of the batch, or numbers them"
) -> CaptureError:
    return CaptureError(
        f"{line_of(node)}: {how}: a microbatch has only some of the rows, so that the model would compute other "
        f"values for each plan. Accepted are operations in which each row counts by itself; let one row of "
        f"Job.batch hold all that is combined, [rows, set, ...], or give each row's number as a tensor of the "
        f"batch. "
        'Job(loss_over="microbatch") trains what gradient accumulation in plain PyTorch trains, '
        "where rows are combined within each microbatch"
    )


def _forward(joint: Joint) -> list[fx.Node]:
    """Return the operations that outputs are made of, in order."""
    needed, queue = set[fx.Node](), list(joint.outputs)
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            queue += node.all_input_nodes
    return [n for n in joint.graph.nodes if n in needed and isinstance(n.target, OpOverload)]


def _varying(few: Joint, many: Joint) -> dict[TensorKey, tuple[int, ...]] | None:
    """Return, for each tensor, the dimensions that grow with the rows; None if the two graphs are not alike."""
    pairs = list(zip(few.graph.nodes, many.graph.nodes, strict=False))
    if len(few.graph.nodes) != len(many.graph.nodes) or any(
        a.target != b.target for a, b in pairs if b.op == "call_function"
    ):
        return None
    varying = {}
    for a, b in pairs:
        for k, (x, y) in enumerate(zip(_tensors(a), _tensors(b), strict=True)):
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                varying[b, k] = tuple(
                    d for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n
                )
    return varying


def _tensors(node: fx.Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, tuple | list) else (value,)


class _Rows:
    """Follow the rows of a chunk's inputs through its joint graph."""

    def __init__(
        self,
        joint: Joint,
        specs: Sequence[TensorSpec],
        varying: Mapping[TensorKey, tuple[int, ...]],
        fewer: Mapping[fx.Node, fx.Node],
    ) -> None:
        self.indexes: Indexed = indexed(joint)
        self._fewer = fewer
        self._varying = varying
        self._rows: set[LoopIndex] = set()
        for node in joint.inputs[: len(specs)]:
            self._rows.update(index for dim in self._of_rows(key_of(node)) for index in dim[:1])

    def _of_rows(self, key: TensorKey) -> Iterator[tuple[LoopIndex, ...]]:
        """Yield, for each dimension of a tensor that grows with the rows, the indexes that do."""
        for dim in self._varying.get(key, ()):
            yield tuple(i for i in self.indexes.tensors[key][dim] if i.size % WHOLE_ROWS == 0)

    def keeps_apart(self, node: fx.Node) -> bool:
        """Return whether an op computes each row by itself."""
        if node.target is float8_scale:  # by definition a scale is that of a microbatch
            return True
        op = self.indexes.ops[node]
        result_numbers = [
            k
            for k, t in enumerate(op.call.results)
            if t.numel() and (node, k) in self._varying and self._used(node, k)
        ]
        if _computes_with_numbers(node) and _numbers(node) != _numbers(self._fewer[node]):
            return False
        if is_draw(node.target, node.args, node.kwargs) or _only_shape(node):
            self._rows.update(
                i for k in result_numbers for dim in self._of_rows((node, k)) for i in dim
            )
            return not any(self._varying[key] for key in op.keys) or all(
                self._varying[node, k] for k in result_numbers
            )
        of_inputs = {i for key in op.keys for dim in self._of_rows(key) for i in dim}
        if not of_inputs:
            numbered = node.target in NUMBERS and any(
                self._varying[node, k] for k in result_numbers
            )
            self._rows.update(
                i for k in result_numbers for dim in self._of_rows((node, k)) for i in dim
            )
            return not numbered or all(
                self._looks_up_own_rows(user, n) for n, user in _readers(node)
            )
        if any(self._looks_up_own_rows(node, n) for n in node.all_input_nodes):
            return True
        if not op.known or any(
            op.parts(i) is None and op.rewrite(i) is None for i in of_inputs & self._rows
        ):
            self._rows.update(
                i for k in result_numbers for dim in self._of_rows((node, k)) for i in dim
            )
            return False
        return all(self._lie_in_place((node, k)) for k in result_numbers)

    def _lie_in_place(self, key: TensorKey) -> bool:
        """Return whether a result has the rows in the dimensions that grow with them, and in no others."""
        growing = {i for dim in self._of_rows(key) for i in dim}
        others = {
            i
            for d, dim in enumerate(self.indexes.tensors[key])
            if d not in self._varying[key]
            for i in dim
        }
        return bool(growing & self._rows) and not others & self._rows

    def _used(self, node: fx.Node, result: int) -> bool:
        items = [u for u in node.users if key_of(u)[0] is node]
        return not items or any(key_of(u)[1] == result and u.users for u in items)

    def _looks_up_own_rows(self, node: fx.Node, number: fx.Node) -> bool:
        """Return whether an op looks up, in each row of a tensor, elements of this row only."""
        if node.target not in (aten.index.Tensor, aten.index_put.default):
            return False
        table, places = node.args[:2]
        assert isinstance(table, fx.Node) and isinstance(places, list | tuple)
        return any(
            place is number
            and _source(number).target in NUMBERS
            and dim in self._varying.get(key_of(table), ())
            for dim, place in enumerate(places)
        )

    def parts(self, key: TensorKey) -> RowsInDim | None:
        """Return where the rows lie in a tensor; None if it has none."""
        dims = self._varying.get(key, ())
        if not dims:
            return None
        outer = 1
        for index in self.indexes.tensors[key][dims[0]]:
            if index.size % WHOLE_ROWS == 0 and (index in self._rows or index.size == WHOLE_ROWS):
                return RowsInDim(dims[0], outer)
            outer *= index.size
        return RowsInDim(dims[0], 1)


def _computes_with_numbers(node: fx.Node) -> bool:
    """Return whether the numbers among an op's arguments are values, and no sizes or dimensions."""
    assert isinstance(node.target, OpOverload)
    return torch.Tag.pointwise in node.target.tags or is_draw(node.target, node.args, node.kwargs)


def _numbers(node: fx.Node) -> tuple[float, ...]:
    return tuple(a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float))


def _only_shape(node: fx.Node) -> bool:
    return (
        isinstance(node.target, OpOverload) and node.target._schema.name.partition("::")[2] in LIKE
    )


def _source(node: fx.Node) -> fx.Node:
    """Return the op that made the values of a node, which may be a view of them."""
    while node.target in SAME_VALUES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the ops that read a node's values, each with the view of them that it reads."""
    for user in node.users:
        if user.target in SAME_VALUES:
            yield from _readers(user)
        else:
            yield node, user
