"""Print tables of the paper's figures, and write each figure's section of docs/paper.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
TITLE = """\
# The paper's figures, simulated

Piper follows "Piper: A Programmable Distributed Training System" (arXiv 2606.11169). Each section below is written by
a script, which simulates one of its figures; no GPU took part.
"""


def printed(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 2,
) -> None:
    """Print a table whose first columns, so many, are text."""
    table = Table(title=title, title_justify="left")
    for k, name in enumerate(header):
        table.add_column(name, justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(x)} |" for x in lines)


def items(texts: Iterable[str]) -> str:
    """Return the items of a list, each of which begins with "- ", in lines that can be read."""
    return "\n".join(fill(text, 118, subsequent_indent="  ") for text in texts)


def write_section(page: Path, name: str, text: str) -> None:
    """Write a section of a page, in place of the one of this name or after the others; make the page if there is
    none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    section = f"{begin}\n{text.strip()}\n\n{end}"
    old = page.read_text(encoding="utf-8") if page.is_file() else TITLE
    if begin in old:
        before, _, rest = old.partition(begin)
        page.write_text(before + section + rest.partition(end)[2], encoding="utf-8")
    else:
        page.write_text(f"{old.rstrip()}\n\n{section}", encoding="utf-8")
