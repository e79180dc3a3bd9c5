"""Write the table of tried models into docs/models.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- zoo -->", "<!-- end of zoo -->"
OUTCOMES = ("equal", "differs", "refused", "failed", "not made")
EQUAL, NARROW = 1e-9, 2e-5
"""The largest error of a model that is equal, and of one that computes in float32 whatever its parameters are."""
MOST_OF_A_REASON, MOST_OF_A_LINE = 170, 160
"""The most characters of a refusal, whose end is the way out that a user reads at capture, and of a line of code."""


def write_table(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace what stands between the two marks of a page."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.split(END)[1]}")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return counts, the equal models of each library in a row, and a row for each other model."""
    tried = [line for line in lines if line["outcome"] != "not made"]
    models = {line["model"]: line for line in tried if line["dp"] == 1}
    counts = Counter(outcome(line) for line in models.values())
    twice = [line for line in tried if line["dp"] > 1]
    commits = Counter(str(line.get("commit", "unknown")) for line in models.values())
    by_commit = ", ".join(f"{count} at {commit}" for commit, count in commits.most_common())
    said = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])
    head = [
        f"{datetime.now(UTC):%d %B %Y}: {len(models)} models, {said}. {len(twice)} of them with two replicas as "
        f"well, {sum(outcome(line) == 'equal' for line in twice)} equal.",
        f"By commit of Piper: {by_commit}.",
        "A model with * computes in float32 whatever its parameters are.",
        "",
    ]
    ordered = sorted(
        models.values(), key=lambda line: (OUTCOMES.index(outcome(line)), line["model"])
    )
    others = [
        f"| {line['model']} | {outcome(line)} | {reason(line)} |"
        for line in ordered
        if outcome(line) != "equal"
    ]
    return "\n".join(
        [
            *head,
            *equal_models([line for line in ordered if outcome(line) == "equal"]),
            "",
            "| model | outcome | largest error, or the reason |",
            "|---|---|---|",
            *others,
        ]
    )


def equal_models(ordered: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for each library with the names of its models."""
    names: dict[str, list[str]] = {}
    for line in ordered:
        library, name = line["model"].split("/", 1)
        names.setdefault(library, []).append(f"{name}*" if line.get("narrow") else name)
    rows = (f"| {library} | {'; '.join(models)} |" for library, models in names.items())
    return ["| library | equal |", "|---|---|", *rows]


def outcome(line: dict[str, Any]) -> str:
    """Return what became of a model; where an error is too large, that it differs."""
    allowed = NARROW if line.get("narrow") else EQUAL
    return (
        "differs"
        if line["outcome"] == "equal" and not line["error"] <= allowed
        else str(line["outcome"])
    )


def reason(line: dict[str, Any]) -> str:
    """Return the error, with the line that is narrower than float64 where it matters, or the place and the reason."""
    if "error" in line:
        return f"{line['error']:.0e}" + (
            f", {shortened(line['narrow'], MOST_OF_A_LINE)}" if line.get("narrow") else ""
        )
    where_and_why = re.sub(r"(\.py:\d+) \(.*?\):", r"\1:", line["why"], count=1)
    return shortened(where_and_why, MOST_OF_A_REASON)


def shortened(message: str, most: int) -> str:
    """Return the beginning of a message, without the paths of a machine."""
    text = re.sub(r"/\S*/site-packages/|/\S*/(?=tests/|packages/)", "", message).replace("|", "\\|")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."
