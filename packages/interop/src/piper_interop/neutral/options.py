"""Give the verdict on every option of another system: a table of rows as data, and the judgement of a job.

An option that no row names is an error: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from piper_interop.neutral.foreign import Foreign
from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text

SAYS_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], (), {})
"""The values with which an option asks for nothing, unless its row lists others."""


@dataclass(frozen=True)
class Mapped:
    """Say that an option becomes part of the job or the strategy; `to` names the part."""

    to: str


@dataclass(frozen=True)
class Ignored:
    """Say that an option changes neither memory nor time of a step, and why."""

    reason: str


@dataclass(frozen=True)
class Nearest:
    """Say that an option is taken in the nearest form.

    Attributes:
        how: the form in which it is taken.
        direction: how the prediction differs from the truth because of that, such as "predicted too fast".
        unless: the values with which the option asks for nothing.
        when: whether the option matters beside the others; without it, it does.
    """

    how: str
    direction: str
    unless: tuple[Any, ...] = SAYS_NOTHING
    when: Callable[[Foreign], bool] | None = None


@dataclass(frozen=True)
class Unsupported:
    """Say that an option cannot be said here, and changes memory or time too much to leave it out.

    Attributes:
        missing: the thing that is missing, as a noun.
        instead: the way out.
        unless: the values with which the option asks for nothing.
        stand_in: the name with which `--as NAME` accepts a stand-in; "" if there is none.
        how: the stand-in in words, with the direction in which the prediction differs.
        when: whether the option matters beside the others; without it, it does.
    """

    missing: str
    instead: str
    unless: tuple[Any, ...] = SAYS_NOTHING
    stand_in: str = ""
    how: str = ""
    when: Callable[[Foreign], bool] | None = None


OptionRow = Mapped | Ignored | Nearest | Unsupported
OptionTable = Mapping[str, OptionRow | tuple[OptionRow, ...]]
"""The rows by the option's full name, or by a pattern such as "checkpoint.*".

