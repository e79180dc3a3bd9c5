"""Write the table of tried models into docs/models.md, and the models that are equal into a CSV file beside it."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- zoo -->", "<!-- end of zoo -->"
EQUAL_MODELS = "equal_models.csv"
OUTCOMES = ("equal", "differs", "refused", "failed", "not made")
EQUAL, NARROW = 1e-9, 2e-5
"""The largest error of a model that is equal, and of one that computes in float32 whatever its parameters are."""
MOST_OF_A_REASON, MOST_OF_A_LINE = 170, 160
"""The most characters of a refusal, whose end is the way out that a user reads at capture, and of a line of code."""


def write_table(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace the text between the two marks of a page, and write the file of equal models beside the page."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.split(END)[1]}")
    path.with_name(EQUAL_MODELS).write_text(equal_models(lines))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return counts, and a row for each model that is not equal."""
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
        f"[{EQUAL_MODELS}]({EQUAL_MODELS}) has those that are equal. The others:",
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
            "| model | outcome | largest error, or the reason |",
            "|---|---|---|",
            *others,
        ]
    )


def equal_models(lines: Sequence[dict[str, Any]]) -> str:
    """Return the text of the CSV file: a row for each equal model, and whether it computes in float32."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("library", "model", "float32 inside"))
    equal = [line for line in lines if line["dp"] == 1 and outcome(line) == "equal"]
    for line in sorted(equal, key=lambda line: str(line["model"])):
        library, name = line["model"].split("/", 1)
        rows.writerow((library, name, "yes" if line.get("narrow") else ""))
    return text.getvalue()


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
