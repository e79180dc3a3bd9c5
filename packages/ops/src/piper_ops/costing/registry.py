"""Keep one record per portable op: which outputs its backward saves, and the FLOPs of its forward, dgrad and wgrad ops.

Bytes follow one rule for all of them, as in `piper_ops.costing.costs`: inputs plus outputs, once each. That is the
least traffic of a fused kernel; no T x T matrix is among the outputs of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from piper_ops.attention import context, sdpa
from piper_ops.experts import biases, experts, rounds
from piper_ops.pointwise import losses, norms, vocabulary


@dataclass(frozen=True, slots=True)
class Call:
    """Hold the arguments of a call by schema name, with defaults filled in, its outputs, and its tensor arguments."""

    args: Mapping[str, Any]
    outs: tuple[Tensor, ...]
    operands: tuple[Tensor, ...] = ()

    def tensor(self, name: str) -> Tensor:
        """Return the argument of this name, which must be a tensor."""
        value = self.args[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"argument {name!r} is {value!r}, not a tensor")
        return value


def _no_dims(call: Call) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Formula:
    """Give the FLOPs (a multiply-add is 2) and the kernel dimensions of one op, from its call.

    `bytes` gives the bytes that it moves, if they are not its inputs and outputs, once each.
    """

    op: torch._ops.OpOverload
    flops: Callable[[Call], int]
    dims: Callable[[Call], tuple[int, ...]] = _no_dims
    bytes: Callable[[Call], int] | None = None


@dataclass(frozen=True, slots=True)
class PortableOp:
    """Describe a portable op.

    Attributes:
        name: the op's name in the namespace "piper".
        kind: the family of its kernels.
        saved: the names among `outputs` that the backward keeps, beside the inputs that it reads.
        forward: the op itself.
        dgrad: the op for the gradients of its inputs; None if it has no such gradients.
        wgrad: the op for the gradients of its weights; None if it has no weights.
        backward: the op for both kinds of gradients at once, if there is one.
        lowering: the lowering that the formulas assume; "" if that makes no difference.
    """

    name: str
    kind: Literal["attention", "norm", "loss", "embedding", "matmul", "elementwise"]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    forward: Formula
    dgrad: Formula | None = None
    wgrad: Formula | None = None
    backward: Formula | None = None
    lowering: str = ""

    @property
    def formulas(self) -> tuple[Formula, ...]:
        return tuple(
            f for f in (self.forward, self.dgrad, self.wgrad, self.backward) if f is not None
        )


FLASH = "flash"
"""The lowering that attention's formulas assume.

A causal call skips masked elements, and no T x T matrix crosses memory. Among the lowerings in
`piper_ops.attention.lowering`, "math" does neither.
"""


def attention_dims(call: Call) -> tuple[int, ...]:
    """Return (batch, query heads, T_q, T_k, head_dim)."""
    q, k = call.tensor("q"), call.tensor("k")
    return q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3]


def loss_dims(call: Call) -> tuple[int, ...]:
    """Return (rows, classes)."""
    return tuple(call.tensor("logits").shape)


def attention_flops(call: Call) -> int:
    """Return 4 B H T_q T_k D: q k^T and p v are 2 B H T_q T_k D each.

    The source is FlashAttention-2 (arXiv 2307.08691, section 4.1). A causal call counts half, as flash kernels skip the
    rest; the model FLOPs of a MFU take no such discount. With a window, the scores in it count. The softmax is not
    counted, nor a mask, which skips no work. A v of another head_dim D_v gives 2 B H T_q T_k (D + D_v).
    """
    batch, heads, *_, dim = attention_dims(call)
    return batch * heads * _scores(call) * (dim + call.tensor("v").shape[3])


def _scores(call: Call) -> int:
    """Return twice the number of a head's scores; of queries that several devices share, the mean."""
    _, _, queries, keys, _ = attention_dims(call)
    if not call.args["is_causal"]:
        return 2 * queries * keys
    window = min(call.args["window"] or keys, keys)
    return queries * window * (2 * keys - window) // keys


