"""Name the nodes of a graph, which are the parts of a plan: ids of computations, sends and copies."""

from __future__ import annotations


def named(id: str, tail: str | None, mb: int) -> str:
    """Return the name of a node or value in one microbatch, as "layer0.F@2"; `tail` stays at the end of the id.

    Without a tail, None, the id is the name in every microbatch.
    """
    if mb < 0 or tail is None:
        return id
    return f"{id[: len(id) - len(tail)]}@{mb}{tail}" if tail else f"{id}@{mb}"


def compute_id(chunk: str, step: str) -> str:
    """Return the id of the node that computes a step of a chunk."""
    return f"{chunk}.{step}"


def send_id(copy: str) -> str:
    """Return the id of the node that sends the value that arrives as `copy`."""
    return f"send.{copy}"
