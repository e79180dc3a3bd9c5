"""The folders of the simulator build on each other in one direction, and other packages use its face.

Each folder's `__init__` says what it may import. Lazy imports and those under TYPE_CHECKING count.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.package_folders import Package

SIMULATOR = Package("piper_simulator", "simulator")


@pytest.mark.parametrize("folder", SIMULATOR.folders)
def test_a_folder_imports_what_it_says(folder: str) -> None:
    files = SIMULATOR.imports_of(folder)
    assert SIMULATOR.violations(folder, files) == []
    used = {name.split(".")[1] for names in files.values() for name in names} - {folder}
    assert SIMULATOR.allowed(folder) == used, "what is said and not used"


def test_a_forbidden_import_is_found() -> None:
    wrong = {
        Path("x.py"): [
            "piper_simulator.explanation.why",
            "piper_simulator",
            "piper_simulator.cluster.device",
        ]
    }
    assert len(SIMULATOR.violations("durations", wrong)) == 2


def test_neither_folders_nor_files_are_in_a_circle() -> None:
    TopologicalSorter({folder: SIMULATOR.allowed(folder) for folder in SIMULATOR.folders}).prepare()
    graph = SIMULATOR.import_graph()
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(
            graph | {"piper_simulator.cluster.checks": {"piper_simulator.simulation"}}
        ).prepare()


def test_other_packages_import_from_the_face() -> None:
    used = SIMULATOR.imports_of_others()
    assert [f"{path}: {name}" for path, name in used if name != SIMULATOR.name] == []
    assert any(path.is_relative_to(SIMULATOR.homes_of_others[0]) for path, _ in used), (
        "nobody imports it"
    )
