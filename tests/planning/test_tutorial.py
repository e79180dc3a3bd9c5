"""docs/tutorial.md runs as it stands, with a smaller config.json and fewer trials, and prints the lines that it shows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from tests.helpers.command_line import command

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"^```(json|python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
NUMBER = re.compile(r"[+-]?\d[\d,.]*(?:e[+-]?\d+)?(?:[MB]\b| (?:[mu]?s|[KMGT]?i?B)\b)?")
"""A number with its unit, of which neither is compared."""
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
FEWER = {
    "--trials 12": "--trials 1 --workers 0", "--trials 6": "--trials 2", "layers=8": "layers=2",
    "--steps 4": "--steps 2",
    "dp=4, tp=2: 1 stage, 8 microbatches, zero=1, 1 row per microbatch; "
    "most memory: activations 20.55 GiB": "...",
    "B of stage 0                         1.995 s  67.0 %      40\n"
    "F of stage 0                        948.1 ms  31.8 %      40": "host of pp1 8 ms 98.9 % 1",
}  # fmt: skip
"""The texts of the page that the test takes in a cheaper form: the small model has another layout and waits for hosts."""


def shape(line: str) -> str:
    """Return a line without its numbers, rules and widths."""
    return " ".join(re.sub(r"-{3,}", "", NUMBER.sub("#", line)).split())


def missing(shown: list[str], printed: list[str]) -> str | None:
    """Return the first line that is shown and not printed behind those before it; `...` is any text or lines."""
    rest = iter([shape(line) for line in printed])
    for line in (line for line in shown if line.strip() not in ("", "...")):
        wanted = ".*".join(re.escape(shape(part)) for part in line.split("..."))
        if not any(re.fullmatch(wanted, text) for text in rest):
            return line
    return None


def sessions(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a block with the lines that are shown under it."""
    for part in block.split("$ ")[1:]:
        line, *shown = part.splitlines()
        yield line, shown


def run(line: str) -> list[str]:
    """Run a command of the page in this process, and return the lines that it printed."""
    program, *arguments = shlex.split(line)
    if program == "cp":
        shutil.copy(*arguments)
        return []
    assert program == "piper", line
    done = command(*arguments)
    assert done.exit_code == 0, (line, done.output, done.exception)
    return done.stdout.splitlines()


def follow(page: str) -> int:
    """Do all that the page says in the current folder, and return how many commands it has."""
    for text, fewer in FEWER.items():
        assert text in page, text
        page = page.replace(text, fewer)
    commands = 0
    for language, text in BLOCK.findall(page):
        named = FILE.match(text)
        if language == "json":
            Path("config.json").write_text(json.dumps(json.loads(text) | SMALL))
        elif language == "python" and named is not None:
            Path(named[1]).write_text(text)
        elif language == "console":
            for line, shown in sessions(text):
                printed = run(line)
                absent = missing(shown, printed)
                assert absent is None, f"{line}: no line {absent!r} in\n" + "\n".join(printed)
                commands += 1
    return commands


@pytest.mark.long
def test_the_ten_steps_run_and_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tutorial"
    folder.mkdir()
    monkeypatch.chdir(folder)
    try:
        assert follow(PAGE) >= 10
    finally:
        sys.modules.pop("planned", None)
    assert re.findall(r"^## (\d+)\. ", PAGE, re.MULTILINE) == [str(k) for k in range(1, 11)]
    assert Path("schedule.png").read_bytes().startswith(b"\x89PNG")


@each_case(
    ("shown", "absent"),
    [
        (["a   1.5 ms", "...", "b of 3"], None),
        (["a 2 us", "----", "c ... 4"], None),
        (["b of 3", "a 1 s"], "a 1 s"),
        (["a of 1"], "a of 1"),
    ],
)
def test_lines_are_compared_without_numbers(shown: list[str], absent: str | None) -> None:
    assert missing(shown, ["a 7 s", "-------", "b of 12", "c in all 5"]) == absent
