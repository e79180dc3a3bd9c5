"""Find the values between chunks whose tokens are not their second dimension: tables, masks, and flat tokens.

A table made without the batch and without parameters is equal on every device. So it passes replicated even if devices
share tokens: if it were sharded, each chunk would gather it again. A mask [queries, keys] has tokens in both dimensions
if a chunk indexes both alike. It is sharded along the first, as the queries are. What the experts of a mixture take is
often [rows x tokens, width]; it is [rows x tokens / n, width] on each of n devices that share the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from piper_capture.graphs.closures import ancestors, is_random
from piper_capture.graphs.stepgraph import TOKENS, Joint
from piper_capture.layouts import Agreed, key_of, taken_apart
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.program.program import Chunk, Program


def constant_values(program: Program, joint_of: Callable[[Chunk], Joint]) -> frozenset[str]:
    """Return the values, as "chunk:out0", that depend on constants and buffers alone.

    A chunk's inputs are made by chunks before it.
    """
    constant_refs: set[str] = set()
    seen: dict[tuple[str, frozenset[int]], frozenset[int]] = {}
    for chunk in program.chunks:
        if chunk.opaque:
            continue
        constant = frozenset(
            k
            for k, chunk_input in enumerate(chunk.inputs)
            if chunk_input.kind == "buffer" or chunk_input.ref in constant_refs
        )
        if (chunk.code, constant) not in seen:
            seen[chunk.code, constant] = _outputs(joint_of(chunk), constant)
        constant_refs.update(f"{chunk.id}:out{k}" for k in seen[chunk.code, constant])
    return frozenset(constant_refs)


def _outputs(joint: Joint, constant: frozenset[int]) -> frozenset[int]:
    """Return the outputs that depend on no inputs but these, draw no random numbers and get no gradient."""
    varying = {node for k, node in enumerate(joint.inputs) if k not in constant}

    def varies(node: fx.Node) -> bool:
        return any(n in varying or is_random(n) for n in ancestors([node]))

    return frozenset(
        k for k, node in enumerate(joint.outputs) if k not in joint.tangents and not varies(node)
    )


def masks(program: Program, joint_of: Callable[[Chunk], Joint]) -> frozenset[str]:
    """Return the values, as "chunk:out0", with two dimensions that any chunk indexes by the same tokens."""
    mask_refs: set[str] = set()
    seen: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
    for chunk in program.chunks:
        if chunk.opaque:
            continue
        if chunk.code not in seen:
            seen[chunk.code] = _masks(joint_of(chunk))
        inputs, outputs = seen[chunk.code]
        mask_refs.update(chunk.inputs[k].ref for k in inputs)
        mask_refs.update(f"{chunk.id}:out{k}" for k in outputs)
    return frozenset(mask_refs)


def _masks(joint: Joint) -> tuple[frozenset[int], frozenset[int]]:
    """Return the values among the inputs and the outputs with two dimensions that are the same loop."""
    apart, indexes = taken_apart(joint)

    def square(node: fx.Node) -> bool:
        dims = indexes.tensors.get(key_of(node), ())
        return len(dims) > TOKENS and not set(dims[TOKENS]).isdisjoint(dims[0])

    inputs = frozenset(
        k for k, node in enumerate(apart.inputs) if joint.kinds[k] == "value" and square(node)
    )
    return inputs, frozenset(k for k, node in enumerate(apart.outputs) if square(node))


def with_tables(
    agreed: Agreed, chunk: Chunk, constants: frozenset[str], masks: frozenset[str]
) -> Agreed:
    """Return the agreement of a chunk, extended by its inputs and outputs that are constants or masks."""

    def among(some: frozenset[str]) -> tuple[frozenset[int], frozenset[int]]:
        inputs = frozenset(
            k
            for k, chunk_input in enumerate(chunk.inputs)
            if chunk_input.kind == "value" and chunk_input.ref in some
        )
        return inputs, frozenset(
            k for k in range(len(chunk.outputs)) if f"{chunk.id}:out{k}" in some
        )

    (tables, table_outputs), (first_inputs, first_outputs) = among(constants), among(masks)
    return replace(
        agreed,
        tables=tables,
        made=table_outputs,
        first_inputs=first_inputs,
        first_outputs=first_outputs,
    )


def is_flat(spec: TensorSpec, tokens: int) -> bool:
    """Return whether a value's first dimension is rows x tokens."""
    return tokens > 1 and spec.shape[:1] == (Affine(0, tokens),)


def flat_values(program: Program, tokens: int) -> frozenset[str]:
    """Return such values, as "chunk:out0"; none for 0 tokens."""
    return frozenset(
        f"{chunk.id}:out{k}"
        for chunk in program.chunks
        for k, output in enumerate(chunk.outputs)
        if is_flat(output.spec, tokens)
    )


def with_flat(agreed: Agreed, chunk: Chunk, flat: frozenset[str], tokens: int) -> Agreed:
    """Return the agreement of a chunk, extended by its inputs and outputs that are such values."""
    if not flat:
        return agreed
    inputs = frozenset(k for k, i in enumerate(chunk.inputs) if i.kind == "value" and i.ref in flat)
    outputs = frozenset(k for k in range(len(chunk.outputs)) if f"{chunk.id}:out{k}" in flat)
    return replace(agreed, flat_inputs=inputs, flat_outputs=outputs, row_tokens=tokens)
