"""Hold a strategy: a mesh and directives that are applied strictly in the order written, with JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from piper_compiler.directives import REGISTRY, Directive, describe
from piper_compiler.directives.replicate import Replicate
from piper_compiler.directives.shard import Shard
from piper_compiler.recipes.registry import SizedLater
from piper_ir.ground.codec import decode, read_document, tagged
from piper_ir.ground.errors import CompileError, DirectiveError, FormatError, OutputError
from piper_ir.ground.mesh import AXES, Mesh
from piper_ir.ground.select import Where
from piper_ir.tools import unread, write_whole

STRATEGY_VERSION = 1


@dataclass(frozen=True)
class Strategy:
    """Hold a mesh and directives: `Strategy(Mesh(pp=2), recipes.gpipe(microbatches=4))`.

    Recipes that leave sizes to the strategy get them here: `pp` from the mesh, and microbatches from their `rows`, the
    replicas and `global_batch`, the rows of a step over all replicas.

    Attributes:
        directives: in the order in which they are applied, or one alone; nested tuples and lists are flattened.
        params: for the record, the values that a function of a trial chose when it made this strategy; equality ignores
            them.
        global_batch: the rows of a step that it is for; a job or a Program with other rows is refused.
    """

    mesh: Mesh
    directives: tuple[Directive, ...]
    params: Mapping[str, Any] = field(default_factory=dict, compare=False)
    global_batch: int | None = field(default=None, compare=False, repr=False)

    def __init__(
        self,
        mesh: Mesh,
        directives: Directive | Iterable[Any] = (),
        *,
        params: Mapping[str, Any] | None = None,
        global_batch: int | None = None,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise DirectiveError(
                f"Strategy: the first argument is {type(mesh).__name__}; a Mesh is expected, e.g. Mesh(pp=2)"
            )
        if global_batch is not None and (type(global_batch) is not int or global_batch < 1):
            raise DirectiveError(
                f"Strategy(global_batch={global_batch!r}): an integer of at least 1 is needed, the rows of a step; "
                f"write Strategy(..., global_batch=job.global_batch)"
            )
        object.__setattr__(self, "mesh", mesh)
        items = tuple(_flatten(directives if isinstance(directives, Iterable) else [directives]))
        object.__setattr__(self, "directives", items)
        if any(isinstance(item, SizedLater) for item in items):
            whole = [
                item.directives(mesh, self.replicas, global_batch)
                if isinstance(item, SizedLater)
                else item
                for item in items
            ]
            object.__setattr__(self, "directives", tuple(_flatten(whole)))
        object.__setattr__(self, "global_batch", global_batch)
        object.__setattr__(self, "params", dict(params or {}))

    @property
    def replicas(self) -> int:
        """Return the number of replicas with rows of their own.

        Along axes whose devices share chunks, which `replicate` may name for states, rows are the same.
        """
        over = {axis for d in self.directives if isinstance(d, Replicate) for axis in d.over}
        same = {
            axis
            for d in self.directives
            if isinstance(d, Shard) and not d.experts
            for axis in d.axes
        }
        return self.mesh.degree(over - same)

    def with_params(self, params: Mapping[str, Any]) -> Strategy:
        """Return the same strategy with these values for the record; raise DirectiveError if JSON cannot hold one."""
        for name, value in params.items():
            if not isinstance(value, bool | int | float | str | None):
                raise DirectiveError(
                    f"Strategy.params[{name!r}] is {value!r}; JSON holds numbers, text, true, false and null"
                )
        return Strategy(self.mesh, self.directives, params=params, global_batch=self.global_batch)

    def with_directives(self, directives: Iterable[Any]) -> Strategy:
        """Return a strategy with other directives, for the same mesh and rows."""
        return Strategy(self.mesh, directives, params=self.params, global_batch=self.global_batch)

    def check_step(self, rows: int | None) -> None:
        """Raise CompileError if a step has other rows than the strategy says; None if they are not known."""
        told = self.global_batch
        if None not in (told, rows) and told != rows:
            raise CompileError(
                f"Strategy(global_batch={told}): a step has {rows} rows; give the same number, from which recipes with "
                f"`rows` count their microbatches: write Strategy(..., global_batch=job.global_batch), or leave it out "
                f"if no recipe has `rows`"
            )

    def dumps(self) -> str:
        """Return the strategy as JSON."""
        for item in self.directives:
            if REGISTRY.get(type(item).__name__) is not type(item):
                raise DirectiveError(
                    f"{describe(item)}: {type(item).__name__} is not registered, so it could not be read back; "
                    f"write @directive above its class"
                )
        head: dict[str, Any] = {
            "format": "Strategy",
            "version": STRATEGY_VERSION,
            "mesh": dict(self.mesh.sizes)
            | ({"order": list(self.mesh.order)} if self.mesh.order else {}),
        }
        if self.global_batch is not None:
            head["global_batch"] = self.global_batch
        if self.params:
            head["params"] = dict(self.params)
        lines = ",\n  ".join(json.dumps(tagged(d)) for d in self.directives)
        return f'{json.dumps(head)[:-1]}, "directives": [\n  {lines}\n]}}\n'

    @staticmethod
    def loads(text: str, where: str = "text") -> Strategy:
        """Return a strategy from JSON; raise FormatError for anything else.

        A user's directive must have been imported before, so that its class is registered.
        """
        data = read_document("Strategy", STRATEGY_VERSION, text, where)
        known = ("mesh", "directives", "params", "global_batch")
        if unknown := data.keys() - {*known}:
            raise FormatError(
                f"{where}: unknown key {min(unknown)!r}; known are {', '.join(known)}"
            )
        rows, params = data.get("global_batch"), data.get("params", {})
        if rows is not None and (type(rows) is not int or rows < 1):
            raise FormatError(f'{where}: "global_batch" must be the rows of a step, from 1 on')
        if not isinstance(params, dict) or not all(
            isinstance(v, bool | int | float | str | None) for v in params.values()
        ):
            raise FormatError(
                f'{where}: "params" must be an object of numbers, texts, true, false or null'
            )
        if not isinstance(data.get("mesh"), dict) or not isinstance(data.get("directives"), list):
            raise FormatError(
                f'{where}: "mesh" must be an object of axis sizes and "directives" an array'
            )
        directives = [
            _directive(d, f"{where}.directives[{i}]") for i, d in enumerate(data["directives"])
        ]
        mesh = _mesh(data["mesh"], f"{where}.mesh")
        return Strategy(mesh, directives, params=params, global_batch=rows)


def _flatten(items: Iterable[Any]) -> Iterable[Directive | SizedLater]:
    for item in items:
        if isinstance(item, tuple | list):
            yield from _flatten(item)
        elif isinstance(item, SizedLater):
            yield item
        elif isinstance(item, Directive) and is_dataclass(item) and not isinstance(item, type):
            _check_selection(item)
            yield item
        else:
            raise DirectiveError(
                f"Strategy: {item!r} is no directive; it needs to be a frozen dataclass with the methods "
                f"check(graph) and apply(graph)"
            )


def _check_selection(item: Directive) -> None:
    """Raise DirectiveError if a directive selects by something else than `where`, or than its default."""
    for f in fields(item):  # type: ignore[arg-type]  # directives are dataclasses
        given = getattr(item, f.name)
        if f.name == "selection" and given != f.default and not isinstance(given, Where):
            raise DirectiveError(
                f"{describe(item)}: the selection is {given!r}; where() is accepted, such as where(stage=0)"
            )


def _mesh(data: dict[str, Any], where: str) -> Mesh:
    order = data.get("order", [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise FormatError(f"{where}.order: names of axes are expected, found {order!r}")
    sizes = {axis: size for axis, size in data.items() if axis != "order"}
    for axis, size in sizes.items():
        if axis not in AXES:
            raise FormatError(
                f"{where}: unknown axis {axis!r}; the axes are {', '.join(sorted(AXES))}"
            )
        if type(size) is not int or size < 1:
            raise FormatError(f"{where}.{axis}: a positive integer is expected, found {size!r}")
    try:
        return Mesh(order=order, **sizes)
    except CompileError as e:  # the sizes together; only here is it known where
        raise FormatError(f"{where}: {e}") from None


def _directive(data: Any, where: str) -> Directive:
    name = data.get("is") if isinstance(data, dict) else data
    if not isinstance(data, dict) or not isinstance(name, str) or name not in REGISTRY:
        raise FormatError(
            f"{where}: unknown directive {name!r}; known are {', '.join(sorted(REGISTRY))}. Import the file that "
            f"defines yours."
        )
    item: Directive = decode(REGISTRY[name], {k: v for k, v in data.items() if k != "is"}, where)
    if "site" in (f.name for f in fields(item)):  # type: ignore[arg-type]  # registered classes are dataclasses
        object.__setattr__(
            item, "site", where
        )  # it was written in the file, not where the file is read
    return item


def save_strategy(strategy: Strategy, path: str | Path) -> None:
    """Write a strategy as JSON; raise OutputError when the file cannot be written."""
    if not isinstance(strategy, Strategy):
        raise DirectiveError(
            f"save_strategy: a {type(strategy).__name__} stands here; a piper.Strategy is needed"
        )
    try:
        write_whole(Path(path), strategy.dumps())
    except OSError as e:
        raise OutputError(
            f"cannot write the strategy to {path}: {e.strerror}; choose a folder that exists and is writable"
        ) from None


def load_strategy(path: str | Path) -> Strategy:
    """Read a strategy from JSON; raise FormatError, which names the file and the place of the error."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(
            unread(
                "the strategy", path, e, "give a JSON file, such as the best.json of `piper tune`"
            )
        ) from None
    return Strategy.loads(text, str(path))
