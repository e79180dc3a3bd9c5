"""Tables of rows: all checked by one test case, or some of them by `make test` and the others by `make test-long`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def rows(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Check a test for every row in one case, with the arguments of `pytest.mark.parametrize`.

    All rows are checked; a group of their errors says which ones failed. Rows share the fixtures of the case.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [value if len(keys) > 1 else (value,) for value in values]
    shown = [*map(repr, table)] if ids is None or callable(ids) else [*ids]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def case(**fixtures: Any) -> None:
            errors: list[BaseException] = []
            for row, said in zip(table, shown, strict=True):
                try:
                    test(**dict(zip(keys, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"in the row {said}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(table)} rows", errors)

        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name not in keys]
        del case.__wrapped__  # type: ignore[attr-defined]  # pytest would look for fixtures named as the keys
        case.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # what pytest reads
        return case

    return decorate


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Return values for `pytest.mark.parametrize`, of which about one in n is not marked long.

    It stands at another place in every n, so that what follows in steps of n is not left out altogether.
    """
    marks = [pytest.mark.long]
    return [
        pytest.param(value, marks=marks * ((k + k // n) % n != 0)) for k, value in enumerate(values)
    ]
