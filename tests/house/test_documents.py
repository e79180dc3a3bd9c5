"""Documents and docstrings name only files that exist, and in backticks only names that our packages have."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.cases import each_case
from tests.helpers.source_tree import ROOT, modules

NAME = re.compile(r"`(piper(?:_[a-z]+)?(?:\.\w+)+)(?:\(\))?`")
"""A dotted name in backticks that begins with one of our packages."""
DOCUMENT = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.md)\b")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PLACES = ("", "docs", "docs/decisions")
"""Folders in which a document may lie that a text names by its name alone."""


def tracked(*patterns: str) -> list[Path]:
    """Return the files under version control that match."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines()]


def texts() -> list[Path]:
    """Return documents and sources: all that people read."""
    return [p for p in tracked("*.md", "*.py") if p.is_file() and p != Path(__file__)]


def exists(name: str) -> bool:
    """Whether a dotted name is a module of ours, or an attribute that can be had from one."""
    parts = name.split(".")
    known = modules()
    at = max((k for k in range(1, len(parts) + 1) if ".".join(parts[:k]) in known), default=0)
    if not at:
        return False
    value: object = importlib.import_module(".".join(parts[:at]))
    for part in parts[at:]:
        if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
            return False
        value = getattr(value, part, None)
    return True


def unknown_names(text: str) -> Iterator[str]:
    """Yield the names in backticks that do not exist; a wrapped docstring may have a line break in between."""
    yield from (name for name in dict.fromkeys(NAME.findall(text)) if not exists(name))


def unknown_documents(path: Path, text: str) -> Iterator[str]:
    """Yield the documents that a text names and that are not there."""
    for name in dict.fromkeys(DOCUMENT.findall(text)):
        near = [path.parent / name, *(ROOT / place / name for place in PLACES)]
        if not any(p.is_file() for p in near):
            yield name


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Yield the targets of links to files that are not there."""
    for target in dict.fromkeys(LINK.findall(text)):
        if (
            "://" not in target
            and not target.startswith("mailto:")
            and not (path.parent / target).exists()
        ):
            yield target


def problems(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    where = path.relative_to(ROOT)
    found = [f"{where}: there is no {name}" for name in unknown_names(text)]
    found += [f"{where}: there is no document {name}" for name in unknown_documents(path, text)]
    if path.suffix == ".md":
        found += [
            f"{where}: a link leads to {target}, which is not there"
            for target in broken_links(path, text)
        ]
    return found


def test_what_texts_name_exists() -> None:
    found = [line for path in texts() for line in problems(path)]
    assert not found, "\n".join(found)


@each_case(
    ("text", "wrong"),
    [
        ("see `piper_ir.plan.plan.Plan`, `piper.Job` and `piper_simulator`", []),
        ("see `piper_ir.plan.plan.Plam`", ["piper_ir.plan.plan.Plam"]),
        ("see `piper_compiler.passes.nowhere`", ["piper_compiler.passes.nowhere"]),
    ],
)
def test_negative_control_names(text: str, wrong: list[str]) -> None:
    assert list(unknown_names(text)) == wrong


def test_a_decision_has_the_number_of_its_file() -> None:
    heads = {p.name[:4]: p.read_text().splitlines()[0] for p in tracked("docs/decisions/*.md")}
    assert heads and not {
        number: head for number, head in heads.items() if not head.startswith(f"# {number} ")
    }


def test_what_documents_install_can_be_installed() -> None:
    """The clone is named `piper` where a reader stands beside it, and `.` within it."""
    commands = [
        (p, line)
        for p in tracked("*.md")
        for line in re.findall(r"pip install ([^\n`#]+)", p.read_text())
    ]
    asked = [(p, word) for p, line in commands for word in line.split() if word.startswith(".")]
    homes = [(p, ROOT / re.sub(r"^\./piper\b", ".", path)) for p, path in asked]
    assert homes and not [(p, home) for p, home in homes if not (home / "pyproject.toml").is_file()]


def test_negative_control_documents() -> None:
    text = "as cost-model.md 3 says, and language.md; README.md, docs/tuning.md"
    assert list(unknown_documents(ROOT / "docs" / "why.md", text)) == ["cost-model.md"]
    assert list(
        broken_links(ROOT / "docs" / "why.md", "[a](memory.md#x) [b](nowhere.md) [c](https://x.y)")
    ) == ["nowhere.md"]
