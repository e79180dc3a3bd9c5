"""Score strategies of a space, or bound them where a bound says enough, and keep the outcomes in a table.

python -m benchmarks.planned.tables llama3-70b 1000     so many random legal strategies of a large space
python -m benchmarks.planned.tables dense               all strategies of a finite one

A strategy is not compiled where a bound says that it does not fit, or is slower than the best that is known: of these
the table has only their number by rule, with the least bounds. The least period of a table is exact.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import optuna

from benchmarks.planned.spaces import CASES, Case, FiniteSpace, Planned, cell, kept, points
from piper_autotune import tune
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.scoring import Refused
from piper_autotune.space.rules import MESSAGES, RULES, Pruned, PruningRules
from piper_autotune.space.space import SkippedError
from piper_compiler import Strategy

MEASURED = Path(__file__).parent.parent / "measured"
SCORED = ""
"""The rule of a strategy that was scored and fits."""
FIELDS = ("rule", "number", "period_s", "device_bytes", "params")
DRAWS = 100
"""Random draws in a row without a new legal strategy after which a space has no others."""
TRIALS = 100
"""The trials of a search whose best bounds all strategies of a finite space."""
SHARED = ("zero", "bucket_mb", "prefetch", "resident_mb")
"""The choices on which the compute of a device does not depend."""
SHOWN = 5_000
"""The strategies between two lines about how far a table is."""


@dataclass(frozen=True)
class Entry:
    """Hold the outcome of one strategy, or of all strategies that a rule rejects.

    Attributes:
        params: its choices by name; none for several strategies.
        rule: the rule or the reason that rejects it; "" if it fits.
        period_s: its seconds per step, or the least bound; None if neither is known.
        device_bytes: of the fullest device, or the least bound; None if neither is known.
        number: of strategies.
    """

    params: dict[str, Any]
    rule: str
    period_s: float | None
    device_bytes: int | None
    number: int = 1


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
        out.writerow((e.rule, e.number, period_s, e.device_bytes, json.dumps(e.params)))
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
            int(line["number"]),
        )
        for line in lines
    ]


def folded(entries: Iterable[Entry]) -> list[Entry]:
    """Return the strategies that were scored, and one entry for all that a rule bounds, with their least bounds."""
    scored, bounded = list[Entry](), dict[str, Entry]()
    for entry in entries:
        if entry.rule not in RULES:
            scored.append(entry)
            continue
        other = bounded.setdefault(entry.rule, replace(entry, params={}, number=0))
        bounded[entry.rule] = replace(
            other,
            period_s=_lesser(entry.period_s, other.period_s),
            device_bytes=_lesser(entry.device_bytes, other.device_bytes),
            number=other.number + entry.number,
        )
    return [*scored, *bounded.values()]


def _lesser(one: Any, other: Any) -> Any:
    return min((value for value in (one, other) if value is not None), default=None)


def least(entries: Iterable[Entry]) -> float:
    """Return the least seconds per step of the strategies that fit."""
    return min(e.period_s for e in entries if e.rule == SCORED and e.period_s is not None)


def outcomes(
    of: Planned, strategies: Iterable[tuple[dict[str, Any], Strategy]], known_s: float
) -> Iterator[Entry]:
    """Yield the outcome of each strategy; one that a bound says to take longer than the best known is not scored."""
    here, checks = Here(of.problem, of.programs), _Checks(of)
    for params, strategy in strategies:
        pruned = checks.check(params, strategy, known_s)
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


class _Checks:
    """Check strategies by the rules; a bound of compute holds for all that share states in another way.

    The rules remember the graphs of all strategies, and are made anew for other sizes of the axes, to save memory.
    """

    def __init__(self, of: Planned) -> None:
        self._of = of
        self._cell: tuple[int, ...] = ()
        self._computing: dict[tuple[Any, ...], Pruned] = {}

    def check(self, params: dict[str, Any], strategy: Strategy, known_s: float) -> Pruned | None:
        """Return the first rule that rejects a strategy."""
        if cell(params) != self._cell:
            self._rules = PruningRules(self._of.problem, self._of.programs)
            self._cell, self._computing = cell(params), {}
        key = tuple(item for item in params.items() if item[0] not in SHARED)
        pruned = self._computing.get(key) or self._rules.check(strategy, known_s)
        if pruned is not None and pruned.rule == "slower" and MESSAGES not in pruned.reason:
            self._computing[key] = pruned
        return pruned


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
    if isinstance(of.space, FiniteSpace):
        study = tune(of.problem, of.space, trials=TRIALS, workers=0, rescore=False, **of.more)
        best = study.best_row
        assert best is not None and best.period_s is not None
        yield from outcomes(of, points(of.space), best.period_s * (1 + 1e-12))
        return
    first = list(outcomes(of, starts(of.space), float("inf")))
    yield from first
    yield from outcomes(of, draws(of.space, number), least(first))


def _told(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries, and say now and then how many there were."""
    scored = 0
    for at, entry in enumerate(entries, start=1):
        scored += entry.rule not in RULES
        if not at % SHOWN:
            text = f"{at:,} strategies, {scored:,} scored, {process_time():,.0f} CPU s"
            print(text, file=sys.stderr, flush=True)
        yield entry


def main(argv: Sequence[str]) -> None:
    """Make the table of one space."""
    if not argv or argv[0] not in CASES:
        raise SystemExit(f"{__doc__}\nspaces: {', '.join(CASES)}")
    case = CASES[argv[0]]
    number = int(argv[1]) if len(argv) > 1 else 200
    entries = folded(_told(evaluate(case, number)))
    write(path_of(case), entries)
    every = sum(e.number for e in entries)
    fits = sum(e.rule == SCORED for e in entries)
    print(f"{every:,} strategies, {fits:,} scored that fit, best {least(entries):.6g} s")
    print(f"{process_time():,.0f} CPU s")


if __name__ == "__main__":
    main(sys.argv[1:])
