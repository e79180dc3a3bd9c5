"""Run the steps of an opaque chunk: its forward runs under autograd, its backward is what autograd recorded.

F returns, behind its outputs, a *handle*: an empty tensor that carries the recorded graph from F to I. What autograd
has saved stays with the graph and is freed while I runs. I makes the gradients of values and of parameters; W only adds
the latter up.

Under a policy of recomputation F keeps no handle. R runs the forward once more, and returns the handle alone.

Returned tensors own their bytes and are contiguous, as everywhere: those that are not are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Body = Callable[..., Sequence[torch.Tensor]]
BoxedStep = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""A step that takes its arguments in a list, which it empties, so that they are freed as early as possible."""

_GRAPH = "_piper_recorded"

Returned = Literal["all", "outputs", "handle"]
"""The results that a run of the forward returns."""


@dataclass(frozen=True)
class Recorded:
    """Hold the graph of one forward.

    Attributes:
        outputs: edges of the outputs whose gradients will come.
        inputs: the inputs whose gradients are wanted.
    """

    outputs: tuple[GradientEdge, ...]
    inputs: tuple[torch.Tensor, ...]


def forward_step(
    body: Body,
    wanted: Sequence[bool],
    tangents: Sequence[bool],
    constants: Sequence[torch.Tensor] = (),
    returns: Returned = "all",
) -> BoxedStep:
    """Return the step F of an opaque chunk, or R.

    The handle follows the outputs if the gradient of any of them will come.

    Args:
        body: takes (*inputs, *constants) and returns the outputs.
        wanted: wanted[k] says whether the gradient of input k is wanted.
        tangents: tangents[k] says whether the gradient of output k will come.
        constants: tensors that are no inputs.
        returns: outputs and handle, the outputs (F under a policy of recomputation), or the handle (R).
    """

    def step(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = tuple(args)
        args.clear()
        inputs = tuple(t.detach().requires_grad_() if want else t for t, want in zip(given, wanted, strict=True))
        with torch.enable_grad():
            outputs = tuple(body(*inputs, *constants))
            edges = tuple(get_gradient_edge(o) for o, comes in zip(outputs, tangents, strict=True) if comes)
        with torch.no_grad():
            results = owned((o.detach() for o in outputs), given) if returns != "handle" else ()
            del outputs
            if returns == "outputs" or not edges:
                return results
            return (*results, _handle(Recorded(edges, tuple(t for t, w in zip(inputs, wanted) if w))))

    return step


def _handle(graph: Recorded) -> torch.Tensor:
    handle = torch.empty(0, dtype=torch.uint8)
    setattr(handle, _GRAPH, graph)
    return handle


def backward_step(tangents: int, used: Sequence[bool]) -> BoxedStep:
    """Return the step I of an opaque chunk.

    The step's arguments are the handle, as many tangents as `tangents` says, and tensors that autograd has saved and
    that are only kept alive. used[k] says whether the forward depends on the k-th wanted input; the others get no
    gradient.
    """

    def step(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        recorded: Recorded = getattr(args[0], _GRAPH)
        delattr(args[0], _GRAPH)
        given = tuple(args[1 : 1 + tangents])
        args.clear()
        inputs = [t for t, u in zip(recorded.inputs, used, strict=True) if u]
        outputs = list(recorded.outputs)
        del recorded
        found = torch.autograd.grad(outputs, inputs, given)
        del inputs, outputs
        with torch.no_grad():
            return owned(found, given)

    return step


def owned(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors, copied unless contiguous with a storage that no other one and none of `others` shares."""
    seen = {storage_key(t) for t in others}
    out = []
    for t in tensors:
        whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()
        if not whole or storage_key(t) in seen:
            t = t.clone(memory_format=torch.contiguous_format)
        seen.add(storage_key(t))
        out.append(t)
    return tuple(out)


def storage_key(t: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share a storage, while both live."""
    key: int = t.untyped_storage()._cdata
    return key
