"""The folders of the simulator build on each other in one direction, and other packages use its face.

Each folder's `__init__` says what it may import. Lazy imports and those under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import piper_simulator

SOURCE = Path(piper_simulator.__file__).parent
ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(p.parent.name for p in SOURCE.glob("*/__init__.py"))
OTHERS = [
    ROOT / "src",
    *(p / "src" for p in (ROOT / "packages").iterdir() if p.name != "simulator"),
    ROOT / "benchmarks",
    ROOT / "docs",
]


def imported(path: Path) -> Iterator[str]:
    """Modules of the simulator that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] == "piper_simulator")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "piper_simulator":
            whole = [f"{node.module}.{a.name}" for a in node.names]  # the name may be that of a module
            yield from (name if exists(name) else str(node.module) for name in whole)


def exists(module: str) -> bool:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def allowed(folder: str) -> set[str]:
    """What the docstring of a folder says that it may import."""
    text = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    (said,) = re.findall(r"^May import: (.+)\.$", text, re.MULTILINE)
    return set() if said == "nothing of the simulator" else set(said.split(", "))


def violations(folder: str, files: Mapping[Path, list[str]]) -> list[str]:
    """Lines for what a folder imports and may not."""
    may = allowed(folder) | {folder}
    return [
        f"{path}: {name}" for path, names in files.items() for name in names if name.split(".")[1:2] not in [[m] for m in may]
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_it_says(folder: str) -> None:
    files = {path: list(imported(path)) for path in sorted((SOURCE / folder).glob("*.py"))}
    assert violations(folder, files) == []
    used = {name.split(".")[1] for names in files.values() for name in names} - {folder}
    assert allowed(folder) == used, "what is said and not used"


def test_a_forbidden_import_is_found() -> None:
    wrong = {Path("x.py"): ["piper_simulator.explanation.why", "piper_simulator", "piper_simulator.cluster.device"]}
    assert len(violations("durations", wrong)) == 2


def test_neither_folders_nor_files_are_in_a_circle() -> None:
    TopologicalSorter({folder: allowed(folder) for folder in FOLDERS}).prepare()
    graph = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(("piper_simulator", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = set(imported(path))
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"piper_simulator.cluster.checks": {"piper_simulator.simulation"}}).prepare()


def test_other_packages_import_from_the_face() -> None:
    found = [f"{p}: {name}" for home in OTHERS for p in home.rglob("*.py") for name in imported(p) if name != "piper_simulator"]
    assert found == []
    assert any(name == "piper_simulator" for p in (ROOT / "src").rglob("*.py") for name in imported(p)), "nobody imports it"
