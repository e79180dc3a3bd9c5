"""Report unknown or missing arguments of a call as one of Piper's errors, with the name that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from piper_ir.ground.errors import PiperError

P = ParamSpec("P")
T = TypeVar("T")


def checked_call(error: type[PiperError]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function raise `error` for unknown or missing arguments."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            problem = call_problem(function.__qualname__, signature, args, kwargs)
            if problem is not None:
                raise error(problem)
            return function(*args, **kwargs)

        return call

    return decorate


def checked_fields(error: type[PiperError]) -> Callable[[type[T]], type[T]]:
    """Make the constructor of a dataclass raise `error` for unknown or missing fields."""

    def decorate(kind: type[T]) -> type[T]:
        constructor = kind.__init__
        constructor.__qualname__ = kind.__name__  # its name in messages
        setattr(kind, "__init__", checked_call(error)(constructor))  # noqa: B010 - mypy refuses to assign to a method
        return kind

    return decorate


def check_keywords(
    name: str, given: Iterable[str], known: Collection[str], error: type[PiperError]
) -> None:
    """Raise `error` for a keyword that a call of `name` does not take."""
    for keyword in given:
        if keyword not in known:
            raise error(
                f"{name}({keyword}=...): there is no argument {keyword!r}; {meant(keyword, known)}"
            )


def meant(word: str, known: Collection[str]) -> str:
    """Return a hint for a misspelt word: the nearest accepted word, else all accepted words."""
    close = get_close_matches(word, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"accepted are {', '.join(known)}"


def call_problem(
    name: str, signature: inspect.Signature, args: Collection[object], given: Mapping[str, object]
) -> str | None:
    """Return the problem with the arguments of a call of `name`; None if its signature takes them."""
    try:
        signature.bind(*args, **given)
    except TypeError as problem:
        names = [n for n in signature.parameters if n not in ("self", "site")]
        try:
            check_keywords(name, given, names, PiperError)
        except PiperError as unknown:
            return str(unknown)
        return f"{name}({', '.join(names)}): {problem}"
    return None
