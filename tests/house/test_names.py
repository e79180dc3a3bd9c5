"""One name, one thing: exported classes and type aliases, and source files, have names of their own over all
packages."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.helpers.source_tree import Module, exported_names, is_alias, modules


def shared_names(found: dict[str, Module]) -> dict[str, list[str]]:
    """Return the names that more than one place defines, each with its places."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in found.values():
        for name, line in exported_names(module):
            places[name].append(f"{module.name}:{line}")
    return {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}


def test_a_name_stands_for_one_thing() -> None:
    shared = shared_names(modules())
    assert not shared, "\n".join(f"{name}: {', '.join(where)}" for name, where in shared.items())


def test_negative_control_a_shared_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "from typing import Literal\nclass Kind: ...\nWay = Literal['a']\nLIMIT = 3\n_Own = int | str\n"
    )
    (tmp_path / "two.py").write_text(
        "class Kind: ...\nWay = int | str\nLIMIT = 4\n_Own = int | str\nmade = [1]\n"
    )
    assert shared_names(modules([tmp_path])).keys() == {"Kind", "Way"}


def test_what_an_alias_is() -> None:
    import ast

    def value(text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body

    assert is_alias("Waits", value("tuple[int, ...]")) and is_alias("Comm", value("Send | Recv"))
    assert (
        not is_alias("Waits", value("Waits(3)"))
        and not is_alias("LIMIT", value("a | b"))
        and not is_alias("waits", value("x[0]"))
    )
