"""Keep the table of rules: op -> its loops. An op without a rule is computed whole.

Each family of ops has a module of its own, `rules_*`. Element-wise ops, which torch tags as such, need no entry.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts import (
    rules_attention,
    rules_indexing,
    rules_products,
    rules_reductions,
    rules_views,
    rules_vocabulary,
)
from piper_compiler.capture.layouts.loops import Loops, OpCall
from piper_compiler.capture.layouts.rules_elementwise import elementwise

Rule = Callable[[OpCall], Loops]

RULES: dict[OpOverload, Rule] = {
    **rules_views.RULES,
    **rules_products.RULES,
    **rules_reductions.RULES,
    **rules_indexing.RULES,
    **rules_attention.RULES,
    **rules_vocabulary.RULES,
}
"""The rules by op, without those of element-wise ops."""


def known(op: OpOverload) -> bool:
    """Return whether an op has a rule."""
    return op in RULES or _elementwise(op)


def loops_of(call: OpCall) -> Loops | None:
    """Return the loops of a call, or None where its op has no rule."""
    rule = RULES.get(call.op)
    if rule is not None:
        return rule(call)
    return elementwise(call) if _elementwise(call.op) else None


def _elementwise(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
