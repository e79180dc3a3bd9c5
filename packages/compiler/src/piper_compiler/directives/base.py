"""Define the directive protocol. A directive in a user's file has the same standing as those here.

A directive is a frozen dataclass with the field `site` (see `site_field`) and the methods `check` and `apply`.
`@directive` registers it, so that it can be read from JSON:

    @directive
    @dataclass(frozen=True)
    class Reverse:
        selection: Where
        site: str = site_field()
        def check(self, graph): ...          # raise DirectiveError when a legality condition does not hold
        def apply(self, graph): ...          # return another graph

One that changes the code of chunks has a third method, `prepare` (see `piper_compiler.directives.prepare`).

A node of a graph stands for all microbatches with the same work (`Node.mbs`). `Graph.pick` gives such nodes, so that a
directive takes no longer for more microbatches; `Graph.select` gives a node per microbatch.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import field, fields
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.keywords import call_problem
from piper_ir.ground.select import Where

_HERE = Path(__file__).parent.parent


@runtime_checkable
class Directive(Protocol):
    """Describe the objects that `Strategy` accepts as directives.

    `check` raises DirectiveError (or SelectorError) and changes nothing. `apply` is called only after it and returns
    the new graph, without changing the old one or reading global state.
    """

    def check(self, graph: Graph) -> None: ...

    def apply(self, graph: Graph) -> Graph: ...


@runtime_checkable
class Settling(Protocol):
    """Describe a directive whose result depends on costs.

    `with_fixed_stages` returns a directive that gives the same result for a graph, whatever the costs.
    """

    def with_fixed_stages(self, graph: Graph) -> Directive: ...


REGISTRY: dict[str, type] = {}
"""The classes of directives by name, for reading a strategy from JSON."""

C = TypeVar("C", bound=type)


def directive(cls: C) -> C:
    """Register a directive's class under its unique name, so that strategies that use it can be saved and loaded."""
    known = REGISTRY.get(cls.__name__)
    if known is not None and known.__module__ != cls.__module__:
        raise DirectiveError(
            f"two directives are called {cls.__name__}: in {known.__module__} and {cls.__module__}; rename one"
        )
    REGISTRY[cls.__name__] = cls
    if "__init__" in vars(cls):
        setattr(cls, "__init__", _checked(cls, vars(cls)["__init__"]))  # noqa: B010 - mypy refuses to assign to a method
    return cls


def _checked(cls: type, constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that raises DirectiveError for missing or unknown arguments.

    The file of `piper_ir.ground.keywords.checked_fields` would be the `call_site` of a directive.
    """
    signature = inspect.signature(constructor)

    @wraps(constructor)
    def init(self: object, *args: object, **given: object) -> None:
        problem = call_problem(written(cls), signature, (self, *args), given)
        if problem is None:
            constructor(self, *args, **given)
            return
        call, _, text = problem.partition(": ")
        if call_problem(call, signature, (self, *args), given | {"selection": None}) is None:
            call = f"{written(cls)}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
            text = "the selection is missing; where() is accepted, for all, or a part, such as where(stage=0)"
        raise DirectiveError(f"{call} at {call_site()}: {text}")

    return init


def as_names(given: Any) -> Any:
    """Return names of axes as a tuple, if one is given alone or all are in a list.

    A value that is neither stays as it is.
    """
    if isinstance(given, str):
        return (given,)
    return tuple(given) if isinstance(given, list | tuple) else given


def call_site() -> str:
    """Return "file.py:12" of the nearest caller outside of this package, where the user wrote the directive."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((str(_HERE), "<")) and Path(path).name != "dataclasses.py":
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return ""


def site_field() -> Any:
    """Return the field `site`: it fills itself in, and is neither compared nor printed nor saved."""
    return field(
        default_factory=call_site, compare=False, repr=False, kw_only=True, metadata={"json": False}
    )


def describe(item: Directive) -> str:
    """Return the directive about as the user wrote it, without default values and with long lists cut.

    A class with a `__str__` of its own overrides this.
    """
    if "__str__" in type(item).__dict__:
        return str(item)
    shown = []
    for f in fields(item):  # type: ignore[arg-type]  # a directive is a dataclass
        value = getattr(item, f.name)
        if f.repr and value != f.default:
            selects = isinstance(value, Where) or (
                isinstance(value, tuple) and any(isinstance(v, Where) for v in value)
            )
            shown.append(_shown(value) if selects else f"{f.name}={_shown(value)}")
    return f"{written(type(item))}({', '.join(shown)})"


def _shown(value: object) -> str:
    """Return a value for a message: selections as plain text, pairs of a name and a value as a dict."""
    if isinstance(value, Where):
        return str(value)
    if isinstance(value, tuple) and value and all(isinstance(v, Where) for v in value):
        more = [f"... {len(value) - 3} more"] if len(value) > 3 else []
        return ", ".join([*map(str, value[:3]), *more])
    if (
        isinstance(value, tuple)
        and value
        and all(isinstance(v, tuple) and len(v) == 2 for v in value)
    ):
        return f"dict({', '.join(f'{k}={v!r}' for k, v in value)})"
    return repr(value)


def fail(
    item: Directive, condition: int, message: str, chunks: tuple[str, ...] = ()
) -> DirectiveError:
    """Return the error for a numbered legality condition of a directive; `chunks` are the chunks that it is about."""
    site = getattr(item, "site", "")
    where = f" at {site}" if site else ""
    return DirectiveError(
        f"{describe(item)}{where}: {message} [{written(type(item))} condition {condition}]", chunks
    )


def written(kind: type) -> str:
    """Return a directive's class as a user writes it: "split_backward" for SplitBackward."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def compute_nodes(item: Directive, graph: Graph, selection: Where) -> list[Node]:
    """Return the compute nodes of a selection (see `Graph.pick`); a SelectorError names the directive."""
    try:
        return graph.pick(selection)
    except LookupError as e:
        site = getattr(item, "site", "")
        raise type(e)(f"{describe(item)}{f' at {site}' if site else ''}: {e}") from None


def names(graph: Graph, nodes: list[Node], most: int = 4) -> str:
    """Return the names of nodes with their microbatches, for a message."""
    each = sorted(graph.copies(nodes), key=graph.position)
    more = f" and {len(each) - most} more" if len(each) > most else ""
    return ", ".join(n.id for n in each[:most]) + more
