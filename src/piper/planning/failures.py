"""Say why a search found no strategy that fits, and name the way out."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from piper_ir.study.study import Row
from piper_ir.tools import count_text, enough_text, size_text
from piper_simulator import Cluster

SKIPPED = "skipped"
"""The kind of a candidate whose choices do not divide the job (`piper.space`)."""


def failure(
    rows: Sequence[Row], cluster: Cluster, global_batch: int, else_: str, *, exhausted: bool = True
) -> str:
    """Return why nothing fits, for people: the memory that the nearest needs, or that no layout divides the job.

    Args:
        rows: the candidates of the search, all of them rejected.
        cluster: that was asked for.
        global_batch: rows of a step.
        else_: the search's own words, for any other reason.
        exhausted: whether there are no further candidates.
    """
    devices = cluster.devices
    left_out = rows and all(row.kind == SKIPPED for row in rows)
    if left_out and not global_batch % devices:  # more rows are no way out
        return f"NO STRATEGY: the values asked for do not go together; the first: {rows[0].reason}"
    if left_out:
        return (
            f"NO LAYOUT: no layout divides {count_text(global_batch, 'row')} among {count_text(devices, 'device')} "
            f"({rows[0].reason}); to plan it here: a multiple of {devices} rows, such as "
            f"{ceil(global_batch / devices) * devices}, or fewer devices"
        )
    held = [row.device_bytes for row in rows if row.kind == "memory" and row.device_bytes]
    if not held:
        return f"DOES NOT FIT: {else_}"
    least, limit = min(held), max(kind.device.memory_bytes for kind in cluster.kinds)
    # Most that a device holds may be shared among more of them, but each needs some for itself.
    nodes = ceil(least * devices / limit / cluster.per_node)
    more = "" if exhausted else "more trials (--trials), since there are further candidates; "
    return (
        f"DOES NOT FIT: the nearest of {count_text(len(rows), 'candidate')} needs at least {enough_text(least)} per "
        f"device, which has {size_text(limit)}; to plan it here: {more}{nodes * cluster.per_node:,} devices of this kind "
        f"or more, devices with more memory, or fewer tokens per row"
    )
