"""List all rewrites of a chunk's graphs, in the order in which they are tried.

A rewrite changes no value, except where its rule says how it rounds. `JOINT` holds rules for each node of the joint
graph of forward and backward, which is functional; `STEP` holds rewrites of the graph of one step, which may write in
place. (Rewrites for devices that share a chunk stand in `layouts`.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from piper_capture.graphs import local_rules as local
from piper_capture.graphs.conjugates import compute_bits
from piper_capture.graphs.expert_rounds_inplace import add_further_rounds_in_place
from piper_capture.graphs.inplace import (
    add_products_in_place,
    add_scaled_in_place,
    copy_spoiled_operands,
    reuse_dying_arguments,
)
from piper_capture.graphs.mixed_dtypes import one_dtype
from piper_capture.graphs.padded_sums import join_padded_parts
from piper_capture.graphs.posting import post_collectives
from piper_capture.graphs.rewriting import Rule, rewrite
from piper_capture.graphs.stepgraph import StepGraph

# fmt: off
JOINT: tuple[Rule, ...] = (
    compute_bits,             # conj(x), neg_view(x)                    -> conj_physical(x), neg(x)
    one_dtype,                # mse_loss(bfloat16, float32)             -> mse_loss(float32, float32)
    local.drop_identity,      # detach(x), alias(x), lift_fresh(x)      -> x
    local.drop_copy,          # clone(x), same-dtype copy               -> x
    local.drop_overwrite,     # copy(destination, x) of equal spec      -> x
    local.drop_shape_source,  # zeros_like(x), new_zeros(x, ...)        -> zeros(...)
    local.fold_permutes,      # t(t(x)), transpose or permute twice     -> x or one permute
    local.select_first,       # select(permute(x))                      -> permute(select(x)), or select(x)
    local.permute_first,      # permute(stack([x, y]))                  -> stack([permute(x), permute(y)])
    local.fold_views,         # view(view(x)), view to the same shape   -> view(x), x
    local.squeeze_sum,        # view(sum(x, dims, keepdim))             -> sum(x, dims)
    local.drop_expand,        # expand to the same shape                -> x
    local.reduce_apart,       # mse_loss(x, y), ..., reduced            -> mean(mse_loss(x, y)), or sum, of its terms
    join_padded_parts,        # select_backward(a) + select_backward(b) -> stack([a, b])
)
STEP: tuple[Callable[[StepGraph], None], ...] = (
    post_collectives,             # g = all_gather(x); mm(a, b); mm(g, w)  -> mm(a, b) while g is under way, then a wait
    add_further_rounds_in_place,  # gradients of further rounds of experts -> added in place
    add_products_in_place,        # add_(total, mm(a, b))                  -> addmm_(total, a, b)
    add_scaled_in_place,          # add_(total, mul(x, scalar))            -> addcmul_(total, x, scalar)
    reuse_dying_arguments,        # add(a, b)                              -> add_(a, b)
    copy_spoiled_operands,        # reduce_scatter(x), where x is read later -> reduce_scatter(clone(x))
)
# fmt: on


def rewrite_joint(graph: fx.Graph, buffers: Collection[fx.Node] = ()) -> None:
    """Rewrite a joint graph in place; copies of the `buffers` stay."""
    rewrite(graph, JOINT, buffers)


def rewrite_step(step: StepGraph) -> None:
    """Rewrite the graph of a step in place."""
    for change in STEP:
        change(step)
