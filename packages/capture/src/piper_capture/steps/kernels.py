"""Compute the cost of nodes of a step's graph: the kernels that they launch, by `piper_ops`. Views launch none."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import fx

from piper_capture.values import aliasing
from piper_ir.ground.errors import CaptureError
from piper_ir.program.program import Cost, Kernel
from piper_ops import (
    COLLECTIVE_KINDS,
    KernelInfo,
    WrongCost,
    dtype_name,
    float8_past_scale,
    kernel_of,
)

SHARED = "shared_by"
"""The key of a node's meta for the number of devices that share its work."""
FUSED = "fused"
"""The key of a fusion's meta for its compiled form and the FLOPs of its operations."""
COUNTS = "counts"
"""The key of a node's meta for how often its products count in model FLOPs."""


def cost(nodes: Iterable[fx.Node]) -> Cost:
    """Return the kernels that nodes launch one by one, in their order."""
    return Cost(
        tuple(
            _noted(kernel, node)
            for node in nodes
            if node.op == "call_function" and _launches(node)
            for kernel in listed(_kernels(node)).kernels
        )
    )


def _kernels(node: fx.Node) -> list[KernelInfo]:
    """Return the kernels of an operation; a fusion has one for each loop, which share its FLOPs by their bytes."""
    if FUSED not in node.meta:
        return [aliasing.asked(launched, node)]
    form, flops = node.meta[FUSED]
    total, dtype = max(1, sum(form.moved)), dtype_name(aliasing.tensors(node)[0].dtype)
    return [
        KernelInfo("elementwise", (), flops * moved // total, moved, dtype, op="fusion")
        for moved in form.moved
    ]


def _noted(kernel: Kernel, node: fx.Node) -> Kernel:
    shared, counts = node.meta.get(SHARED, 1), node.meta.get(COUNTS, 1)
    return replace(kernel, shared=shared, counts=counts) if shared > 1 or counts > 1 else kernel


def listed(kernels: Iterable[KernelInfo]) -> Cost:
    """Return kernels as a cost, each one separately: equal kernels may differ at other numbers of rows."""
    return Cost(
        tuple(
            Kernel(k.kind, k.dims, k.dtype, k.flops, k.bytes, 1, k.lowering, k.op, k.formula)
            for k in kernels
        )
    )


def flops_of(node: fx.Node) -> int:
    """Return the FLOPs of an op."""
    return aliasing.asked(launched, node).flops if _launches(node) else 0


def launched(op: object, args: Sequence[Any], out: Any, kwargs: Mapping[str, Any]) -> KernelInfo:
    """Return the kernel of a call, as `kernel_of` does; raise CaptureError if its cost formula gives no number."""
    try:
        return kernel_of(op, args, out, kwargs)
    except WrongCost as error:
        raise CaptureError(str(error)) from error


def counted(cost: Cost) -> Cost:
    """Return a cost with one entry for equal kernels of a run, in the order of their first launch.

    A run is of element-wise kernels or of others: an addition behind a product is no part of a run before the product.
    """
    runs = (Counter(run) for _, run in groupby(cost.kernels, lambda k: k.kind == "elementwise"))
    return Cost(tuple(replace(kernel, count=n) for run in runs for kernel, n in run.items()))


def _launches(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.target in COLLECTIVE_KINDS or node.target is float8_past_scale:  # known before the step
        return False
    return node.target is not operator.getitem and (
        not aliasing.is_view(node) or (schema is not None and schema.is_mutable)
    )