def attention_dgrad_flops(call: Call) -> int:
    """Return 2.5 times the forward's FLOPs: q k^T, dO v^T, p^T dO, ds k, ds^T q against two matmuls (same source)."""
    batch, heads, *_, dim = attention_dims(call)
    return batch * heads * _scores(call) * (3 * dim + 2 * call.tensor("v").shape[3])


def _per_element(name: str, count: Callable[[Call], int]) -> Callable[[Call], int]:
    def flops(call: Call) -> int:
        return count(call) * call.tensor(name).numel()

    return flops


def _given(call: Call, name: str) -> int:
    return int(call.args[name] is not None)


def layer_norm_flops(call: Call) -> int:
    """Count FLOPs per element, off the definition: sum 1, centre, square, sum 3, centre, scale 2; weight 1, bias 1."""
    return 6 + _given(call, "weight") + _given(call, "bias")


def layer_norm_dgrad_flops(call: Call) -> int:
    """Count FLOPs per element: normalise 2, the sums of g and of g xhat 3, rstd (g - c1 - xhat c2) 4; weight 1."""
    return 9 + _given(call, "weight")


def layer_norm_wgrad_flops(call: Call) -> int:
    """Count FLOPs per element: normalise 2 and sum of g xhat 2 for the weight; sum of g 1 for the bias."""
    wants_weight, wants_bias = call.args["output_mask"]
    return 4 * int(wants_weight) + int(wants_bias)


def layer_norm_backward_flops(call: Call) -> int:
    """Count FLOPs per element: dgrad, which normalises, and the wanted column sums of g xhat (2) and g (1)."""
    wants_weight, wants_bias = call.args["output_mask"]
    return layer_norm_dgrad_flops(call) + 2 * int(wants_weight) + int(wants_bias)


def rms_norm_flops(call: Call) -> int:
    """Count FLOPs per element: square and sum 2, scale 1; weight 1."""
    return 3 + _given(call, "weight")


def rms_norm_dgrad_flops(call: Call) -> int:
    """Count FLOPs per element: normalise 1, the sum of g xhat 2, rstd (g - xhat c) 3; weight 1."""
    return 6 + _given(call, "weight")


def rms_norm_wgrad_flops(call: Call) -> int:
    """Count FLOPs per element: normalise 1, sum of g xhat 2."""
    return 3


def cross_entropy_flops(call: Call) -> int:
    """Count FLOPs per logit: maximum, subtract, exp, sum."""
    return 4


def cross_entropy_dgrad_flops(call: Call) -> int:
    """Count FLOPs per logit: subtract, exp, scale."""
    return 3


def cross_entropy_joined_flops(call: Call) -> int:
    """Count FLOPs per number that a device sends: a logsumexp over the one statistic, and a sum over the other."""
    return 4


def copied_flops(call: Call) -> int:
    """Count none: rows are copied."""
    return 0


def rounds_formulas() -> list[tuple[torch._ops.OpOverload, Formula]]:
    """Return the formulas of ops that trade rows, for no further round: rows come home, or zeros are written."""
    trades = (
        rounds.experts_send,
        rounds.experts_home,
        rounds.experts_give,
        rounds.experts_drop,
        rounds.experts_checked,
    )
    times_by_op = {
        rounds.experts_return: 2,
        rounds.experts_return_dgrad: 1,
        rounds.experts_return_wgrad: 1,
    }

    def passes(op: torch._ops.OpOverload) -> Callable[[Call], int]:
        return lambda call: (
            call.tensor("table").nbytes
            + times_by_op.get(op, 0) * sum(result.nbytes for result in call.outs)
        )

    with_rounds = [(op, Formula(op, copied_flops, bytes=passes(op))) for op in rounds.ROUNDS]
    return [*((op, Formula(op, copied_flops)) for op in trades), *with_rounds]


def embedding_part_bytes(call: Call) -> int:
    """Count the numbers, and rows that are read and written; of a table only these are read."""
    (result,) = call.outs
    return call.tensor("indices").nbytes + 2 * result.nbytes


def embedding_part_dgrad_flops(call: Call) -> int:
    """Count one FLOP per element of the gradient, at most: rows are added up."""
    return call.tensor("grad").numel()


def embedding_part_dgrad_bytes(call: Call) -> int:
    """Count a table that is set to zero, then gradients that are read and added to rows of it."""
    (table,) = call.outs
    return call.tensor("indices").nbytes + 2 * call.tensor("grad").nbytes + table.nbytes


