"""Captures a function as a chunk, runs its steps F, I and W by their signatures, and compares them with plain
autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from piper_capture.steps.codegen import compile_step
from piper_capture.steps.joint import JointInput, TracedChunk, cut_chunk, trace_joint
from piper_ir.program.ops import KEEP_ALL
from piper_ir.program.program import Step
from piper_ops import replace_portable


@dataclass(eq=False)
class Case:
    """`tensors` are the function's arguments with their kinds: value, param, frozen (param), buffer, batch, dead (value
    without gradient). The outputs that receive a gradient are all floating ones."""

    function: Callable[..., Any]
    kinds: Sequence[str]
    tensors: Sequence[Tensor]
    mutated: Sequence[int] = ()
    symbolic: bool = False
    portable: bool = False
    """symbolic: trace with torch.fx, which keeps outputs that Dynamo merges (one returned twice, an input returned as
    it is). portable: with the ops of piper_ops, as the capture front does."""

    def inputs(self, device: str = "cpu") -> list[JointInput]:
        names = {"frozen": "param", "dead": "value"}
        return [
            JointInput(names.get(kind, kind), t.detach().to(device), kind in ("value", "param"))  # type: ignore[arg-type]  # a kind
            for kind, t in zip(self.kinds, self.tensors, strict=True)
        ]


@cache
def capture(case: Case) -> fx.GraphModule:
    """The graph of a case's function, its placeholders in the order of the arguments."""
    if case.symbolic:
        return fx.symbolic_trace(case.function)
    captured: list[fx.GraphModule] = []
    order: list[int] = []

    def backend(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        captured.append(module)
        order.extend(next(i for i, t in enumerate(copies) if t is e) for e in examples)
        return module.forward

    # Dynamo drops the backward of a custom autograd function whose inputs need no gradient; a clone may be changed in
    # place.
    copies = [
        t.detach().clone().requires_grad_(kind in ("value", "param")).clone()
        for kind, t in zip(case.kinds, case.tensors, strict=True)
    ]
    torch._dynamo.reset()
    torch.compile(case.function, backend=backend, fullgraph=True)(*copies)
    graph = captured[0].graph
    given = dict(zip(order, graph.find_nodes(op="placeholder"), strict=True))
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for k in range(len(copies)):
        if k in given:
            first.prepend(given[k])
        else:
            with graph.inserting_before(first):
                graph.placeholder(f"unused_{k}")
    captured[0].recompile()
    if case.portable:
        replace_portable(captured[0])
    return captured[0]


def trace_chunk(
    module: fx.GraphModule, inputs: Sequence[JointInput], tangent_mask: Sequence[bool]
) -> TracedChunk:
    """Return the steps of a module that keeps all."""
    return cut_chunk(trace_joint(module, inputs, tangent_mask), KEEP_ALL)


@cache
def trace(case: Case, device: str = "cpu") -> TracedChunk:
    """Return the steps of a case; several test files look at the same ones."""
    outputs = _outputs(case.function, [t.detach().clone() for t in case.tensors], ())
    values = [k for k in case.mutated if case.kinds[k] != "buffer"]
    mask = [o.is_floating_point() for o in outputs] + [True] * len(values)
    return trace_chunk(capture(case), case.inputs(device), mask)


def run(
    traced: TracedChunk, tensors: Sequence[Tensor], tangents: Sequence[Tensor]
) -> dict[str, Tensor]:
    """All ports that the steps read or write, and `acc{k}` per accumulated parameter (starting from ones)."""
    ports = {f"in{k}": t.detach().clone() for k, t in enumerate(tensors)}
    ports |= {f"tan{k}": t.clone() for k, t in enumerate(tangents)}
    for step, signature in traced.steps.items():
        if signature.empty:
            continue
        ports |= {f"acc{k}": torch.ones_like(tensors[k]) for k in signature.accumulates}
        given = [ports[p] for p in signature.reads] + [
            ports[f"acc{k}"] for k in signature.accumulates
        ]
        with torch.no_grad():
            written = compile_step(traced.code[step])(given)
        assert not given, "the step must empty the list that it is given"
        ports |= dict(zip(signature.writes, written, strict=True))
    return ports


class LiveBytes(TorchDispatchMode):
    """Counts live storages op by op, knowing nothing of the plan; `peak` is the most bytes seen at the end of an op."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(tensors)
        self.before = self.peak = self._live()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(torch.utils._pytree.tree_leaves(result))
        self.peak = max(self.peak, self._live())
        return result

    def _note(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _live(self) -> int:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        return sum(size for _, size in self._seen.values())


def measured_peak(
    traced: TracedChunk, step: Step, ports: Mapping[str, Tensor], dying: Collection[str]
) -> int:
    """Bytes above those held before the step, at its worst op, when the caller keeps no reference to the ports in
    `dying`."""
    signature = traced.steps[step]
    kept = {p: ports[p].clone() for p in signature.reads}
    kept |= {f"acc{k}": ports[f"acc{k}"].clone() for k in signature.accumulates}
    given = list(kept.values())
    for port in dying:
        del kept[port]
    function = compile_step(traced.code[step])
    with torch.no_grad(), LiveBytes(given) as live:
        written = function(given)
    assert len(written) == len(signature.writes)
    return live.peak - live.before


def reference(
    case: Case, tangents: Sequence[Tensor]
) -> tuple[list[Tensor], dict[int, Tensor | None]]:
    """Outputs (the new contents of changed inputs behind the function's own) and gradients of plain autograd."""
    leaves = [
        t.detach().clone().requires_grad_(kind in ("value", "param"))
        for kind, t in zip(case.kinds, case.tensors, strict=True)
    ]
    given = [
        leaf.clone() if kind == "value" else leaf
        for kind, leaf in zip(case.kinds, leaves, strict=True)
    ]
    outputs = _outputs(case.function, given, case.mutated)
    wanted = [k for k, leaf in enumerate(leaves) if leaf.requires_grad]
    pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if o.requires_grad]
    if not pairs:
        return outputs, dict.fromkeys(wanted)
    grads = torch.autograd.grad(
        [o for o, _ in pairs], [leaves[k] for k in wanted], [t for _, t in pairs], allow_unused=True
    )
    return outputs, dict(zip(wanted, grads, strict=True))


def tangents_of(case: Case) -> list[Tensor]:
    """A random gradient for every output, those of changed inputs last."""
    torch.manual_seed(7)
    outputs = _outputs(case.function, [t.detach().clone() for t in case.tensors], case.mutated)
    return [
        torch.randn(o.shape, dtype=o.dtype) if o.is_floating_point() else torch.zeros(o.shape)
        for o in outputs
    ]


def check(case: Case, tolerance: float = 1e-12) -> TracedChunk:
    """F, then I, then W equal autograd; every written port is contiguous, of its spec, and shares bytes with no other
    tensor."""
    traced = trace(case)
    compare(case, traced, tolerance)
    return traced


def compare(case: Case, traced: TracedChunk, tolerance: float = 1e-12) -> None:
    """The comparison of `check`, for steps that were traced before."""
    tangents = tangents_of(case)
    torch.manual_seed(11)
    outputs, grads = reference(case, tangents)
    torch.manual_seed(11)
    ports = run(traced, case.tensors, tangents)
    for k, expected in enumerate(outputs):
        torch.testing.assert_close(
            ports[f"out{k}"], expected.detach(), rtol=tolerance, atol=tolerance
        )
    for k, gradient in grads.items():
        assert traced.input_grads[k] == (gradient is not None)
        if gradient is not None:
            mine = ports[f"gin{k}"] if case.kinds[k] == "value" else ports[f"acc{k}"] - 1
            torch.testing.assert_close(mine, gradient, rtol=tolerance, atol=tolerance)
    for port, spec in traced.ports.items():
        assert (tuple(ports[port].shape), str(ports[port].dtype)) == (
            spec.shape,
            f"torch.{spec.dtype}",
        ), port
        assert ports[port].is_contiguous(), port
        assert ports[port].untyped_storage().nbytes() == spec.nbytes, port
    storages = [ports[p].untyped_storage().data_ptr() for p in traced.ports if ports[p].numel()]
    assert len(set(storages)) == len(storages), "two ports share bytes"


def saved_bytes(traced: TracedChunk) -> int:
    return sum(int(str(s.nbytes)) for p, s in traced.ports.items() if p.startswith("saved"))


def _outputs(
    function: Callable[..., Any], tensors: Sequence[Tensor], mutated: Sequence[int]
) -> list[Tensor]:
    result = function(*tensors)
    return [*(result if isinstance(result, tuple) else (result,)), *(tensors[k] for k in mutated)]
