"""Dynamo capture and AOTAutograd joint graphs, as the compiler makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

Capture = Callable[..., tuple[fx.GraphModule, list[torch.Tensor]]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def capture() -> Capture:
    """capture(fn, *args) -> (the forward graph that Dynamo makes of it, the graph's example inputs)."""

    def run(
        fn: Callable[..., Any], *args: Any, dynamic: bool = False
    ) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        torch._dynamo.reset()
        caught: list[tuple[fx.GraphModule, list[torch.Tensor]]] = []

        def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            caught.append((gm, inputs))
            return gm.forward

        with torch._dynamo.config.patch(allow_rnn=True):
            torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
        (only,) = caught
        return only

    return run


@pytest.fixture
def joint() -> Callable[..., fx.GraphModule]:
    """joint(gm, inputs) -> AOTAutograd's functionalised joint graph."""

    def run(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> fx.GraphModule:
        with contextlib.ExitStack() as stack:
            graph_module = aot_export_joint_with_descriptors(stack, gm, tuple(inputs)).graph_module
        assert isinstance(graph_module, fx.GraphModule)
        return graph_module

    return run
