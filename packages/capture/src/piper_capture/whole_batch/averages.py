"""Find the statistics of rows that a model keeps in its buffers, such as running averages."""

from __future__ import annotations

from torch import fx

from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import tensors_of
from piper_capture.whole_batch.batch_loss.writers import owner, written
from piper_ops import STATISTICS


def averages(forward: Forward) -> set[fx.Node]:
    """Return the operations that make new contents of buffers, with the reductions over rows that they read."""
    buffers = {n for n, origin in forward.origins.items() if origin.kind == "buffer"}
    queue = [
        n
        for n in forward.graph.nodes
        if (target := written(n)) is not None and owner(target) in buffers
    ]
    queue += [n for n in forward.rewrites.values() if not _has_rows(n)]
    reached = set[fx.Node]()
    while queue:
        node = queue.pop()
        if node not in reached and node.op != "placeholder":
            reached.add(node)
            queue += [n for n in node.all_input_nodes if not _has_rows(n)]
    return reached


def mark_averages(forward: Forward) -> None:
    """Mark these operations as statistics that the job asks for, like the statistics of batch norms."""
    for node in averages(forward):
        node.meta[STATISTICS] = True


def _has_rows(node: fx.Node) -> bool:
    return any(_torch.is_symbolic(size) for tensor in tensors_of(node) for size in tensor.shape)
