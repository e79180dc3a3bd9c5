"""Make a Program with exact sizes and a CodeStore with its functions from an nn.Module with coordinates.

It may import piper_ir, piper_ops, torch, numpy and cloudpickle; the compiler reads the Program and knows no module.
"""

from piper_capture.chunks.advancing import Advancing
from piper_capture.chunks.layers import Layers
from piper_capture.chunks.narrow_dtypes import narrowest
from piper_capture.chunks.other_rows import check_rows
from piper_capture.module.model import (
    ASKED_ROWS,
    built_model,
    flatten_batch,
    named_tensors,
    sharing_memory,
)
from piper_capture.module.tags import region, tag
from piper_capture.steps.codegen import StepCode, compile_step
from piper_capture.steps.recompute import POLICIES
from piper_capture.store.assemble import capture, trace, with_layers
from piper_capture.store.captured import Captured
from piper_capture.store.codestore import CodeStore
from piper_capture.store.empty_stages import with_empty_stages
from piper_capture.store.layout_facts import (
    ChunkFacts,
    IndexFacts,
    WorkFacts,
    layout_facts,
)
from piper_capture.store.sharding import with_shardings
from piper_capture.store.stored import (
    StaleCapture,
    StoredCode,
    StoredTrace,
    extent,
    restored,
    stored,
)
from piper_capture.store.tiles import with_tiles
from piper_capture.store.traced import Traced
from piper_capture.store.variants import with_policies
from piper_capture.torch_api._torch_context import (
    check_autocast,
    check_context,
    tracer_settings,
)
from piper_capture.torch_api.replacements import own_replacements, replaced_experts, replacement

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
    "StaleCapture",
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
    "replaced_experts",
    "replacement",
    "restored",
    "sharing_memory",
    "stored",
    "tag",
    "trace",
    "tracer_settings",
    "with_empty_stages",
    "with_layers",
    "with_policies",
    "with_shardings",
    "with_tiles",
]
