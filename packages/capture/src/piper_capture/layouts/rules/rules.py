"""Hold the table of sharding rules: op -> its loops. An op without a rule is computed replicated.

Each family of ops has a module of its own, `rules_*`. Element-wise ops, which torch tags as such, need no entry. Of
random ops dropout alone has a rule: `local` tells each device which elements of the whole it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from piper_capture.layouts.loops import Loops, OpCall
from piper_capture.layouts.rewrites import rewrites_of
from piper_capture.layouts.rules import (
    rules_attention,
    rules_experts,
    rules_float8,
    rules_indexing,
    rules_losses,
    rules_made,
    rules_norms,
    rules_parts,
    rules_products,
    rules_reductions,
    rules_views,
)
from piper_capture.layouts.rules.rules_elementwise import DRAWING, UNTAGGED, elementwise
from piper_capture.torch_api._torch import OpOverload

LoopRule = Callable[[OpCall], Loops]

RULES: dict[OpOverload, LoopRule] = {
    **rules_views.RULES,
    **rules_parts.RULES,
    **rules_products.RULES,
    **rules_reductions.RULES,
    **rules_norms.RULES,
    **rules_indexing.RULES,
    **rules_made.RULES,
    **rules_losses.RULES,
    **rules_attention.RULES,
    **rules_experts.RULES,
    **rules_float8.RULES,
    **dict.fromkeys((*UNTAGGED, *DRAWING), elementwise),
}
"""The rules by op, without those of ops that torch tags as element-wise."""


def loops_of(call: OpCall) -> Loops | None:
    """Return the loops of a call, or None if its op has no rule."""
    rule = RULES.get(call.op)
    if rule is None:
        if not is_elementwise(call.op):
            return None
        rule = elementwise
    loops = rule(call)
    linear = tuple(terms for terms in loops.linear if _one_dtype(call, terms))
    return replace(loops, linear=linear, rewrites=rewrites_of(call))


def is_elementwise(op: OpOverload) -> bool:
    """Return whether an op computes each element by itself, and draws no random numbers."""
    if op in UNTAGGED:
        return True
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


def _one_dtype(call: OpCall, terms: frozenset[int]) -> bool:
    """Return whether an op sums in the floating-point dtype of its argument, so that partial sums add up.

    A cast rounds each element, booleans add up to "or", and integers divide with a rest. The gradient of experts'
    shares has the shares' dtype, whose rounding it has on one device, too.
    """
    if call.op is rules_experts.UNROUTE_WGRAD:
        return True
    dtypes = {call.tensors[k].dtype for k in terms} | {
        t.dtype for t in call.results if t.shape != (0,)
    }
    return len(dtypes) == 1 and all(d.is_floating_point for d in dtypes)
