"""Liveness of generated steps against a counter of live storages that knows nothing of it."""

from __future__ import annotations

import dataclasses

import torch

from packages.capture.tests.joint_cases import CASES
from packages.capture.tests.joint_harness import measured_peak, run, tangents_of, trace
from piper_capture.steps.codegen import StepCode
from piper_ir.ground.sizes import bind
from tests.helpers.cases import each_case

torch.set_num_threads(1)


@each_case("name", CASES)
@each_case("inputs_die", [True, False])
def test_measured_peak_is_the_planned_one(name: str, inputs_die: bool) -> None:
    """To the byte, in each step, with inputs that die at their last use and with inputs that stay."""
    case = CASES[name]
    traced = trace(case)
    ports = run(traced, case.tensors, tangents_of(case))
    for step, signature in traced.steps.items():
        if signature.empty:
            continue
        dying = signature.reads if inputs_die else ()
        sizes = {
            i: bind(traced.ports[p].nbytes, 0) for i, p in enumerate(signature.reads) if p in dying
        }
        assert measured_peak(traced, step, ports, dying) == max(
            0, signature.liveness.peak(sizes)
        ), (
            step,
            traced.code[step].source,
        )


def test_a_tensor_kept_too_long_is_noticed() -> None:
    """Negative control: a generated step that forgets to drop its temporaries holds more than planned."""
    case = CASES["mlp"]
    traced = trace(case)
    code = {
        s: StepCode("\n".join(line.split("; del")[0] for line in c.source.split("\n")), c.constants)
        for s, c in traced.code.items()
    }
    leaky = dataclasses.replace(traced, code=code)
    ports = run(leaky, case.tensors, tangents_of(case))
    signature = traced.steps["I"]
    sizes = {i: bind(traced.ports[p].nbytes, 0) for i, p in enumerate(signature.reads)}
    assert measured_peak(leaky, "I", ports, signature.reads) > signature.liveness.peak(sizes)
