"""Compute the memory that a step's code holds beyond its inputs, as `piper_ir.program.program.Liveness`.

The model goes op by op, in the order of `schedule`:

- an op holds its arguments and all its results at once; each result of a multi-output op has a storage of its own, and
  unused results are freed right after the op;
- a view and an in-place op allocate nothing and keep the storage that they share alive;
- a storage is freed after the last op that uses a tensor in it; storages of outputs are never freed;
- a gradient that is added to its accumulator lives until this op is done;
- an op that writes into a copy of a view (`select_scatter`) copies the view's whole storage;
- an input is freed after the last op that uses it or a view of it, if it dies in this step.

The workspace of a kernel is counted for the CPU; for CUDA it is listed separately, as `Liveness.inside`. What a CPU
computes written out and a CUDA device by a kernel (latent attention) is listed for the CPU, as `Liveness.on_cpu`.
Constants are not counted: they live as long as the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.steps.kernels import FUSED
from piper_capture.steps.schedule import Line
from piper_capture.values import aliasing
from piper_ir.program.program import Inside, Liveness
from piper_ops import ROUNDS, Workspace, cpu_workspace, cuda_workspace, is_written_on_cpu

aten = torch.ops.aten

STORAGE_COPIES = frozenset(
    {
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    }
)
"""The ops whose kernels clone the whole storage of their first argument; fake tensors show only the viewed part.

Of an expanded argument they clone its elements, each as often as it is there (clone_preserve_strides of ATen).
"""


def analyse(step: StepGraph, lines: Sequence[Line]) -> Liveness:
    """Return the liveness of a step at concrete sizes.

    A segment holds the bytes at each of its ops that allocate, in order: the same ops at every number of rows, so that
    each can be fitted. (Any other op holds no more than the op before.)
    """
    last = _last_lines(step, lines)
    inputs = step.graph.find_nodes(op="placeholder")[: len(step.reads)]
    consumed = sorted(range(len(inputs)), key=lambda k: (last.get(inputs[k], -1), k))
    at_line = _bytes_at_lines(lines, last)
    ends = [last.get(inputs[k], -1) for k in consumed]
    spans = list(zip([-1, *ends], [*ends, len(lines)], strict=True))
    own_by_line = {number: aliasing.asked(_workspaces, lines[number].node) for number, _ in at_line}
    written = {number for number, own in own_by_line.items() if own.written}
    inside_too = [(number, live_bytes + own_by_line[number].cpu) for number, live_bytes in at_line]
    segments = [
        tuple(
            live_bytes if number in written else size
            for (number, size), (_, live_bytes) in zip(inside_too, at_line, strict=True)
            if start < number <= end
        )
        for start, end in spans
    ]
    on_cpu = [
        tuple(size for number, size in inside_too if number in written and start < number <= end)
        for start, end in spans
    ]
    kernels = [
        (number, _inside(live_bytes, own))
        for number, live_bytes in at_line
        if (own := own_by_line[number].cuda) is not None
    ]
    inside = (
        [tuple(k for number, k in kernels if start < number <= end) for start, end in spans]
        if kernels
        else []
    )
    return Liveness(
        tuple(consumed), tuple(segments), tuple(inside), tuple(on_cpu) if written else ()
    )


@dataclass(frozen=True)
class _Workspaces:
    """Hold the workspace of an op's kernels, and whether a CPU computes it written out."""

    written: bool
    cpu: int
    cuda: Workspace | None


def _workspaces(op: Any, args: Any, out: Any, kwargs: Any) -> _Workspaces:
    call = op, args, out, kwargs
    return _Workspaces(is_written_on_cpu(*call), cpu_workspace(*call), cuda_workspace(*call))


def _inside(held: int, own: Workspace) -> Inside:
    return Inside(held + own.always, own.sliced, own.most)


def _bytes_at_lines(lines: Sequence[Line], last: Mapping[fx.Node, int]) -> list[tuple[int, int]]:
    """Return (line number, bytes held while it runs) for the lines that allocate."""
    live_bytes = 0
    freed_at: dict[int, int] = {}
    at_line: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        if not aliasing.is_view(line.node):
            for owner, size in _results(line):
                live_bytes += size
                end = number if owner is None else last[owner]
                freed_at[end] = freed_at.get(end, 0) + size
        if (
            not aliasing.is_view(line.node) or line.node.target in ROUNDS
        ):  # further rounds have a workspace
            at_line.append((number, live_bytes + _inside_fusion(line.node)))
        live_bytes -= freed_at.pop(number, 0)
    return at_line


def _inside_fusion(node: fx.Node) -> int:
    """Return the bytes that a fusion holds beside its arguments and results; 0 for another operation."""
    return node.meta[FUSED][0].workspace if FUSED in node.meta else 0


def _results(line: Line) -> list[tuple[fx.Node | None, int]]:
    """Return the storages that a line makes: (variable or None, bytes); None is an unused result."""
    if line.makes == (line.node,):
        return [(line.node, _owned_bytes(line.node))]
    variables = {item.args[1]: item for item in line.makes}
    values = line.node.meta["val"]
    return [
        (variables.get(i), aliasing.storage_bytes(v)) for i, v in enumerate(values) if v is not None
    ]


def _owned_bytes(node: fx.Node) -> int:
    if node.target in STORAGE_COPIES:
        base = node.args[0]
        assert isinstance(base, fx.Node)
        value = aliasing.tensor(base)
        if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
            return value.numel() * value.element_size()
        return _owned_bytes(aliasing.root(base))
    return sum(map(aliasing.storage_bytes, aliasing.tensors(node)))


def _last_lines(step: StepGraph, lines: Sequence[Line]) -> dict[fx.Node, int]:
    """Return for each owner of a storage the last line that uses it; outputs outlive every line."""
    last: dict[fx.Node, int] = {}
    for number, line in enumerate(lines):
        for node in (*line.makes, *line.node.all_input_nodes):
            last[aliasing.root(node)] = number
    for node in step.graph.output_node().all_input_nodes:
        last[aliasing.root(node)] = len(lines)
    return last
