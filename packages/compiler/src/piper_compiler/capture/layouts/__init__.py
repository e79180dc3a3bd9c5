"""Find the loops that run through a joint graph, so that a device may compute its part of them.

`loops` says what an op tells of itself, the modules `rules_*` tell it for each op, and `indexes` puts the ops of a
graph together.
"""

from piper_compiler.capture.layouts.indexes import Index, Indexed, indexed
from piper_compiler.capture.layouts.loops import At, Inner, Loops, OpCall, place_of
from piper_compiler.capture.layouts.rules import known, loops_of

__all__ = ["At", "Index", "Indexed", "Inner", "Loops", "OpCall", "indexed", "known", "loops_of", "place_of"]
