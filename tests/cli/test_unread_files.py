"""A file that cannot be read is said in words by every command that reads one, never as Python's "[Errno 2]"."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import each_case
from tests.helpers.command_line import command, fails

COMMANDS = [
    *((name, "@.py") for name in ("simulate", "tune", "run", "profile", "explain", "verify")),
    *((name, "@.py") for name in ("plan", "launch", "show", "recipes")),
    ("export", "@.py", "--to", "torchtitan"),
    ("simulate", "RECIPE", "@.py"),
    ("simulate", "RECIPE", "@.json"),
    ("simulate", "RECIPE", "--strategy", "@.json"),
    ("simulate", "RECIPE", "--costs", "@.json"),
    ("simulate", "RECIPE", "--cluster", "@.toml"),
    ("simulate", "RECIPE", "--cluster", "@.json"),
    ("plan", "@_model/config.json"),
    ("plan", "llama3-8b", "--global-batch", "8", "--cluster", "@.toml"),
    ("accuracy", "@.csv"),
    ("accuracy", "--stack", "@.toml", "TABLE"),
    ("import", "megatron", "@.sh"),
    ("import", "deepspeed", "@.json"),
    ("import", "accelerate", "@.yaml"),
    ("import", "torchtitan", "@.json"),
    ("trace", "@.json"),
    ("report", "@"),
    ("show", "@.csv"),
    ("checkpoint", "show", "@"),
    ("checkpoint", "convert", "@.safetensors", "out"),
]
TABLE = str(Path(__file__).parents[2] / "benchmarks/published/own_runs.csv")
WORDS = {
    "missing": ("no such", "not a folder"),
    "folder": ("is a folder", "no such", "holds no", "no checkpoint"),
    "binary": ("UTF-8", "no JSON", "not a folder", "SyntaxError", "no safetensors", "no such"),
    "refused": ("this user may not read it", "not a folder", "no such"),
    "nested": (
        "recursion",
        "not a folder",
        "SyntaxError",
        "no safetensors",
        "no such",
        "columns",
        "TOML",
        "no command",
        "cell 1",
    ),
}
"""Why a file of each kind cannot be read: a command says one of these."""


@each_case("kind", sorted(WORDS))
def test_every_command(
    kind: str, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _refuse(monkeypatch)
    places = {"RECIPE": str(recipe), "TABLE": TABLE}
    for row in COMMANDS:
        named = next(argument for argument in row if "@" in argument).replace("@", kind)
        _make(Path(named), kind)
        result = command(*(places.get(part, part.replace("@", kind)) for part in row))
        fails(result, named.partition("/")[0])
        assert "[Errno" not in result.output + result.stderr, row
        assert any(word in result.stderr for word in WORDS[kind]), (row, result.stderr)
        assert len(result.stderr) < 4000, (row, "the text of a file is not an error's")


def _make(path: Path, kind: str) -> None:
    """Make the file of a kind that a command finds at a path."""
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        path.mkdir(exist_ok=True)
    elif kind != "missing" and not path.exists():
        path.write_bytes(b"[" * 100_000 if kind == "nested" else b"\x80\x00\xff")


def _refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be refused by their name, since root may read all of them."""
    plain = builtins.open

    def refusing(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "refused" in str(file) and "r" in mode:
            raise PermissionError(13, "Permission denied", str(file))
        return plain(file, mode, *args, **options)

    monkeypatch.setattr(builtins, "open", refusing)
    monkeypatch.setattr(io, "open", refusing)
