"""Let traces of nested regions be reused that store tensors in attributes of their arguments (`_torch_reuse`).

A layer that counts its experts' tokens does so in a buffer: `self.expert_tokens = ...`. Dynamo reuses no trace with
such a side effect. Here one is reused if its only changes are tensors that the region made and stores as attributes of
modules that its arguments lead to: the call stores its own tensors in its own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, higher_order_ops, invoke_subgraph
from torch._dynamo.variables.builder import VariableBuilder

from piper_capture.torch_api import _torch
from piper_capture.torch_api._torch_changes import RegionChange

EXAMPLES = 5
"""The place of the examples of a graph's outputs among the arguments that a trace is saved with."""


@dataclass(frozen=True)
class Stores:
    """Hold the tensors that a trace stores.

    Attributes:
        each: (module, attribute, place among the outputs of the region's graph), the module by its source.
        outputs: the examples of all of these outputs.
    """

    each: tuple[tuple[Any, str, int], ...] = ()
    outputs: tuple[Any, ...] = ()

    @staticmethod
    def of(changes: Sequence[RegionChange], graph: torch.fx.Graph, saved: Sequence[Any]) -> Stores:
        """Return the tensors that changes store, of an attribute the last one.

        `saved` are the arguments with which Dynamo saves a trace. Raises KeyError if the graph does not return a
        tensor that is stored.
        """
        last = {(change.module.source, change.name): change.value for change in changes}
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        places = {node: place for place, node in enumerate(outputs)}
        each = [
            (source, name, places[value.as_proxy().node]) for (source, name), value in last.items()
        ]
        return Stores(tuple(each), tuple(saved[EXAMPLES]))

    def again(self, stamp_out: Callable[..., Any], tx: Any, fingerprint: Any, entry: Any) -> Any:
        """Add a call of the trace's graph that stores its own tensors, and return the region's result."""
        if not self.each:
            return stamp_out(tx, fingerprint, entry)
        added: list[Any] = []
        add = higher_order_ops.add_call_function

        def add_whole(tx: Any, fn: Any, args: Any, kwargs: Any, _: Any, *rest: Any) -> Any:
            with tx.fake_mode:
                outputs = tuple(map(_like, self.outputs))
            added.append(add(tx, fn, args, kwargs, outputs, *rest))
            return added[-1]

        with _torch.in_place(higher_order_ops, {"add_call_function": add_whole}):
            result = stamp_out(tx, fingerprint, entry)
        moved = invoke_subgraph.build_source_replacement(entry.arg_sources, fingerprint.arg_sources)
        roots = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        for source, name, place in self.each:
            own = source.clone(lambda part: moved.get(part, part))
            module = VariableBuilder(tx, own)(own.get_value(roots, {}, {}))
            arguments = [ConstantVariable.create(name), added[-1].items[place]]
            module.call_method(tx, "__setattr__", arguments, {})
        return result


def _like(example: Any) -> Any:
    """Return an output of another call like this one: a size as it is, a tensor anew."""
    if not isinstance(example, torch.Tensor):
        return example
    return torch.empty_strided(
        example.shape,
        example.stride(),
        dtype=example.dtype,
        device=example.device,
        requires_grad=example.requires_grad,
    )
