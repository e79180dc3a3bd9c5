"""The parts of torch's private API that capture stands on do what is said of them."""

from __future__ import annotations

import types

import pytest
import torch
from torch import fx, nn
from torch._dynamo import funcname_cache
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from packages.capture.tests.repeated_cases import Layer, Model, batch, loss
from piper_capture import built_model, capture
from piper_capture.steps.joint import trace_joint
from piper_capture.torch_api import _torch


def test_a_constructor_may_cast_its_module_before_torch_has_cached_the_casts() -> None:
    FakeTensorMode.cache_clear()
    built = built_model(lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2)).double())
    assert {(type(p), p.dtype) for p in built.parameters()} == {(FakeTensor, torch.float64)}


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_fake_parameter_is_the_one_that_torch_makes(requires_grad: bool) -> None:
    mode = _torch.fake_cpu()
    found = _torch.fake_parameter(_torch.fake_tensor(mode, (2, 3), torch.bfloat16), requires_grad)
    with mode:
        expected = nn.Parameter(torch.empty(2, 3, dtype=torch.bfloat16), requires_grad)
    assert isinstance(found, nn.Parameter) and isinstance(expected, nn.Parameter)
    facts = [
        (
            type(t),
            t.shape,
            t.stride(),
            t.dtype,
            t.device,
            t.layout,
            t.requires_grad,
            t.is_leaf,
            t._is_view(),
            t.fake_mode,
            vars(t),
        )
        for t in (found, expected)
    ]
    assert facts[0][:-1] == facts[1][:-1]
    assert facts[0][-1].keys() == facts[1][-1].keys()
    with mode:
        assert (found + expected).requires_grad == requires_grad
    assert dict(nn.ParameterList([found]).named_parameters()) == {"0": found}


def test_no_source_file_is_read_for_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(funcname_cache, "cache", {})
    monkeypatch.setattr(funcname_cache, "_add_file", read.append)
    capture(lambda: Model([Layer()]), batch, loss)
    assert not read


def test_functions_stand_in_place_for_a_while() -> None:
    owner = types.SimpleNamespace(a=len, b=max)
    with pytest.raises(ZeroDivisionError), _torch.in_place(owner, {"a": min}):
        assert (owner.a, owner.b) == (min, max)
        raise ZeroDivisionError
    assert (owner.a, owner.b) == (len, max)
    with pytest.raises(AttributeError), _torch.in_place(owner, {"a": min, "c": min}):
        pass
    assert (owner.a, owner.b) == (len, max)


def test_a_joint_graph_may_have_no_inputs() -> None:
    """The weights of a loss that is a sum beside a mean are counted by a graph that reads nothing of the batch."""
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ones, ((),)),))
    joint = trace_joint(fx.GraphModule(nn.Module(), graph), [], (False,))
    assert [node.op for node in joint.graph.nodes] == ["call_function", "output"]
