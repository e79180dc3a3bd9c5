"""Name the step in the error of tokens that chose experts with too few places."""

from __future__ import annotations

from collections.abc import Callable

from piper_ops import ExpertsOverflow


def naming_overflow(run: Callable[[], None], name: str) -> Callable[[], None]:
    """Return a function that runs `run`, and names the step in that error."""

    def named() -> None:
        try:
            run()
        except ExpertsOverflow as error:
            raise ExpertsOverflow(f"{name}: {error}") from error

    return named
