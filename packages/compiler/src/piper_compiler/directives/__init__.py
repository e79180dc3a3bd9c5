"""The directives of the language, one file each, with their legality conditions numbered at the top."""

from piper_compiler.directives.base import REGISTRY, Directive, call_site, describe, directive, fail, site_field
from piper_compiler.directives.order import Order as order
from piper_compiler.directives.order import Overlap as overlap
from piper_compiler.directives.partition import Boundaries
from piper_compiler.directives.partition import Partition as partition
from piper_compiler.directives.place import Place as place
from piper_compiler.directives.replicate import Replicate as replicate
from piper_compiler.directives.split import Split as split
from piper_compiler.directives.split_backward import SplitBackward as split_backward
from piper_compiler.directives.stream import Stream as stream

__all__ = [
    "REGISTRY",
    "Boundaries",
    "Directive",
    "call_site",
    "describe",
    "directive",
    "fail",
    "order",
    "overlap",
    "partition",
    "place",
    "replicate",
    "site_field",
    "split",
    "split_backward",
    "stream",
]
