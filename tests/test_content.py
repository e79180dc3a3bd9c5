"""The content of callables: equal for equal code and values, different for every difference that Python can see."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from piper.api.content import MOST_BYTES, MOST_ITEMS, MOST_VALUES, content_of


class Kind(Enum):
    ONE = 1
    TWO = 2


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


@dataclass
class Record:
    x: int
    more: tuple[Any, ...] = ()


class Rate(float):
    pass


class Name(str):
    """A text with an attribute of its own."""

    def __init__(self, text: str) -> None:
        self.length = 1


class Queue(deque):  # type: ignore[type-arg]  # of anything
    """Has a dictionary beside its items."""


def cyclic(x: int) -> Record:
    out = Record(x)
    out.more = (out,)
    return out


def linear(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, 2)


MAKERS: list[Callable[[int], object]] = [
    lambda x: x,
    float,
    str,
    lambda x: bytes([x]),
    lambda x: [1, {"a": (x,)}],
    lambda x: {"a", str(x)},
    lambda x: frozenset([x]),
    lambda x: OrderedDict(a=x),
    lambda x: deque([x]),
    lambda x: Path(str(x)),
    lambda x: Decimal(x),
    Slotted,
    Record,
    cyclic,
    Rate,
    lambda x: Name(str(x)),
    lambda x: Queue([x]),
    lambda x: datetime(2000 + x, 1, 1),
    lambda x: ValueError(x),
    lambda x: Kind(1 + x),
    lambda x: [Kind.ONE, Kind.TWO][x],
    lambda x: partial(int, base=x),
    lambda x: lambda: x,
    lambda x: lambda y=x: y,
    lambda x: [torch.zeros, torch.ones][x],
    lambda x: [int, Slotted][x],
    lambda x: Record(x).__eq__,
    lambda x: cache(lambda: x),
    lambda x: torch.tensor([x]),
    lambda x: torch.zeros(1 + x),
    lambda x: torch.zeros(1, dtype=[torch.int8, torch.uint8][x]),
    lambda x: torch.tensor(1 + x * 1j).conj(),
    lambda x: nn.Parameter(torch.zeros(1), requires_grad=bool(x)),
    lambda x: numpy.arange(2) + x,
    lambda x: [torch.float32, torch.float64][x],
    lambda x: linear(1 + x),
    lambda x: nn.Dropout(x / 2),
    lambda x: type("Made", (), {"x": x}),
    lambda x: type("Made", (), {"f": lambda self: x}),
    lambda x: type("Made", (), {"f": property(lambda self: x)}),
    lambda x: type("Made", (), {"f": classmethod(lambda self: x)}),
]


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
def test_equal_when_made_alike_and_different_otherwise(make: Callable[[int], object]) -> None:
    assert content_of(make(0)) == content_of(make(0))
    assert content_of(make(0)) != content_of(make(1))


def test_types_are_told_apart() -> None:
    values: list[object] = [1, 1.0, True, "1", b"1", [1], (1,), {1}, {1: 1}, torch.tensor(1), numpy.array(1), Record(1), None]
    assert len({content_of(v).digest for v in values}) == len(values)


def test_what_python_cannot_look_into_counts_by_identity_and_is_kept() -> None:
    first, second = threading.Lock(), threading.Lock()
    assert content_of(first) == content_of(first) != content_of(second)
    assert first in content_of([{"a": {first}}]).kept
    assert content_of(n for n in ()) != content_of(n for n in ())


def test_large_data_counts_by_identity_and_version() -> None:
    data = torch.zeros(MOST_BYTES)
    before = content_of(data)
    assert before == content_of(data) and before.kept == (data,)
    assert before != content_of(data.clone())
    data[0] = 1
    assert content_of(data) != before
    array, rows = numpy.zeros(MOST_BYTES), list(range(MOST_ITEMS + 1))
    for large in (array, rows):
        assert content_of(large) == content_of(large) != content_of(large.copy())
    tree = [[i] * 1 for i in range(MOST_ITEMS)]
    nested = [[list(t) for t in tree] for _ in range(1 + MOST_VALUES // MOST_ITEMS)]
    assert content_of(nested).kept  # ends, and soon


def test_a_long_chain_is_no_recursion() -> None:
    chain: list[Any] = []
    for _ in range(5000):
        chain = [chain]
    assert content_of(chain) == content_of(chain)


def test_of_installed_packages_the_plain_globals_of_the_code_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "piper_test_installed.py").write_text(
        "import threading\nDEPTH = 2\nLOCK = threading.Lock()\n"
        "class Net:\n    def __init__(self):\n        with LOCK:\n            self.depth = DEPTH\n"
    )
    monkeypatch.syspath_prepend(home)
    import piper_test_installed as installed  # type: ignore[import-not-found]  # made above

    before = content_of(installed.Net)
    assert not before.kept
    installed.LOCK = threading.Lock()
    assert content_of(installed.Net) == before
    installed.DEPTH = 3
    assert content_of(installed.Net) != before
