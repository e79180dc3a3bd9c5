"""Make the tiles at the head: the loss of a run, whether a plan fits, its speed, the best candidate of a tuning."""

from __future__ import annotations

from math import isfinite

from piper_ir.tools import size_text, time_text
from piper_report.facts.results import HANG_FILE, Measured, Predicted, Results
from piper_report.facts.summary import percent
from piper_report.figures.training_figures import steps_of
from piper_report.pages.page import AnswerTile
from piper_report.tables.tables import error_of, signed_percent
from piper_report.tables.tuning_tables import trial_text


def answers_of(results: Results) -> list[AnswerTile]:
    """Return the figures for the head of the page: loss first for a run, whether it fits first for a plan."""
    hung = AnswerTile("run", "hung", f"{HANG_FILE} says where every rank was", bad=True)
    answers = [hung] if results.hung else []
    answers += [*_loss(results), *_fits(results.predicted), *_step(results)]
    answers += [*_speed(results.predicted, results.measured), *_best(results)]
    return answers


def _loss(results: Results) -> list[AnswerTile]:
    losses = [(step, loss) for step, loss, _ in steps_of(results)]
    if not losses:
        return []
    (_, first), (step, last) = losses[0], losses[-1]
    detail = f"after step {step}; {first:.4g} at first" if len(losses) > 1 else f"in step {step}"
    return [AnswerTile("loss", f"{last:.4g}", detail, bad=not isfinite(last))]


def _fits(predicted: Predicted | None) -> list[AnswerTile]:
    """Return the fullest device against its memory; without a known limit its bytes alone."""
    if predicted is None:
        return []
    if predicted.oom is not None:
        oom = predicted.oom
        detail = f"{size_text(oom.needs_bytes)} of {size_text(oom.limit_bytes)} on {oom.role}"
        return [AnswerTile("memory", "does not fit", detail, bad=True)]
    limits = [
        (r.device_bytes / r.limit_bytes, r.device_bytes, r.limit_bytes)
        for r in (*predicted.ranks, *predicted.roles)
        if r.limit_bytes
    ]
    if not limits:
        detail = "predicted, on the fullest device"
        return [AnswerTile("memory", size_text(predicted.device_bytes), detail)]
    _, used, limit = max(limits)
    detail = f"{size_text(used)} of {size_text(limit)} on the fullest device, predicted"
    return [AnswerTile("memory", "fits", detail)]


def _step(results: Results) -> list[AnswerTile]:
    predicted = results.predicted.period_s if results.predicted is not None else None
    measured = results.measured.period_s if results.measured is not None else None
    seconds = measured if measured is not None else predicted
    if seconds is None:
        return []
    detail = "measured" if measured is not None else "predicted"
    error = error_of(predicted, measured)
    if error is not None and predicted is not None:
        detail = f"measured; {time_text(predicted)} predicted, {signed_percent(error)}"
    return [AnswerTile("step in steady state", time_text(seconds), detail)]


def _speed(predicted: Predicted | None, measured: Measured | None) -> list[AnswerTile]:
    rate = measured.tokens_per_s if measured is not None else None
    word = "measured"
    if rate is None and predicted is not None:
        rate, word = predicted.tokens_per_s, "predicted"
    answers = [] if rate is None else [AnswerTile("tokens per second", f"{rate:,.0f}", word)]
    if predicted is None or predicted.mfu is None:
        return answers
    period = measured.period_s if measured is not None else None
    mfu = predicted.mfu * predicted.period_s / period if period else predicted.mfu
    detail = "measured" if period else "predicted"
    return [*answers, AnswerTile("model FLOP utilisation", percent(mfu), detail)]


def _best(results: Results) -> list[AnswerTile]:
    study = results.study
    answered = results.answer is not None and results.answer.rows
    if study is None or answered:  # the strategies of a plan are simulated with contention
        return []
    best = next((t for t in study.trials if t.number == study.best), None)
    if best is None:
        detail = f"none of {len(study.trials)} candidates can be used"
        return [AnswerTile("best candidate", "none", detail, bad=True)]
    measured = best.measured_period_s
    seconds = measured if measured is not None else best.period_s
    word = "predicted" if measured is None else "measured"
    detail = f"{word}, trial {best.number}: {trial_text(best)}"
    return [AnswerTile("best candidate", "-" if seconds is None else time_text(seconds), detail)]
