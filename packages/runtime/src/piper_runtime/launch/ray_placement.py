"""Decide which rank runs on which node of a Ray cluster."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
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


def ranks_that_fit(ray: Any, gpus: int) -> int:
    """Return how many ranks the living nodes can hold, with one CPU and `gpus` GPUs each, if nobody else takes them."""
    found = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    return sum(int(min(r.get("CPU", 0.0), r.get("GPU", 0.0) / gpus if gpus else r.get("CPU", 0.0))) for r in found)


@dataclass
class SpareRoom:
    """Keep a placement group from team to team, with room for `spares` more ranks.

    `dead` are the bundles of ranks that died.
    """

    spares: int
    dead: set[int] = field(default_factory=set)
    _group: Any = None
    _hosts: list[RankHost] = field(default_factory=list)

    def place(self, ray: Any, world: int, gpus: int) -> tuple[Any, list[RankHost]]:
        """Return the group and the hosts of a team's ranks: bundles where none died as long as there are enough.

        When too few nodes are left, room is looked for anew, without spares. Raises as `place_ranks`.
        """
        if self._group is not None:
            nodes = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
            alive = [host for host in self._hosts if host.node in nodes]
            unhurt = [host for host in alive if host.bundle not in self.dead]
            if len(alive) >= world:
                return self._group, (unhurt if len(unhurt) >= world else alive)[:world]
            self.release(ray)
            self.spares = 0
        self._group, self._hosts = place_ranks(ray, world + self.spares, gpus)
        return self._group, self._hosts[:world]

    def release(self, ray: Any) -> None:
        """Give the room back."""
        group, self._group = self._group, None
        self.dead.clear()
        if group is not None and ray.is_initialized():
            with suppress(ray.exceptions.RayError):  # a cluster that is gone has nothing left
                ray.util.remove_placement_group(group)


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
