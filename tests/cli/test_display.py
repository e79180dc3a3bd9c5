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


def printed(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdout", out)
    show(TABLE)
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
