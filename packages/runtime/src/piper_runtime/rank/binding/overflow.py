"""Name the step in the error of tokens that chose experts for which there are too few places."""

from __future__ import annotations

from collections.abc import Callable

from piper_ops import ExpertsOverflow


def naming_overflow(run: Callable[[], None], name: str) -> Callable[[], None]:
    """Return what runs `run`, and says in that error which step it was."""

    def named() -> None:
        try:
            run()
        except ExpertsOverflow as error:
            raise ExpertsOverflow(f"{name}: {error}") from error

    return named
