"""Turn `torch.utils.checkpoint` in a model into a region with the coordinate `checkpoint`, for a plan to recompute.

Dynamo makes a call of the function's own graph. It is replaced by a copy of that graph, so that its operations are
operations of the model like all others. The strategy decides about recomputation; without a directive for the region,
it is recomputed as the model asks (`piper_compiler.directives.recompute`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from piper_capture.module.tags import PREFIX
from piper_capture.values.concrete import line_of, tensors_of
from piper_ir.ground.errors import CaptureError
from piper_ir.program.ops import CHECKPOINT
from piper_ops import BATCH_NORMS, storage_key, user_line

IN_PLACE = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
)  # fmt: skip
"""The functions of Python's `operator` that write into their first argument."""
CALLS = (
    torch.ops.higher_order.tag_activation_checkpoint,
    torch.ops.higher_order.wrap_activation_checkpoint,
)


@torch.compiler.substitute_in_graph(checkpoint_sequential, skip_signature_check=True)
def _sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Replace `checkpoint_sequential`, which Dynamo does not trace into; by default it is reentrant."""
    functions = (
        list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    )
    reentrant, size = use_reentrant is None or use_reentrant, len(functions) // segments
    for k in range(segments - 1):
        part = _in_a_row(functions[k * size : (k + 1) * size])
        input = checkpoint(part, input, use_reentrant=reentrant, **kwargs)
    return _in_a_row(functions[(segments - 1) * size :])(input)


def _in_a_row(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return run


def open_checkpoints(module: fx.GraphModule) -> list[str]:
    """Replace the calls of checkpointed functions by their operations; return the user's lines.

    Raises CaptureError for calls that train less than the plain function, or choose which tensors are saved.
    """
    lines: list[str] = []
    while calls := [n for n in module.graph.nodes if n.op == "call_function" and n.target in CALLS]:
        for call in calls:
            lines.append(_opened(module, call))
    return list(dict.fromkeys(lines))


def checkpoint_note(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the note about checkpointed functions at these lines; empty if there are none."""
    if not lines:
        return ()
    more = f" and {len(lines) - 2} more" if len(lines) > 2 else ""
    return (
        f"torch.utils.checkpoint ({', '.join(lines[:2])}{more}): these regions have the coordinate checkpoint=1, "
        f"and are made again in the backward as by recompute(where(checkpoint=1), keep='inputs'), unless the "
        f"strategy has a recompute for them (keep='all' keeps everything)",
    )


def _opened(module: fx.GraphModule, call: fx.Node) -> str:
    """Replace one call; return its line."""
    name, *arguments = call.args
    assert isinstance(name, fx.Node)
    body: Any = getattr(module, str(name.target))
    line = user_line(call)
    _check(call, arguments, body)
    copies: dict[fx.Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), arguments, strict=True)
    )
    storages = {
        storage_key(t)
        for g in arguments
        if isinstance(g, fx.Node) and g.op == "placeholder"
        for t in tensors_of(g)
    }
    norms = [node for node in body.graph.nodes if node.target in BATCH_NORMS]
    results: Any = ()
    with module.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], copies.__getitem__)
            elif node.op == "get_attr":
                copies[node] = module.graph.get_attr(_moved(module, body, str(node.target)))
                copies[node].meta = dict(node.meta)
            elif node.op != "placeholder":
                copy = copies[node] = module.graph.node_copy(node, copies.__getitem__)
                copy.meta = {
                    **node.meta,
                    "custom": {**(node.meta.get("custom") or {}), PREFIX + CHECKPOINT: 1},
                }
                if _runs_again(call):
                    _update_twice(copy, storages, before_norm=any(node < norm for norm in norms))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(call)
    if not name.users:
        module.graph.erase_node(name)
    return line


def _runs_again(call: fx.Node) -> bool:
    """Return whether plain PyTorch recomputes a checkpointed function in the backward."""
    return any(t.requires_grad for t in tensors_of(call))


def _update_twice(node: fx.Node, held: Set[int], before_norm: bool) -> None:
    """Make an update of a buffer count twice, as in plain PyTorch, which recomputes the region.

    Two updates of a running average with the same statistics are one with another momentum. A counter is doubled only
    before a batch norm: PyTorch stops the recomputation after the last tensor that the backward needs, so that later
    operations run once. Raises CaptureError for other in-place changes; `held` are the storages of the tensors of the
    model and the batch, since a view of one may be changed, too.
    """
    if node.target in BATCH_NORMS:
        bound: dict[str, Any] = (
            dict(zip(BATCH_NORMS[node.target], node.args, strict=False)) | node.kwargs
        )
        if bound.get("training", False) is not False and bound.get("running_mean") is not None:
            bound["momentum"] = 1 - (1 - bound.get("momentum", 0.1)) ** 2
            node.args, node.kwargs = (), bound
        return
    changed, *rest = node.args or (None,)
    method = str(node.target) if node.op == "call_method" else ""
    writes = (method.endswith("_") and not method.endswith("__")) or node.target in IN_PLACE
    if (
        not writes
        or not isinstance(changed, fx.Node)
        or not any(storage_key(t) in held for t in tensors_of(changed))
    ):
        return
    if (
        before_norm
        and method == "add_"
        and isinstance(rest[0], int)
        and not tensors_of(node)[0].is_floating_point()
    ):
        node.args = (changed, 2 * rest[0])
        return
    raise CaptureError(
        f"{line_of(node)}: a tensor of the model or the batch is changed in place inside of "
        f"torch.utils.checkpoint, which plain PyTorch does twice: in the forward, and in the backward, when it "
        f"makes the region again and comes so far. Change it outside of the checkpointed function, or leave "
        f"checkpoint out and write piper.recompute in the strategy"
    )


def _moved(module: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    """Copy an attribute of the inner graph module to the outer one; return its new name."""
    value: Any = body
    for part in name.split("."):
        value = getattr(value, part)
    fresh = name.replace(".", "_")
    while hasattr(module, fresh):
        fresh += "_"
    setattr(module, fresh, value)
    return fresh


def _check(call: fx.Node, given: list[Any], body: fx.GraphModule) -> None:
    where = line_of(call)
    if body.meta.get("_checkpoint_context_fn") is not None:
        raise CaptureError(
            f"{where}: torch.utils.checkpoint with a context_fn chooses which operations are kept. Leave "
            f"context_fn out, and say so in the strategy: piper.recompute(where(checkpoint=1), keep='products'), "
            f"or names of ops"
        )
    values = [
        n.meta["example_value"] for n in given if isinstance(n, fx.Node) and n.op != "placeholder"
    ]
    reached = any(v.requires_grad for v in values if isinstance(v, Tensor))
    if call.kwargs.get("use_reentrant") and not reached:
        raise CaptureError(
            f"{where}: torch.utils.checkpoint(use_reentrant=True) of inputs that need no gradient trains none of "
            f"the weights inside, in plain PyTorch too. Write use_reentrant=False"
        )
