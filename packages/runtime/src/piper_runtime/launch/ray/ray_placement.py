"""Assign ranks to the nodes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from piper_ir.ground.errors import ExecutionError

PLACE_S = 5.0
"""The seconds of waiting for free CPUs; the CPUs of actors that have just ended come back within it."""
DEATH_S = 90.0
"""The seconds within which Ray gives up a node that does not answer: by default it asks 5 times, 13 s apart at most."""
LOOK_S = 0.2


@dataclass(frozen=True)
class RankHost:
    """Hold the place of a rank.

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
                f"the plan has {world} ranks and needs {each * world:g} {resource}s, the Ray cluster has {have:g} "
                f"on {len(nodes)} node{'s' * (len(nodes) > 1)}; add nodes, use a smaller mesh, or "
                f'use cluster="local" or launcher="processes", which share the CPUs of this machine'
            )
    roomy = any(
        all(n["Resources"].get(r, 0.0) >= each * world for r, each in needed.items())
        for n in nodes.values()
    )
    group = _reserve(ray, [needed] * world, ["STRICT_PACK", "PACK"] if roomy else ["PACK"])
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    order = sorted(node_of, key=lambda b: (node_of[b] != here, node_of[b], b))
    places = []
    for bundle in order:
        node = nodes[node_of[bundle]]
        places.append(
            RankHost(
                bundle,
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["NodeID"] == here,
            )
        )
    return group, places


def free_ranks(ray: Any, gpus: int) -> int:
    """Return how many ranks the living nodes can hold now beside the work of others.

    A rank needs one CPU and `gpus` GPUs.
    """
    free = ray._private.state.available_resources_per_node()
    resources = [free.get(n["NodeID"], {}) for n in ray.nodes() if n["Alive"]]
    return sum(
        int(min(r.get("CPU", 0.0), r.get("GPU", 0.0) / gpus if gpus else r.get("CPU", 0.0)))
        for r in resources
    )


def await_room(
    ray: Any,
    world: int,
    gpus: int,
    silent: Callable[[str, int], object],
    spare: SpareRoom | None = None,
) -> int:
    """Return for how many ranks there is room after a failure, with the reserved room included.

    The resources of killed actors come back within PLACE_S. A node that does not answer counts until Ray has given it
    up itself, since Ray would place ranks there: this waits for it, DEATH_S at most. `silent` asks an address and port.
    """
    end = time.monotonic() + DEATH_S
    asked = [
        n
        for n in ray.nodes()
        if n["Alive"] and silent(n["NodeManagerAddress"], n["NodeManagerPort"])
    ]
    while time.monotonic() < end and {n["NodeID"] for n in asked} & _alive(ray):
        time.sleep(LOOK_S)
    end = time.monotonic() + PLACE_S
    while (
        room := free_ranks(ray, gpus) + (spare.held(ray) if spare is not None else 0)
    ) < world and time.monotonic() < end:
        time.sleep(LOOK_S)
    return room


def _alive(ray: Any) -> set[str]:
    return {n["NodeID"] for n in ray.nodes() if n["Alive"]}


@dataclass
class SpareRoom:
    """Keep a placement group from team to team, with room for so many more `ranks`.

    `dead` are the bundles of ranks that died.
    """

    ranks: int
    dead: set[int] = field(default_factory=set)
    _group: Any = None
    _hosts: list[RankHost] = field(default_factory=list)

    def place(self, ray: Any, world: int, gpus: int) -> tuple[Any, list[RankHost]]:
        """Return the group and the hosts of a team's ranks: bundles without a dead rank as long as there are enough.

        When too few nodes are left, ranks are placed anew, without spare room. Raises as `place_ranks`.
        """
        if self._group is not None:
            nodes = _alive(ray)
            alive = [host for host in self._hosts if host.node in nodes]
            unhurt = [host for host in alive if host.bundle not in self.dead]
            if len(alive) >= world:
                return self._group, (unhurt if len(unhurt) >= world else alive)[:world]
            self.release(ray)
            self.ranks = 0
        self._group, self._hosts = place_ranks(ray, world + self.ranks, gpus)
        return self._group, self._hosts[:world]

    def held(self, ray: Any) -> int:
        """Return how many ranks the group has room for, on nodes that live."""
        nodes = _alive(ray) if self._group is not None else set[str]()
        return sum(host.node in nodes for host in self._hosts)

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
        f"the plan's {len(bundles)} ranks found no room in the Ray cluster within {PLACE_S:g} s: "
        f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free; wait for others to end (`ray "
        f"status` shows them), or use a smaller mesh"
    )