A name goes before patterns, and longer patterns before shorter ones. Of several rows of an option the first one holds
that its value concerns.
"""


@dataclass(frozen=True)
class OptionVerdict:
    """Hold the verdict on one option: its name, and its value with the reason as text."""

    option: str
    text: str


@dataclass(frozen=True)
class Judgement:
    """Hold the verdicts on all options of a job.

    Attributes:
        mapped: the options that are parts of the job and the strategy.
        ignored: the options that change no step, with the reasons.
        nearest: the options in the nearest form, with how and the direction.
        stand_ins: the options for which a stand-in was accepted, with how.
        refused: the options that cannot be said, with the way out.
        unknown: the options that no row names.
    """

    mapped: tuple[OptionVerdict, ...] = ()
    ignored: tuple[OptionVerdict, ...] = ()
    nearest: tuple[OptionVerdict, ...] = ()
    stand_ins: tuple[OptionVerdict, ...] = ()
    refused: tuple[OptionVerdict, ...] = ()
    unknown: tuple[OptionVerdict, ...] = ()


def judge(
    foreign: Foreign,
    table: OptionTable,
    stand_ins: frozenset[str] = frozenset(),
    skip_unknown: bool = False,
) -> Judgement:
    """Return the verdict on each option of a job.

    Raises JobError that names all options that are unknown, unless they are to be skipped, and all that are refused.
    """
    kinds: dict[str, list[OptionVerdict]] = {name: [] for name in Judgement.__dataclass_fields__}
    for name, value in foreign.values.items():
        rows = row_of(table, name)
        if not rows:
            kinds["unknown"].append(OptionVerdict(name, _written(foreign, name)))
            continue
        row = next((row for row in rows if _concerns(row, value.value, foreign)), None)
        kind, text = _verdict(row, stand_ins)
        kinds[kind].append(OptionVerdict(name, f"{_written(foreign, name)}: {text}"))
    judgement = Judgement(**{name: tuple(lines) for name, lines in kinds.items()})
    unknown = () if skip_unknown else judgement.unknown
    if unknown or judgement.refused:
        raise JobError(_complaint(foreign, table, unknown, judgement.refused))
    return judgement


def forms(foreign: Foreign, table: OptionTable, stand_ins: frozenset[str]) -> tuple[str, ...]:
    """Return the options of a job that are taken in the nearest form or by a stand-in, as notes for predictions."""
    notes = []
    for name, value in foreign.values.items():
        row = next(
            (row for row in row_of(table, name) if _concerns(row, value.value, foreign)), None
        )
        kind, text = _verdict(row, stand_ins)
        if kind in ("nearest", "stand_ins"):
            notes.append(f"{name}={value.text}: {text}")
    return tuple(notes)


def row_of(table: OptionTable, name: str) -> tuple[OptionRow, ...]:
    """Return the rows of an option; empty if the table has none."""
    rows = table.get(nearest_name(table, name), ())
    return rows if isinstance(rows, tuple) else (rows,)


def nearest_name(names: Collection[str], option: str) -> str:
    """Return the name or the longest pattern that an option matches; "" if it matches none."""
    if option in names:
        return option
    return max((name for name in names if fnmatchcase(option, name)), key=len, default="")


def spelled(table: OptionTable, names: Iterable[str]) -> OptionTable:
    """Return a table in which patterns stand for these names alone, so that a misspelt name has no row.

    Patterns that match none of the names stay: their options are keys that a user chooses.
    """
    rows = {name: nearest_name(table, name) for name in names}
    used = {pattern for name, pattern in rows.items() if pattern and pattern != name}
    return {
        **{name: row for name, row in table.items() if name not in used},
        **{name: table[pattern] for name, pattern in rows.items() if pattern},
    }


def _concerns(row: OptionRow, value: Any, foreign: Foreign) -> bool:
    """Return whether a row is about this value."""
    if isinstance(row, Mapped | Ignored):
        return True
    says_nothing = any(type(value) is type(none) and value == none for none in row.unless)
    return not says_nothing and (row.when is None or row.when(foreign))


def _verdict(row: OptionRow | None, stand_ins: frozenset[str]) -> tuple[str, str]:
    """Return the kind of a judgement's lines, and the words; no row means that the option asks for nothing."""
    if row is None:
        return "ignored", "asks for nothing"
    if isinstance(row, Mapped):
        return "mapped", row.to
    if isinstance(row, Ignored):
        return "ignored", row.reason
    if isinstance(row, Nearest):
        return "nearest", f"{row.how}; {row.direction}"
    if row.stand_in and row.stand_in in stand_ins:
        return "stand_ins", row.how
    way = f"--as {row.stand_in} ({row.how}), or {row.instead}" if row.stand_in else row.instead
    return "refused", f"{row.missing} cannot be said here; {way}"


def _written(foreign: Foreign, name: str) -> str:
    return f"{name}={foreign.values[name].text}{foreign.at(name)}"


def _complaint(
    foreign: Foreign,
    table: OptionTable,
    unknown: tuple[OptionVerdict, ...],
    refused: tuple[OptionVerdict, ...],
) -> str:
    count = len(unknown) + len(refused)
    options, stop = count_text(count, "option"), "stops" if count == 1 else "stop"
    lines = [f"{foreign.source}: {options} of this job {stop} its import"]
    lines += [
        f"  {line.text}: no such option of {foreign.system} is known here"
        f"{_near(table, line.option)}; mend its name, or give --skip-unknown"
        for line in unknown
    ]
    lines += [f"  {line.text}" for line in refused]
    return "\n".join(lines)


def _near(table: OptionTable, option: str) -> str:
    """Return the known name that is most like an option's, as words of a message; "" if none is.

    An option of the same name in another section goes first.
    """
    names = [name for name in table if "*" not in name]
    alike = [name for name in names if name.rpartition(".")[2] == option.rpartition(".")[2]]
    near = get_close_matches(option, alike, n=1, cutoff=0) or get_close_matches(option, names, n=1)
    return f", the nearest is {near[0]}" if near else ""
