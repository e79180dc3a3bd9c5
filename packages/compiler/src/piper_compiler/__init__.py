"""Piper's compiler: directives and recipes, graph building, lowering to a plan. Capture is in piper_compiler.capture (needs
torch)."""

from piper_compiler import recipes
from piper_compiler.compile import CompileRequest, Lowered, Options, Training, compile_program, compiled, with_fixed_stages
from piper_compiler.directives import (
    Directive,
    describe,
    directive,
    fail,
    order,
    overlap,
    partition,
    place,
    replicate,
    site_field,
    split,
    split_backward,
    stream,
)
from piper_compiler.interchange import Schedule, read_schedule_csv, write_schedule_csv
from piper_compiler.strategy import Strategy, load_strategy, save_strategy
from piper_compiler.synthetic import synthetic

__all__ = [
    "CompileRequest",
    "Directive",
    "Lowered",
    "Options",
    "Schedule",
    "Strategy",
    "Training",
    "compile_program",
    "compiled",
    "describe",
    "directive",
    "fail",
    "load_strategy",
    "order",
    "overlap",
    "partition",
    "place",
    "read_schedule_csv",
    "recipes",
    "replicate",
    "save_strategy",
    "with_fixed_stages",
    "site_field",
    "split",
    "split_backward",
    "stream",
    "synthetic",
    "write_schedule_csv",
]
