"""Write a result folder as one page, with its figures and tables as separate files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from piper_ir.ground.errors import OutputError
from piper_ir.ground.expert_tokens import LOAD_NOT_MEASURED
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import Plan
from piper_ir.study.study import Row, StudyDocument, limit_text
from piper_ir.study.study_groups import indifferent_text, interval_text
from piper_ir.tools import count_text, time_text, write_whole
from piper_report.facts.clocks import NOTE, aligned
from piper_report.facts.results import HANG_FILE, Results, SavedTable, load
from piper_report.facts.summary import Table, far_from_measured
from piper_report.figures.expert_figures import load_figure, token_figure
from piper_report.figures.gantt import timelines
from piper_report.figures.live_timeline import TimelineStep, live_timeline
from piper_report.figures.memory_figure import memory_figure
from piper_report.figures.parallel_figure import parallel_figure
from piper_report.figures.style import Picture, house_style
from piper_report.figures.training_figures import gradient_figure, loss_figure, step_time_figure
from piper_report.figures.tuning_figures import history_figure, pareto_figure
from piper_report.pages.answers import answers_of
from piper_report.pages.page import PageItem, PageSection, page
from piper_report.tables.expert_tables import layer_sheet, load_note, rank_load_sheet, token_sheet
from piper_report.tables.stage_tables import stage_sheet, strategy_sheet
from piper_report.tables.tables import (
    Column,
    Sheet,
    cost_sheet,
    headline,
    line_sheet,
    owner_sheet,
    rank_sheet,
    restart_sheet,
    sheet,
    source_sheet,
    step_sheet,
)
from piper_report.tables.tuning_tables import params_text, trial_text, tuning_sheets

DEFINITIONS = (
    "Exposed communication: a rank computes nothing while one of its transfers is under way. Bubble, global: the "
    "step's length less the rank's compute; span: from the rank's first to its last compute, less its compute. "
    "Each is that of the worst rank. Utilisation: FLOPs over the peak of the devices; N are the parameters, of "
    "experts as many as a token visits."
)
OF_MEASURED = (
    "Errors are predicted / measured - 1. Measured idle times are of the last step, the one that was traced. Step "
    "in steady state, measured: the median without the first 3 steps."
)

OF_SEARCH = (
    "A search scores its candidates without contention on shared links. The best of each structure were then simulated "
    "with it: the first chapter has these times."
)
WARNING = "warning: "
"""The start of a note that the page marks."""


@dataclass(frozen=True)
class Report:
    """Name the files that were written.

    Attributes:
        headline: the table at the head; None if nothing was predicted or measured.
        experts: the load of experts by layer, with a prediction's assumptions; None without experts.
    """

    html: Path
    figures: tuple[Path, ...]
    tables: tuple[Path, ...]
    headline: Table | None = None
    experts: Table | None = None


def write_report(
    folder: str | Path, *, out: str | Path | None = None, plan: Plan | None = None
) -> Report:
    """Write report.html, a PNG per figure and a CSV file per table into `out` (default: report/ in the folder).

    `plan` is the content of plan.json, if it is known already: a large one takes long to read.

    Raises:
        FormatError: see `piper_report.load`.
        OutputError: they cannot be written (no space, no permission); the folder stays as it was.
    """
    results = with_aligned_clocks(load(folder, plan))
    target = Path(out) if out is not None else Path(folder) / "report"
    with house_style():
        sections = _sections(results)
    items = [x for s in sections for x in (*s.items, *s.folded)]
    report = write_files(
        target,
        page(
            f"Piper: {Path(folder).resolve().name}",
            facts_of(results),
            sections,
            answers_of(results),
        ),
        items,
    )
    if report.experts is None:
        return report
    return replace(
        report, experts=replace(report.experts, notes=(*report.experts.notes, *load_note(results)))
    )


def write_files(target: Path, document: str, items: Sequence[PageItem | str]) -> Report:
    """Write a page, a PNG per figure and a CSV file per table into a folder; raise OutputError if that fails."""
    figures = {target / f"{x.name}.png": x.png for x in items if isinstance(x, Picture)}
    tables = {
        target / f"{x.name}.csv": x.frame.to_csv(index=False).encode()
        for x in items
        if isinstance(x, Sheet)
    }
    html = target / "report.html"
    _write(target, {**figures, **tables, html: document.encode()})
    by_name = {x.name: x.table for x in items if isinstance(x, Sheet)}
    return Report(
        html, tuple(figures), tuple(tables), by_name.get("headline"), by_name.get("experts")
    )


def with_aligned_clocks(results: Results) -> Results:
    """Return results whose measured trace is on one clock, as far as the plan tells which spans belong together."""
    if results.plan is None or results.measured_trace is None:
        return results
    return replace(results, measured_trace=aligned(results.plan, results.measured_trace))


def _write(target: Path, files: dict[Path, bytes]) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_whole(path, content)
    except OSError as e:
        raise OutputError(
            f"cannot write the report to {target}: {e.strerror}; the results are untouched: "
            "make room or choose another folder, then `piper report DIR`"
        ) from None


def _sections(results: Results) -> list[PageSection]:
    """Return all chapters; people look for the strategies of a plan and for the training of a run first."""
    return [
        _answer(results), _training(results), _summary(results), _strategy(results), _timeline(results), _why(results),
        _memory(results), _experts(results), _tuning(results), _costs(results),
    ]  # fmt: skip


def _answer(results: Results) -> PageSection:
    """Return the strategies that `piper plan` found; the next chapter has the warnings of the first."""
    if results.answer is None:
        return PageSection("strategies", "Strategies")
    known = results.predicted.notes if results.predicted is not None else ()
    warned = [note for note in results.answer.notes if note.startswith(WARNING)]
    told = [note for note in results.answer.notes if note not in warned]
    item = _saved("strategies", replace(results.answer, notes=tuple(told)))
    return PageSection(
        "strategies",
        results.answer.title,
        [note for note in warned if note.removeprefix(WARNING) not in known],
        [item] if results.answer.rows else told,
    )


def _strategy(results: Results) -> PageSection:
    sheets = stage_sheet(results), strategy_sheet(results)
    return PageSection("strategy", "Strategy and stages", (), [x for x in sheets if x is not None])


def _why(results: Results) -> PageSection:
    tables = results.why.tables if results.why is not None else ()
    titled = [replace(t, title=t.title[:1].upper() + t.title[1:]) for t in tables]
    items = [_saved(f"why{n}", t) for n, t in enumerate(titled, start=1)]
    step = "step" if results.measured is None else "predicted step"
    return PageSection("why", f"Why the {step} takes as long as it does", (), items)


def _saved(name: str, table: SavedTable) -> Sheet:
    """Return a saved table as a sheet; columns without a title need names in the file."""
    columns = [
        Column(title or f"column{k}", title) for k, title in enumerate(table.columns, start=1)
    ]
    return sheet(name, table.title, columns, table.rows, table.notes)


def facts_of(results: Results) -> list[tuple[str, str]]:
    """Return the facts at the head of the page."""
    plan, study = results.plan, results.study
    facts = []
    if plan is not None:
        facts.append(
            (
                "plan",
                f"{plan.key} on {plan.mesh}: {count_text(len(plan.roles), 'role')}, {count_text(plan.mesh.world, 'rank')}",
            )
        )
        tokens = f", {plan.tokens_per_step:,} tokens" if plan.tokens_per_step else ""
        rows = "1 row" if plan.rows == 1 else f"{plan.rows} rows"
        batch = f"{plan.global_batch:,} rows{tokens} per step; {plan.microbatches} microbatches of {rows}"
        facts.append(("batch", batch))
    if results.params:
        facts.append(("parameters", params_text(results.params)))
    if results.predicted_trace is not None and "cluster" in results.predicted_trace.notes:
        facts.append(("predicted for", results.predicted_trace.notes["cluster"]))
    if results.measured is not None:
        done, asked = len(results.measured.step_s), results.measured.steps_asked
        of = "" if asked is None else f" of {asked:,}, then interrupted"
        facts.append(("measured", f"{done:,} steps{of}"))
    facts += _origin(results)
    if study is not None:
        limit = limit_text(study.memory_limit, study.device_limits) or "none"
        ended = "; interrupted, this is what was found until then" if study.interrupted else ""
        text = f"{study.cluster}: {len(study.trials)} candidates, seed {study.seed}, memory limit {limit}{ended}"
        facts.append(("tuned for", text))
        facts += [] if results.answer is not None and results.answer.rows else _best(study)
        facts += [("one word more", text) for text in study.advice]
        facts += [("parameters that", text)] if (text := indifferent_text(study.trials)) else []
    return facts


def _origin(results: Results) -> list[tuple[str, str]]:
    """Return the origin of the results as rows: machine, time, versions, commit, seed and command."""
    provenance = results.origin
    if provenance is None:
        return []
    versions = ", ".join(f"{name} {number}" for name, number in provenance.versions.items())
    seed = "" if provenance.seed is None else str(provenance.seed)
    said = [
        ("made on", provenance.machine),
        ("at", provenance.time),
        ("with", versions),
        ("commit", provenance.commit),
        ("seed", seed),
    ]
    return [(name, text) for name, text in (*said, ("command", provenance.command)) if text]


def _best(study: StudyDocument) -> list[tuple[str, str]]:
    """Return the best candidate of a search, and how many others are within its interval."""
    best = next((t for t in study.trials if t.number == study.best), None)
    if best is None:
        return [("best candidate", "none was found")]
    within = interval_text(study.trials, best, study.interval_share, study.interval_stack)
    return [("best candidate", _told(best)), *([("interval", within)] if within else [])]


def _told(best: Row) -> str:
    times = [("predicted", best.period_s), ("measured", best.measured_period_s)]
    shown = ", ".join(f"{time_text(t)} {name}" for name, t in times if t is not None)
    return f"trial {best.number}, {shown}: {trial_text(best)}"


def _summary(results: Results) -> PageSection:
    items: list[Picture | Sheet | str] = []
    warnings = (
        [f"warning: this run hung; {results.folder / HANG_FILE} says where every rank was"]
        if results.hung
        else []
    )
    if results.predicted is not None:
        oom = results.predicted.oom
        warnings += [f"DOES NOT FIT: {oom.text}"] if oom is not None else []
        # A run that measured the load of experts has that in the place of the note that nobody did.
        measured = results.experts is not None
        warnings += [
            f"warning: {n}"
            for n in results.predicted.notes
            if not (measured and n.startswith(LOAD_NOT_MEASURED))
        ]
        period = results.measured.period_s if results.measured is not None else None
        warnings += far_from_measured(results.predicted.period_s, period, results.predicted.sources)
    if results.predicted is not None or results.measured is not None:
        items += [
            *load_note(results),
            headline(results),
            DEFINITIONS,
            *([OF_MEASURED] if results.measured is not None else []),
        ]
    items += [
        s
        for s in (restart_sheet(results), rank_sheet(results), source_sheet(results))
        if s is not None
    ]
    return PageSection("summary", "Headline", warnings, items)


def _timeline(results: Results) -> PageSection:
    traces = with_spans(results)
    live = live_timeline([TimelineStep("", traces, results.plan)])
    items: list[PageItem | str] = [live] if live is not None else []
    if results.measured_trace is not None:
        clocks = {
            k: v for k, v in results.measured_trace.notes.items() if k.startswith(NOTE.format(""))
        }
        items += [f"Clocks: {_clocks(clocks)}"] if clocks else []
    pictures = timelines(traces, results.plan) if traces else []
    return PageSection("timeline", "Timeline of a step", (), items, pictures)


def _clocks(notes: dict[str, str]) -> str:
    """Return one line in which the same words for many ranks occur once."""
    by_text: dict[str, list[str]] = {}
    for key, text in notes.items():
        by_text.setdefault(text, []).append(key.removeprefix(NOTE.format("")))
    return (
        "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items())
        + " (against the lowest rank)."
    )


def with_spans(results: Results) -> list[Trace]:
    """Return the predicted and the measured trace, as far as they are there and have spans."""
    return [
        t for t in (results.predicted_trace, results.measured_trace) if t is not None and t.spans
    ]


def _memory(results: Results) -> PageSection:
    devices = results.predicted.by_rank() if results.predicted is not None else {}
    drawn = memory_figure(results.predicted_trace, results.measured_trace, results.plan, devices)
    items: Sequence[Picture | Sheet | None] = (drawn, line_sheet(results), owner_sheet(results))
    return PageSection("memory", "Memory", (), [x for x in items if x is not None])


def _training(results: Results) -> PageSection:
    items = [
        x
        for x in (loss_figure(results), gradient_figure(results), step_time_figure(results))
        if x is not None
    ]
    steps = step_sheet(results)
    return PageSection("training", "Training", (), items, [steps] if steps is not None else [])


def _experts(results: Results) -> PageSection:
    history = results.experts
    if history is None:
        return PageSection("experts", "Experts")
    items = (
        layer_sheet(history),
        rank_load_sheet(history, results.plan),
        load_figure(history),
        token_figure(history),
    )
    return PageSection(
        "experts", "Experts", (), [x for x in items if x is not None], [token_sheet(history)]
    )


def _tuning(results: Results) -> PageSection:
    study = results.study
    if study is None:
        return PageSection("tuning", "Tuning")
    if results.answer is not None:  # whose best is the one with contention
        study = replace(study, best=None)
    figures = (history_figure(study), pareto_figure(study), parallel_figure(study))
    sheets = {s.name: s for s in tuning_sheets(results)}
    items: list[Picture | Sheet | str] = [OF_SEARCH] if results.answer is not None else []
    items += [x for x in figures if x is not None]
    items += [sheets[n] for n in ("confirmed", "rejected", "rules") if n in sheets]
    return PageSection(
        "tuning", "Tuning", (), items, [sheets["trials"]] if "trials" in sheets else []
    )


def _costs(results: Results) -> PageSection:
    costs = cost_sheet(results)
    return PageSection(
        "costs", "Costs", (), (), [costs] if costs is not None and len(costs.frame) else []
    )
