"""Turn a program and a strategy into a plan: directives, recipes, passes, and schedules as CSV files.

It may import piper_ir and numpy: a program's sizes are all that it knows of a model, so nothing here needs torch.
"""

from piper_compiler import recipes
from piper_compiler.build import build_graph
from piper_compiler.compile import (
    CompileRequest,
    Lowered,
    Options,
    Training,
    apply_directives,
    check_strategy,
    compile_program,
    compiled,
    depends_on_costs,
    split_mesh,
    with_fixed_stages,
)
from piper_compiler.directives import (
    ASKED_FOR,
    CaptureRequest,
    Directive,
    capture_request,
    describe,
    directive,
    eager,
    fail,
    offload,
    order,
    overlap,
    partition,
    place,
    recompute,
    replicate,
    shard,
    site_field,
    split,
    split_backward,
    stream,
    tile_loss,
)
from piper_compiler.interchange import Schedule, read_schedule_csv, write_schedule_csv
from piper_compiler.passes import EVERYWHERE, FORGETS, states, windows, with_buckets
from piper_compiler.ports import steps_of
from piper_compiler.request import kernel_source
from piper_compiler.strategy import Strategy, load_strategy, save_strategy
from piper_compiler.synthetic import MOST_SECONDS, synthetic

__all__ = [
    "ASKED_FOR",
    "CaptureRequest",
    "EVERYWHERE",
    "FORGETS",
    "MOST_SECONDS",
    "CompileRequest",
    "Directive",
    "Lowered",
    "Options",
    "Schedule",
    "Strategy",
    "Training",
    "apply_directives",
    "capture_request",
    "check_strategy",
    "build_graph",
    "compile_program",
    "compiled",
    "depends_on_costs",
    "describe",
    "directive",
    "eager",
    "fail",
    "kernel_source",
    "load_strategy",
    "order",
    "overlap",
    "partition",
    "place",
    "read_schedule_csv",
    "recipes",
    "offload",
    "recompute",
    "replicate",
    "shard",
    "save_strategy",
    "site_field",
    "split",
    "split_backward",
    "split_mesh",
    "states",
    "steps_of",
    "stream",
    "synthetic",
    "tile_loss",
    "windows",
    "with_buckets",
    "with_fixed_stages",
    "write_schedule_csv",
]
