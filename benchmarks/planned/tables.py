"""Score strategies of a space, or bound them where a bound says enough, and keep the outcomes in a table.

python -m benchmarks.planned.tables llama3-70b 1000     so many random legal strategies of a large space
python -m benchmarks.planned.tables dense               all strategies of a finite one

A strategy is not compiled where a bound says that it does not fit, or is slower than the best that is known: then the
table has the bound and the name of its rule. The least period of a table is exact.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from benchmarks.planned.spaces import CASES, Case, FiniteSpace, Planned, kept, points
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.scoring import Refused
from piper_autotune.space.rules import PruningRules
from piper_autotune.space.space import SkippedError
from piper_compiler import Strategy

MEASURED = Path(__file__).parent.parent / "measured"
SCORED = ""
"""The rule of a strategy that was scored and fits."""
FIELDS = ("rule", "period_s", "device_bytes", "params")
DRAWS = 100
"""Random draws in a row without a new legal strategy after which a space has no others."""


@dataclass(frozen=True)
class Entry:
    """Hold the outcome of one strategy.

    Attributes:
        params: its choices by name.
        rule: the rule or the reason that rejects it; "" if it fits.
        period_s: its seconds per step, or a bound; None if neither is known.
        device_bytes: of the fullest device, or a bound; None if neither is known.
    """

    params: dict[str, Any]
    rule: str
    period_s: float | None
    device_bytes: int | None


def path_of(case: Case) -> Path:
    """Return the file of a space's table."""
    return MEASURED / f"planned-{case.name}.csv.gz"


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Write a table, with the same bytes for the same entries."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(FIELDS)
    for e in entries:
        period_s = "" if e.period_s is None else repr(e.period_s)
        out.writerow((e.rule, period_s, e.device_bytes, json.dumps(e.params)))
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read(path: Path) -> list[Entry]:
    """Return the entries of a table."""
    lines = csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
    return [
        Entry(
            json.loads(line["params"]),
            line["rule"],
            float(line["period_s"]) if line["period_s"] else None,
            int(line["device_bytes"]) if line["device_bytes"] else None,
        )
        for line in lines
    ]


def least(entries: Iterable[Entry]) -> float:
    """Return the least seconds per step of the strategies that fit."""
    return min(e.period_s for e in entries if e.rule == SCORED and e.period_s is not None)


def outcomes(
    of: Planned, strategies: Iterable[tuple[dict[str, Any], Strategy]], known_s: float
) -> Iterator[Entry]:
    """Yield the outcome of each strategy; one that a bound says to take longer than the best known is not scored."""
    rules, here = PruningRules(of.problem, of.programs), Here(of.problem, of.programs)
    for params, strategy in strategies:
        pruned = rules.check(strategy, known_s)
        if pruned is not None:
            yield Entry(params, pruned.rule, pruned.period_s, pruned.device_bytes)
            continue
        scored = here.result(here.submit(strategy))
        if isinstance(scored, Refused):
            yield Entry(params, scored.kind, None, None)
            continue
        rule = "memory" if scored.reason else SCORED
        if rule == SCORED:
            known_s = min(known_s, scored.period_s)
        yield Entry(params, rule, scored.period_s, scored.device_bytes)


def starts(space: Any) -> Iterator[tuple[dict[str, Any], Strategy]]:
    """Yield the strategies with which a search of a space begins."""
    for start in space.starts:
        yield _made(space, optuna.trial.FixedTrial(dict(start)))


def draws(space: Any, number: int, seed: int = 1) -> Iterator[tuple[dict[str, Any], Strategy]]:
    """Yield random legal strategies: each parameter's values are equally probable."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    seen: set[str] = set()
    repeats = 0
    while len(seen) < number and repeats < DRAWS:
        try:
            params, strategy = _made(space, study.ask())
        except SkippedError:
            continue
        text = json.dumps(params, sort_keys=True)
        repeats = repeats + 1 if text in seen else 0
        if not repeats:
            seen.add(text)
            yield params, strategy


def _made(space: Any, trial: Any) -> tuple[dict[str, Any], Strategy]:
    trial.skip = _skip
    strategy = space(trial)
    return dict(trial.params), strategy


def _skip(reason: str) -> None:
    raise SkippedError(reason)


def evaluate(case: Case, number: int) -> Iterator[Entry]:
    """Yield the outcomes of all strategies of a finite space, or else of a search's first ones and of random ones."""
    of = kept(case)
    first = list(outcomes(of, starts(of.space), float("inf")))
    if not isinstance(of.space, FiniteSpace):
        yield from first
        yield from outcomes(of, draws(of.space, number), least(first))
        return
    some = list(outcomes(of, draws(of.space, number), least(first)))
    yield from outcomes(of, points(of.space), least([*first, *some]) * (1 + 1e-12))


def main(argv: Sequence[str]) -> None:
    """Make the table of one space."""
    if not argv or argv[0] not in CASES:
        raise SystemExit(f"{__doc__}\nspaces: {', '.join(CASES)}")
    case = CASES[argv[0]]
    number = int(argv[1]) if len(argv) > 1 else 200
    entries: list[Entry] = []
    for entry in evaluate(case, number):
        entries.append(entry)
        if len(entries) % 50 == 0:
            print(f"{len(entries):,}", file=sys.stderr, flush=True)
            write(path_of(case), entries)
    write(path_of(case), entries)
    fits = sum(e.rule == SCORED for e in entries)
    print(f"{len(entries):,} strategies, {fits:,} scored that fit, best {least(entries):.6g} s")


if __name__ == "__main__":
    main(sys.argv[1:])
