"""Make the directive that shards the states of a published run over its replicas, with its software's buckets."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from piper import models
from piper.published.run_model import is_megatron, is_nanotron
from piper.published.table import PublishedRow
from piper_compiler import replicate
from piper_compiler.directives import Directive
from piper_compiler.directives.replicate import STATES
from piper_ir.ground.errors import JobError
from piper_ir.ground.select import where

if TYPE_CHECKING:
    from piper_runtime import Precision

WHOLE_MB = 2**20
"""The MiB of a bucket that holds all gradients of a role, for software that reduces them after the backward."""
HSDP = re.compile(r"\bHSDP(?: over (\d+))?")
"""The words of a note for hybrid sharding: a node's devices, or so many, share the states, and others copy them."""
BUCKET_PER_REPLICA = 10**6
"""The parameters of a bucket of gradients per replica in Megatron-Core, and 40 million at least.

distributed/distributed_data_parallel.py: rings of many devices need large messages. Apex's distributed_fused_adam has
buckets of one size.
"""
DDP_MB = 25
"""The MiB of a bucket of 16-bit parameters in torch's DistributedDataParallel, which nanotron uses."""


@cache
def _unit_parameters(config: models.DecoderConfig, ep: int) -> int:
    """Return the parameters of a block (of one with experts, if there are any) that FSDP gathers at once.

    Experts that `ep` devices share have buckets of their own, which no other layer joins if they are larger.
    """
    experts = config.experts
    one, two = (replace(config, layers=n, dense_layers=0) for n in (1, 2))
    block = models.parameter_count(two) - models.parameter_count(one)
    if experts is None or ep == 1:
        return block
    matrices = 3 if config.gated else 2
    return block - experts.number * matrices * config.width * experts.hidden


def shards_gradients(published: PublishedRow) -> bool:
    """Return whether gradients are sharded, as FSDP does; Megatron's distributed optimizer shards none."""
    return published.zero == 3 or (published.zero == 2 and not is_megatron(published))


def states(
    published: PublishedRow,
    config: models.DecoderConfig,
    dtypes: Precision,
    groups: int,
    *,
    behind: bool,
) -> tuple[Directive, ...]:
    """Return the directive that says which states replicas share, in buckets as large as the software's.

    `behind`: gradients are reduced after the backward, all of a role at once.
    """
    if published.dp * published.cp == 1 and published.zero == 0:
        return (replicate(where(), over="dp"),)
    over = ("dp", *(["ep"] if published.ep > 1 else []))
    over = (*over, "cp") if published.cp > 1 and published.zero else over
    item = 2 if (dtypes.reduce or dtypes.params) == "bfloat16" else 4
    if shards_gradients(published):
        unit = _unit_parameters(config, published.ep)
        bucket = max(25.0, float(round(item * unit / published.tp / 2**20 * 1.01)))
        # torch's stages gather parameters, and reduce gradients, once a step.
        once: dict[str, Any] = {"resident_mb": "step", "reduced_mb": "step"}
        stay = once if published.pp > 1 else {}
        if groups > 1:
            shared = dict.fromkeys(STATES[-published.zero :], over)
            return (replicate(where(), (*over, "rep"), shard=shared, bucket_mb=bucket, **stay),)
        return (replicate(where(), over, published.zero, bucket_mb=bucket, **stay),)  # type: ignore[arg-type]  # 2 or 3
    whole = behind or "bucketing off" in published.note
    grows = is_megatron(published) and "distributed_fused_adam" not in published.note
    replicas = published.dp * published.cp if grows else 0
    least = DDP_MB / 2 * item if is_nanotron(published) else 160.0
    bucket = max(least, item * replicas * BUCKET_PER_REPLICA / 2**20)
    zero = min(published.zero, 1)  # Megatron's distributed optimizer shards no gradients
    mb = WHOLE_MB if whole else bucket
    if groups > 1:
        return (replicate(where(), (*over, "rep"), shard={"optim": over}, bucket_mb=mb),)
    return (replicate(where(), over, zero, bucket_mb=mb),)  # type: ignore[arg-type]  # 0 or 1


def groups_of(published: PublishedRow, per_node: int) -> int:
    """Return how many groups of replicas each have all states: one, or with "HSDP" as many as the replicas make."""
    found = HSDP.search(published.note)
    if found is None or not published.zero:
        return 1
    apart = published.tp * published.cp
    inside, rest = divmod(int(found[1] or per_node), apart)
    own = published.dp
    if rest or not inside or own % inside or published.ep > 1:
        raise JobError(
            f"{published.case}: the note says {found[0]}, and {own} replicas of {apart} devices, with ep = "
            f"{published.ep}, make no groups of {inside * apart + rest} devices: give the devices that share states, "
            f"as in HSDP over {max(1, own // 2) * apart}"
        )
    return own // inside
