"""Hold the guards on the number of rows under which a path traced by Dynamo is valid (torch >= 2.11)."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from piper_capture.torch_api._torch import expr_at, of_rows


@dataclass(frozen=True)
class RowGuard:
    """Hold a guard on the row symbols: a condition under which the traced path is valid.

    Attributes:
        expr: the condition, as sympy.
        line: the user's line, if torch knows it.
    """

    expr: Any
    line: str | None

    def holds(self, rows: int) -> bool:
        """Return whether the condition holds for this number of rows."""
        return bool(expr_at(self.expr, rows))

    @property
    def text(self) -> str:
        """Return the condition as text."""
        return re.sub(r"\bs[0-9]+\b", "rows", str(self.expr))


def either(first: Sequence[RowGuard], second: Sequence[RowGuard]) -> tuple[RowGuard, ...]:
    """Return guards that hold if all of the first hold, or all of the second."""
    if not second:
        return ()
    others = functools.reduce(operator.and_, [g.expr for g in second])
    return tuple(replace(g, expr=g.expr | others) for g in first)


def row_guards(graph: fx.Graph) -> tuple[RowGuard, ...]:
    """Return the guards on the number of rows that Dynamo assumed while it traced."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            assumed = [g for g in mode.shape_env.guards if of_rows(g.expr)]
            return tuple(
                RowGuard(g.expr, _whole_line(g.sloc.maybe_user_loc, graph)) for g in assumed
            )
    return ()


def _whole_line(line: str | None, graph: fx.Graph) -> str | None:
    """Return "file:line (code)" for a user's line in ShapeEnv's form, which has only the end of the file name."""
    code, _, place = (line or "").partition("  # ")
    file, _, number = place.partition(" in ")[0].rpartition(":")
    if not file:
        return line
    pattern = re.compile(rf'File "([^"]*{re.escape(file)})", line {number},')
    said = (pattern.search(node.meta.get("stack_trace") or "") for node in graph.nodes)
    return f"{next((match[1] for match in said if match), file)}:{number} ({code.strip()})"
