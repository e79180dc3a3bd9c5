"""No capture of an earlier state of the code is used: each way in which a model may read something gives another
content.

A case writes modules of the user's, or of an installed package, in two states that differ in one number. The content of
the job, as it names a file of captures, must differ, or there must be none.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from piper.api.captures.capturing import capture_key
from tests.helpers.capture_jobs import job

READS = 'def f():\n    return int((pathlib.Path(__file__).parent / "stale.txt").read_text())'
NET = """
import torch
from torch import nn
{before}
class Net(nn.Module{bases}):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        {make}
    def forward(self, x):
        {imports}
        return {value}
"""


def net(
    value: str, before: str = "", make: str = "pass", imports: str = "pass", bases: str = ""
) -> str:
    return NET.format(value=value, before=before, make=make, imports=imports, bases=bases)


HELPER = "def f(x):\n    return x * NUMBER\n"
INSIDE = {
    "stale_package/__init__.py": "",
    "stale_package/inner/__init__.py": "",
    "stale_package/helper.py": HELPER,
}
DECORATED = "from installed_of_test import wrap\n@wrap\ndef f(x):\n    return x * NUMBER"
ENTERED = "import installed_of_test\ndef f(x):\n    return x * NUMBER\ninstalled_of_test.TABLE{how}"
REGISTRY = "class Table:\n    known = {}\n    @classmethod\n    def add(cls, f): cls.known['f'] = f\nTABLE = Table()\n"

CASES: dict[str, dict[str, str]] = {
    "a helper's helper": {
        "stale_model.py": net("helper.f(x)", "import stale_helper as helper"),
        "stale_helper.py": "from stale_inner import g\ndef f(x):\n    return g(x)\n",
        "stale_inner.py": "def g(x):\n    return x * NUMBER\n",
    },
    "an import in forward": {
        "stale_model.py": net("f(x)", imports="from stale_helper import f"),
        "stale_helper.py": HELPER,
    },
    "an import in a helper": {
        "stale_model.py": net("f(x)", "from stale_helper import f"),
        "stale_helper.py": "def f(x):\n    import stale_inner\n    return stale_inner.g(x)\n",
        "stale_inner.py": "def g(x):\n    return x * NUMBER\n",
    },
    "a relative import": {
        **INSIDE,
        "stale_model.py": "import stale_package.helper\nfrom stale_package.inner.model import Net\n",
        "stale_package/inner/model.py": net("f(x)", imports="from ..helper import f"),
    },
    "a relative import of a module": {
        **INSIDE,
        "stale_model.py": "import stale_package.helper\nfrom stale_package.inner.model import Net\n",
        "stale_package/inner/model.py": net("helper.f(x)", imports="from .. import helper"),
    },
    "a module that makes its attributes": {
        "stale_model.py": net("x * helper.scale", "import stale_helper as helper"),
        "stale_helper.py": "_kept = {'scale': NUMBER}\ndef __getattr__(name):\n    return _kept[name]\n",
    },
    "a closure": {
        "stale_model.py": net("f(x)", "def make(k):\n    def f(x):\n        return x * k\n    return f\nf = "
                                      "make(NUMBER)"),
    },
    "a global constant": {"stale_model.py": net("x * SCALE['a'][0]", "SCALE = {'a': [NUMBER]}")},
    "a name among the built-in ones": {
        "stale_model.py": net("x * stale_scale", "import builtins\nbuiltins.stale_scale = NUMBER"),
    },
    "a metaclass": {
        "stale_model.py": net("x * type(self).scale", "class Kind(type):\n    scale = "
                                                      "NUMBER", bases=", metaclass=Kind"),
    },
    "what is drawn in a constructor": {
        "stale_model.py": net("x * self.k", "torch.manual_seed(NUMBER)", make="self.k = float(torch.rand(1))"),
    },
    "what a function read that a trace takes for a constant": {
        "stale_model.py": net("x * f()", f"import pathlib\n@torch.compiler.assume_constant_result\n{READS}"),
        "stale.txt": "NUMBER",
    },
    "what a function read that a trace only calls": {
        "stale_model.py": net("f() + x", f"import pathlib\n@torch.compiler.allow_in_graph\n{READS}"),
        "stale.txt": "NUMBER",
    },
    "a function of torch that was replaced": {
        "stale_model.py": net("self.act(x)", "nn.functional.gelu = lambda x, **_: x * "
                                             "NUMBER", make="self.act = nn.GELU()"),
    },
    "a decorator of an installed package": {
        "stale_model.py": net("f(x)", DECORATED),
        "site-packages/installed_of_test.py": "def wrap(f):\n    def g(x):\n        return f(x)\n    return g\n",
    },
    "a function of an installed package that a trace only calls": {
        "stale_model.py": net("installed_of_test.run(x)", "import installed_of_test"),
        "site-packages/installed_of_test.py": (
            "import torch\n@torch.compiler.allow_in_graph\ndef run(x):\n    return x * NUMBER\n"
        ),
    },
    "a registry of an installed package": {
        "stale_model.py": net("installed_of_test.run(x)", ENTERED.format(how="['f'] = f")),
        "site-packages/installed_of_test.py": "TABLE = {}\ndef run(x):\n    return TABLE['f'](x)\n",
    },
    "a registry that is an object": {
        "stale_model.py": net("installed_of_test.run(x)", ENTERED.format(how=".add(f)")),
        "site-packages/installed_of_test.py": f"{REGISTRY}def run(x):\n    return TABLE.known['f'](x)\n",
    },
    "a function in place of an installed one": {
        "stale_model.py": net("installed_of_test.run(x)", "import installed_of_test\ninstalled_of_test.g = lambda x: x "
                                                          "* NUMBER"),
        "site-packages/installed_of_test.py": "def run(x):\n    return g(x)\n",
    },
}  # fmt: skip


@contextmanager
def modules_apart(home: Path) -> Iterator[None]:
    """Import from a folder, and forget what was imported from there, and what it changed elsewhere."""
    known, names, gelu = set(sys.modules), set(vars(builtins)), nn.functional.gelu
    with patch.object(sys, "path", [str(home), str(home / "site-packages"), *sys.path]):
        importlib.invalidate_caches()
        try:
            yield
        finally:
            nn.functional.gelu = gelu
            for name in set(sys.modules) - known:
                if str(home) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
            for name in set(vars(builtins)) - names:
                delattr(builtins, name)


def write(home: Path, files: dict[str, str], number: int) -> None:
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NUMBER", str(number)))


def content(home: Path, files: dict[str, str], number: int) -> object:
    """Return what the job's capture depends on, as a process of its own says it."""
    write(home, files, number)
    with modules_apart(home):
        torch.manual_seed(0)
        return capture_key(job(importlib.import_module("stale_model").Net))


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # files of one size and second would be taken for the same


