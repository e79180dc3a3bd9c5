"""What a step's code holds beyond its inputs while it runs, as `piper_ir.program.Liveness`.

The model, op by op in the order of `schedule`:
- an op holds its operands and all its results at once; each result of a multi-output op is a storage of its own, and those
  that nothing uses are freed right after the op;
- a view and an in-place op cost nothing and keep the storage that they share alive;
- a storage is freed after the op that last uses a variable living in it; what the step writes is never freed;
- a gradient that is added into its accumulator lives until that op is done;
- an input counts as used last by the last op that uses it or a view of it; it is freed there if it dies in this step.
Memory that a kernel allocates and frees inside is not counted, nor are constants, which live as long as the code.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_ir.program import Liveness
from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture.phases import StepGraph
from piper_compiler.capture.schedule import Line


def analyse(step: StepGraph, lines: Sequence[Line]) -> Liveness:
    """Liveness of a step at concrete sizes: one integer per segment that has an op, none in the others."""
    last = _last_lines(step, lines)
    inputs = step.graph.find_nodes(op="placeholder")[: len(step.reads)]
    order = sorted(range(len(inputs)), key=lambda k: (last.get(inputs[k], -1), k))
    held = 0
    at_line: list[int] = []
    freed_at: dict[int, int] = {}
    for number, line in enumerate(lines):
        if not aliasing.is_view(line.node):
            made = list(_results(line))
            held += sum(size for _, size in made)
            for owner, size in made:
                end = number if owner is None else last[owner]
                freed_at[end] = freed_at.get(end, 0) + size
        at_line.append(held)
        held -= freed_at.pop(number, 0)
    segments: list[tuple[int, ...]] = []
    start = 0
    for k in order:
        end = max(start, last.get(inputs[k], -1) + 1)
        segments.append((max(at_line[start:end]),) if end > start else ())
        start = end
    segments.append((max(at_line[start:]),) if start < len(at_line) else ())
    return Liveness(tuple(order), tuple(segments))


def _results(line: Line) -> list[tuple[fx.Node | None, int]]:
    """The storages that a line makes: (variable or None, bytes)."""
    if line.makes == (line.node,):
        return [(line.node, sum(map(aliasing.storage_bytes, aliasing.tensors(line.node))))]
    variables = {item.args[1]: item for item in line.makes}
    values = line.node.meta["val"]
    return [(variables.get(i), aliasing.storage_bytes(v)) for i, v in enumerate(values) if v is not None]


def _last_lines(step: StepGraph, lines: Sequence[Line]) -> dict[fx.Node, int]:
    """The number of the line that uses a storage last, by its owner; beyond the last line for what the step writes."""
    last: dict[fx.Node, int] = {}
    for number, line in enumerate(lines):
        for node in (*line.makes, *line.node.all_input_nodes):
            last[aliasing.root(node)] = number
    for node in step.graph.output_node().all_input_nodes:
        last[aliasing.root(node)] = len(lines)
    return last
