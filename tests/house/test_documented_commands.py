"""Commands that documents show exist, with the options that they are given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from piper.cli import app
from tests.helpers.cases import each_case
from tests.house.test_documents import ROOT, tracked

LINE = re.compile(r"^(?:    |\$ )?piper +([a-z][^\n|]*)$", re.MULTILINE)
"""A line of code that is a command, as documents write it: fenced, behind a prompt or indented."""
OPTION = re.compile(r"--[a-z][a-z-]*|-[a-z]\b")


def unknown(line: str, root: Any) -> Iterator[str]:
    """Yield the command or the options of a line that do not exist; `a|b|c` in place of a name is any of these."""
    words = shlex.split(re.sub(r"\s{2,}.*| \| .*", "", line), comments=True)
    command = root
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            yield name
            return
        command = command.commands[name]
    known = {text for parameter in command.params for text in parameter.opts} | {"--help"}
    for word in words:
        option = OPTION.match(word)
        if option is not None and option[0] not in known:
            yield option[0]


def test_commands_of_documents_exist() -> None:
    root = typer.main.get_command(app)
    lines = [
        (path.relative_to(ROOT), line)
        for path in tracked("*.md")
        for line in LINE.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(lines) > 30
    found = [(str(path), line, name) for path, line in lines for name in unknown(line, root)]
    assert not found, "\n".join(map(str, found))


@each_case(
    ("line", "names"),
    [
        ("simulate FILE.py --cluster h100x8 --why      # explains it", []),
        ("checkpoint show saved", []),
        ("simulte FILE.py", ["simulte"]),
        ("checkpoint shows saved", ["shows"]),
        ("run FILE.py --step 3 -q", ["--step", "-q"]),
    ],
)
def test_negative_controls(line: str, names: list[str]) -> None:
    assert list(unknown(line, typer.main.get_command(app))) == names
