"""Make a Program with exact sizes and a CodeStore with its functions from an nn.Module with coordinates.

Only this folder of the compiler may import torch and piper_ops; of the compiler it imports nothing else.
"""

from piper_compiler.capture.chunks.advancing import Advancing
from piper_compiler.capture.chunks.layers import Layers
from piper_compiler.capture.chunks.narrow_dtypes import narrowest
from piper_compiler.capture.chunks.other_rows import check_rows
from piper_compiler.capture.module.model import (
    ASKED_ROWS,
    built_model,
    flatten_batch,
    named_tensors,
    sharing_memory,
)
from piper_compiler.capture.module.tags import region, tag
from piper_compiler.capture.steps.codegen import StepCode, compile_step
from piper_compiler.capture.steps.recompute import POLICIES
from piper_compiler.capture.store.assemble import capture, trace, with_layers
from piper_compiler.capture.store.codestore import Captured, CodeStore
from piper_compiler.capture.store.layout_facts import (
    ChunkFacts,
    IndexFacts,
    WorkFacts,
    layout_facts,
)
from piper_compiler.capture.store.sharding import with_shardings
from piper_compiler.capture.store.stored import StoredCode, StoredTrace, extent, restored, stored
from piper_compiler.capture.store.traced import Traced
from piper_compiler.capture.store.variants import with_policies
from piper_compiler.capture.torch_api._torch_context import (
    check_autocast,
    check_context,
    tracer_settings,
)
from piper_compiler.capture.torch_api.replacements import own_replacements, replacement

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
