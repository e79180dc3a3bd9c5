"""Many small cases of a test as one, whose failure names each that does not hold."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def each_case(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Sequence[str] | Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for all cases in a row, as one test; the arguments are those of `pytest.mark.parametrize`.

    It is for cases that take milliseconds. All cases run; what fails is raised together, under the names of its cases.
    A case that skips leaves the others to run; the test is skipped if all of its cases are.
    Each case has its own folder in `tmp_path`, sees only its own output in `capsys`, and its changes by `monkeypatch`
    are undone.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    rows = [tuple(case) if len(arguments) > 1 else (case,) for case in cases]
    if ids is None or callable(ids):
        name_of = ids or _name
        labels = ["-".join(str(name_of(value) or _name(value)) for value in row) for row in rows]
    else:
        labels = [*ids]
    if not rows or len(labels) != len(rows) or {len(row) for row in rows} != {len(arguments)}:
        raise ValueError(f"{len(rows)} cases with {len(labels)} names do not give {arguments}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            failures: dict[str, BaseException] = {}
            skipped: list[BaseException] = []
            for k, (label, row) in enumerate(zip(labels, rows)):
                try:
                    with pytest.MonkeyPatch.context() as patches:
                        own = _own_fixtures(fixtures, k, patches)
                        test(*args, **own, **dict(zip(arguments, row)))
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"in the case [{label}]")
                    failures[f"{k}: {label}"] = failure
            if failures:
                summary = f"{len(failures)} of {len(rows)} cases failed: {'; '.join(failures)}"
                raise BaseExceptionGroup(summary, [*failures.values()])
            if len(skipped) == len(rows):
                raise skipped[0]

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=others)
        return run

    return decorate


def _own_fixtures(fixtures: dict[str, Any], k: int, patches: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the fixtures of case number k: those of pytest that a case before it would change are made anew."""
    own = dict(fixtures)
    if "tmp_path" in own:
        folder: Path = own["tmp_path"] / str(k)
        folder.mkdir()
        own["tmp_path"] = folder
    if "monkeypatch" in own:
        own["monkeypatch"] = patches
    if "capsys" in own:
        own["capsys"].readouterr()
    return own


def _name(value: Any) -> str:
    """Return the name of a value in a message: of functions and classes their own, of long ones the beginning."""
    return str(getattr(value, "__name__", None) or repr(value)[:60])
