"""The content of callables: equal for equal code and values, different for every difference that Python can see."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from piper.api.content.content import MOST_BYTES, MOST_VALUES, content_of
from piper.api.content.objects_in_packages import of_the_user
from piper_runtime.rank import home_of


class Kind(Enum):
    ONE = 1
    TWO = 2


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


class Private:
    __slots__ = ("__x",)

    def __init__(self, x: int) -> None:
        self.__x = x


class Array(numpy.ndarray):  # type: ignore[type-arg]  # of anything
    """Has a dictionary beside its bytes."""


class Weak:
    def __init__(self, x: int) -> None:
        self.x = x


KEPT = [Weak(0), Weak(1)]


def local(x: int) -> threading.local:
    made = threading.local()
    made.x = x
    return made


class Decorated:
    @staticmethod
    @contextmanager
    def context(x: int) -> Iterator[None]:
        yield


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
    lambda x: torch.zeros(1 + x),
    lambda x: torch.zeros(1, dtype=[torch.int8, torch.uint8][x]),
    lambda x: [torch.tensor(1j), torch.tensor(1j).conj()][x],
    lambda x: nn.Parameter(torch.zeros(1), requires_grad=bool(x)),
    lambda x: numpy.arange(2) + x,
    lambda x: (numpy.arange(2) + x).view(Array),
    Private,
    lambda x: weakref.ref(KEPT[x]),
    local,
    lambda x: Decorated.context(x),
    lambda x: [torch.float32, torch.float64][x],
    lambda x: linear(1 + x),
    lambda x: nn.Dropout(x / 2),
    lambda x: type("Made", (), {"x": x}),
    lambda x: type("Made", (), {"__scale__": x}),
    lambda x: type("Made", (), {"f": lambda self: x}),
    lambda x: type("Made", (), {"f": property(lambda self: x)}),
    lambda x: type("Made", (), {"f": classmethod(lambda self: x)}),
]


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
def test_equal_when_made_alike_and_different_otherwise(make: Callable[[int], object]) -> None:
    assert content_of(make(0)) == content_of(make(0)) != None  # noqa: E711 - a chain
    assert content_of(make(0)) != content_of(make(1))


def test_values_of_tensors_count_where_code_runs() -> None:
    for make in (lambda x: torch.tensor([x]), lambda x: torch.tensor(1 + x * 1j).conj()):
        assert (
            content_of(make(0), runs=True)
            == content_of(make(0), runs=True)
            != content_of(make(1), runs=True)
        )
        assert content_of(make(0)) == content_of(make(1)), "no trace knows them"


def test_types_are_told_apart() -> None:
    values: list[object] = [
        1,
        1.0,
        True,
        "1",
        b"1",
        [1],
        (1,),
        {1},
        {1: 1},
        torch.tensor(1),
        numpy.array(1),
        Record(1),
        None,
    ]
    assert len({content_of(v) for v in values} - {None}) == len(values)


def test_what_python_cannot_look_into_has_no_content(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        for unseen in (file, (n for n in ()), settings, numpy.array([object()])):
            assert content_of(unseen) is None
            assert content_of([{"a": (unseen,)}]) is None
            assert content_of(lambda: unseen) is None or unseen is settings  # noqa: B023 - looked at here


def test_large_data_is_looked_into_or_has_no_content() -> None:
    large = torch.zeros(MOST_BYTES)
    assert content_of(large, runs=True) is None and content_of(large) is not None
    assert content_of(numpy.zeros(MOST_BYTES)) is None
    rows = list(range(50_000))
    before = content_of(rows)
    assert before == content_of(rows.copy())
    rows[-1] = 0
    assert before != content_of(rows)
    assert content_of([[i] for i in range(MOST_VALUES + 1)]) is None  # and soon


def test_tensors_that_share_memory_or_have_attributes_are_told_apart() -> None:
    one = torch.zeros(2)
    shared, apart = [one, one.view(2)], [one, torch.zeros(2)]
    assert content_of(shared) != content_of(apart) != content_of([one, one])
    marked = torch.zeros(2)
    marked.expert = 1  # type: ignore[attr-defined]  # as libraries mark parameters
    assert content_of(marked) != content_of(one)


def test_a_long_chain_is_no_recursion() -> None:
    chain: list[Any] = []
    for _ in range(5000):
        chain = [chain]
    assert content_of(chain) == content_of(chain)


def test_of_installed_packages_the_plain_globals_of_the_code_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "piper_test_installed.py").write_text(
        "import sys, threading\nDEPTH = 2\nLOCK = threading.Lock()\nMISSING = object()\n"
        # A registry of transformers imports all of its models when it is listed, and some need packages that are not
        # there.
        "class Registry(dict):\n    def items(self):\n        raise ValueError\nKNOWN = Registry(depth=1)\nclass "
        "Net:\n    def __init__(self, width=MISSING, *, scale=1.0):\n        with LOCK:\n            self.depth = "
        "DEPTH + KNOWN.get('depth')\n    def home(self):\n        return sys.modules.get(type(self).__module__)\n"
    )
    spec = spec_from_file_location("piper_test_installed", home / "piper_test_installed.py")
    assert spec is not None and spec.loader is not None
    installed = module_from_spec(spec)
    monkeypatch.setitem(
        sys.modules, spec.name, installed
    )  # until the end of this test: nothing is kept beside new packages
    spec.loader.exec_module(installed)
    before = content_of(installed.Net)
    assert before is not None
    installed.LOCK = threading.Lock()
    assert content_of(installed.Net) == before
    copy.copy(installed.Net())  # Python then adds __slotnames__ to the class
    assert content_of(installed.Net) == before
    installed.DEPTH = 3
    assert content_of(installed.Net) != before
    installed.DEPTH = 2
    for changed in (
        dict(scale=2.0),
        dict(scale=linear),
    ):  # a plain value, and a function of the user's
        monkeypatch.setattr(installed.Net.__init__, "__kwdefaults__", changed)
        assert content_of(installed.Net) != before
    assert (
        content_of(lambda: sys.modules["settings"]) is None
    )  # of the user's code, what it reads there is not known


settings = types.ModuleType("settings_of_test_content")
settings.depth = 2  # type: ignore[attr-defined]  # a module of the user's
NAME = "depth"

READS: list[Callable[[], object]] = [
    lambda: getattr(settings, "depth"),  # noqa: B009 - the name is a text
    lambda: getattr(settings, NAME),
    lambda: vars(settings)["depth"],
    lambda: settings.__dict__[NAME],
    lambda: settings.depth,
]


@pytest.mark.parametrize("read", READS, ids=range(len(READS)))
def test_what_code_reads_of_a_module_counts_however_it_is_read(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content_of(read)
    assert before == content_of(read) != None  # noqa: E711 - a chain
    monkeypatch.setattr(settings, "depth", 3)
    assert content_of(read) != before


@pytest.mark.parametrize(
    "read", [lambda: os.environ["PIPER_TEST"], lambda: os.getenv("PIPER_TEST")]
)
def test_the_environment_counts_where_code_reads_it(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPER_TEST", "1")
    before = content_of(read)
    assert before == content_of(read) != None  # noqa: E711 - a chain
    monkeypatch.setenv("PIPER_TEST", "2")
    assert content_of(read) != before


def test_torch_with_a_function_of_the_users_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(nn.Linear(2, 2)(x))

    before = content_of(Net)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: x)
    changed = content_of(Net)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert len({before, changed, content_of(Net)} - {None}) == 3


def test_a_type_in_c_whose_module_has_another_name_is_nobodys_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like `_regex.Pattern`, which is loaded as `regex._regex`; classes of the user's count wherever they live."""
    held, own = [datetime(2020, 1, 1)], Slotted(1)
    monkeypatch.delitem(sys.modules, "datetime")
    assert list(of_the_user([*held, own], set())) == [own]
    monkeypatch.setattr(Slotted, "__module__", "not_loaded")
    assert list(of_the_user(own, set())) == [own]