def context_take_bytes(call: Call) -> int:
    """Count the bytes read and written: only the taken tokens are read, also if `x` has tokens of several devices."""
    return 2 * call.outs[0].nbytes


def context_add_in_place_bytes(call: Call) -> int:
    """Count reads of the addend, and reads and writes of the part of `total` that it is added to."""
    return 3 * call.tensor("more").nbytes


def context_merge_flops(call: Call) -> int:
    """Count FLOPs per number that is merged: subtract, scale, add."""
    return 3 * call.tensor("more").numel()


def grouped_dims(call: Call) -> tuple[int, ...]:
    """Return (rows, columns, elements) of all experts' products together; each row meets the matrix of one expert."""
    return (
        *call.tensor("rows").shape[:1],
        call.tensor("weight").shape[2],
        call.tensor("weight").shape[1],
    )


def grouped_dgrad_dims(call: Call) -> tuple[int, ...]:
    """Return (rows, elements, columns): the matrices are read the other way around."""
    return (
        *call.tensor("grad").shape[:1],
        call.tensor("weight").shape[1],
        call.tensor("weight").shape[2],
    )


def grouped_wgrad_dims(call: Call) -> tuple[int, ...]:
    """Return (elements, columns, rows): each expert sums over its rows."""
    return call.tensor("rows").shape[1], call.tensor("grad").shape[1], call.tensor("rows").shape[0]


def _grouped_flops(dims: Callable[[Call], tuple[int, ...]]) -> Callable[[Call], int]:
    """Return the FLOPs of all experts' products: 2 M N K, for any numbers of rows per expert."""
    return lambda call: 2 * prod(dims(call))


def grouped_add_flops(call: Call) -> int:
    """Count an addition per element of the rows."""
    return call.tensor("rows").numel()


def grouped_add_wgrad_flops(call: Call) -> int:
    """Count an addition per element of the gradient of the rows."""
    return call.tensor("grad").numel()


def route_dgrad_flops(call: Call) -> int:
    """Count an addition per element of the rows, less the first of each token."""
    return call.tensor("grad").numel() - call.outs[0].numel()


def unroute_flops(call: Call) -> int:
    """Count a product and an addition per element of the rows."""
    return 2 * call.tensor("rows").numel()


def unroute_dgrad_flops(call: Call) -> int:
    """Count a product per element of the rows."""
    return call.outs[0].numel()


