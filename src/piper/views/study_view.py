"""Show a search on the screen: its progress while it goes on, and the table of its results."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from math import log
from pathlib import Path
from typing import Any

from piper.views.display import show
from piper.views.strategy_facts import StrategyFacts, facts_of
from piper_autotune import RULES, SearchProgress, Study, value_text
from piper_ir.study.study import Row, limit_text
from piper_ir.study.study_groups import folded_text, indifferent_text
from piper_ir.tools import count_text, size_text, time_text, working
from piper_report import FAR, Table

GOALS = {"tokens_per_s_per_device": "tokens", "dollars_per_token": "price"}
"""The column of the objective."""
SHOWN = 10
"""The number of rows of the table on the screen."""


def show_study(
    study: Study, name: str, global_batch: int | None = None, *, profiled: bool = False
) -> None:
    """Print the best candidates, equal ones folded into one, how many were rejected by kind, and the rules.

    `global_batch` is the job's, for the rows of a microbatch; `profiled` says that the search had measured costs.
    """
    groups = study.folded()[:SHOWN]
    shown = [group.best.as_dict() for group in groups]
    notes = [
        f"{_params(row)}: {text}"
        for group, row in zip(groups, shown)
        if (text := folded_text(group))
    ]
    notes += [text] if (text := indifferent_text(study.rows)) else []
    notes += [text] if (text := study.interval_text()) else []
    notes += [f"what one word would change in the best: {text}" for text in study.advice]
    notes += [f"rejected: {count} {kind}" for kind, count in _rejected(study).items()]
    notes += [
        f"warning: {_params(row)}: {row['reason']}"
        for row in study.rejected()
        if row["kind"] == "confirmation"
    ]
    notes.append(
        f"rules asked before compiling: {', '.join(line.partition(':')[0] for line in study.rules)}"
    )
    notes += [f"rule {line}" for line in study.rules if not line.endswith("(0 candidates)")]
    notes += [f"warning: {text}" for text in _warnings(shown)] + _far(shown, profiled)
    if study.interrupted:
        notes.append(f"warning: {INTERRUPTED}")
    head: tuple[str, ...] = (
        "params",
        "mesh",
        "schedule",
        "rows",
        "predicted",
        "measured",
        "error",
        "memory",
    )
    rows: tuple[tuple[str, ...], ...] = tuple(
        _shown(row, _facts(study, row, global_batch)) for row in shown
    )
    if study.objective != "period":
        head = (*head, GOALS[study.objective])
        rows = tuple(
            (*cells, value_text(study.objective, row["value"])) for cells, row in zip(rows, shown)
        )
    limit = limit_text(study.memory_limit, study.device_limits)
    within = f" within {limit}" if limit else ""
    show(
        Table(
            f"{name} on {study.cluster}{within}: {_counted(study)}, s/step",
            head,
            rows,
            tuple(notes),
        )
    )


def _counted(study: Study) -> str:
    """Return how many candidates were scored; candidates that a rule rejected cost no trial."""
    by_rule = sum(row.kind in RULES for row in study.rows)
    more = [f"{by_rule} more rejected by rules before compiling"] if by_rule else []
    more += [f"{study.repeated} proposals were plans known already"] if study.repeated else []
    more += ["the space has no others"] if study.exhausted else []
    scored = f"best of {count_text(len(study.rows) - by_rule, 'candidate')}"
    return f"{scored} ({'; '.join(more)})" if more else scored


def _far(shown: list[dict[str, Any]], profiled: bool) -> list[str]:
    """Return advice if a prediction is far from the measurement; `profiled` costs may be of a busy machine."""
    errors = [row["error"] for row in shown if row["error"] is not None]
    if all(1 / FAR <= 1 + error <= FAR for error in errors):
        return []
    worst = max(errors, key=lambda error: abs(log(max(1 + error, 1e-9))))
    hint = (
        "the costs were measured on this machine, which may have had other work then, or while the candidate ran; "
        "repeat both when it has none"
        if profiled
        else "run `piper profile FILE.py --out costs.json` on this machine, then search with --costs costs.json"
    )
    return [f"warning: predicted / measured is {1 + worst:.2f}: {hint}"]


INTERRUPTED = (
    'interrupted; this is what was found until then. Steps of the source "sweep" are without contention of messages: '
    "`piper simulate` has the step of one, and its warnings"
)
"""The warning of a search that ended early."""


def as_numbers(
    study: Study, folder: Path | None, global_batch: int | None = None
) -> dict[str, Any]:
    """Return a search for programs: its best row, with None for missing values, the strategy's facts, and remarks."""
    best = study.best_row
    row = dict.fromkeys(f.name for f in fields(Row)) if best is None else best.as_dict()
    facts = None if best is None else _facts(study, row, global_batch)
    row |= {name: getattr(facts, name, None) for name in ("mesh", "schedule", "rows")}
    counts = {"candidates": len(study.rows), "scored": sum(r.kind not in RULES for r in study.rows)}
    counts |= {"folded": len(study.folded())}
    remarks: dict[str, Any] = {
        "indifferent": study.indifferent(),
        "one_word": list(study.advice),
        "interval_share": study.interval_share,
        "interval_stack": study.interval_stack,
    }
    search: dict[str, Any] = (
        counts | remarks | {"rejected": _rejected(study), "interrupted": study.interrupted}
    )
    return (
        row
        | {"folder": str(folder) if folder else None}
        | search
        | {"warnings": [*_warnings(study.table()[:SHOWN]), *([INTERRUPTED] * study.interrupted)]}
    )


