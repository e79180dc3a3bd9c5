"""Write a schedule for a terminal: one line per rank, columns of equal time."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase

from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.phases import PHASES, InstrLabel, Phase
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.tools import named_ranks, time_text
from piper_report.facts.idle import makespan
from piper_report.facts.phases import chunk_numbers, chunks_of, kinds

IDLE, GOES_ON = ".", "="
NARROWEST = 40
MOST_MISSED = 0.1
"""The share of instructions that may be too short to show before numbers are given up for more columns."""
MOST_UNITS = 4096
"""The most slots of a schedule whose times are multiples of one unit; with more, the unit is given up."""


TERMINAL = {"F": 75, "B": 214, "R": 220, "I": 36, "W": 175, "pair": 228, "U": 246}
"""The numbers of xterm's 256 colours, near the colours of the pictures; an overlapped pair has one of its own."""


def schedule_table(
    trace: Trace, plan: Plan | None = None, *, width: int | None = None, colour: bool = False
) -> str:
    """Return each rank's compute over time, at most `width` characters wide (default: the terminal's).

    Ranks that the trace says are alike have one line.

    Each column is the same time: the common unit of all durations if they have one and it fits, else the time with
    which the step fills the width. It shows the instruction that fills most of it. If too few microbatches' numbers
    would fit, a column is one letter. The plan tells apart the chunks (stages) of a device, and I fused with I from I
    fused with W; without it the latter is assumed. `colour` asks for the colours of a terminal with 256.
    """
    width = max(NARROWEST, width or shutil.get_terminal_size().columns)
    label_of = kinds(trace, plan)
    work = {
        s: k
        for s, k in label_of.items()
        if s.stream == COMPUTE and k.phase != "other" and s.end > s.start
    }
    if not work:
        return "nothing is computed in this trace"
    marks = _Marks(work, plan)
    by_rank: dict[int, list[Span]] = {s.rank: [] for s in sorted(trace.spans, key=lambda s: s.rank)}
    for s in sorted(work, key=lambda s: (s.start, s.end)):
        by_rank[s.rank].append(s)
    origin, length = min(s.start for s in trace.spans), makespan(trace)
    alike = {ranks[0]: ranks for ranks in trace.alike}
    names = {rank: named_ranks(alike.get(rank, (rank,))) for rank in by_rank}
    indent = max(map(len, names.values())) + 2
    letters = max(len(marks.label(s)) for s in work)
    for cell in _cell_widths(letters, _unit(work, origin, length), length, width - indent):
        slots, slot = _grid(work, origin, length, (width - indent) // cell)
        rows = {rank: _row(spans, origin, slot, slots) for rank, spans in by_rank.items()}
        missed = sum(len(set(by_rank[rank]) - set(row)) for rank, row in rows.items())
        if missed <= MOST_MISSED * len(work):
            break
    lines = []
    for rank, row in rows.items():
        cells = [*_cells(row, marks, cell)]
        if colour:
            cells = [
                _coloured(text, work[span].phase) if span else text
                for text, span in zip(cells, row, strict=True)
            ]
        lines.append(names[rank].ljust(indent) + "".join(cells).rstrip())
    return "\n".join([*lines, "", *_legend(marks, slot, cell > 1, missed, width)])


class _Marks:
    """Choose the text of an instruction.

    With two chunks per device the second one is in lower case. With more, each has its letter, or every other one is in
    lower case if there is room for one letter only.
    """

    def __init__(self, work: Mapping[Span, InstrLabel], plan: Plan | None) -> None:
        self.work = work
        chunks = {} if plan is None else chunks_of(plan)
        self.numbers = {} if plan is None else chunk_numbers(work, plan, chunks)
        self.most = max(map(len, chunks.values()), default=1)

    def label(self, span: Span) -> str:
        """Return the text with the numbers of microbatches."""
        halves = self.work[span].halves
        texts = [InstrLabel((half,)).label for half in halves]
        return "&".join(map(self._marked, texts, self.numbers.get(span, (None,) * len(halves))))

    def _marked(self, text: str, number: int | None) -> str:
        if number is None or self.most == 1:
            return text
        if self.most == 2:
            return text.lower() if number else text
        return text + (
            ascii_lowercase[number] if self.most <= len(ascii_lowercase) else f".{number}"
        )

    def letter(self, span: Span) -> str:
        phase = self.work[span].phase
        if phase == "pair":
            return "&"
        (number,) = self.numbers.get(span, (0,))
        return phase.lower() if (number or 0) % 2 else phase

    def legend(self, numbered: bool) -> list[str]:
        """Return the lines that explain how chunks are told apart."""
        if self.most == 1:
            return []
        if self.most == 2:
            return ["lower case: the device's second chunk"]
        names = "a, b, ..." if self.most <= len(ascii_lowercase) else ".0, .1, ..."
        return [
            f"{names}: the chunk of the device"
            if numbered
            else "lower case: every other chunk of the device"
        ]


def _cell_widths(letters: int, unit: float | None, length: float, room: int) -> tuple[int, ...]:
    """Return the widths of columns to try, widest first.

    They are labels of `letters` and a space, or without the space if only so a column can be the common unit of all
    times; then one letter.
    """
    if (
        unit is not None
        and (slots := round(length / unit)) * (letters + 1) > room >= slots * letters
    ):
        return (letters, 1)
    return (letters + 1, 1)


def _grid(spans: Iterable[Span], origin: float, length: float, most: int) -> tuple[int, float]:
    """Return the number of slots, at most `most`, and the seconds of one."""
    unit = _unit(spans, origin, length)
    if unit is not None and round(length / unit) <= most:
        return max(1, round(length / unit)), unit
    return max(1, most), length / max(1, most)


def _unit(spans: Iterable[Span], origin: float, length: float) -> float | None:
    """Return the largest time of which all starts and ends are multiples (to a thousandth of it); None for none."""
    times = sorted({t - origin for s in spans for t in (s.start, s.end)})
    unit = length
    for t in times:
        a, b = max(t, unit), min(t, unit)
        while b > 1e-6 * length:
            a, b = b, a % b
            if b > a - 1e-6 * length:  # a remainder that is the divisor again, but for rounding
                b = 0.0
        unit = a
        if unit * MOST_UNITS < length:
            return None
    return unit if all(abs(t / unit - round(t / unit)) < 1e-3 for t in times) else None


def _row(spans: Sequence[Span], origin: float, slot: float, slots: int) -> list[Span | None]:
    """Return for each slot the span that runs longest in it; None if more than half of it is idle."""
    row: list[Span | None] = []
    first = 0
    for i in range(slots):
        low, high = origin + i * slot, origin + (i + 1) * slot
        while first < len(spans) and spans[first].end <= low:
            first += 1
        most: tuple[float, Span | None] = (0.0, None)
        busy = 0.0
        for s in spans[first:]:
            if s.start >= high:
                break
            share = min(s.end, high) - max(s.start, low)
            busy += share
            if share > most[0] * (1 + 1e-9):
                most = share, s
        row.append(most[1] if busy * 2 >= slot * (1 - 1e-9) else None)
    return row


def _cells(row: Sequence[Span | None], marks: _Marks, cell: int) -> Iterable[str]:
    before = None
    for i, span in enumerate(row):
        if span is None:
            yield IDLE.ljust(cell)
        else:
            after = row[i + 1] if i + 1 < len(row) else None
            label = marks.label(span) if cell > 1 else marks.letter(span)
            text = label if span is not before else GOES_ON
            yield text.ljust(cell, GOES_ON if span is after else " ")
        before = span


def _coloured(text: str, phase: Phase) -> str:
    """Return the text in black on the colour of a phase; a space that follows a label stays as it is."""
    letters = text.rstrip()
    return f"\x1b[30;48;5;{TERMINAL.get(phase, 250)}m{letters}\x1b[0m{text[len(letters) :]}"


def _legend(marks: _Marks, slot: float, numbered: bool, missed: int, width: int) -> list[str]:
    labels = marks.work.values()
    phases = {p for k in labels for p, _ in k.halves} | {k.phase for k in labels}
    words = [f"{p} {PHASES[p]}" for p in PHASES if p in phases and p != "pair"]
    if "pair" in phases:
        words.append(f"{'F1&B0' if numbered else '&'} {PHASES['pair']}")
    words += ["the number is the microbatch"] if numbered else []
    words += marks.legend(numbered)
    words += [f"{GOES_ON} goes on", f"{IDLE} idle", f"a column is {time_text(slot)}"]
    if missed:
        words.append(f"too short to show: {missed} instructions")
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}; {word}" if lines[-1] else word
        if len(joined) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines
