"""Make a Program with exact sizes and a CodeStore with its functions from an nn.Module with coordinates.

Only this folder of the compiler may import torch and piper_ops; of the compiler it imports nothing else.
"""

from piper_compiler.capture._torch_context import check_autocast, check_context, tracer_settings
from piper_compiler.capture.advancing import Advancing
from piper_compiler.capture.assemble import capture, trace, with_layers
from piper_compiler.capture.codegen import StepCode, compile_step
from piper_compiler.capture.codestore import Captured, CodeStore
from piper_compiler.capture.layers import Layers
from piper_compiler.capture.layout_facts import ChunkFacts, IndexFacts, WorkFacts, layout_facts
from piper_compiler.capture.model import ASKED_ROWS, built_model, flatten_batch, named_tensors, sharing_memory
from piper_compiler.capture.narrow import narrowest
from piper_compiler.capture.other_rows import check_rows
from piper_compiler.capture.recompute import POLICIES
from piper_compiler.capture.replacements import own_replacements, replacement
from piper_compiler.capture.sharding import with_shardings
from piper_compiler.capture.stored import StoredCode, StoredTrace, extent, restored, stored
from piper_compiler.capture.tags import region, tag
from piper_compiler.capture.traced import Traced
from piper_compiler.capture.variants import with_policies

__all__ = [
    "ASKED_ROWS",
    "Advancing",
    "Captured",
    "ChunkFacts",
    "CodeStore",
    "IndexFacts",
    "Layers",
    "POLICIES",
    "StepCode",
    "StoredCode",
    "StoredTrace",
    "Traced",
    "WorkFacts",
    "built_model",
    "capture",
    "check_autocast",
    "check_context",
    "check_rows",
    "compile_step",
    "extent",
    "flatten_batch",
    "layout_facts",
    "named_tensors",
    "narrowest",
    "own_replacements",
    "region",
    "replacement",
    "restored",
    "sharing_memory",
    "stored",
    "tag",
    "trace",
    "tracer_settings",
    "with_layers",
    "with_policies",
    "with_shardings",
]
