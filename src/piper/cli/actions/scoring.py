"""Run `piper accuracy`: predict published runs, score the predictions, explain one, and fit a stack to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log
from pathlib import Path
from typing import Any

from piper.api.ground.results import writing
from piper.cli.accuracy_options import AccuracyArguments
from piper.cli.interrupts import INTERRUPTED
from piper.cli.pipes import show_json
from piper.published.convert import readings
from piper.published.fitting import FAR, fit
from piper.published.plans import plan_of
from piper.published.run_cluster import ON, cluster_of, stack_named
from piper.published.scoring import HEADLINE, RunPrediction, Scores, by_model, predict, scores
from piper.published.sensitivity import sensitivities
from piper.published.stack_file import check_target, write_stack
from piper.published.table import PublishedRow, read_rows, write_rows
from piper.views.accuracy_tables import fit_table, prediction_table, score_table, why_table
from piper.views.display import show
from piper_ir.ground.errors import JobError
from piper_ir.tools import check_writable, count_text, working
from piper_simulator import Device, Stack, holds_for, stacks_of, step_parts


def accuracy(arguments: AccuracyArguments) -> int:
    """Print the scores of a table's predictions, an explanation or a fit, and return the exit code."""
    a = arguments
    _check_together(a)
    rows = read_rows(a.table, a.rows if a.why is None else str(a.why))
    stack = None if a.stack is None else stack_named(a.stack)
    if a.why is not None:
        if len(rows) > 1:
            cases = ", ".join(row.case for row in rows[:3])
            raise JobError(
                f"--why {a.why}: {len(rows)} rows have such a case; name one, such as {cases}"
            )
        return _explained(a, rows[0], stack)
    for flag, file in (("--fit", a.fit), ("--out", a.out)):
        if file is not None:  # before the work, which may take minutes
            with writing(file, flag):
                check_writable(file)
            if file.exists() and file.samefile(a.table):
                raise JobError(f"{flag} {file} is the table itself; name another file")
    if a.fit is not None:
        return _fitted(a, rows, stack)
    by_row: dict[int, RunPrediction] = {}
    interrupted = False
    try:
        for k, at in enumerate(by_model(rows)):
            with working(f"row {k + 1} of {len(rows)}"):
                by_row[at] = predict(rows[at], stack=stack)
    except KeyboardInterrupt:  # minutes of work are shown and kept
        interrupted = True
        if not by_row:
            raise
    predictions = [by_row[at] for at in sorted(by_row)]
    found = scores(predictions)
    if a.out is not None:
        with writing(a.out):
            own = {"stack": a.stack} if a.stack is not None else {}
            write_rows(a.out, [p.columns() | own for p in predictions])
    warnings = _warnings(predictions, stack)
    if interrupted:
        warnings.append(f"warning: interrupted behind {len(predictions)} of {len(rows)} rows")
    if a.as_json:
        warned = [text.removeprefix("warning: ") for text in warnings]
        show_json({**_numbers(found), "warnings": warned})
    else:
        show(prediction_table(predictions, warnings))
        show(score_table(found))
    if interrupted:
        return INTERRUPTED
    missed = a.at_most is not None and (found.macro is None or found.macro > a.at_most)
    return int(missed)


def _check_together(a: AccuracyArguments) -> None:
    """Raise JobError for an option that has no use beside another one, or without one."""
    usual = AccuracyArguments(table=a.table)
    by, unused = "without --fit", ["free"]
    if a.why is not None:
        by, unused = "beside --why", ["rows", "out", "at_most", "fit", "free"]
    elif a.fit is not None:
        by, unused = "beside --fit", ["out", "at_most"]
    for name in unused:
        if getattr(a, name) != getattr(usual, name):
            raise JobError(f"--{name.replace('_', '-')} has no use {by}; leave it out")
    if a.fit is not None and a.fit.name and a.fit.suffix != ".toml":
        raise JobError(f"--fit {a.fit}: --stack reads files that end in .toml, such as mine.toml")