def _facts(study: Study, row: dict[str, Any], global_batch: int | None) -> StrategyFacts | None:
    """Return the facts of a row's strategy; None for one that the study does not hold any more."""
    strategy = study.strategies.get(row["number"])
    return None if strategy is None else facts_of(strategy, global_batch)


def _rejected(study: Study) -> dict[str, int]:
    """Count the rejected candidates by kind, the most first."""
    return dict(Counter(str(r["kind"]) for r in study.rejected()).most_common())


def files_text(study: Study, folder: Path) -> str:
    """Return a text for the user about the files of `Study.save`."""
    files = (
        "study.json is"
        if study.best is None
        else "study.json and best.json (for piper run --strategy) are"
    )
    return f"{files} in {folder}"


def _warnings(rows: list[dict[str, Any]]) -> list[str]:
    """Return the warnings of `simulate`, each once, with its candidates unless it holds for all that the engine scored.

    Among them are costs of another machine, chunks without costs, and assumed constants.
    """
    scored = [r for r in rows if r["source"] == "engine"]
    params_by_note = {
        note: [_params(r) for r in scored if note in r["notes"]]
        for r in scored
        for note in r["notes"]
    }
    return [
        note + ("" if len(candidates) == len(scored) else f" ({'; '.join(candidates)})")
        for note, candidates in params_by_note.items()
    ]


def _params(row: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in row["params"].items())


def _shown(row: dict[str, Any], facts: StrategyFacts | None) -> tuple[str, ...]:
    measured, error = row["measured_period_s"], row["error"]
    return (
        _params(row),
        *(
            ("", "", "")
            if facts is None
            else (facts.mesh, facts.schedule, "" if facts.rows is None else str(facts.rows))
        ),
        time_text(row["period_s"]),
        "" if measured is None else time_text(measured),
        "" if error is None else f"{error:+.1%}",
        size_text(row["device_bytes"]),
    )


@contextmanager
def bar(trials: int) -> Iterator[Callable[[SearchProgress], None]]:
    """Show how far a search is and its best so far: by a bar on a terminal, by lines in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    if not sys.stderr.isatty():
        with working(f"searching {count_text(trials, 'candidate')}") as name:
            yield lambda now: name(
                f"candidate {now.done} of {now.trials}; {_best_text(now.best)}; {now.rejected} rejected"
            )
        return
    columns = (
        TextColumn("candidates"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(file=sys.stderr), transient=True) as drawn:
        task = drawn.add_task("no candidate fits yet", total=trials)

        def show(now: SearchProgress) -> None:
            drawn.update(
                task,
                completed=now.done,
                description=f"{_best_text(now.best)}; {now.rejected} rejected",
            )

        yield show


def _best_text(row: Row | None) -> str:
    if row is None or row.period_s is None:
        return "no candidate fits yet"
    return f"best {time_text(row.period_s)}/step in {size_text(row.device_bytes or 0)}"
