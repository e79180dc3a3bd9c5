"""Make one HTML page that needs no other file: style, script and figures are in it, and it may not load anything."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from piper_report.facts.summary import Table
from piper_report.figures.live_timeline import LiveTimeline
from piper_report.figures.style import Picture
from piper_report.tables.tables import Sheet

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
PROSE = 40
"""The number of characters in a cell above which a column is broken into lines."""
PageItem = Picture | Sheet | LiveTimeline


@dataclass(frozen=True)
class AnswerTile:
    """Hold one of the figures at the head of the page; `bad` ones are marked."""

    name: str
    value: str
    detail: str = ""
    bad: bool = False


@dataclass(frozen=True)
class PageSection:
    """Hold a chapter of the page; `folded` items open on a click, and sections without content are left out."""

    name: str
    title: str
    warnings: Sequence[str] = ()
    items: Sequence[PageItem | str] = ()
    folded: Sequence[Picture | Sheet] = field(default=())

    @property
    def titled(self) -> list[PageItem]:
        """Return all that the table of contents names."""
        return [x for x in (*self.items, *self.folded) if not isinstance(x, str)]


def page(
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[PageSection],
    answers: Sequence[AnswerTile] = (),
) -> str:
    """Return the whole document; `facts` are names and values below the title and the answers.

    It has a script only if it has a timeline; the policy of the page allows no other script than that.
    """
    sections = [s for s in sections if s.items or s.folded or s.warnings]
    live = any(isinstance(item, LiveTimeline) for s in sections for item in s.items)
    environment = _environment()
    script = _source("timeline.js") if live else ""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        title=title,
        facts=facts,
        sections=sections,
        answers=answers,
        style=_source("page.css"),
        script=script,
        policy=f"{POLICY}; script-src 'sha256-{digest}'" if live else POLICY,
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("piper_report", "pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.tests["sheet"] = lambda item: isinstance(item, Sheet)
    environment.tests["timeline"] = lambda item: isinstance(item, LiveTimeline)
    environment.filters |= {"column_kinds": _column_kinds, "compact": _compact, "extent": _extent}
    return environment


def _source(name: str) -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _compact(data: Any) -> str:
    """Return JSON that may stand in an element of HTML, which a "<" could end."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _extent(item: Picture | Sheet) -> str:
    return f"{len(item.frame)} rows" if isinstance(item, Sheet) else "a picture"


def _column_kinds(table: Table) -> list[str]:
    """Return the style of each column: "long" text, "word" (to the left), or "" for numbers (to the right)."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    return [
        "long"
        if any(len(cell) > PROSE for cell in cells)
        else "word"
        if any(cell[:1].isalpha() for cell in cells)
        else ""
        for cells in columns
    ]
