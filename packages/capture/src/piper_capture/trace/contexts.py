"""Remove the context managers of torch that choose a kernel, which Dynamo writes into a graph."""

from __future__ import annotations

from torch import fx

from piper_ops import user_line

KERNEL_CHOICES = frozenset({"_sdpa_kernel", "_backend_from_string"})
"""The names of the calls that entering and leaving `torch.nn.attention.sdpa_kernel` leaves in a graph."""


def drop_kernel_choices(module: fx.GraphModule) -> list[str]:
    """Remove the choices of attention kernels from a graph, and return a warning for each line that makes one."""
    return [
        f"sdpa_kernel ({line}) is left out: attention is one operation of a plan, whose kernel each device chooses "
        f"for itself. The result is the same up to rounding"
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for line in _drop(part.graph)
    ]


def _drop(graph: fx.Graph) -> list[str]:
    """Erase the calls, and return the user's lines that enter a choice."""
    calls = [
        n
        for n in graph.nodes
        if n.op == "call_function" and getattr(n.target, "__name__", "") in KERNEL_CHOICES
    ]
    entries = [n for n in calls if n.target.__name__ == "_sdpa_kernel"][::2]
    lines = list(dict.fromkeys(map(user_line, entries)))
    for node in reversed(calls):
        graph.erase_node(node)
    return lines
