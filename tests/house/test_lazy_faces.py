"""Faces that load names on first use: every name can be had, and typing sees the names that running code does."""

import ast
from pathlib import Path

import piper_autotune
import piper_report


def names_for_typing(source: str) -> set[str]:
    """Return what a module imports for typing only."""
    blocks = [n for n in ast.parse(source).body if isinstance(n, ast.If)]
    return {
        alias.name
        for block in blocks
        for n in block.body
        if isinstance(n, ast.ImportFrom)
        for alias in n.names
    }


def test_every_exported_name_can_be_had_and_has_a_type() -> None:
    for package in (piper_report, piper_autotune):
        assert package.__file__ is not None
        typed = names_for_typing(Path(package.__file__).read_text(encoding="utf-8"))
        assert typed == set(package.__all__)
        assert all(getattr(package, name) is not None for name in package.__all__)
