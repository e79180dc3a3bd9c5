"""Cost of a step: the kernels that its graph launches, by the formulas of `piper_ops`. Views launch none."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture.stepgraph import StepGraph
from piper_ir.program import Cost, Kernel
from piper_ops import KernelInfo, kernel_of


def cost(step: StepGraph) -> Cost:
    """Equal kernels are counted together, in the order of their first launch."""
    launched = Counter(_kernel(n) for n in step.graph.nodes if n.op == "call_function" and _launches(n))
    return counted(launched)


def counted(launched: Mapping[KernelInfo, int]) -> Cost:
    """How often each kernel is launched, as a cost."""
    return Cost(
        tuple(Kernel(k.kind, k.dims, k.dtype, k.flops, k.bytes, n, k.lowering, k.op, k.formula) for k, n in launched.items())
    )


def _launches(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem and (not aliasing.is_view(node) or (schema is not None and schema.is_mutable))


def _kernel(node: fx.Node) -> KernelInfo:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return kernel_of(node.target, args, node.meta["val"], kwargs)