def _warnings(predictions: Sequence[RunPrediction], stack: Stack | None) -> list[str]:
    """Return warnings about rows that were predicted; `stack` is that of --stack."""
    known = [(p, cluster_of(p.row, stack).device) for p in predictions if not p.refused]
    devices = [device for _, device in known]
    return [*_unfitted(known), *_elsewhere(devices), *_doubtful(known)]


def _unfitted(known: Sequence[tuple[RunPrediction, Device]]) -> list[str]:
    """Return a warning for each device on which rows have no stack, or facts of another device's."""
    rows: dict[tuple[str, str], list[str]] = {}
    for p, device in known:
        if not p.stack or ON in p.stack:
            rows.setdefault((device.name, p.stack), []).append(p.row.case)
    texts = []
    for (device_name, name), cases in rows.items():
        there = ", ".join(stacks_of(device_name))
        how = (
            f"facts are those of {name.partition(ON)[0]}, constants those of {there}"
            if name
            else "none is used"
        )
        more = f"; --stack takes one of {there}" if there else ""
        texts.append(
            f"warning: {_some(cases)}: no stack of {device_name} has the words of source and note; {how}, and intervals "
            f"are wide{more}"
        )
    return texts


def _some(cases: Sequence[str]) -> str:
    """Return how many rows there are, with the first cases."""
    return f"{count_text(len(cases), 'row')} ({', '.join(cases[:3])}{', ...' if len(cases) > 3 else ''})"


def _elsewhere(devices: Sequence[Device]) -> list[str]:
    """Return a warning for each stack, of --stack or of a row, that has constants of other devices than its rows."""
    others: dict[str, tuple[Stack, list[str]]] = {}
    for device in devices:
        if device.stack is not None and not holds_for(device.stack, device.name):
            others.setdefault(device.stack.name, (device.stack, []))[1].append(device.name)
    return [
        f"warning: the constants of {name} hold for {', '.join(one.devices)} and not for "
        f"{', '.join(dict.fromkeys(names))}, of {count_text(len(names), 'row')}, so that the interval is as wide as "
        f"without a stack"
        for name, (one, names) in others.items()
    ]


def _doubtful(known: Sequence[tuple[RunPrediction, Device]]) -> list[str]:
    """Return warnings for rows that may have a wrong value in a column.

    The prediction of such a row needs more memory than its device has, or is `FAR` times away from the measured step.
    """
    texts = []
    needed = [  # a run that was measured has fitted, so that its allocator has reserved less
        (p.reserved_gib if p.row.step_s is None else p.peak_gib) * p.row.peak_unit for p, _ in known
    ]
    full = [
        p.row.case
        for (p, device), nbytes in zip(known, needed, strict=True)
        if nbytes > device.memory_bytes
    ]
    measured = [p for p, _ in known if p.row.step_s is not None]
    far = [p.row.case for p in measured if abs(log(p.step_s / (p.row.step_s or 1))) > log(FAR)]
    larger = [
        p.row.case for p, d in known if (p.row.peak_gib or 0) * p.row.peak_unit > d.memory_bytes
    ]
    for cases, said in (
        (
            full,
            "predicted is more memory than the device has; check the columns zero, recompute and micro_batch",
        ),
        (
            far,
            f"predicted is a step that is more than {FAR:g} times away from the measured one; check that step_s is in "
            "seconds",
        ),
        (larger, "measured is more memory than the device has; check that peak_gib is in GiB"),
    ):
        if cases:
            texts.append(f"warning: {_some(cases)}: {said}")
    return texts


