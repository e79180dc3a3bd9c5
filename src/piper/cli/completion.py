"""Complete the values of options in a shell: clusters, recipes, launchers, and the parameters of a file's strategy.

A file is read here, not run: its parameters are the names that it asks a trial for.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LAUNCHERS = ("ray", "processes", "inline")
LOSSES = ("restart", "replan")
Completer = Callable[[str], list[str]]


def one_of(*words: str) -> Completer:
    """Return a completer of fixed words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def clusters(incomplete: str) -> list[str]:
    """Return the built-in clusters of one node, also with a kernel stack, and the files that describe some."""
    from piper_simulator import ALIASES, CPU, STACKS

    names = [CPU, *(f"{short}x8" for short in ALIASES)]
    if "@" in incomplete:
        names = [f"{name}@{stack}" for name in names[1:] for stack in STACKS]
    return [name for name in (*names, *_files(incomplete, ".toml")) if name.startswith(incomplete)]


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes that `piper show --recipe` draws."""
    from piper_compiler.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def parameters(ctx: Any, incomplete: str) -> list[str]:
    """Return NAME= for the parameters of the command's FILE.py, and NAME=VALUE for the choices of one."""
    file = ctx.params.get("file") or _typed_file()
    return (
        []
        if file is None
        else [text for text in _pairs(Path(file), incomplete) if text.startswith(incomplete)]
    )


def space_parameters(incomplete: str) -> list[str]:
    """Return NAME= for the parameters of the spaces that `piper plan` and `tune` make."""
    from piper.api.problems.tried_values import PARAMETERS

    return [f"{name}=" for name in PARAMETERS if f"{name}=".startswith(incomplete)]


def _typed_file() -> str | None:
    """Return the FILE.py of the typed line: one that ends in an option without a value is no command yet."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return next((word for word in line.split() if word.endswith(".py")), None)


def _pairs(file: Path, incomplete: str) -> Iterator[str]:
    for name, choices in asked_parameters(file).items():
        if incomplete.startswith(f"{name}="):
            yield from (f"{name}={choice}" for choice in choices)
        else:
            yield f"{name}="


def asked_parameters(file: Path) -> dict[str, Sequence[Any]]:
    """Return the names that a file's functions ask a trial for, with their choices if these are written out.

    A file that cannot be read, or is no Python, has none: a shell shows no errors while somebody types.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    choices_by_name: dict[str, Sequence[Any]] = {}
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or not node.args
        ):
            continue
        if (
            node.func.attr.startswith("suggest_")
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            choices = (
                _literal(node.args[1])
                if node.func.attr == "suggest_categorical" and len(node.args) > 1
                else ()
            )
            choices_by_name[node.args[0].value] = choices
    return choices_by_name


def _literal(node: ast.expr) -> Sequence[Any]:
    try:
        value: Any = ast.literal_eval(node)
    except ValueError:
        return ()
    return value if isinstance(value, list | tuple) else ()


def _files(incomplete: str, ending: str) -> list[str]:
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    return [str(path) for path in sorted(folder.glob(f"*{ending}"))]
