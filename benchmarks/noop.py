"""Make a plan whose chunks compute nothing: what is left of its time is the cost of executing instructions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

import piper
from piper_compiler import Options, Training, compile_program
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.plan.plan import Plan
from piper_ir.program.program import (
    BatchTensor,
    Chunk,
    Input,
    Output,
    Param,
    Program,
    Signature,
    Step,
)
from piper_runtime.rank import ShippedCode

DTYPE = "float32"
_ROW = TensorSpec((Affine(0, 1),), DTYPE)
_SCALAR = TensorSpec((), DTYPE)
_WEIGHT = TensorSpec((1,), DTYPE)

# The outputs are constants that every call hands out again: no tensor is made.
_TENSORS = {"ROW": torch.zeros(1), "LOSS": torch.zeros(())}


def _code(*outputs: str) -> ShippedCode:
    returned = "".join(f"{name}, " for name in outputs)
    return ShippedCode(
        f"def step(args):\n    args.clear()\n    return ({returned})\n",
        {n: _TENSORS[n] for n in outputs},
    )


CODE = {
    "noop": {"F": _code("ROW"), "I": _code("ROW"), "W": _code()},
    "noop.loss": {"F": _code("LOSS"), "I": _code("ROW"), "W": _code()},
}
"""The code store."""


class Nothing(nn.Module):
    """Be the model of which `program` is the program: one number per layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(layers)])


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(rows)), torch.zeros(len(rows))


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.0)


def job(of: Plan) -> piper.Job:
    """Return the job of a plan that `plan` has made."""
    layers = len(of.chunks)
    return piper.Job(
        lambda: Nothing(layers),
        batch,
        lambda output, targets: output.sum(),
        sgd,
        global_batch=of.global_batch,
    )


def program(layers: int) -> Program:
    """Return a chain of `layers` chunks, each with one parameter; the last makes the loss."""
    chunks = tuple(_chunk(k, layers) for k in range(layers))
    params = tuple(Param(f"layers.{k}", _WEIGHT) for k in range(layers))
    return Program(
        chunks, params, batch=(BatchTensor("inputs", _ROW), BatchTensor("targets", _ROW))
    )


def _chunk(k: int, layers: int) -> Chunk:
    last = k == layers - 1
    source = (
        Input("batch", "inputs", _ROW)
        if k == 0
        else Input("value", f"layer{k - 1}:out0", _ROW, needs_grad=True)
    )
    inputs = (source, Input("param", f"layers.{k}", _WEIGHT, needs_grad=True))
    spec = _SCALAR if last else _ROW
    output = Output("loss" if last else "value", spec, needs_grad=True)
    steps: dict[Step, Signature] = {
        "F": Signature(("in0", "in1"), ("out0",)),
        "I": Signature((), ()) if k == 0 else Signature(("tan0", "in1"), ("gin0",)),
        "W": Signature(("in0", "tan0"), (), (1,)),
    }
    ports = {"in0": _ROW, "in1": _WEIGHT, "out0": spec, "tan0": spec, "gin0": _ROW}
    return Chunk(
        f"layer{k}", {"layer": k}, inputs, (output,), ports, steps, "noop.loss" if last else "noop"
    )


@lru_cache(maxsize=8)
def plan(pp: int, layers: int, microbatches: int) -> Plan:
    """Return a plan of 1F1B over pp stages; one row per microbatch.

    It is unfused, so that an instruction is forward or backward of one layer. SGD without momentum has
    no optimizer state.
    """
    stages = piper.recipes.one_f_one_b(pp=pp, microbatches=microbatches)
    strategy = piper.Strategy(piper.Mesh(pp=pp), stages)
    options = replace(Options(), fuse=False)
    return compile_program(
        program(layers), strategy, global_batch=microbatches, training=Training(), options=options
    ).plan
