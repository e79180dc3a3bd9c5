"""Make one HTML page that needs no other file: it has style and figures, no scripts, and may not load anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from piper_report.facts.summary import Table
from piper_report.figures.style import Picture
from piper_report.tables.tables import Sheet

# "only light": a browser that darkens pages would turn the words of figures white and leave their ground white.
STYLE = """
:root { color-scheme: only light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.25rem 3rem; max-width: 74rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .5rem; border-top: 1px solid #ddd; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
a { color: #0b5394; }
nav ol { margin: .25rem 0; padding-left: 1.5rem; }
nav > ol { columns: 18rem; }
nav > ol > li { break-inside: avoid; }
nav li li { list-style: none; }
nav ol ol { padding-left: .75rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .75rem 0; }
dt { color: #555; }
dd { margin: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #e3e3e3; text-align: right; vertical-align: top; white-space: nowrap; }
th { background: #f5f5f5; font-weight: 600; white-space: normal; vertical-align: bottom; }
td.long { white-space: normal; min-width: 18rem; }
.word, .long, th:first-child, td:first-child { text-align: left; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .875rem; margin: .35rem 0 0; }
.warning { border-left: 4px solid #d55e00; background: #fdf3ec; padding: .4rem .75rem; margin: .5rem 0; }
summary { cursor: pointer; padding: .3rem 0; }
@media (max-width: 40rem) { body { padding: .5rem .75rem 2rem; } dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; }
  table { font-size: .85rem; } td:first-child { white-space: normal; } th, td { padding: .25rem .4rem; } }
@media print { h2 { break-after: avoid; } figure { break-inside: avoid; } .scroll { overflow: visible; } }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
PROSE = 40
"""The number of characters in a cell above which a column is broken into lines."""


@dataclass(frozen=True)
class PageSection:
    """Hold a chapter of the page; `folded` tables open on a click, and sections without content are left out."""

    name: str
    title: str
    warnings: Sequence[str] = ()
    items: Sequence[Picture | Sheet | str] = ()
    folded: Sequence[Sheet] = field(default=())


def page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[PageSection]) -> str:
    """Return the whole document; `facts` are names and values below the title."""
    shown = [s for s in sections if s.items or s.folded or s.warnings]
    head = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta '
        f'http-equiv="Content-Security-Policy" content="{POLICY}">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<link rel="icon" '
        f'href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>'
    )
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    body = [
        f"<header><h1>{escape(title)}</h1><dl>{listed}</dl></header>",
        _contents(shown),
        "<main>",
    ]
    body += [_section(s) for s in shown]
    return "\n".join([head, *body, "</main>", "</body>", "</html>", ""])


def _contents(sections: Sequence[PageSection]) -> str:
    lines = []
    for s in sections:
        inner = "".join(
            f'<li><a href="#{_anchor(x)}">{escape(_title(x))}</a></li>'
            for x in _titled(s)
            if _title(x) != s.title
        )
        lines.append(
            f'<li><a href="#{s.name}">{escape(s.title)}</a>'
            + (f"<ol>{inner}</ol>" if inner else "")
            + "</li>"
        )
    return f'<nav aria-label="Contents"><strong>Contents</strong><ol>{"".join(lines)}</ol></nav>'


def _titled(section: PageSection) -> list[Picture | Sheet]:
    return [x for x in (*section.items, *section.folded) if not isinstance(x, str)]


def _title(item: Picture | Sheet) -> str:
    return item.title if isinstance(item, Picture) else item.table.title


def _anchor(item: Picture | Sheet) -> str:
    return ("figure-" if isinstance(item, Picture) else "table-") + item.name


def _section(section: PageSection) -> str:
    lines = [f'<section id="{section.name}">', f"<h2>{escape(section.title)}</h2>"]
    lines += [f'<p class="warning">{escape(w)}</p>' for w in section.warnings]
    for item in section.items:
        if isinstance(item, str):
            lines.append(f'<p class="note">{escape(item)}</p>')
            continue
        heading = f"<h3>{escape(_title(item))}</h3>" if _title(item) != section.title else ""
        content = _figure(item) if isinstance(item, Picture) else _table(item.table)
        lines.append(f'<div id="{_anchor(item)}">{heading}{content}</div>')
    for x in section.folded:
        summary = f"<summary>{escape(x.table.title)} ({len(x.frame)} rows)</summary>"
        lines.append(f'<details id="{_anchor(x)}">{summary}{_table(x.table)}</details>')
    return "\n".join([*lines, "</section>"])


def _figure(p: Picture) -> str:
    image = f'<img style="min-width:{p.least}px;max-width:{p.most}px" alt="{escape(p.alt)}" src="{p.uri}">'
    caption = f"<figcaption>{escape(p.caption)}</figcaption>" if p.caption else ""
    return f'<figure><div class="scroll" tabindex="0" role="group" aria-label="{escape(p.title)}">{image}</div>{caption}</figure>'


def _table(table: Table) -> str:
    kinds = [_kind([row[i] for row in table.rows]) for i in range(len(table.columns))]

    def row(cells: Sequence[str], tag: str) -> str:
        marks = [f' class="{kind}"' if kind else "" for kind in kinds]
        scope = ' scope="col"' if tag == "th" else ""
        return (
            "<tr>"
            + "".join(f"<{tag}{scope}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks))
            + "</tr>"
        )

    rows = "".join(row(r, "td") for r in table.rows)
    notes = "".join(f'<p class="note">{escape(n)}</p>' for n in table.notes)
    label = f'tabindex="0" role="group" aria-label="{escape(table.title)}"'
    body = f"<table><thead>{row(table.columns, 'th')}</thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" {label}>{body}</div>{notes}'


def _kind(cells: Sequence[str]) -> str:
    """Return the style of a column: "long" text, "word" (to the left), or "" for numbers (to the right)."""
    if any(len(c) > PROSE for c in cells):
        return "long"
    return "word" if any(c[:1].isalpha() for c in cells) else ""
