"""Hold the sizes of a job and a cluster, and say of sizes of axes whether they go together and leave memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from piper.api.problems.scale import FULL, SHORT, Scale

AXES = ("tp", "cp", "ep", "pp")
KEPT = ("all", "products", "attention", "inputs")
"""The policies of recomputation, by how much of a layer they keep."""
KEPT_COMPILED = ("all", "products/1", *KEPT[1:])
"""The policies that are tried where plans may have compiled chunks, whose default is products/1."""
TILES = 8
"""The tiles of tokens in which a large loss is computed, as in torchtitan's recipes."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class SpaceSizes:
    """Hold the sizes on which the choices of a space depend.

    Attributes:
        devices: of the cluster.
        global_batch: rows of a step.
        layers: of the model.
        sizes: the sizes of the axes tp, cp, ep and pp that are tried.
        rows: the rows of a microbatch that are tried.
        scale: sizes and rates on which the time of a mesh depends.
        experts: how many the model has in a layer that axes may share.
        dropless: whether experts take every token; experts with a capacity need the tokens of whole rows.
        tiles: whether the loss may be computed in tiles.
        tried: values that are tried in place of the usual ones, by name of a parameter; a single one fixes it.
    """

    devices: int
    global_batch: int
    layers: int
    sizes: Mapping[str, Sizes]
    rows: Sizes
    scale: Scale
    experts: int = 1
    dropless: bool = False
    tiles: bool = False
    tried: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes whose sizes are chosen: etp only if a user gives values for it."""
        return (*AXES, "etp") if "etp" in self.sizes else AXES

    def replicas(self, at: Mapping[str, int]) -> int:
        """Return how many groups of devices have rows of their own."""
        return self.devices // (at["tp"] * at["cp"] * at["pp"])

    def lacking(self, at: Mapping[str, int], rows: int) -> str:
        """Return why sizes do not go together; "" if they do."""
        used = at["tp"] * at["cp"] * at["pp"]
        if self.devices % used:
            return f"{self.devices} devices do not divide into tp x cp x pp = {used}"
        replicas = self.replicas(at)
        if replicas % self.sharing_experts(at):
            named = "ep" if at.get("etp", 1) == 1 else "ep x etp"
            return f"{replicas} replicas do not divide into groups of {named} = {self.sharing_experts(at)}"
        if at.get("etp", 1) > 1 and at["ep"] == 1:
            return f"etp = {at['etp']} cuts experts that ep exchanges, and ep = 1"
        if min(at["ep"], at["cp"]) > 1 and not self.dropless:
            return f"experts with a capacity need whole rows: ep = {at['ep']} does not go with cp = {at['cp']}"
        if self.global_batch % (replicas * rows):
            return f"{self.global_batch} rows do not divide into {replicas} replicas of {rows} rows per microbatch"
        return ""

    def sharing_experts(self, at: Mapping[str, int]) -> int:
        """Return how many replicas share or cut the experts of a layer."""
        return at["ep"] * at.get("etp", 1)

    def may_fold(self, at: Mapping[str, int], tokens_over: Sequence[str]) -> bool:
        """Return whether axes that share the tokens of a row may share dropless experts, too, beside ep."""
        over = (*tokens_over, "ep")
        return (
            at["ep"] > 1
            and self.dropless
            and bool(tokens_over)
            and not self.experts % prod(at[axis] for axis in over)
        )

    def sharing(self, at: Mapping[str, Any]) -> int:
        """Return how many devices have the same parameters, if experts have most of them."""
        alike = 1 if at.get("fold", False) else int(at["cp"])
        return self.replicas(at) // self.sharing_experts(at) * alike

    def is_short(self, at: Mapping[str, Any], tiles: int) -> bool:
        """Return whether a mesh leaves little memory with the least rows, all states shared and layers made again.

        `at` says beside the sizes of the axes whether experts are folded or cut, without which they are whole over tp.
        """
        held = self.held_bytes(at, self.rows[0], keep="inputs", flying=1.0, tiles=tiles)
        return held > SHORT * self.scale.memory_bytes

    def are_large(self, at: Mapping[str, Any]) -> bool:
        """Return whether states fill much of a device even if all that have the same parameters share them."""
        return self.scale.states(at, self.sharing(at)) > FULL * self.scale.memory_bytes

    def held_bytes(self, at: Mapping[str, int], rows: int, **how: Any) -> float:
        """Return the bytes of a device, roughly; see `Scale.held_bytes`."""
        return self.scale.held_bytes(at, self.layers, rows, self.sharing(at), **how)

    def tiled(self, at: Mapping[str, int], tiles: int = TILES) -> bool:
        """Return whether the loss may be in tiles, which divide the tokens of a row on each device."""
        return self.tiles and not self.scale.tokens % (at["tp"] * at["cp"] * tiles)