def _numbers(found: Scores) -> dict[str, Any]:
    return {
        "macro": found.macro,
        "refused": found.refused,
        "sources": [s.as_dict() for s in found.sources],
        "rows": [
            {
                "case": p.row.case,
                "stack": p.stack,
                "refused": p.refused,
                "notes": list(p.notes),
                "measured_step_s": p.row.step_s,
                "step_s": list(p.seconds),
                "interval": [p.low, p.high] if p.seconds else None,
                "allocated_gib": p.peak_gib if p.seconds else None,
                "reserved_gib": p.reserved_gib if p.seconds else None,
            }
            for p in found.predictions
        ],
    }


def _explained(a: AccuracyArguments, row: PublishedRow, stack: Stack | None) -> int:
    """Print the parts of the step of one row."""
    if row.unread:
        raise JobError(f"{a.table}, {row.unread}")
    every = list(readings(row))
    reading = every[0]
    differ = [n for n in ("vpp", "micro_batch") if len({getattr(r, n) for r in every}) > 1]
    said = " and ".join(f"{n} = {getattr(reading, n)}" for n in differ)
    run, plan = plan_of(reading, stack)
    parts = step_parts(plan, run.cluster)
    changes = sensitivities(reading, run.cluster.device.stack)
    if a.as_json:
        show_json({"case": row.case, "parts": vars(parts), "derivatives": changes})
    else:
        show(why_table(row, run.cluster.name, parts, changes, said))
    return 0


def _fitted(a: AccuracyArguments, rows: Sequence[PublishedRow], stack: Stack | None) -> int:
    """Fit a stack to rows, write it, and print its constants."""
    assert a.fit is not None
    rows, left_out = _to_be_fitted(rows, stack)
    if not rows:
        raise JobError(f"--fit: no row of {a.table} can be fitted: {'; '.join(left_out)}")
    names = {s.name for s in (cluster_of(r).device.stack for r in rows) if s is not None}
    if stack is None and len(names) != 1:
        raise JobError(
            f"--fit needs rows of one stack, and these are of {', '.join(sorted(names)) or 'none'}; choose rows by "
            f"--rows, or name the stack from whose constants the fit starts by --stack"
        )
    start = stack or stack_named(names.pop())
    for r in rows:
        device = cluster_of(r, start).device.name
        if not holds_for(start, device):
            raise JobError(
                f"--fit: {r.case} is of {device}, and {start.name} of {', '.join(start.devices)}; choose rows of one "
                f"device by --rows"
            )
    check_target(Path(a.fit), start)
    free = [name.strip() for name in a.free.split(",") if name.strip()]

    def predicted(chosen: Sequence[PublishedRow], changed: Stack) -> list[RunPrediction]:
        return list(map(partial(predict, stack=changed, memory=False), chosen))

    with working("fitting"):
        found = fit(rows, start, free, predicted)
    write_stack(Path(a.fit), found.stack, a.stack or start.name)
    if a.as_json:
        values = {n: vars_of(c) for n, c in found.stack.constants.items()}
        numbers = {"before": found.before, "after": found.after, "constants": values}
        show_json({**numbers, "left_out": left_out})
    else:
        show(fit_table(found, str(a.fit), left_out))
    return 0


def _to_be_fitted(
    rows: Sequence[PublishedRow], stack: Stack | None
) -> tuple[list[PublishedRow], list[str]]:
    """Return the rows that a fit takes, and notes on the others: not measured, in another block, or not predicted."""
    taken: list[PublishedRow] = []
    others: dict[str, list[str]] = {}
    for row in rows:
        why = row.unread or ("" if row.step_s is not None else "step_s is empty")
        if not why and row.block != HEADLINE:
            why = f'block is "{row.block}", and "{HEADLINE}" is fitted'
        if not why:
            why = predict(row, stack=stack, memory=False).refused
        if why:
            others.setdefault(why, []).append(row.case)
        else:
            taken.append(row)
    return taken, [f"left out: {_some(cases)}: {why}" for why, cases in others.items()]


def vars_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record with slots by name."""
    return {name: getattr(record, name) for name in record.__slots__}
