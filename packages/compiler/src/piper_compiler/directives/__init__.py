"""Hold the directives of the language, one file each, with their legality conditions numbered at the top.

They may import `ports`, `durations` and piper_ir. No other file compiles a directive specially by its class, and
searches ask its method `decided`. A description in words (`piper.views.strategy_facts`) and an export of a strategy
that is not compiled (`piper_compiler.interchange`) look for Piper's own classes, and say nothing of others.
"""

from piper_compiler.directives.base import (
    REGISTRY,
    Directive,
    call_site,
    describe,
    directive,
    fail,
    site_field,
)
from piper_compiler.directives.decided import Decided, Ordered, decided, simplest
from piper_compiler.directives.eager import Eager as eager
from piper_compiler.directives.offload import Offload as offload
from piper_compiler.directives.order import Order as order
from piper_compiler.directives.order import Overlap as overlap
from piper_compiler.directives.partition import (
    Boundaries,
    chunk_layers,
    stage_of_layers,
)
from piper_compiler.directives.partition import Partition as partition
from piper_compiler.directives.place import Place as place
from piper_compiler.directives.prepare import CaptureRequest, layers_of
from piper_compiler.directives.recompute import Recompute as recompute
from piper_compiler.directives.replicate import Replicate as replicate
from piper_compiler.directives.shard import Shard as shard
from piper_compiler.directives.split import Split as split
from piper_compiler.directives.split import split_all
from piper_compiler.directives.split_backward import SplitBackward as split_backward
from piper_compiler.directives.stream import Stream as stream
from piper_compiler.directives.tile_loss import TileLoss as tile_loss
from piper_compiler.directives.unwritten import (
    ASKED_FOR,
    asked_by_model,
    capture_request,
    kept_by_kernels,
)

__all__ = [
    "ASKED_FOR",
    "REGISTRY",
    "Boundaries",
    "CaptureRequest",
    "Decided",
    "Directive",
    "Ordered",
    "asked_by_model",
    "call_site",
    "capture_request",
    "chunk_layers",
    "decided",
    "describe",
    "directive",
    "eager",
    "fail",
    "kept_by_kernels",
    "layers_of",
    "offload",
    "order",
    "overlap",
    "partition",
    "place",
    "recompute",
    "replicate",
    "shard",
    "simplest",
    "site_field",
    "split",
    "split_all",
    "split_backward",
    "stage_of_layers",
    "stream",
    "tile_loss",
]
