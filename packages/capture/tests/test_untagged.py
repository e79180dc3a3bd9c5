"""Refusals name the modules that look like experts where no region of a model is marked as such."""

from __future__ import annotations

import re

from piper_capture.module.untagged_experts import way_to_experts
from piper_ir.ground.sizes import TensorSpec
from piper_ir.program.program import Param, Program
from tests.helpers.cases import each_case

STACK, MATRIX = TensorSpec((4, 6, 8), "float32"), TensorSpec((6, 8), "float32")


@each_case(
    ("specs", "message"),
    [
        (
            {"layers.0.up.weight": MATRIX},
            r"`with piper.region\(experts=0\)`, or tag their module: piper.tag\(model, ",
        ),
        ({"conv.weight": STACK, "conv.bias": MATRIX}, "`, or tag their module"),
        ({"a.up": STACK, "a.down": TensorSpec((5, 6, 8), "float32")}, "`, or tag their module"),
        (
            {"layers.3.moe.up": STACK, "layers.3.moe.down": STACK},
            r"^if the matrices of module 'layers.3.moe' are experts, tag it .*\(model, "
            r"{'layers.\*.moe': "
            r"dict\(experts=0\)}\)",
        ),
        (
            {
                f"h.{layer}.experts.{name}": STACK
                for layer in range(3)
                for name in ("gate_up_proj", "down_proj")
            },
            r"^tag module 'h.0.experts' and 2 more .*{'h.\*.experts': dict\(experts=0, "
            r"replace='gated_experts'\)}\)$",
        ),
    ],
)
def test_modules_that_look_like_experts_are_named(
    specs: dict[str, TensorSpec], message: str
) -> None:
    params = tuple(Param(name, spec) for name, spec in specs.items())
    assert re.search(message, way_to_experts(Program((), params)))
