"""Documents can be read: lines are short, links lead to a heading that is there, and files that are named exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
WIDEST = 120
LINK = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|json|txt|csv|png))`")


def long_lines(text: str) -> Iterator[int]:
    """Yield the numbers of lines that are too long; the row of a table cannot be broken, and code is held by ruff."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if len(line) > WIDEST and not fenced and not line.startswith("|"):
            yield number


def anchors(text: str) -> set[str]:
    """Return what a link may name of a document: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_anchors(path: Path, text: str) -> Iterator[str]:
    """Yield the links to a heading that the document they lead to does not have."""
    for target, anchor in LINK.findall(text):
        other = (path.parent / target).read_text(encoding="utf-8") if target else text
        if anchor not in anchors(other):
            yield f"{target}#{anchor}"


def missing_files(text: str) -> Iterator[str]:
    """Yield the files that a text names by their path from the root, and that are not there."""
    yield from (name for name in FILE.findall(text) if not (ROOT / name).is_file())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_document_can_be_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not list(long_lines(text)), f"lines of more than {WIDEST} characters"
    assert not list(broken_anchors(path, text))
    assert not list(missing_files(text))


def test_negative_controls() -> None:
    long = "x" * (WIDEST + 1)
    assert list(long_lines(f"a\n{long}\n| {long}\n```\n{long}\n```\n{long}")) == [2, 7]
    text = "[a](#two-words) [b](#three) [c](memory.md#snapshots) [d](memory.md#nowhere)\n\n## Two words!\n"
    assert list(broken_anchors(ROOT / "docs" / "why.md", text)) == ["#three", "memory.md#nowhere"]
    assert list(missing_files("`docs/why.py`, `docs/nowhere.py`, `why.py`")) == ["docs/nowhere.py"]