def test_types_in_c_whose_module_is_not_loaded_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of triton's libraries are of the module pybind11_builtins, which there is not."""
    value = hashlib.blake2b()
    assert type(value).__flags__ & (1 << 9)  # made while running, as types of Python are
    monkeypatch.delitem(sys.modules, type(value).__module__)
    assert list(of_the_user([value], set())) == []


def test_a_hash_that_a_package_keeps_is_no_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' GenerationConfig has `_original_object_hash`: another number in each process, for the same
    settings."""

    class Settings:
        def __init__(self, seed: int, rate: float, hashes: int = 4) -> None:
            self.rate, self.num_hashes, self._own_hash = rate, hashes, hash((seed, "a text", rate))

    def contents() -> list[str | None]:
        return [
            content_of(Settings(*given)) for given in ((1, 0.5), (2, 0.5), (1, 0.25), (1, 0.5, 5))
        ]

    assert len({*contents()} - {None}) == 4, "of the user's classes all counts"
    monkeypatch.setattr(
        "piper.api.content.content.home_of",
        lambda name: "installed" if name == __name__ else home_of(name),
    )
    one, same, *others = contents()
    assert one == same and len({one, *others} - {None}) == 3


def helper() -> str:
    return Path("settings.json").read_text()


IMPURE: list[Callable[[], object]] = [
    lambda: open("settings.json"),  # noqa: SIM115 - not called
    helper,
    lambda: helper(),
    lambda: os.environ["PIPER_TEST"],
    lambda: time.time(),
    lambda: numpy.load("table.npy"),
    lambda: torch.load("weights.pt"),
    lambda: torch.from_file("weights"),
    lambda: torch.get_num_threads(),
    lambda: globals()["NAME"],
    lambda: sys.modules["settings"],
    lambda: torch.distributed.get_rank(),
]


@pytest.mark.parametrize("impure", IMPURE, ids=range(len(IMPURE)))
def test_code_that_runs_and_may_depend_on_more_than_is_seen_has_no_content(
    impure: Callable[[], object],
) -> None:
    assert content_of(impure, runs=True) is None


def test_code_that_runs_and_depends_on_its_values_has_a_content() -> None:
    for x in (
        nn.Linear,
        partial(linear, 3),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU()),
        lambda: linear(len(KEPT)),
    ):
        assert content_of(x, runs=True) is not None
