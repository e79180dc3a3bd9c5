"""torchtitan's own parser takes exports, and its recipes are read to the parameter; `make interop` installs it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from piper import models
from piper_interop import Asked, DeviceLayout, Recomputation, export_job, import_job, system
from piper_interop.torchtitan.reader import every, of_answer
from piper_ir.ground.errors import JobError

PYTHON = os.environ.get("PIPER_TORCHTITAN_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="PIPER_TORCHTITAN_PYTHON names no interpreter"),
]
RECIPE = "llama3:llama3_debugmodel"
REFUSED = ("flux:", "gpt_oss:", "muse_glimmer:", "_mtp", "_float8", "_mxfp8", "nvfp4", "_lora")
"""The parts of names of recipes that are refused, each by the name of the part that is missing."""


@pytest.fixture(scope="module")
def answers() -> Mapping[str, Any]:
    return every(PYTHON)


def test_every_option_of_every_recipe_has_a_row(answers):
    """Unknown options are errors, so a recipe that is refused must be so for the parts that are missing."""
    titan, asked = system("torchtitan"), Asked(devices=256, python=PYTHON)
    said = 0
    for name, answer in answers.items():
        if isinstance(answer, str):
            continue  # needs a library or a device that is not here
        foreign = of_answer(answer, name)
        try:
            described = titan.described(foreign, asked)[1]
        except JobError as e:
            assert "no such option" not in str(e), f"{name}: {e}"
            assert any(part in name for part in REFUSED) or "256 devices" in str(e), f"{name}: {e}"
            continue
        if described.parameters is None:
            continue  # a module that only a device can build
        said += 1
        sizes = eval(described.sizes.text(), {"piper": __import__("piper")})
        assert models.parameter_count(sizes) == described.parameters, name
    assert said >= 15


LAYOUTS = {
    "fsdp": DeviceLayout(dp=8, zero=3),
    "tp": DeviceLayout(dp=2, tp=4, sequence=True, zero=3),
    "hybrid": DeviceLayout(dp=4, dp_replicate=2, zero=3),
    "cp": DeviceLayout(dp=2, cp=4, attention="gather", zero=3, over_cp=True),
    "pipeline": DeviceLayout(
        dp=4, pp=2, schedule="interleaved", chunks=2, at=(2, 4, 6), units="all", zero=3, reshard=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_comes_back_through_the_parser(name):
    layout = LAYOUTS[name]
    asked = Asked(devices=8, python=PYTHON)
    before = import_job("torchtitan", RECIPE, asked).described
    wanted = replace(
        before,
        layout=layout,
        rows=1,
        global_batch=32,
        recompute=(Recomputation("inputs"),),
        notes=(),
    )
    (text,) = export_job("torchtitan", wanted).files.values()
    sets = tuple(shlex.split(text))
    after = import_job("torchtitan", RECIPE, replace(asked, sets=sets)).described
    assert replace(after, notes=()) == wanted
