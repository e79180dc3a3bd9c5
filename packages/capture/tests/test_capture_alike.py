"""One condition each under which a layer's trace does not serve another: the program is that of a plain trace all the
same."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import invoke_subgraph

from packages.capture.tests.alike_calls import CALLS_DIFFER, MODELS_CHANGE
from packages.capture.tests.alike_layers import LAYERS_DIFFER, layers
from packages.capture.tests.repeated_cases import LAYERS, Model, captured, pieces, plainly
from piper_capture.torch_api._torch_reuse import checked_reuse
from piper_capture.trace import repeated


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "FEWEST", LAYERS)


CASES = {
    f"{title}: {name}": case
    for title, cases in (
        ("layers", LAYERS_DIFFER),
        ("calls", CALLS_DIFFER),
        ("changes", MODELS_CHANGE),
    )
    for name, case in cases.items()
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", CASES)
def test_a_trace_serves_where_it_would_be_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = CASES[name]
    found, work = captured(model, monkeypatch, pieces)
    assert (work, found == plainly(model, monkeypatch, pieces)) == (expected, True)


def test_another_torch_traces_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(invoke_subgraph, "save_reuse_entry")
    found, work = captured(lambda: Model(layers()), monkeypatch, pieces)
    assert work == (0, 0, 0)
    assert found == plainly(lambda: Model(layers()), monkeypatch, pieces)


def test_a_torch_without_the_private_api_imports_all_else() -> None:
    """torch 2.11 has no `invoke_subgraph` among Dynamo's variables."""
    script = (
        "import sys, torch._dynamo.variables as v; del v.invoke_subgraph\n"
        "sys.modules['torch._dynamo.variables.invoke_subgraph'] = None\n"
        "import piper_capture"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_is_left_as_it_was() -> None:
    names = ("find_reuse_match", "save_reuse_entry", "stamp_out_subgraph")
    before = (
        [getattr(invoke_subgraph, name) for name in names],
        SideEffects.store_attr,
        SideEffects.mutation,
    )
    with pytest.raises(ZeroDivisionError), checked_reuse([]):
        assert invoke_subgraph.find_reuse_match is not before[0][0]
        assert SideEffects.mutation is not before[2]
        raise ZeroDivisionError
    assert before == (
        [getattr(invoke_subgraph, name) for name in names],
        SideEffects.store_attr,
        SideEffects.mutation,
    )
