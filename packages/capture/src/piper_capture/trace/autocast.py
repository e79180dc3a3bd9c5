"""Write the casts of `torch.autocast` inside a model into its graph, as explicit operators.

Each operator in such a block runs once on fake tensors, with autocast, to see which of its arguments are cast. These
casts are added in front of it. Without autocast the operator must then run the same kernels in the same dtypes; an
operator that casts an intermediate tensor is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piper_capture.torch_api import _torch
from piper_capture.values.concrete import line_of, tensors_of
from piper_ir.ground.errors import CaptureError
from piper_ops import as_written, user_line

DEVICE = "cpu"
PRECISION = "Job(precision=Precision(params='float32', compute='bfloat16')) computes the whole model in bfloat16"


def write_casts(graph: fx.Graph) -> tuple[str, ...]:
    """Replace the autocast blocks of a graph by casts; return notes about them for the user.

    Raises CaptureError, with the user's line, for a block whose casts cannot be written into the graph.
    """
    blocks: list[fx.Node] = []
    lines: dict[str, None] = {}
    for node in list(graph.nodes):
        if node.target is _torch.ENTER_AUTOCAST:
            blocks.append(node)
            if _options(node)["enabled"]:
                _check_device(node)
                lines[user_line(node)] = None
        elif node.target is _torch.EXIT_AUTOCAST:
            blocks.remove(node.args[0])
        elif (
            blocks
            and node.op in ("call_function", "call_method")
            and tensors_of(node)
            and _options(blocks[-1])["enabled"]
        ):
            _write(graph, node, _options(blocks[-1]))
    for node in reversed(list(graph.nodes)):
        if node.target in (_torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST):
            graph.erase_node(node)
    return tuple(
        f"torch.autocast ({line}): its casts are part of what is captured, the same on every device: those of a "
        f"CPU. A cast of a weight is made in every microbatch. In float64 (`piper verify`) autocast casts nothing"
        for line in lines
    )


def _options(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of `torch.autocast` for a block."""
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    return {
        "enabled": True,
        "dtype": None,
        **dict(zip(names, node.args, strict=False)),
        **node.kwargs,
    }


def _check_device(node: fx.Node) -> None:
    device = str(_options(node)["device_type"])
    if device != DEVICE:
        raise CaptureError(
            f"{user_line(node)}: torch.autocast({device!r}) inside the model casts on this device only, so that "
            f"each device would train another model. Write torch.autocast(x.device.type, ...), whose casts are "
            f"captured. {PRECISION}"
        )


def _write(graph: fx.Graph, node: fx.Node, options: dict[str, Any]) -> None:
    """Add the casts of one operator in front of it."""
    name = str(getattr(node.target, "__name__", node.target))
    if isinstance(node.target, _torch.HigherOrderOperator) or node.target is as_written:
        raise CaptureError(
            f"{line_of(node)}: this runs as it is, in the middle of torch.autocast. Leave it out of the block. "
            f"{PRECISION}"
        )
    if name == "setitem" or (name.endswith("_") and not name.endswith("__")):
        return  # autocast casts no argument of an in-place operator
    examples: dict[fx.Node, Any] = {n: n.meta["example_value"] for n in node.all_input_nodes}
    with torch.autocast(DEVICE, dtype=options["dtype"], cache_enabled=False):
        cast = _observed(node, examples)
    wanted = {n: cast.inputs[id(e)] for n, e in examples.items() if id(e) in cast.inputs}
    if not wanted and not cast.inside:
        return
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for source, dtype in wanted.items():
            copy = copies[source] = graph.call_method("to", (source, dtype))
            copy.meta = {**node.meta, "example_value": examples[source].to(dtype)}
    alone = _observed(
        node,
        {n: copies[n].meta["example_value"] if n in copies else e for n, e in examples.items()},
    )
    if alone.ops != cast.ops:
        raise CaptureError(
            f"{line_of(node)}: {name} casts inside of itself under torch.autocast, which a plan cannot write out. "
            f"Leave it out of the block, or call its parts. {PRECISION}"
        )
    node.args = fx.map_arg(node.args, lambda n: copies.get(n, n))
    node.kwargs = fx.map_arg(node.kwargs, lambda n: copies.get(n, n))


@dataclass
class _Seen:
    """Hold the aten ops and the casts that an operator ran.

    Attributes:
        inputs: the id of each argument that it cast -> the dtype.
        ops: the aten ops that ran beside these casts, with their dtypes.
        inside: whether it cast another tensor than an argument.
    """

    inputs: dict[int, torch.dtype] = field(default_factory=dict)
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    inside: bool = False


class _Watch(_torch.TorchDispatchMode):
    def __init__(self, given: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.seen, self._given = _Seen(), given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        casts = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is not None
        if casts and id(args[0]) in self._given:
            self.seen.inputs[id(args[0])] = kwargs["dtype"]
        elif func.namespace != "prim":  # prim::device only reads a tensor's device
            self.seen.inside |= casts
            self.seen.ops.append((str(func), *_dtypes((args, kwargs)), *_dtypes(result)))
        return result


def _dtypes(values: Any) -> Iterator[torch.dtype]:
    yield from (
        leaf.dtype for leaf in _torch.pytree.tree_leaves(values) if isinstance(leaf, Tensor)
    )


def _observed(node: fx.Node, examples: dict[fx.Node, Any]) -> _Seen:
    """Return the ops and casts of an operator that runs on these examples."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: examples[n])
    tensors = [
        leaf
        for leaf in _torch.pytree.tree_leaves(list(examples.values()))
        if isinstance(leaf, Tensor)
    ]
    mode = next((m for t in tensors if (m := getattr(t, "fake_mode", None)) is not None), None)
    if mode is None:
        return _Seen()
    with mode, _Watch(set(map(id, tensors))) as watch:
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    return watch.seen
