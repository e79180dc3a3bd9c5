"""Calls share an example value exactly where nothing that counts of it can differ."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper_ops.written.examples import Examples
from tests.helpers.cases import each_case

OTHER: dict[str, tuple[Any, ...]] = {
    "a size": (torch.ones(2, 4), 1),
    "a stride": (torch.ones(3, 2).t(), 1),
    "a dtype": (torch.ones(2, 3, dtype=torch.float64), 1),
    "a device": (torch.ones(2, 3, device="meta"), 1),
    "a gradient": (torch.ones(2, 3, requires_grad=True), 1),
    "a number": (torch.ones(2, 3), 2),
    "a number's type": (torch.ones(2, 3), 1.0),
    "a bool": (torch.ones(2, 3), True),
    "a list": ([torch.ones(2, 3)], 1),
}


class Calls:
    """Counts them."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *args: Any) -> int:
        self.number += 1
        return self.number


@each_case("name", OTHER)
def test_another_call_has_another_example(name: str) -> None:
    examples, calls = Examples(), Calls()
    assert [examples.of("f", calls, torch.ones(2, 3), 1) for _ in range(2)] == [1, 1]
    assert examples.of("f", calls, *OTHER[name]) == 2
    assert examples.of("f", calls, torch.zeros(2, 3), 1) == 1  # what is in a tensor does not count


def test_another_function_or_grad_mode_has_another_example() -> None:
    examples, calls = Examples(), Calls()
    found = [examples.of("f", calls), examples.of("g", calls)]
    with torch.no_grad():
        found.append(examples.of("f", calls))
    assert found == [1, 2, 3]


def test_symbols_count_as_their_expressions() -> None:
    examples, calls = Examples(), Calls()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    a, b = (mode.from_tensor(torch.ones(n, 3), static_shapes=False) for n in (5, 7))
    guards = len(mode.shape_env.guards)
    assert [examples.of("f", calls, t) for t in (a, a + 1, b, torch.cat([a, a]))] == [1, 1, 2, 3]
    assert [examples.of("g", calls, t.shape[0]) for t in (a, a + 1, b)] == [4, 4, 5]
    assert len(mode.shape_env.guards) == guards
