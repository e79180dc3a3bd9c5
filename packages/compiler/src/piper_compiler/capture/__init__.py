"""Capture: from an nn.Module with coordinates to a Program with exact sizes and a CodeStore with its functions."""

from piper_compiler.capture.advancing import Advancing
from piper_compiler.capture.assemble import capture
from piper_compiler.capture.codegen import StepCode, compile_step
from piper_compiler.capture.codestore import Captured, CodeStore
from piper_compiler.capture.model import flatten_batch, named_tensors
from piper_compiler.capture.tags import region, tag

__all__ = [
    "Advancing",
    "Captured",
    "CodeStore",
    "StepCode",
    "capture",
    "compile_step",
    "flatten_batch",
    "named_tensors",
    "region",
    "tag",
]
