"""Compare predictions with training steps that others published: read tables of runs, predict each, score, fit.

`row` makes job, strategy and cluster of one published run. Names are imported on first use. This room may import
`piper.api`, `piper.models` and every package of Piper.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper.published.convert import PublishedRun as PublishedRun
    from piper.published.convert import readings as readings
    from piper.published.convert import row as row
    from piper.published.table import COLUMNS as COLUMNS
    from piper.published.table import PublishedRow as PublishedRow
    from piper.published.table import read_row as read_row
    from piper.published.table import read_rows as read_rows

_HOME = dict.fromkeys(("PublishedRun", "readings", "row"), "convert")
_HOME |= dict.fromkeys(("COLUMNS", "PublishedRow", "read_row", "read_rows"), "table")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"piper.published.{_HOME[name]}"), name)
