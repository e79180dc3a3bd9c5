"""Mark the statistics of rows that a model keeps in its buffers, where its author wants those of microbatches."""

from __future__ import annotations

from torch import fx

from piper_compiler.capture import _torch
from piper_compiler.capture.batch_loss.writers import owner, written
from piper_compiler.capture.concrete import tensors_of
from piper_compiler.capture.dynamo import Forward
from piper_ops import STATISTICS


def mark_averages(forward: Forward) -> None:
    """Mark the operations that write into buffers, with the reductions over rows that they read, as statistics."""
    buffers = {n for n, origin in forward.origins.items() if origin.kind == "buffer"}
    queue = [n for n in forward.graph.nodes if (target := written(n)) is not None and owner(target) in buffers]
    while queue:
        node = queue.pop()
        if STATISTICS not in node.meta:
            node.meta[STATISTICS] = True
            queue += [n for n in node.all_input_nodes if n.op != "placeholder" and not _has_rows(n)]


def _has_rows(node: fx.Node) -> bool:
    return any(_torch.is_symbolic(size) for tensor in tensors_of(node) for size in tensor.shape)
