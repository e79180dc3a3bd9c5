"""Check that editors and type checkers see the public names that are there, and no others."""

import ast
from pathlib import Path

import piper


def declared() -> dict[str, str]:
    """Return the names that the block for type checkers imports, each with its module."""
    tree = ast.parse(Path(piper.__file__).read_text())
    (block,) = [
        n
        for n in tree.body
        if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"
    ]
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    return {alias.asname or "": n.module or "" for n in imports for alias in n.names}


def test_type_checkers_are_told_of_each_public_name_where_it_is():
    assert declared() == piper._HOME | dict.fromkeys(piper._MODULES, "piper")


def test_public_names_are_found():
    assert {name for name in dir(piper) if getattr(piper, name, None) is None} == set()
