"""The file that most tests of the command line give it."""

from pathlib import Path

import pytest

from tests.helpers.command_line import GOOD, RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE + GOOD)
    return path
