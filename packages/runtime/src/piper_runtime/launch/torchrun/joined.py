"""Join the reported shards of the ranks that share a bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piper_ir.ground.errors import ExecutionError
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Bucket, Plan
from piper_runtime.launch.ground.report import RankReport
from piper_runtime.rank.values.layouts import whole_of
from piper_runtime.rank.values.store import bucket_views

_Tensors = dict[str, torch.Tensor]


def joined_states(plan: Plan, reports: Mapping[int, RankReport]) -> dict[int, _Tensors]:
    """Return by rank and name its tensors after the last step, joined with the shards of ranks that share with it."""
    shared = {rank: report.shared_states for rank, report in reports.items()}
    return _over_parts(
        plan, {rank: report.states | _whole(plan, rank, shared) for rank, report in reports.items()}
    )


def joined_gradients(plan: Plan, reports: Mapping[int, RankReport]) -> dict[int, list[_Tensors]]:
    """Return by rank the joined gradients of each step; without the ranks that have reported none."""
    by_rank: dict[int, list[_Tensors]] = {}
    for rank, report in reports.items():
        steps = max(len(report.gradients), len(report.shared_gradients))
        own = report.gradients or [{} for _ in range(steps)]
        for step in range(steps):
            shared = {
                r: rep.shared_gradients[step] if rep.shared_gradients else {}
                for r, rep in reports.items()
            }
            by_rank.setdefault(rank, []).append(own[step] | _whole(plan, rank, shared))
    steps = max(map(len, by_rank.values()), default=0)
    whole = [
        _over_parts(plan, {rank: tensors[step] for rank, tensors in by_rank.items()})
        for step in range(steps)
    ]
    return {rank: [tensors[rank] for tensors in whole] for rank in by_rank}


def _over_parts(plan: Plan, found: Mapping[int, _Tensors]) -> dict[int, _Tensors]:
    """Return tensors by rank, joined from their parts if devices that share chunks have one each."""
    layouts = {p.name: p.layout for p in plan.params if p.layout}
    if not layouts:
        return dict(found)
    joined = {}
    for rank, tensors in found.items():
        parts = {n: {r: t[n] for r, t in found.items() if n in t} for n in tensors if n in layouts}
        joined[rank] = tensors | {
            n: whole_of(of, layouts[n], plan.mesh, rank) for n, of in parts.items()
        }
    return joined


def _whole(plan: Plan, rank: int, parts: Mapping[int, _Tensors]) -> _Tensors:
    """Return the parameters of a rank's shared buckets, given every rank's parts by bucket."""
    views: _Tensors = {}
    shapes = {p.name: torch.Size([bind(d, 0) for d in p.spec.shape]) for p in plan.params}
    for id in parts[rank]:
        bucket = plan.bucket(id)
        flat = torch.cat([parts[r][id] for r in _sharers(plan, bucket, rank)])
        if flat.numel() != bucket.numel:
            raise ExecutionError(
                f"bucket {id}: the parts that ranks report have {flat.numel()} elements of {bucket.numel}"
            )
        views |= bucket_views(bucket, flat, [shapes[name] for name in bucket.params])
    return views


def _sharers(plan: Plan, bucket: Bucket, rank: int) -> tuple[int, ...]:
    """Return the ranks that share a bucket with this one, in the order of their parts."""
    channel = plan.channel(bucket.gather[bucket.roles.index(plan.role_of(rank).role)])
    return plan.peers(channel, rank)
