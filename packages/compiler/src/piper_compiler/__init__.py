"""Piper's compiler: directives and recipes, graph building, lowering to a plan. Capture is in piper_compiler.capture (needs
torch)."""

from piper_compiler import recipes
from piper_compiler.compile import Lowered, Options, Training, compile_program
from piper_compiler.directives import (
    Directive,
    describe,
    directive,
    fail,
    order,
    partition,
    place,
    replicate,
    site_field,
    split,
    stream,
)
from piper_compiler.strategy import Strategy, load_strategy, save_strategy
from piper_compiler.synthetic import synthetic

__all__ = [
    "Directive",
    "Lowered",
    "Options",
    "Strategy",
    "Training",
    "compile_program",
    "describe",
    "directive",
    "fail",
    "load_strategy",
    "order",
    "partition",
    "place",
    "recipes",
    "replicate",
    "save_strategy",
    "site_field",
    "split",
    "stream",
    "synthetic",
]