PORTABLE: Mapping[str, PortableOp] = {
    record.name: record
    for record in (
        PortableOp(
            "attention",
            "attention",
            outputs=("out", "logsumexp"),
            saved=("out", "logsumexp"),
            forward=Formula(sdpa.attention, attention_flops, attention_dims),
            dgrad=Formula(sdpa.attention_dgrad, attention_dgrad_flops, attention_dims),
            lowering=FLASH,
        ),
        PortableOp(
            "layer_norm",
            "norm",
            outputs=("out", "mean", "rstd"),
            saved=("mean", "rstd"),
            forward=Formula(norms.layer_norm, _per_element("x", layer_norm_flops)),
            dgrad=Formula(norms.layer_norm_dgrad, _per_element("x", layer_norm_dgrad_flops)),
            wgrad=Formula(norms.layer_norm_wgrad, _per_element("x", layer_norm_wgrad_flops)),
            backward=Formula(
                norms.layer_norm_backward, _per_element("x", layer_norm_backward_flops)
            ),
        ),
        PortableOp(
            "rms_norm",
            "norm",
            outputs=("out", "rstd"),
            saved=("rstd",),
            forward=Formula(norms.rms_norm, _per_element("x", rms_norm_flops)),
            dgrad=Formula(norms.rms_norm_dgrad, _per_element("x", rms_norm_dgrad_flops)),
            wgrad=Formula(norms.rms_norm_wgrad, _per_element("x", rms_norm_wgrad_flops)),
        ),
        PortableOp(
            "cross_entropy",
            "loss",
            outputs=("loss", "logsumexp"),
            saved=("logsumexp",),
            forward=Formula(
                losses.cross_entropy, _per_element("logits", cross_entropy_flops), loss_dims
            ),
            dgrad=Formula(
                losses.cross_entropy_dgrad,
                _per_element("logits", cross_entropy_dgrad_flops),
                loss_dims,
            ),
        ),
        PortableOp(
            "cross_entropy_part",
            "loss",
            outputs=("statistics",),
            saved=(),
            forward=Formula(
                vocabulary.cross_entropy_part,
                _per_element("logits", cross_entropy_flops),
                loss_dims,
            ),
            dgrad=Formula(
                vocabulary.cross_entropy_part_dgrad,
                _per_element("logits", cross_entropy_dgrad_flops),
                loss_dims,
            ),
        ),
        PortableOp(
            "cross_entropy_joined",
            "loss",
            outputs=("loss", "logsumexp"),
            saved=(),
            forward=Formula(
                vocabulary.cross_entropy_joined,
                _per_element("statistics", cross_entropy_joined_flops),
            ),
        ),
        PortableOp(
            "context_take",
            "elementwise",
            outputs=("out",),
            saved=(),
            forward=Formula(context.context_take, lambda call: 0, bytes=context_take_bytes),
        ),
        PortableOp(
            "context_add",
            "elementwise",
            outputs=("out",),
            saved=(),
            forward=Formula(context.context_add, lambda call: call.tensor("more").numel()),
        ),
        PortableOp(
            "context_add_",
            "elementwise",
            outputs=("out",),
            saved=(),
            forward=Formula(
                context.context_add_,
                lambda call: call.tensor("more").numel(),
                bytes=context_add_in_place_bytes,
            ),
        ),
        PortableOp(
            "context_merge",
            "elementwise",
            outputs=("out", "logsumexp"),
            saved=(),
            forward=Formula(context.context_merge, context_merge_flops),
        ),
        PortableOp(
            "embedding_part",
            "embedding",
            outputs=("out",),
            saved=(),
            forward=Formula(vocabulary.embedding_part, copied_flops, bytes=embedding_part_bytes),
            wgrad=Formula(
                vocabulary.embedding_part_dgrad,
                embedding_part_dgrad_flops,
                bytes=embedding_part_dgrad_bytes,
            ),
        ),
        PortableOp(
            "route",
            "elementwise",
            outputs=("rows", "counts"),
            saved=(),
            forward=Formula(experts.route, copied_flops),
            dgrad=Formula(experts.route_dgrad, route_dgrad_flops),
        ),
        PortableOp(
            "grouped_mm",
            "matmul",
            outputs=("out",),
            saved=(),
            forward=Formula(experts.grouped_mm, _grouped_flops(grouped_dims), grouped_dims),
            dgrad=Formula(
                experts.grouped_mm_dgrad, _grouped_flops(grouped_dgrad_dims), grouped_dgrad_dims
            ),
            wgrad=Formula(
                experts.grouped_mm_wgrad, _grouped_flops(grouped_wgrad_dims), grouped_wgrad_dims
            ),
        ),
        PortableOp(
            "grouped_mm_wgrad_",
            "matmul",
            outputs=("total",),
            saved=(),
            forward=Formula(
                experts.grouped_mm_wgrad_, _grouped_flops(grouped_wgrad_dims), grouped_wgrad_dims
            ),
        ),
        PortableOp(
            "grouped_add",
            "elementwise",
            outputs=("out",),
            saved=(),
            forward=Formula(biases.grouped_add, grouped_add_flops),
            wgrad=Formula(biases.grouped_add_wgrad, grouped_add_wgrad_flops),
        ),
        PortableOp(
            "unroute",
            "elementwise",
            outputs=("out",),
            saved=(),
            forward=Formula(experts.unroute, unroute_flops),
            dgrad=Formula(experts.unroute_dgrad, unroute_dgrad_flops),
            wgrad=Formula(experts.unroute_wgrad, unroute_flops),
        ),
        *[
            PortableOp(
                op._schema.name.removeprefix("piper::"), "elementwise", ("out",), (), formula
            )
            for op, formula in rounds_formulas()
        ],
        PortableOp(
            "experts_take",
            "elementwise",
            ("rows", "counts"),
            (),
            Formula(rounds.experts_take, copied_flops),
        ),
    )
}
"""The portable ops by name."""
