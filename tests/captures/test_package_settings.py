"""A kept capture is not used where an installed package is another one, or its settings are, and else it is.

A package that a test writes stands for those that are installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from piper.api.captures import installed, package_settings
from piper.api.captures.installed import installed_state
from piper.api.captures.package_settings import settings
from tests.captures.test_stale_captures import modules_apart, no_bytecode, write

__all__ = ["no_bytecode"]

PRIVATE = "_".join(["_of", "a", "set"])
"""A name that no source of the user's has in one piece."""
PACKAGE = (
    f"""
import time
from pathlib import Path
import numpy
TABLE = numpy.arange(4)
STARTED = time.time()
ORDER, {PRIVATE} = ["a", "b"], ["c", "d"]
Path(__file__).with_name("numbers.dat").read_text()
[path.read_text() for path in Path(__file__).parent.glob("*.y?ml")]
import os
"""
    + """
SCALE = {'a': NUMBER}
PLAIN = NUMBER
class Sizes:
    hidden = NUMBER
    _width = NUMBER
class Options(dict):
    pass
class Settings:
    pass
OPTIONS, SETTINGS, PARTS, NAMED = Options(a=1), Settings(), [], dict(a=1, b=2)
def inner(x):
    return x * int(os.environ.get("STALE_SCALE", "1"))
"""
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package without torch, as old as this process; no other counts, for tests may have put things
    there."""
    every = package_settings.installed_modules
    for module in (package_settings, installed):
        monkeypatch.setattr(
            module,
            "installed_modules",
            lambda: [found for found in every() if found[0] == "installed_of_test"],
        )
    monkeypatch.setattr(installed, "started", lambda: float("inf"))
    home = "site-packages/installed_of_test"
    write(
        tmp_path,
        {
            f"{home}/__init__.py": PACKAGE,
            f"{home}/numbers.dat": "NUMBER",
            f"{home}/numbers.yaml": "NUMBER",
        },
        2,
    )
    with modules_apart(tmp_path):
        # Settings of packages count that use torch or that a module of the user's names, which this one is.
        monkeypatch.setitem(
            globals(), "package_of_test", importlib.import_module("installed_of_test")
        )
        yield tmp_path / home / "__init__.py"


def change_source(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_text(package.read_text().replace("x * int", "x + int"))


def change_a_setting(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().SCALE["a"] = 3


def change_a_plain_variable(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().PLAIN = 3


def change_a_class(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an attribute that the package may have read from a file."""
    loaded().Sizes.hidden = 3


def change_a_private_attribute(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().Sizes._width = 3


def fill_a_container_of_the_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().OPTIONS["b"] = {"c": [{"d": 1}]}


def fill_a_list(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().PARTS.append("gelu")


def set_an_attribute_of_an_object(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().SETTINGS.scale = 3


def change_the_source_but_not_its_size_and_time(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do as conda, nix and `cp -p` do, which give every file of a package one time."""
    found = package.stat()
    package.write_text(package.read_text().replace("x * int", "x + int"))
    os.utime(package, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (package.stat().st_size, package.stat().st_mtime_ns) == (
        found.st_size,
        found.st_mtime_ns,
    )


def change_a_data_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.with_name("numbers.dat").write_text("3")


def change_an_array(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().TABLE[3] = 0


def change_an_order(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().ORDER.reverse()


def change_the_order_of_a_mapping_by_name(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().NAMED = dict(reversed(loaded().NAMED.items()))


def come_from_elsewhere(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = package.parents[2] / "dist-packages" / package.parent.name / package.name
    monkeypatch.setattr(loaded(), "__file__", str(elsewhere))


def remove_the_source(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.unlink()


def loaded() -> Any:
    return sys.modules["installed_of_test"]


def put_a_function(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded().inner = change_source


def change_a_listed_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.with_name("numbers.yaml").write_text("3")


def change_the_environment(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALE_SCALE", "2")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", [
    change_source, change_the_source_but_not_its_size_and_time, remove_the_source, change_a_setting, change_a_plain_variable,
    change_a_class, change_a_private_attribute, fill_a_container_of_the_package, fill_a_list, set_an_attribute_of_an_object,
    put_a_function, change_the_environment, change_a_data_file, change_an_array, change_an_order,
    change_the_order_of_a_mapping_by_name, come_from_elsewhere, change_a_listed_file,
])  # fmt: skip
def test_what_an_installed_package_depends_on_is_the_same_or_seen(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = settings()
    assert before is not None and "installed_of_test" in before
    kept = installed_state(before)
    assert kept is not None and kept.environment == {**kept.environment, "STALE_SCALE": None}
    assert kept.hold()
    change(package, monkeypatch)
    assert not kept.hold()


def test_what_is_another_in_each_process_by_itself_does_not_count(package: Path) -> None:
    """Times, modules, addresses, and the order of private lists, which come from sets: transformers has all of
    these."""
    before = settings()
    assert before is not None and {"STARTED", PRIVATE} <= before["installed_of_test"].keys()
    kept = installed_state(before)
    assert kept is not None
    loaded().STARTED += 1
    getattr(loaded(), PRIVATE).reverse()
    loaded().NAMED = loaded().NAMED.copy()
    loaded().shown, loaded().inner_module = repr(object()), os
    assert kept.hold()


def test_nothing_is_kept_where_a_loaded_file_is_newer_than_the_process(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert installed_state({}) is None


class Lazy(dict[str, int]):
    """A mapping that imports what it names when it is read, and cannot, as transformers has them."""

    __module__ = "installed_of_test"

    def __len__(self) -> int:
        raise ImportError

    items = __len__  # type: ignore[assignment]  # whatever is asked for


def test_mappings_that_import_what_they_name_are_not_read(package: Path) -> None:
    before = settings(["installed_of_test"])
    loaded().lazy = Lazy(a=1)
    after = settings(["installed_of_test"])
    assert before is not None and after is not None and before != after


def test_compiled_functions_of_an_installed_package_are_not_the_users() -> None:
    """Optuna's storages hold classes of sqlalchemy, whose methods Cython compiled: a search with a file keeps captures,
    too."""
    importlib.import_module("optuna.storages._rdb.models")
    assert settings(["optuna.storages._rdb.models"])
