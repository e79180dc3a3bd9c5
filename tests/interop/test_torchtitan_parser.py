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
from piper_interop.neutral.units import unit_mb
from piper_interop.torchtitan.reader import every, of_answer
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES

PYTHON = os.environ.get("PIPER_TORCHTITAN_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="PIPER_TORCHTITAN_PYTHON names no interpreter"),
]
RECIPE = "llama3:llama3_debugmodel"
REFUSED = ("flux:", "muse_glimmer:", "_lora")
"""The parts of names of recipes that are refused, each by the name of the part that is missing."""
QUANTIZED = ("671b_float8", "debugmodel_mxfp8", "nvfp4")
"""The parts of names of recipes with experts in 8 bits or products in 4, which go as bfloat16."""
AT_LEAST = (34, 42)
"""The recipes that are imported as they are, and with all stand-ins: 80 % of the 52 that need no torchvision."""


@pytest.fixture(scope="module")
def answers() -> Mapping[str, Any]:
    return every(PYTHON)


@pytest.mark.parametrize("stand_ins", [(), ("bf16",)])
def test_every_option_of_every_recipe_has_a_row(answers, stand_ins):
    """Unknown options are errors, so a recipe that is refused must be so for the parts that are missing."""
    titan, said = system("torchtitan"), 0
    refused = REFUSED if stand_ins else (*REFUSED, *QUANTIZED)
    for name, answer in answers.items():
        if isinstance(answer, str):
            assert "torchvision" in answer, f"{name}: {answer}"
            continue
        foreign = of_answer(answer, name)
        devices = 1 if "async_ep" in name else 256
        asked = Asked(devices=devices, python=PYTHON, stand_ins=frozenset(stand_ins))
        try:
            described = titan.described(foreign, asked)[1]
        except JobError as e:
            assert "no such option" not in str(e), f"{name}: {e}"
            assert any(part in name for part in refused), f"{name}: {e}"
            continue
        said += 1
        sizes = eval(described.sizes.text(), {"piper": __import__("piper")})
        if described.parameters is not None:  # a module that only a device can build has no count
            assert models.parameter_count(sizes) == described.parameters, name
    assert said >= AT_LEAST[bool(stand_ins)]


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
    asked, layout = Asked(devices=8, python=PYTHON), LAYOUTS[name]
    before = import_job("torchtitan", RECIPE, asked).described
    unit = unit_mb(before.sizes, layout.tp, layout.ep, ITEM_BYTES[before.reduce])
    layout = replace(layout, bucket_mb=unit, reduce_once=layout.pp > 1)
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
