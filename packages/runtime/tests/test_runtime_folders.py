"""The folders of the runtime build on each other in one direction: each folder's `__init__` says what it may import."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.package_folders import Package

RUNTIME = Package("piper_runtime", "runtime")


@pytest.mark.parametrize("folder", RUNTIME.folders)
def test_a_folder_of_the_runtime_imports_what_it_says(folder: str) -> None:
    files = RUNTIME.imports_of(folder)
    assert RUNTIME.violations(folder, files) == []
    used = {name.split(".")[1] for names in files.values() for name in names} - {folder}
    assert RUNTIME.allowed(folder) == used, "what is said and not used"


def test_a_forbidden_import_in_the_runtime_is_found() -> None:
    wrong = {
        Path("x.py"): [
            "piper_runtime.launch.running.run",
            "piper_runtime",
            "piper_runtime.rank.job.job",
        ]
    }
    assert len(RUNTIME.violations("engine", wrong)) == 2


def test_no_folders_of_the_runtime_are_in_a_circle() -> None:
    assert RUNTIME.folders == [
        "checkpoint",
        "data",
        "engine",
        "launch",
        "profile",
        "rank",
        "transport",
        "weights",
    ]
    TopologicalSorter({folder: RUNTIME.allowed(folder) for folder in RUNTIME.folders}).prepare()


def test_other_packages_import_from_the_runtime_or_its_folders() -> None:
    faces = {RUNTIME.name, *(f"{RUNTIME.name}.{folder}" for folder in RUNTIME.folders)}
    used = RUNTIME.imports_of_others()
    assert [f"{path}: {name}" for path, name in used if name not in faces] == []
    assert any(path.is_relative_to(RUNTIME.homes_of_others[0]) for path, _ in used), (
        "nobody imports it"
    )
