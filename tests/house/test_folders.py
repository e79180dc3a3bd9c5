"""The folders of a package build on each other in one direction: each folder's `__init__` says what it may import."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.package_folders import Package

PACKAGES = [
    Package(name, said)
    for name, said in {
        "piper_ir": "IR",
        "piper_ops": "ops",
        "piper_capture": "capture",
        "piper_compiler.passes": "passes",
        "piper_runtime.launch": "launchers",
        "piper_runtime.rank": "ranks",
        "piper_report": "report",
        "piper_autotune": "tuner",
        "piper.api": "calls",
    }.items()
]


@pytest.mark.parametrize(("package", "folder"), [(p, f) for p in PACKAGES for f in p.folders])
def test_a_folder_imports_what_it_says(package: Package, folder: str) -> None:
    files = package.imports_of(folder)
    assert package.violations(folder, files) == []
    used = {package.folder_of(name) for names in files.values() for name in names} - {folder}
    assert package.allowed(folder) == used & set(package.folders), "what is said and not used"


def test_a_forbidden_import_is_found() -> None:
    capture = PACKAGES[2]
    wrong = {
        Path("x.py"): [
            "piper_capture.store.assemble",
            "piper_capture",
            "piper_capture.values",
        ]
    }
    assert len(capture.violations("steps", wrong)) == 2


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folders_are_in_a_circle(package: Package) -> None:
    TopologicalSorter({folder: package.allowed(folder) for folder in package.folders}).prepare()
