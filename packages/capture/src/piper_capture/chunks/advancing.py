"""Find the buffers whose content after a step depends on how many microbatches the step has.

A plan runs forward once per microbatch. A buffer that forward computes from its own old content, or from the batch,
then advances several times in a step: spectral norm's vectors, running statistics, counters. Plain PyTorch does the
same in a loop over the microbatches, but not with the whole batch in one forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from piper_capture.chunks.cut import Cut
from piper_capture.values.concrete import line_of, tensors_of
from piper_ir.ground.expert_tokens import counts_tokens

BATCH = "the batch"
OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
"""The in-place operations that do not read the old content of their tensor."""
SHAPE_ONLY = re.compile(r"\w+_like$|new_(empty|full|ones|zeros)")
"""The names of operations that take shape, dtype and device of a tensor, not its content."""


@dataclass(frozen=True)
class Advancing:
    """Name a buffer that advances once per microbatch.

    Attributes:
        line: the line where forward changes it last.
        read: whether the loss depends on its content from before.
    """

    name: str
    line: str
    read: bool = True


def advancing_buffers(cut: Cut) -> tuple[Advancing, ...]:
    """Return the buffers that advance, in the order of their registration; those made of parameters only do not."""
    forward, facts = cut.forward, cut.facts
    buffers = {o.name: n for n, o in forward.origins.items() if o.kind == "buffer"}
    content: dict[int, set[str]] = {}
    for node, origin in forward.origins.items():
        made_of = (
            {origin.name}
            if origin.kind == "buffer"
            else {BATCH}
            if origin.kind == "batch"
            else set()
        )
        content.update(dict.fromkeys(facts.storages[node], made_of))
    changed_by: dict[int, fx.Node] = {}
    for node in cut.ops.nodes:
        made_of = set().union(*(content[s] for s in _read(node, facts.storages) if s in content))
        made_of |= {BATCH} if node in facts.random else set()
        content.update(
            (storage, made_of) for storage in facts.storages[node] if storage not in content
        )
        replaced = _replaced(node)
        for storage in facts.writes[node]:
            # a part that is not replaced has its old content, which counts if that was computed
            stays = replaced is None or (storage in changed_by and not _is_whole(replaced))
            content[storage] = made_of | (content.get(storage, set()) if stays else set())
            changed_by[storage] = node
    sources: dict[str, set[str]] = {}
    lines: dict[str, fx.Node] = {}
    for name, node in buffers.items():
        for storage in facts.storages[node] & set(changed_by):
            sources[name], lines[name] = content[storage], changed_by[storage]
    for name, node in forward.rewrites.items():
        sources[name] = set().union(*(content[s] for s in facts.storages[node]))
        lines[name] = node
    advancing = _advancing(sources)
    changed = [b.name for b in forward.buffers if b.name in advancing and not counts_tokens(b.name)]
    results = forward.results
    read = set().union(*(content[s] for node in results for s in facts.storages[node]))
    return tuple(Advancing(name, line_of(lines[name]), name in read) for name in changed)


def _read(node: fx.Node, storages: Mapping[fx.Node, frozenset[int]]) -> Iterable[int]:
    """Return the storages whose content an operation reads, without the storages of a tensor that it overwrites."""
    if SHAPE_ONLY.match(_name(node)):
        return []
    replaced = _replaced(node)
    return [s for n in node.all_input_nodes if n is not replaced for s in storages.get(n, ())]


def _replaced(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose content an operation replaces unread, or None; it may be a part of another."""
    replaced = node.args[0] if _name(node) in OVERWRITES else node.kwargs.get("out")
    return replaced if isinstance(replaced, fx.Node) else None


def _is_whole(node: fx.Node) -> bool:
    """Return whether tensors fill their storages, and are no parts of others."""
    return all(map(_fills_storage, tensors_of(node)))


def _fills_storage(tensor: torch.Tensor) -> bool:
    # `aliasing.fills_storage` would compare sizes in rows, which are symbols here
    size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if type(size) is int and type(storage) is int:
        return size == storage
    return not tensor._is_view()  # it has the rows of the batch


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _advancing(sources: Mapping[str, set[str]]) -> set[str]:
    """Return the buffers that are computed from themselves or the batch, if only through other buffers that change."""
    reach = {name: set(made_of) for name, made_of in sources.items()}
    for _ in sources:
        for made_of in reach.values():
            made_of |= set().union(*(reach[other] for other in made_of & set(reach)))
    itself = {name for name, made_of in reach.items() if name in made_of or BATCH in made_of}
    return itself | {name for name, made_of in reach.items() if made_of & itself}
