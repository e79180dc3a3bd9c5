"""Run the steps of an opaque chunk: its forward runs under autograd, its backward is autograd's recorded graph.

F returns, behind its outputs, a *handle*: an empty tensor that carries the recorded graph from F to I. The saved
tensors stay with the graph and are freed while I runs. I makes the gradients of values and of parameters; W only adds
the latter up.

Under a policy of recomputation F keeps no handle. R runs the forward once more, and returns the handle alone.

Autograd keeps no parameter that I is given again: a saved view of one is kept as a place in it. So the memory of the
parameters may be freed between F and I, and I may be given others with the same content, as when ranks share them.

Returned tensors own their bytes and are contiguous, as everywhere: others are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

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
        outputs: gradient edges of the outputs whose gradients will come.
        inputs: the inputs whose gradients are wanted; parameters to be given again are empty here.
        given: the parameters by index, which are put in for the time of the backward.
        shapes: the shapes of `inputs`, also of the empty ones.
    """

    outputs: tuple[GradientEdge, ...]
    inputs: tuple[torch.Tensor, ...]
    given: dict[int, torch.Tensor]
    shapes: tuple[torch.Size, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Describe a view of a parameter: its dtype, size and stride, and its offset from the parameter's start."""

    param: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Places:
    """Keep autograd's saved views of parameters as places in them, and make the views again from `given`."""

    def __init__(self, params: Mapping[int, torch.Tensor]) -> None:
        self.given = dict(params)  # a forward may ask for gradients itself
        self._params: dict[
            int, list[tuple[int, torch.Tensor]]
        ] = {}  # by storage; parameters may share one
        for k, t in sorted(params.items(), key=lambda item: item[1].storage_offset()):
            self._params.setdefault(storage_key(t), []).append((k, t))

    def pack(self, t: torch.Tensor) -> torch.Tensor | _Place:
        """Return the tensor, or its place in the last parameter that does not begin behind it."""
        place: _Place | None = None
        for k, param in self._params.get(storage_key(t), ()):
            offset = t.storage_offset() - _as_dtype(param, t.dtype).storage_offset()
            if place is None or offset >= 0:
                place = _Place(k, t.dtype, t.size(), t.stride(), offset)
        return t.detach() if place is None else place  # without its graph, which would hold itself

    def unpack(self, kept: torch.Tensor | _Place) -> torch.Tensor:
        """Return the tensor that was packed."""
        if isinstance(kept, torch.Tensor):
            return kept
        base = _as_dtype(self.given[kept.param], kept.dtype)
        return base.as_strided(kept.size, kept.stride, base.storage_offset() + kept.offset)

    def ended(self) -> None:
        """Let go of the parameters of the forward."""
        self.given.clear()
        self._params.clear()


def _as_dtype(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return param if param.dtype == dtype else param.detach().reshape(-1).view(dtype)


def forward_step(
    body: Body,
    wanted: Sequence[bool],
    tangents: Sequence[bool],
    constants: Sequence[torch.Tensor] = (),
    returns: Returned = "all",
    params: Sequence[int] = (),
) -> BoxedStep:
    """Return the step F of an opaque chunk, or R.

    The handle follows the outputs if the gradient of any of them will come.

    Args:
        body: takes (*inputs, *constants) and returns the outputs.
        wanted: wanted[k] says whether the gradient of input k is wanted.
        tangents: tangents[k] says whether the gradient of output k will come.
        constants: tensors that are no inputs.
        returns: outputs and handle, the outputs (F under a policy of recomputation), or the handle (R).
        params: the inputs that the step I is given again; they are contiguous.
    """

    def step(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tensors = tuple(args)
        args.clear()
        inputs = tuple(
            t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)
        )
        places = _Places({k: inputs[k] for k in params})
        with (
            torch.enable_grad(),
            saved_tensors_hooks(places.pack, places.unpack) if params else nullcontext(),
        ):
            outputs = tuple(body(*inputs, *constants))
            edges = tuple(
                get_gradient_edge(o) for o, comes in zip(outputs, tangents, strict=True) if comes
            )
        places.ended()
        with torch.no_grad():
            results = owned((o.detach() for o in outputs), tensors) if returns != "handle" else ()
            del outputs
            if returns == "outputs" or not edges:
                return results
            handle = torch.empty(
                0, dtype=torch.uint8, device=tensors[params[0]].device if params else None
            )
            shapes = tuple(t.shape for t, w in zip(inputs, wanted) if w)
            for k in params:
                if wanted[k]:  # the graph keeps the tensor, but not its memory
                    inputs[k].data = handle.view(inputs[k].dtype)
            setattr(
                handle,
                _GRAPH,
                Recorded(
                    edges, tuple(t for t, w in zip(inputs, wanted) if w), places.given, shapes
                ),
            )
            return (*results, handle)

    return step


def backward_step(
    tangents: int,
    used: Sequence[bool],
    params: Mapping[int, int] | None = None,
    zeros: bool = False,
) -> BoxedStep:
    """Return the step I of an opaque chunk.

    The step's arguments are the handle, as many tangents as `tangents` says, and more tensors: the parameters, and the
    saved tensors, which are only kept alive. used[k] says whether the forward depends on the k-th wanted input; the
    others get no gradient. `params` has the index of each parameter of the forward among the last arguments. With
    `zeros` an input that the forward did not reach this time has a gradient of zeros.
    """
    places = dict(params or {})

    def step(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        recorded: Recorded = getattr(args[0], _GRAPH)
        delattr(args[0], _GRAPH)
        grad_outputs = tuple(args[1 : 1 + tangents])
        again = recorded.given
        again.update((k, args[1 + tangents + n]) for k, n in places.items())
        args.clear()
        inputs = [t for t, u in zip(recorded.inputs, used, strict=True) if u]
        outputs = list(recorded.outputs)
        shapes = [shape for shape, u in zip(recorded.shapes, used, strict=True) if u]
        del recorded
        try:
            gradients = torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=zeros)
        finally:
            again.clear()
        with torch.no_grad():
            filled = [
                t.new_zeros(shape) if g is None else g
                for g, t, shape in zip(gradients, inputs, shapes, strict=True)
            ]
            del inputs, outputs, gradients
            return owned(filled, grad_outputs)

    return step


def owned(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors, copied unless contiguous with a storage that no other one and none of `others` shares."""
    seen = {storage_key(t) for t in others}
    results = []
    for t in tensors:
        whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()
        if not whole or storage_key(t) in seen:
            t = t.clone(memory_format=torch.contiguous_format)
        seen.add(storage_key(t))
        results.append(t)
    return tuple(results)


def storage_key(t: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share a storage, while both live."""
    key: int = t.untyped_storage()._cdata
    return key
