"""Tables: drawn on a terminal, plain in a pipe, the same cells in both."""

from __future__ import annotations

import io
import sys

import pytest

from piper.views.display import show
from piper_report.facts.summary import Table

TABLE = Table(
    "gpt.py on h100",
    ("", "predicted"),
    (("step [s]", "1.5 ms"), ("peak", "2 GiB")),
    ("warning: not calibrated",),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_words_below_a_row_fill_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("NO_COLOR", "1"), ("COLUMNS", "60")):
        monkeypatch.setenv(name, value)
    words = " ".join(["words"] * 30)
    wide = Table("title", ("", "s"), (("1", "2"), ("yours", "3")), (), (words, "mine"))
    assert max(map(len, wide.lines())) <= 120
    text = printed(Terminal(), monkeypatch, wide)
    assert max(map(len, text.splitlines())) <= 60 and text.count("words") == 30
    assert [line.split() for line in text.splitlines()][-2:] == [["yours", "3"], ["mine"]]


def printed(out: io.StringIO, monkeypatch: pytest.MonkeyPatch, table: Table = TABLE) -> str:
    monkeypatch.setattr(sys, "stdout", out)
    show(table)
    return out.getvalue()


def test_a_pipe_gets_plain_text_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert printed(io.StringIO(), monkeypatch) == TABLE.plain() + "\n"


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = printed(Terminal(), monkeypatch)
    assert "\x1b[33mwarning: not calibrated" in text and "─" in text
    for cell in (TABLE.title, "predicted", "step [s]", "1.5 ms", "peak", "2 GiB"):
        assert cell in text, cell
