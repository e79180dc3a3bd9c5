"""The folders of a package as data, for tests of what they say that they may import ("May import: a, b." in their
`__init__`).

Lazy imports and those under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.helpers.source_tree import parsed

ROOT = Path(__file__).resolve().parents[2]


@cache
def _imports(path: Path) -> tuple[tuple[str, str], ...]:
    """Return what a file imports anywhere: modules, and a name of it or ""."""
    imports: list[tuple[str, str]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            imports += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.module or "", alias.name) for alias in node.names]
    return tuple(imports)


@cache
def _exported(init: Path) -> frozenset[str]:
    """Return the names in `__all__` of a folder: a function may be named as the module that holds it."""
    body = parsed(init).body if init.is_file() else []
    lists = [
        n.value
        for n in body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    return frozenset(name for value in lists for name in ast.literal_eval(value))


@dataclass(frozen=True)
class Package:
    """A package with folders.

    Attributes:
        name: as it is imported; a folder of a package is one, too: "piper_capture".
        said: how its docstrings name it in "nothing of the ...".
    """

    name: str
    said: str

    @property
    def source(self) -> Path:
        parts = self.name.split(".")
        home = ROOT if parts[0] == "piper" else ROOT / "packages" / parts[0].removeprefix("piper_")
        return (home / "src").joinpath(*parts)

    @property
    def depth(self) -> int:
        """Return the number of names before that of a folder."""
        return self.name.count(".") + 1

    @property
    def folders(self) -> list[str]:
        return sorted(p.parent.name for p in self.source.glob("*/__init__.py"))

    @property
    def homes_of_others(self) -> list[Path]:
        """Folders with code that may use the package through its face only."""
        packages = [
            p / "src" for p in (ROOT / "packages").iterdir() if p / "src" not in self.source.parents
        ]
        return [ROOT / "src", *packages, ROOT / "benchmarks", ROOT / "docs"]

    def imported(self, path: Path) -> Iterator[str]:
        """Yield the modules of the package that a file imports anywhere."""
        for module, name in _imports(path):
            if self._has(module):  # the name may be that of a module
                whole = f"{module}.{name}" if name else module
                exported = name in _exported(self._init_of(module))
                yield whole if self._exists(whole) and not exported else module

    def _has(self, module: str) -> bool:
        return f"{module}.".startswith(f"{self.name}.")

    def _init_of(self, module: str) -> Path:
        return self.source.joinpath(*module.split(".")[self.depth :], "__init__.py")

    def _exists(self, module: str) -> bool:
        init = self._init_of(module)
        return init.parent.with_suffix(".py").is_file() or init.is_file()

    def allowed(self, folder: str) -> set[str]:
        """Return what the docstring of a folder says that it may import."""
        text = ast.get_docstring(parsed(self.source / folder / "__init__.py")) or ""
        (said,) = re.findall(r"^May import: (.+)\.$", text, re.MULTILINE)
        return set() if said == f"nothing of the {self.said}" else set(said.split(", "))

    def violations(self, folder: str, files: Mapping[Path, list[str]]) -> list[str]:
        """Return a line for each import of a folder that its docstring does not allow."""
        may = self.allowed(folder) | {folder}
        return [
            f"{path}: {name}"
            for path, names in files.items()
            for name in names
            if self.folder_of(name) not in may
        ]

    def folder_of(self, module: str) -> str:
        """Return the folder in which a module stands; "" for one in none."""
        return "".join(module.split(".")[self.depth : self.depth + 1])

    def imports_of(self, folder: str) -> dict[Path, list[str]]:
        """Return what each file of a folder imports of the package."""
        return {
            path: list(self.imported(path)) for path in sorted((self.source / folder).rglob("*.py"))
        }

    def import_graph(self) -> dict[str, set[str]]:
        """Return what each module of the package imports of it."""
        graph = {}
        for path in self.source.rglob("*.py"):
            name = ".".join(
                (self.name, *path.relative_to(self.source).with_suffix("").parts)
            ).removesuffix(".__init__")
            graph[name] = set(self.imported(path))
        return graph

    def imports_of_others(self) -> list[tuple[Path, str]]:
        """Return what code outside of the package imports of it."""
        return [
            (p, name)
            for home in self.homes_of_others
            for p in home.rglob("*.py")
            for name in self.imported(p)
        ]
