"""The folders of a package build on each other in one direction: each folder's `__init__` says what it may import.

Other packages use a package through its face. Lazy imports and those under TYPE_CHECKING count.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from tests.helpers.package_folders import Package

PACKAGES = {
    name: Package(name, said)
    for name, said in {
        "piper_ir": "IR",
        "piper_ops": "ops",
        "piper_capture": "capture",
        "piper_compiler.passes": "passes",
        "piper_simulator": "simulator",
        "piper_runtime": "runtime",
        "piper_runtime.launch": "launchers",
        "piper_runtime.rank": "ranks",
        "piper_report": "report",
        "piper_autotune": "tuner",
        "piper_interop": "systems",
        "piper.api": "calls",
    }.items()
}
RUNTIME, SIMULATOR = PACKAGES["piper_runtime"], PACKAGES["piper_simulator"]


@each_case(("package", "folder"), [(p, f) for p in PACKAGES.values() for f in p.folders])
def test_a_folder_imports_what_it_says(package: Package, folder: str) -> None:
    files = package.imports_of(folder)
    assert package.violations(folder, files) == []
    used = {package.folder_of(name) for names in files.values() for name in names} - {folder}
    assert package.allowed(folder) == used & set(package.folders), "what is said and not used"


@each_case(
    ("name", "folder", "imports"),
    [
        ("piper_capture", "steps", ["store.assemble", "", "values"]),
        ("piper_simulator", "durations", ["explanation.why", "", "cluster.device"]),
        ("piper_runtime", "engine", ["launch.running.run", "", "rank.job.job"]),
    ],
)
def test_a_forbidden_import_is_found(name: str, folder: str, imports: list[str]) -> None:
    wrong = {Path("x.py"): [f"{name}.{module}".rstrip(".") for module in imports]}
    assert len(PACKAGES[name].violations(folder, wrong)) == 2


def test_no_folders_are_in_a_circle() -> None:
    for package in PACKAGES.values():
        TopologicalSorter({f: package.allowed(f) for f in package.folders}).prepare()


def test_no_files_of_the_simulator_are_in_a_circle() -> None:
    graph = SIMULATOR.import_graph()
    TopologicalSorter(graph).prepare()
    circle = {"piper_simulator.cluster.checks": {"piper_simulator.simulation"}}
    with pytest.raises(CycleError):
        TopologicalSorter(graph | circle).prepare()


@each_case(
    ("package", "faces"),
    [
        (SIMULATOR, {SIMULATOR.name}),
        (RUNTIME, {RUNTIME.name, *(f"{RUNTIME.name}.{folder}" for folder in RUNTIME.folders)}),
    ],
)
def test_other_packages_import_from_faces(package: Package, faces: set[str]) -> None:
    used = package.imports_of_others()
    assert [f"{path}: {name}" for path, name in used if name not in faces] == []
    assert any(path.is_relative_to(package.homes_of_others[0]) for path, _ in used), (
        "nobody imports it"
    )
