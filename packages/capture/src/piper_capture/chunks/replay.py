"""Run the captured forward graph once on meta tensors at two rows, to learn which storages its nodes write and share.

The graph is torch-level: no schema tells whether `relu(x, inplace=True)`, a custom op or an index assignment writes to
a tensor. Here version counters show writes, shared storages show views, and the tags of the ops that ran show random
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import (
    concrete_call,
    concrete_shape,
    line_of,
    tensors_of,
)
from piper_ir.ground.errors import CaptureError
from piper_ops import is_draw

ROWS = 2
META = torch.device("meta")


@dataclass
class ReplayFacts:
    """Hold the storages that the nodes of a graph write and share, and their random numbers.

    Attributes:
        storages: node -> ids of the storages of its tensors.
        writes: node -> ids of storages it changes.
        random: nodes that draw random numbers, with the number of their draws.
        varies: ids of storages whose content depends on the batch or on random numbers at the end.
        requires_grad: node -> the operations at which its tensor's requires_grad became known or changed, in order,
            with the new value.
    """

    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    writes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    random: dict[fx.Node, int] = field(default_factory=dict)
    varies: set[int] = field(default_factory=set)
    requires_grad: dict[fx.Node, dict[fx.Node, bool]] = field(default_factory=dict)


class RandomWatch(_torch.TorchDispatchMode):
    """Count the ops that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += is_draw(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def replay(forward: Forward, nodes: Sequence[fx.Node]) -> ReplayFacts:
    """Run `nodes` (statements and tensor operations in program order); raise CaptureError with the user's line."""
    facts = ReplayFacts()
    env: dict[fx.Node, Any] = {}
    requires_grad = {p.name for p in forward.params if p.requires_grad}
    for node, origin in forward.origins.items():
        symbolic = node.meta["example_value"]
        shape = concrete_shape(symbolic, ROWS, node)
        env[node] = torch.empty(shape, dtype=symbolic.dtype, device=META)
        if origin.kind == "param":
            env[node].requires_grad_(origin.name in requires_grad)
        facts.storages[node] = _storages(env[node])
        if origin.kind == "batch":
            facts.varies |= facts.storages[node]
    with torch.enable_grad(), RandomWatch() as watch:
        for node in nodes:
            _run(forward.owner, node, env, facts, watch)
    return facts


def _run(
    owner: fx.GraphModule,
    node: fx.Node,
    env: dict[fx.Node, Any],
    facts: ReplayFacts,
    watch: RandomWatch,
) -> None:
    if node.op == "get_attr":
        env[node] = getattr(owner, str(node.target))
        facts.storages[node] = facts.writes[node] = frozenset()
        return
    for tensor in tensors_of(node):
        if _torch.data_dependent(tensor):
            concrete_shape(tensor, ROWS, node)
    args, kwargs = concrete_call(node, env, ROWS, META)
    tensors = [env[n] for n in node.all_input_nodes if n in env]
    flat = [
        t
        for item in tensors
        for t in (item if isinstance(item, tuple | list) else (item,))
        if isinstance(t, Tensor)
    ]
    versions = [t._version for t in flat]
    watch.seen = 0
    try:
        if node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            env[node] = node.target(*args, **kwargs)
    except _torch.RUN_ERRORS as error:
        said = str(error).partition("\n\nWhile executing")[
            0
        ]  # behind it is a traceback of fx's interpreter
        raise CaptureError(
            f"{line_of(node)}: this operation cannot run on meta tensors: {said}; it must have static shapes, "
            f"tensors that forward makes must be on the device of the others (device=x.device), and a custom op "
            f"must be registered with torch.library (register_fake, register_autograd)"
        ) from error
    facts.storages[node] = _storages(env[node])
    facts.writes[node] = frozenset().union(
        *(_storages(t) for t, before in zip(flat, versions, strict=True) if t._version != before)
    )
    if watch.seen:
        facts.random[node] = watch.seen
    touched = (
        {node} | {n for n in env if facts.writes[node] & facts.storages.get(n, frozenset())}
        if facts.writes[node]
        else {node}
    )
    for n in touched:
        if isinstance(env[n], Tensor):
            facts.requires_grad.setdefault(n, {})[node] = env[n].requires_grad
    read = frozenset().union(
        *(facts.storages[n] for n in node.all_input_nodes if n in facts.storages)
    )
    if watch.seen or read & facts.varies:
        fresh = facts.storages[node] - read
        facts.varies |= fresh | facts.writes[node]


def _storages(value: Any) -> frozenset[int]:
    if isinstance(value, Tensor):
        return frozenset({value.untyped_storage()._cdata})
    if isinstance(value, tuple | list):
        return frozenset().union(*(_storages(v) for v in value))
    return frozenset()
