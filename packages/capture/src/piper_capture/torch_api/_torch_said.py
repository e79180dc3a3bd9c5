"""Run print, logging and warnings of a model's forward once, while Dynamo traces it (torch >= 2.11).

Dynamo itself refuses them. Here each call runs when it is traced, with the values that a trace knows: numbers and
strings, sizes with the number of rows as "rows", and tensors by shape and dtype. A plan does not run it again.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables import misc as dynamo_misc
from torch._guards import TracingContext

from piper_capture.torch_api._torch import in_place, user_frame

_LOGGING = (
    logging.debug,
    logging.info,
    logging.warning,
    logging.error,
    logging.critical,
    logging.log,
    logging.exception,
)
FUNCTIONS: frozenset[Any] = frozenset((print, warnings.warn, *_LOGGING))
"""The functions that run once, beside the methods of loggers."""


class Statements:
    """Hold the calls that have run, by line and arguments, so that each runs once in a capture."""

    def __init__(self) -> None:
        self._ran: dict[tuple[str, str], str] = {}

    @property
    def note(self) -> tuple[str, ...]:
        """Return the note about these calls for the user; empty if there are none."""
        lines = list(dict.fromkeys(self._ran.values()))
        if not lines:
            return ()
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        return (
            f"print, logging and warnings in forward ran once, when the model was captured, and do not run in "
            f"training: {', '.join(lines[:3])}{more}",
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let calls of print, logging and warnings run once while Dynamo traces."""

        def call_function(
            variable: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> Any:
            return self._run(variable.value, args, kwargs)

        def call_method(
            variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> Any:
            return self._run(getattr(variable.value, name), args, kwargs)

        with (
            dynamo_config.patch(reorderable_logging_functions=set(FUNCTIONS)),
            in_place(dynamo_misc.DebuggingVariable, {"call_function": call_function}),
            in_place(dynamo_misc.LoggingLoggerVariable, {"call_method": call_method}),
        ):
            yield

    def _run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        positional, named = [_told(a) for a in args], {name: _told(a) for name, a in kwargs.items()}
        frame = user_frame(TracingContext.extract_stack())
        line = f"{frame.filename}:{frame.lineno} ({frame.line})" if frame is not None else ""
        key = line, f"{positional!r} {named!r}"
        result = None
        if key not in self._ran:
            self._ran[key] = line
            if function is warnings.warn and frame is not None:
                _warn(frame.filename, frame.lineno or 0, *positional, **named)
            else:
                result = function(*positional, **named)
        return ConstantVariable.create(result if isinstance(result, bool) else None)


def _warn(
    filename: str, line: int, message: Any, category: Any = None, stacklevel: Any = 1, **rest: Any
) -> None:
    """Issue the warning at the user's line."""
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    warnings.warn_explicit(message, kind, filename, line)


class _Rows(int):
    """Represent a size that depends on the rows: its formula as text, its value in the trace as a number."""

    text = "rows"

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__


class _Shape:
    """Stand for a tensor or an unknown value in a printed text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __format__(self, spec: str) -> str:
        return self._text


def _size(value: Any) -> Any:
    node = getattr(value, "node", None)
    if node is None or node.hint is None:
        return value if node is None else _Shape("a number that follows values of tensors")
    symbols = node.expr.free_symbols
    if not symbols:
        return int(node.expr)
    rows = _Rows(node.hint)
    rows.text = str(node.expr.subs({s: type(s)("rows", integer=True) for s in symbols}))
    return rows


def _told(variable: Any) -> Any:
    """Return the argument that a call gets in place of a Dynamo variable."""
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        example = variable.as_proxy().node.meta["example_value"]
        shape = ", ".join(str(_size(s)) for s in example.shape)
        return _Shape(f"tensor of shape [{shape}], {str(example.dtype).removeprefix('torch.')}")
    if isinstance(variable, SymNodeVariable):
        return _size(variable.sym_num)
    if isinstance(variable, dynamo_misc.StringFormatVariable):
        named = {name: _told(v) for name, v in variable.sym_kwargs.items()}
        return variable.format_string.format(*[_told(v) for v in variable.sym_args], **named)
    if variable.is_python_constant():
        return variable.as_python_constant()
    items = getattr(variable, "items", None)
    if isinstance(items, list | tuple):
        return [_told(item) for item in items]
    return getattr(variable, "value", _Shape(f"a {variable.python_type().__name__}"))
