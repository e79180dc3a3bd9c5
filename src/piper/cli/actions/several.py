"""Simulate several choices of a strategy's parameters, as one table: `piper simulate FILE.py -p tp=2,4 -p zero=1,3`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from piper.api.captures.capturing import captured_once
from piper.cli.actions.predicting import Target, asked_target
from piper.cli.arguments import SimulateArguments
from piper.cli.given import pairs
from piper.cli.loading import load_file
from piper.cli.pipes import show_json
from piper.views.display import show
from piper_ir.ground.errors import JobError, PiperError
from piper_ir.tools import size_text, time_text, working
from piper_report import Table
from piper_simulator import Simulation

MOST = 1_000
"""The most choices of a table."""


def asked(arguments: SimulateArguments) -> bool:
    """Return whether a parameter has several values."""
    return any("," in value for value in pairs(arguments.params).values())


def simulated(arguments: SimulateArguments) -> None:
    """Simulate all choices as one table; raise JobError for options that are for one strategy."""
    a = arguments
    if a.why or a.versus or a.other or a.strategy or a.out or a.memory_snapshot or a.jitter:
        raise JobError(
            "-p NAME=A,B makes a table of several strategies; --why, --jitter, --memory-snapshot, --out, --strategy, "
            "--versus and a second file are for one"
        )
    target = asked_target(a)
    with captured_once():
        predict_several(a.file, choices(pairs(a.params)), target, as_json=a.as_json)


def choices(params: Mapping[str, str]) -> list[dict[str, str]]:
    """Return every choice of parameters whose values are separated by commas; raise JobError for too many."""
    names = list(params)
    values = [params[name].split(",") for name in names]
    if any(not value for each in values if len(each) > 1 for value in each):
        raise JobError("-p NAME=A,B: a value is empty between two commas")
    count = 1
    for each in values:
        count *= len(each)
    if count > MOST:
        raise JobError(f"-p gives {count} choices; a table has at most {MOST}: use piper tune")
    return [dict(zip(names, chosen)) for chosen in product(*values)]


@dataclass(frozen=True)
class Tried:
    """Hold a choice with its prediction, or with the reason why there is none."""

    params: Mapping[str, str]
    simulation: Simulation | None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for programs."""
        summary = None if self.simulation is None else self.simulation.summary()
        return {"params": dict(self.params), "reason": self.reason or None, "prediction": summary}


def predict_several(
    path: Path, every: Sequence[Mapping[str, str]], target: Target, *, as_json: bool
) -> None:
    """Simulate each choice and print a row for it; raise the first error if none can be simulated."""
    tried: list[Tried] = []
    first: PiperError | None = None
    for number, params in enumerate(every, 1):
        with working(f"simulating {number} of {len(every)}"):
            try:
                result = target.simulated(target.compiled(load_file(path, params)).plan)
            except PiperError as e:  # one that is refused leaves the others
                first = first or e
                tried.append(Tried(params, None, str(e)))
            else:
                tried.append(Tried(params, result))
    if first is not None and all(one.simulation is None for one in tried):
        raise first
    if as_json:
        show_json([one.as_dict() for one in tried])
    else:
        show(_table(path.stem, target.cluster.name, tried))


def _table(name: str, cluster: str, tried: Sequence[Tried]) -> Table:
    names = list(tried[0].params)
    columns = (*names, "s/step", "tokens/s", "MFU", "fullest device", "fits")
    rows = tuple((*one.params.values(), *_cells(one.simulation)) for one in tried)
    return Table(f"{name} on {cluster}: {len(tried)} choices", columns, rows, tuple(_notes(tried)))


def _cells(simulation: Simulation | None) -> tuple[str, ...]:
    if simulation is None:
        return ("refused", "", "", "", "")
    rate, mfu = simulation.tokens_per_s, simulation.mfu
    return (
        time_text(simulation.period_s),
        "" if rate is None else f"{rate:,.0f}",
        "" if mfu is None else f"{mfu:.1%}",
        size_text(max(simulation.device_bytes)),
        "yes" if simulation.fits else "no",
    )


def _notes(tried: Sequence[Tried]) -> list[str]:
    """Return the fastest choice that fits, and the reason of each that was refused."""
    fitting = [one for one in tried if one.simulation is not None and one.simulation.fits]
    best = min(fitting, key=lambda one: one.simulation.period_s, default=None)  # type: ignore[union-attr]  # by the filter
    notes = [f"the fastest that fits: {_text(best.params)}"] if best is not None else ["none fits"]
    return notes + [f"{_text(one.params)}: {one.reason}" for one in tried if one.reason]


def _text(params: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items())
