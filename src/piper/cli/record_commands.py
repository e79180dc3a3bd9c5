"""Make commands of functions that take one record: its fields are the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from piper.cli.messages import user_errors

Record = TypeVar("Record")


def command_of(record: type[Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Return a decorator that gives a function of a record the record's fields as options at the command line."""

    def decorate(action: Callable[[Record], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            with user_errors(given):
                action(record(**given))

        types = get_type_hints(record, include_extras=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(f.name, kind, default=_default(f.default), annotation=types[f.name])
            for f in fields(record)  # type: ignore[arg-type]  # a dataclass
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__name__, command.__doc__ = action.__name__, action.__doc__
        return command

    return decorate


def _default(value: object) -> object:
    return inspect.Parameter.empty if value is MISSING else value