@pytest.mark.parametrize("case", CASES)
def test_another_number_is_another_content(case: str, tmp_path: Path) -> None:
    first = content(tmp_path, CASES[case], 2)
    assert first is None or first != content(tmp_path, CASES[case], 3)


KEPT = [
    "a function of an installed package that a trace only calls",
    "a helper's helper",
    "a relative import",
    "a closure",
    "a metaclass",
    "a registry of an installed package",
]


@pytest.mark.parametrize("case", KEPT)
def test_the_same_number_is_the_same_content(case: str, tmp_path: Path) -> None:
    first = content(tmp_path, CASES[case], 2)
    assert first == content(tmp_path, CASES[case], 2) != None  # noqa: E711 - a chain


def asks_the_process() -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [
        lambda x: x * hash("a"),
        lambda x: x if torch.cuda.is_available() else -x,
        lambda x: x if importlib.util.find_spec("flash_attn") else -x,
        lambda x: x * sys.getrecursionlimit(),
        lambda x: x * eval("len(CASES)"),
    ]


@pytest.mark.parametrize("number", range(len(asks_the_process())))
def test_what_another_process_may_answer_otherwise_is_kept_in_no_file(number: int) -> None:
    asked = asks_the_process()[number]

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return asked(self.linear(x))

    key = capture_key(job(Asking))
    assert key is None or key.file is None


@pytest.mark.parametrize("config", ["torch._dynamo.config", "torch._functorch.config"])
def test_settings_of_the_tracers_count(config: str) -> None:
    module = importlib.import_module(config)
    name = "capture_scalar_outputs" if "dynamo" in config else "functionalize_rng_ops"
    before = capture_key(job(nn.Identity))
    with module.patch({name: not getattr(module, name)}):
        assert capture_key(job(nn.Identity)) != before
    assert capture_key(job(nn.Identity)) == before


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "a function by another of torch": (nn.functional, "gelu", nn.functional.relu),
    "a function in C": (torch, "tanh", torch.sin),
    "a function with other defaults": (
        nn.functional,
        "gelu",
        functools.partial(nn.functional.gelu, approximate="tanh"),
    ),
    "a method of a tensor": (torch.Tensor, "tanh", torch.Tensor.sin),
    "a forward": (nn.Linear, "forward", nn.Identity.forward),
    "a method of a base": (nn.modules.conv._ConvNd, "extra_repr", nn.Module.extra_repr),
    "a property": (torch.Tensor, "T", property(torch.neg)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_functions_of_torch_in_the_place_of_others_count(name: str) -> None:
    owner, attribute, value = REPLACED[name]
    before, old, own = (
        capture_key(job(nn.Identity)),
        getattr(owner, attribute),
        attribute in vars(owner),
    )
    assert before is not None
    setattr(owner, attribute, value)
    try:
        assert capture_key(job(nn.Identity)) not in (None, before)
    finally:
        setattr(owner, attribute, old) if own else delattr(owner, attribute)
    assert capture_key(job(nn.Identity)) == before


@pytest.mark.parametrize(
    ("asked", "set_to"),
    [("get_num_threads", torch.set_num_threads), ("initial_seed", torch.manual_seed)],
)
def test_a_constructor_that_asks_torch_for_settings_counts_by_what_it_makes(
    asked: str, set_to: Callable[[int], object]
) -> None:
    scope: dict[str, Any] = {"__name__": __name__}
    exec(net("x * self.k", make=f"self.k = int(torch.{asked}())"), scope)
    before, keys = getattr(torch, asked)(), []
    for number in (1, 2, 2):
        set_to(number)
        keys.append(capture_key(job(scope["Net"])))
    set_to(before)
    assert keys[1] is not None and keys[0] != keys[1] == keys[2]
