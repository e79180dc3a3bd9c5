"""Show tables on the screen: drawn by rich for a person, plain text for a pipe or a file."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from piper_report import WIDTH, Table


def show(table: Table) -> None:
    """Print a table to stdout, with lines and colours only if that is a terminal."""
    if not sys.stdout.isatty():
        print(table.plain())
        return
    console = Console(file=sys.stdout, highlight=False)
    if table.below:  # cells of a drawn table cannot reach over columns
        console.print(Text("\n".join(table.lines(min(WIDTH, console.width)))))
    else:
        console.print(drawn(table))
    for note in table.notes:
        style = (
            "bold red"
            if note.startswith("DOES NOT FIT")
            else "yellow"
            if note.startswith("warning:")
            else ""
        )
        console.print(Text(note, style=style))


def drawn(table: Table) -> Drawn:
    """Return a table as rich draws it, without its notes; cells are text, never markup."""
    drawing = Drawn(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(table.columns):
        drawing.add_column(Text(name), justify="right" if i else "left", no_wrap=i == 0)
    for row in table.rows:
        drawing.add_row(*map(Text, row))
    return drawing
