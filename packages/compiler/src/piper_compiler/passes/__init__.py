"""Hold the passes from a graph to a plan; `piper_compiler.compile` lists them in the order of their runs.

They may import `ports`, `durations`, `request`, `directives.split`, piper_ir and numpy, but neither recipes nor
`interchange`.
"""

from piper_compiler.passes.program.assemble import states
from piper_compiler.passes.program.complete import EVERYWHERE, with_buckets
from piper_compiler.passes.program.forwards import FORGETS
from piper_compiler.passes.steps.windows import windows

__all__ = ["EVERYWHERE", "FORGETS", "states", "windows", "with_buckets"]
