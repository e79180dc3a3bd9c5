"""Keep frozen parameters in the job's dtype, if forward and backward read them in a narrower one.

A rank holds a frozen parameter in the dtype of forward and backward alone. A checkpoint holds it without a loss of
bits, so a rank that writes one keeps it twice: its exact numbers stay on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piper_ir.plan.plan import Plan
from piper_runtime.checkpoint.rank_tensors import saved_dtypes, saved_portion
from piper_runtime.rank.binding.rank_state import RankState
from piper_runtime.rank.values.layouts import own_parts


def keep_exact(
    rank: RankState, given: Mapping[str, torch.Tensor], *, share: bool, restored: bool
) -> None:
    """Let a rank keep the exact values of its frozen parameters from `given`: of all, or of its `share` of writing.

    If its state is about to be `restored`, only memory for them is allocated.
    """
    own = own_parts(rank.plan, rank.rank, given)
    portion = saved_portion(rank.plan, rank.rank).params if share else None
    for name, dtype in narrowed(rank.plan).items():
        tensor = rank.store.params.get(name)
        if tensor is not None and (portion is None or name in portion):
            exact = torch.empty(tensor.shape, dtype=dtype) if restored else own[name].detach()
            rank.store.exact[name] = exact.contiguous()


def narrowed(plan: Plan) -> dict[str, torch.dtype]:
    """Return the parameters outside of buckets that ranks hold in another dtype than checkpoints, with the latter."""
    bucketed = {name for bucket in plan.buckets for name in bucket.params}
    specs = {p.name: p.spec.dtype for p in plan.params if p.name not in bucketed}
    return {
        name: getattr(torch, d)
        for name, d in saved_dtypes(plan).items()
        if name in specs and specs[name] != d
    }
