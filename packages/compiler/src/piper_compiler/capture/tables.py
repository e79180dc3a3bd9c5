"""Find what passes between chunks and is made without the batch and without parameters: masks, tables of positions.

Every device makes the same of it, so it need not pass in parts where devices share tokens: each chunk would gather it
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from piper_compiler.capture.closures import ancestors, is_random
from piper_compiler.capture.layouts import Agreed
from piper_compiler.capture.stepgraph import Joint
from piper_ir.program import Chunk, Program


def constant_values(program: Program, joint_of: Callable[[Chunk], Joint]) -> frozenset[str]:
    """Return the values, as "chunk:out0", that depend on constants and buffers alone.

    A chunk's inputs are made by chunks before it.
    """
    found: set[str] = set()
    seen: dict[tuple[str, frozenset[int]], frozenset[int]] = {}
    for chunk in program.chunks:
        if chunk.opaque:
            continue
        constant = frozenset(k for k, given in enumerate(chunk.inputs) if given.kind == "buffer" or given.ref in found)
        if (chunk.code, constant) not in seen:
            seen[chunk.code, constant] = _outputs(joint_of(chunk), constant)
        found.update(f"{chunk.id}:out{k}" for k in seen[chunk.code, constant])
    return frozenset(found)


def _outputs(joint: Joint, constant: frozenset[int]) -> frozenset[int]:
    """Return the outputs that depend on no inputs but these, draw no random numbers and get no gradient."""
    varying = {node for k, node in enumerate(joint.inputs) if k not in constant}

    def varies(node: fx.Node) -> bool:
        return any(n in varying or is_random(n) for n in ancestors([node]))

    return frozenset(k for k, node in enumerate(joint.outputs) if k not in joint.tangents and not varies(node))


def with_tables(agreed: Agreed, chunk: Chunk, constants: frozenset[str]) -> Agreed:
    """Return what is agreed of a chunk with those of its inputs and outputs that are constants."""
    inputs = frozenset(k for k, given in enumerate(chunk.inputs) if given.kind == "value" and given.ref in constants)
    outputs = frozenset(k for k in range(len(chunk.outputs)) if f"{chunk.id}:out{k}" in constants)
    return replace(agreed, tables=inputs, made=outputs)
