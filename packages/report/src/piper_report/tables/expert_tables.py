"""Make the tables of the load of experts: by layer, by rank and by expert; and give a prediction's assumption of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from piper_ir.plan.plan import Plan
from piper_ir.tools import ranks_text
from piper_report.facts.expert_history import (
    RECENT,
    ExpertHistory,
    LayerLoad,
    LoadHistory,
    over_mean,
    ranks_over_mean,
)
from piper_report.facts.results import Results
from piper_report.facts.summary import percent
from piper_report.tables.tables import Column, Sheet, sheet

MOST_ROWS = 10
"""The most layers or ranks with a row of their own on the page."""
EVERY = "all layers"


def layer_sheet(history: ExpertHistory) -> Sheet:
    """Return how full the fullest expert and the fullest rank of each layer are, over the steps of a run.

    The page shows the layers with the fullest experts; the file has all.
    """
    layers = [*history.layers.values()]
    columns = [Column("module", "layer")]
    for key in ("expert", "rank"):
        columns += [Column(f"{key}_mean", f"{key}: mean", _load), Column(f"{key}_worst", "worst", _load),
                    Column(f"{key}_worst_step", "in step"), Column(f"{key}_last", _last(history), _load)]  # fmt: skip
    columns += [Column("overflow", "no place", percent), Column("dropped", "dropped", percent)]
    every = [_row(EVERY, layers, history)] if len(layers) > 1 else []
    rows = {layer.module: _row(layer.module, [layer], history) for layer in layers}
    worst = [max(layers, key=lambda x: _worst(x.expert))]
    worst += [max(layers, key=lambda x: _worst(x.rank))] if any(x.ranks > 1 for x in layers) else []
    fullest = [*worst, *sorted(layers, key=lambda layer: -(layer.expert.mean or 0.0))]
    chosen = [*dict.fromkeys(layer.module for layer in fullest)][:MOST_ROWS]
    shown = [rows[layer.module] for layer in layers if layer.module in chosen]
    title = f"Load of experts in {_steps(len(history.steps))}"
    notes = [_words(layers)]
    if len(shown) < len(layers):
        notes.append(
            f"{len(shown)} of {len(layers)} layers, the worst and those with the highest means; "
            f"experts.csv has all."
        )
    page = [*every, *shown]
    if not any(layer.overflow for layer in layers):  # as of dropless experts
        page = [
            [
                None if column.name == "overflow" else v
                for column, v in zip(columns, row, strict=True)
            ]
            for row in page
        ]
    page_sheet = sheet("experts", title, columns, page, tuple(notes))
    return replace(
        page_sheet, frame=sheet("experts", title, columns, [*every, *rows.values()]).frame
    )


def _words(layers: Sequence[LayerLoad]) -> str:
    shared = " and rank" if any(layer.ranks > 1 for layer in layers) else ""
    words = [f"Tokens of the fullest expert{shared} over the mean of all; 1 is even"]
    words += (
        ["no place: choices that found their expert full"]
        if any(layer.overflow for layer in layers)
        else []
    )
    words += (
        ["dropped: rows that found no place on a device"]
        if any(layer.dropped is not None for layer in layers)
        else []
    )
    return f"{'; '.join(words)}."


def _row(name: str, layers: Sequence[LayerLoad], history: ExpertHistory) -> list[Any]:
    row: list[Any] = [name]
    for kind in ([layer.expert for layer in layers], [layer.rank for layer in layers]):
        worst = max(
            [highest for loads in kind if (highest := loads.worst())],
            key=lambda w: (w[0], -w[1]),
            default=None,
        )
        row += [
            _mean(loads.mean for loads in kind),
            *((worst[0], history.steps[worst[1]]) if worst else (None, None)),
        ]
        row += [_mean(loads.recent for loads in kind) if len(history.steps) > RECENT else None]
    choices = sum(sum(layer.tokens) for layer in layers) or 1
    dropped = [layer.dropped for layer in layers if layer.dropped is not None]
    return [
        *row,
        sum(layer.overflow for layer in layers) / choices,
        sum(dropped) / choices if dropped else None,
    ]


def rank_load_sheet(history: ExpertHistory, plan: Plan | None) -> Sheet | None:
    """Return how full the experts of each rank are; None if no ranks share experts."""
    ranks = max(layer.ranks for layer in history.layers.values())
    layers = [layer for layer in history.layers.values() if layer.ranks == ranks]
    if ranks == 1 or plan is None:
        return None
    size = len(layers[0].tokens) // ranks
    recent = [ranks_over_mean(layer.recent_tokens(), ranks) for layer in layers]
    owners: dict[int, list[int]] = {}
    for rank in range(plan.mesh.world):
        owners.setdefault(plan.mesh.index_along(plan.experts, rank), []).append(rank)
    rows: list[list[Any]] = []
    for place in range(ranks):
        worst = max(layers, key=lambda layer: layer.by_rank.worst[place])
        total, steps = (
            sum(layer.by_rank.totals[place] for layer in layers),
            sum(layer.by_rank.steps for layer in layers),
        )
        same = len({len(layer.tokens) for layer in layers}) == 1
        experts = (
            (f"{place * size}-{(place + 1) * size - 1}" if size > 1 else f"{place}")
            if same
            else None
        )
        mean = total / steps if steps else None
        last = _mean(of[place] for of in recent if of) if len(history.steps) > RECENT else None
        at = history.steps[worst.by_rank.at[place]]
        rows.append(
            [
                place,
                ranks_text(owners[place]),
                experts,
                mean,
                worst.by_rank.worst[place],
                at,
                worst.module,
                last,
            ]
        )
    columns = [Column("part", "+".join(plan.experts)), Column("ranks", "ranks"), Column("experts", "experts"),
               Column("mean", "mean", _load), Column("worst", "worst", _load), Column("worst_step", "in step"),
               Column("worst_layer", "in layer"), Column("last", _last(history), _load)]  # fmt: skip
    fullest = sorted(rows, key=lambda row: -(row[3] or 0.0))[:MOST_ROWS]
    shown = [row for row in rows if row in fullest]
    notes = ["Tokens of a rank's experts over the mean of all ranks, in all layers."]
    notes += (
        [f"{len(shown)} of {ranks} rows, the fullest; expert_ranks.csv has all."]
        if len(shown) < ranks
        else []
    )
    title = "Load of experts by rank"
    page_sheet = sheet("expert_ranks", title, columns, shown, tuple(notes))
    return replace(page_sheet, frame=sheet("expert_ranks", title, columns, rows).frame)


def token_sheet(history: ExpertHistory) -> Sheet:
    """Return how full each expert is: over all steps, and over the last ones."""
    rows = []
    for layer in history.layers.values():
        steps, size = len(layer.expert.known()) or 1, len(layer.tokens) // layer.ranks
        over = [over_mean(tokens) for tokens in (layer.tokens, layer.recent_tokens())]
        for expert, tokens in enumerate(layer.tokens):
            loads = [of[expert] if of else None for of in over]
            rows.append(
                (
                    layer.module,
                    expert,
                    expert // size if layer.ranks > 1 else None,
                    tokens / steps,
                    *loads,
                )
            )
    columns = [Column("module", "layer"), Column("expert", "expert"), Column("part", "part"),
               Column("tokens", "tokens per step", lambda v: f"{v:,.1f}"), Column("mean", "over the mean", _load),
               Column("last", _last(history), _load)]  # fmt: skip
    return sheet("expert_tokens", "Tokens of each expert", columns, rows)


def load_note(results: Results) -> tuple[str, ...]:
    """Return a sentence on the load that a prediction assumed beside the one that its run measured."""
    history, predicted = (
        results.experts,
        results.predicted.load if results.predicted is not None else None,
    )
    if history is None or predicted is None:
        return ()
    mean, worst = history.rank_of_step.mean, history.rank_of_step.worst()
    if mean is None or worst is None:
        return (
            "Each device has all experts of its layers, so that no predicted time depends on their load.",
        )
    capacity = "experts with a capacity compute all their places, so that no time depends on it"
    dropless = f"predict with that by piper simulate FILE.py --load {results.folder}"
    return (
        f"Load of experts on the fullest rank: predicted for {predicted.mean:.3g} ({predicted.source}), measured "
        f"{mean:.3g} over {_steps(len(history.steps))}, at most {worst[0]:.3g} in step {history.steps[worst[1]]}; "
        f"{dropless if _trades_rows(results.plan) else capacity}",
    )


def _trades_rows(plan: Plan | None) -> bool:
    """Return whether ranks trade rows of dropless experts inside of steps, which the load then makes longer."""
    chunks = (
        [chunk for chunk in plan.chunks if chunk.experts and "F" in chunk.steps]
        if plan is not None
        else []
    )
    return any(c.axis == chunk.experts for chunk in chunks for c in chunk.steps["F"].collectives)


def _worst(loads: LoadHistory) -> float:
    highest = loads.worst()
    return highest[0] if highest else 0.0


def _mean(values: Iterator[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _load(value: float) -> str:
    return f"{value:.2f}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _last(history: ExpertHistory) -> str:
    return f"last {min(RECENT, len(history.steps))}"
