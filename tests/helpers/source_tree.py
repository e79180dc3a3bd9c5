"""The source tree as data, for tests of its rules: modules, what they import, what they define."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One source file. name: dotted, a package by its folder's name."""

    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return parsed(self.path)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is read once in a process."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def source_roots() -> tuple[Path, ...]:
    """The folders that hold packages."""
    return (ROOT / "src", *sorted(ROOT.glob("packages/*/src")))


def modules(roots: Sequence[Path] | None = None) -> dict[str, Module]:
    """Return every module of the source tree by its dotted name."""
    found = {}
    for root in source_roots() if roots is None else roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path)
    return found


def imported_modules(module: Module, known: Mapping[str, Module]) -> Iterator[tuple[str, int]]:
    """Yield the modules of ours that a module imports anywhere, also lazily and for typing only, each with its line."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from ((a.name, node.lineno) for a in names if a.name in known)
            case ast.ImportFrom(module=str(source), names=names, level=0):
                for alias in names:
                    name = f"{source}.{alias.name}"
                    if name in known:
                        yield name, node.lineno
                    elif source in known:
                        yield source, node.lineno


def _imports_of_others(module: Module, known: Mapping[str, Module]) -> set[str]:
    inner = module.name + "."
    found = {name for name, _ in imported_modules(module, known)}
    return {
        name
        for name in found
        if name != module.name and not (module.is_package and name.startswith(inner))
    }


def circles(known: Mapping[str, Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, by Tarjan's algorithm; an `__init__` that only re-exports
    the modules of its own folder does not count as one that they import."""
    edges = {name: sorted(_imports_of_others(m, known)) for name, m in known.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for to in edges[name]:
            if to not in index:
                visit(to)
                low[name] = min(low[name], low[to])
            elif to in stack:
                low[name] = min(low[name], index[to])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    return found


def exported_names(module: Module) -> Iterator[tuple[str, int]]:
    """Yield the public classes and type aliases that a module defines at its top level."""
    for node in module.tree.body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield name, node.lineno
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_alias(name, value):
                yield name, node.lineno


def is_alias(name: str, value: ast.expr) -> bool:
    """Whether an assignment at top level names a type: a name in CamelCase for a subscription, a union or another such
    name."""
    if name.startswith("_") or not name[0].isupper() or name.isupper() or "_" in name:
        return False
    return isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)
