"""Decide which rank runs on which node of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from piper_ir.errors import ExecutionError

PLACE_S = 5.0
"""The seconds of waiting for free CPUs; those of actors that have just ended come back within it."""


@dataclass(frozen=True)
class RankHost:
    """Say where a rank runs.

    Attributes:
        bundle: the rank's index in the placement group.
        node: Ray's id of the node.
        here: whether the node is this machine.
    """

    bundle: int
    node: str
    name: str
    address: str
    here: bool


def place_ranks(ray: Any, world: int, gpus: int) -> tuple[Any, list[RankHost]]:
    """Return a placement group with one CPU and `gpus` GPUs per rank, and the host of each rank.

    They are on one node if one holds all, else packed. Ranks of one node are neighbours, and ranks count along the
    mesh's fastest axis first, so groups of fast axes share nodes. Raises ExecutionError when there is no room.
    """
    nodes = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
    needed = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
    for resource, each in needed.items():
        have = sum(n["Resources"].get(resource, 0.0) for n in nodes.values())
        if have < each * world:
            raise ExecutionError(
                f"the plan has {world} ranks and needs {each * world:g} {resource}s, the Ray cluster has {have:g} on "
                f"{len(nodes)} node{'s' * (len(nodes) > 1)}; add nodes, use a smaller mesh, or "
                f'use cluster="local" or launcher="processes", which share the CPUs of this machine'
            )
    roomy = any(all(n["Resources"].get(r, 0.0) >= each * world for r, each in needed.items()) for n in nodes.values())
    group = _reserve(ray, [needed] * world, ["STRICT_PACK", "PACK"] if roomy else ["PACK"])
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    order = sorted(node_of, key=lambda b: (node_of[b] != here, node_of[b], b))
    places = []
    for bundle in order:
        node = nodes[node_of[bundle]]
        places.append(
            RankHost(bundle, node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"] == here)
        )
    return group, places


def _reserve(ray: Any, bundles: list[dict[str, float]], strategies: list[str]) -> Any:
    for strategy in strategies:
        group = ray.util.placement_group(bundles, strategy=strategy)
        if group.wait(PLACE_S / len(strategies)):
            return group
        ray.util.remove_placement_group(group)
    free = ray.available_resources()
    raise ExecutionError(
        f"the plan's {len(bundles)} ranks found no room in the Ray cluster within {PLACE_S:g} s: {free.get('CPU', 0.0):g} CPUs "
        f"and {free.get('GPU', 0.0):g} GPUs are free; wait for others to end (`ray status` shows them), or use a smaller mesh"
    )
