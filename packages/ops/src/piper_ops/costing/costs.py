"""Count the FLOPs and bytes of one op call from its arguments and outputs, for the ops of this package and for aten's.

The counting rules: a multiply-add is 2 FLOPs. Bytes are the reads plus the writes of a kernel if every operand
crosses memory once (a dimension of stride 0 is read once). Views launch nothing and count 0 of both. Moving data
(copies, casts, gathers, fills) is 0 FLOPs. Ops that do many FLOPs per element have a formula in
`piper_ops.costing.formulas`. Every other op counts one FLOP per element of its largest operand: the output's elements
for element-wise ops, the input's for reductions. `piper_ops.costing.few_flops` lists the ops for which that is right;
for any other op it is a guess, and `KernelInfo.formula` is False.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from piper_ops.costing.few_flops import needs_no_formula
from piper_ops.costing.formulas import FORMULAS, CostFormula, CostKind, nbytes_of
from piper_ops.costing.registry import Call
from piper_ops.ground.errors import WrongCost
from piper_ops.ground.library import dtype_name

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Hold the FLOPs and the bytes moved by the kernel of one op call.

    Attributes:
        kind: the family of the kernel; "other" with no bytes is a view, which launches no kernel.
        dims: (M, N, K) or (batch, M, N, K) of a matmul, (batch, heads, T_q, T_k, head_dim) of an attention, (rows,
            classes) of a cross-entropy, (outer, length, inner) of a running sum along a dimension, else empty.
        flops: a multiply-add counts 2.
        bytes: read plus written.
        dtype: the dtype of the arithmetic, by torch's name without `torch.`.
        lowering: the lowering that flops and bytes assume, if an op has several that differ in them.
        op: the op's name, without the namespace aten or piper and without the trailing _ of an in-place op.
        formula: False for an op of unknown FLOPs; one per element is counted for it.
    """

    kind: CostKind
    dims: tuple[int, ...]
    flops: int
    bytes: int
    dtype: str
    lowering: str = ""
    op: str = ""
    formula: bool = True


def kernel_of(
    op: object,
    args_meta: Sequence[Any],
    out_meta: Any,
    kwargs_meta: Mapping[str, Any] | None = None,
) -> KernelInfo:
    """Return the cost of `op(*args_meta, **kwargs_meta) -> out_meta`; tensors are fake or real, with concrete shapes.

    `op` is an OpOverload, or operator.getitem. Raises TypeError for anything else: only ops of a joint graph have a
    cost.
    """
    if op is operator.getitem:
        return KernelInfo("other", (), 0, 0, _dtype([*_tensors(out_meta)]))
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(
            f"{op!r} is no OpOverload; trace the function with AOTAutograd first and pass the node's target"
        )
    call = call_of(op, args_meta, out_meta, kwargs_meta or {})
    dtype, name = _dtype([*call.outs, *call.operands]), _name(op)
    own, known = _OWN.get(op.name()), FORMULAS.get(op._schema.name)
    # prim::device and its like ask a tensor what it is and run no kernel
    if own is None and known is None and (_is_view(op) or op.namespace == "prim"):
        return KernelInfo("other", (), 0, 0, dtype)
    moved = sum(map(nbytes_of, (*call.operands, *call.outs)))
    if own is not None:
        nbytes = moved if own.bytes is None else _whole_number(op.name(), "bytes", own.bytes, call)
        flops = _whole_number(op.name(), "flops", own.flops, call)
        return KernelInfo(own.kind, (), flops, nbytes, dtype, op=name)
    if known is not None:
        nbytes = moved if known.bytes is None else round(known.bytes(call))
        dims, flops = known.dims(call), round(known.flops(call))
        return KernelInfo(
            known.kind, dims, flops, nbytes, known.dtype or dtype, known.lowering, name
        )
    flops = max((t.numel() for t in (*call.operands, *call.outs)), default=0)
    return KernelInfo("elementwise", (), flops, moved, dtype, op=name, formula=needs_no_formula(op))


_OWN: dict[str, CostFormula] = {}
"""The formulas of users' ops, by name: an op that is registered again is another object."""


def op_cost(
    op: str,
    *,
    flops: Callable[[Call], float],
    bytes: Callable[[Call], float] | None = None,
    kind: CostKind = "elementwise",
) -> None:
    """Set the cost of a custom op, before a model with that op is captured.

    Without a formula an op counts one FLOP per element of its largest operand, and predictions name it.

    Args:
        op: its name in torch.library, such as "mine::gate".
        flops: the FLOPs of one call, from its arguments by schema name (`call.tensor("x")`) and its outputs
            (`call.outs`): an integer or a real number, affine in the rows of the batch but for rounding.
        bytes: the bytes of one call, likewise; by default its inputs plus its outputs, once each.
        kind: "matmul" and "attention" run at a device's matmul rate, anything else at the rate of its vector units.

    Raises:
        ValueError: the op is not registered.
    """
    namespace, _, name = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace and name else None
    if packet is None:
        raise ValueError(
            f"op_cost({op!r}): no such op; register it first with @torch.library.custom_op({op!r}, mutates_args=())"
        )
    _OWN[packet.default.name()] = CostFormula(flops, bytes=bytes, kind=kind)


def _whole_number(op: str, name: str, formula: Callable[[Call], float], call: Call) -> int:
    """Return the count that a user's formula gives, as an integer; raise WrongCost if it gives none."""
    try:
        value = formula(call)
    except Exception as error:  # whatever the user's formula raises
        raise WrongCost(
            f"op_cost({op!r}): the formula of {name} fails: {type(error).__name__}: {error}. It gets the call: "
            f"call.tensor(NAME) for {', '.join(call.args)}, and call.outs"
        ) from error
    if not isinstance(value, Real) or not isfinite(value) or value < 0:
        raise WrongCost(
            f"op_cost({op!r}): the formula of {name} gives {value!r}; a number of at least 0 is needed"
        )
    return int(value) if isinstance(value, int) else round(float(value))


def own_costs() -> tuple[tuple[object, ...], ...]:
    """Return the costs that `op_cost` has set so far, as plain tuples in the order of operators' names."""
    return tuple(
        (name, own.kind, own.flops, own.bytes)
        for name, own in sorted(_OWN.items(), key=lambda found: found[0])
    )


def call_of(
    op: torch._ops.OpOverload,
    args_meta: Sequence[Any],
    out_meta: Any,
    kwargs_meta: Mapping[str, Any],
) -> Call:
    """Return a call of an op in the form that formulas read."""
    args = _bound(op, args_meta, kwargs_meta)
    read = [args[a.name] for a in op._schema.arguments if a.name in args and not _is_out(a)]
    return Call(args, tuple(_tensors(out_meta)), tuple(_tensors(read)))


def _name(op: torch._ops.OpOverload) -> str:
    """Return the op's name; the in-place variant runs the same kernel and has the same name."""
    namespace, _, name = op._schema.name.partition("::")
    name = name if name.endswith("__") else name.removesuffix("_")
    return name if namespace in ("aten", "piper") else f"{namespace}::{name}"


def _bound(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    schema = op._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update((a.name, value) for a, value in zip(schema, args, strict=False))
    return bound | dict(kwargs)


def _is_out(argument: torch.Argument) -> bool:
    """Return whether an argument is a keyword that only names the memory of a result."""
    return argument.kwarg_only and argument.is_out


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


def _dtype(tensors: Sequence[Tensor]) -> str:
    floating = [t for t in tensors if t.is_floating_point()] or tensors
    return dtype_name(floating[0].dtype) if floating else "float32"


def _is_view(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    aliases = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return aliases or op.overloadpacket is aten._unsafe_view
