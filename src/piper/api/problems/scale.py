"""Estimate from sizes alone how long a step of a mesh takes, to order the meshes that a search tries first.

Nothing is rejected by an estimate: the model counts as a decoder, and only differences between meshes matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from piper_ir.program.ops import BESIDE, EVERY, WITHIN
from piper_simulator import Cluster

if TYPE_CHECKING:
    from piper_capture import Traced

KEPT_BYTES = 8
"""The bytes of a parameter and of its gradient in float32: each device keeps them with zero=1."""
SHARED_BYTES = 8
"""The bytes of Adam's two moments of a parameter in float32: replicas share them with zero=1."""
KEPT_OF_LAYER = {"all": 45, "products/1": 31, "products": 20, "attention": 4, "inputs": 2}
"""The bytes, per element between layers, that a layer keeps by policy: of plans of a Llama whose MLP is 4 x as wide."""
CLASS_BYTES = 4
"""The bytes of a logit: itself and its gradient in 2 bytes each."""
SHORT = 0.7
"""The part of a device's memory beyond which it counts as short."""
FULL = 0.5
"""The part of a device's memory that states may fill in the first candidate of a mesh with stages."""
ROOM = 0.85
"""The part of a device's memory that a first candidate may fill which keeps as much as has room."""
FLOPS = {"all": 6.0, "products/1": 6.05, "products": 6.3, "attention": 7.6, "inputs": 8.0}
"""The FLOPs of a parameter and token by policy: 2 forward, 4 backward, and up to 2 that are made again."""
GATHERED_BYTES = 8
"""The bytes of messages of a parameter in a microbatch with zero=3: twice gathered in 2 bytes, its gradient in 4."""
UPDATED_BYTES = 6
"""The bytes of messages of a parameter in a step with zero=1: its gradient in 4 bytes, its value in 2."""
TOKEN_SHARERS = 20
"""The bytes of messages of an element between layers along tp: 10 collectives of a layer, 2 bytes each.

There are four in the forward and as many in the backward with sequence parallelism (Megatron-LM, arXiv 2205.05198), and
two when a forward is made again.
"""
KEY_VALUES = 3
"""The bytes of messages of an element between layers along cp: keys and values, a quarter as wide, go 3 times."""
HIDDEN = 0.8
"""The part of compute beside which messages of zero=3 may go."""
CUTS = {True: "tp"}
"""The axes of a value of `cut` that is not their names."""
ROUTED = 8
"""The bytes of messages of an element between layers per expert of its token: to and from it, forward and backward."""


@dataclass(frozen=True)
class Scale:
    """Hold the sizes of a job and the rates of a cluster on which the time of a mesh depends.

    Attributes:
        parameters: of the model.
        active: parameters that compute a token: of a layer's experts as many as its router chooses.
        classes: the largest dimension of a parameter, which is that of logits.
        width: the elements of a token between layers: the size that most dimensions of parameters have.
        tokens: of a row.
        memory_bytes: of the smallest device.
        flops: FLOP/s of a device.
        inside: bytes/s of a device within its node.
        between: bytes/s of a device between nodes.
        per_node: devices of a node.
        chosen: the experts that compute a token.
        dropless: whether experts take every token; beside ep, tp leaves such an expert whole.
    """

    parameters: int
    active: float
    classes: int
    width: int
    tokens: int
    memory_bytes: int
    flops: float
    inside: float
    between: float
    per_node: int
    chosen: int = 1
    dropless: bool = False

    @classmethod
    def of(cls, traced: Traced, tokens: int, cluster: Cluster) -> Scale:
        """Return the sizes of a traced model and the rates of a cluster's first devices."""
        shapes = [p.shape for p in traced.forward.params]
        dims = Counter(dim for shape in shapes for dim in shape if dim > 1)
        device, links = cluster.device, cluster.network.links[0]
        chosen = _chosen(traced)
        return cls(
            parameters=sum(map(prod, shapes)),
            active=_active(shapes, chosen),
            classes=max(dims, default=1),
            width=dims.most_common(1)[0][0] if dims else 1,
            tokens=tokens,
            memory_bytes=min(kind.device.memory_bytes for kind in cluster.kinds),
            flops=device.peak("bfloat16") * device.matmul_fraction,
            inside=links.intra_bandwidth,
            between=links.inter_bandwidth,
            per_node=cluster.per_node,
            chosen=max(1, chosen),
            dropless=traced.dropless,
        )

    def own(self, at: Mapping[str, Any]) -> float:
        """Return the parameters of a device, if experts have most of them: they are cut, folded or whole over tp."""
        cut = at.get("cut", False)
        over = ["tp"] if at["ep"] == 1 or not self.dropless else CUTS.get(cut, cut or "").split("+")
        over = ["tp", "cp"] if at.get("fold", False) else over
        sharers = prod(int(at.get(axis, 1)) for axis in (*over, "pp", "ep", "etp"))
        return self.parameters / sharers

    def held_bytes(
        self,
        at: Mapping[str, int],
        layers: int,
        rows: int,
        sharers: int,
        *,
        keep: str,
        flying: float,
        tiles: int,
        whole: bool = False,
    ) -> float:
        """Return the bytes of a device, roughly: states, kept tensors, and one layer made again or the logits.

        Args:
            at: the sizes of the axes.
            layers: of the model.
            rows: of a microbatch.
            sharers: the devices that share all states.
            keep: the policy of recomputation.
            flying: the share of the most microbatches that are in flight at once.
            tiles: of the loss.
            whole: whether parameters and gradients are whole, and only the optimizer's states shared.
        """
        tokens = rows * self.tokens / (at["tp"] * at["cp"])
        states = self.states(at, sharers, whole=whole)
        kept = flying * layers * of_policy(KEPT_OF_LAYER, keep) * self.width
        again = max(KEPT_OF_LAYER["all"] * self.width, CLASS_BYTES * self.classes / tiles)
        return states + tokens * (kept + again)

    def states(self, at: Mapping[str, Any], sharers: int, *, whole: bool = False) -> float:
        """Return the bytes of a device's states if `sharers` share them all, or `whole` the optimizer's alone."""
        kept = KEPT_BYTES if whole else KEPT_BYTES / max(1, sharers)
        return self.own(at) * (kept + SHARED_BYTES / max(1, sharers))

    def fits_whole(self, own: float, sharers: int) -> bool:
        """Return whether a device may keep `own` parameters and gradients whole, and share the optimizer's states."""
        return own * (KEPT_BYTES + SHARED_BYTES / max(1, sharers)) <= FULL * self.memory_bytes

    def step_s(
        self, choices: Mapping[str, Any], layers: int, microbatches: int, replicas: int
    ) -> float:
        """Return seconds of a step, roughly: compute, bubbles, and messages as far as compute does not hide them."""
        tp, cp, ep, pp = (int(choices[axis]) for axis in ("tp", "cp", "ep", "pp"))
        cut = int(choices.get("etp", 1))
        devices = replicas * tp * cp * pp
        # elements between layers that a device would compute alone, over all layers
        elements = microbatches * int(choices["rows"]) * replicas * self.tokens / devices
        compute_s = of_policy(FLOPS, choices["keep"]) * self.active * elements / self.flops
        elements *= layers * self.width
        inner_s = (
            TOKEN_SHARERS * elements * (tp - 1) / self._rate(tp)
            + KEY_VALUES * elements * (cp - 1) / self._rate(tp * cp)
            + ROUTED * elements * self._exchanged(tp * cp * cut, ep, cut)
        )
        moved = self.own(choices) * (
            GATHERED_BYTES * microbatches if choices["zero"] == 3 else UPDATED_BYTES
        )
        # between two devices with the same parameters lie all that have other ones, if experts have most of them
        apart = tp * ep * cut * (cp if choices.get("fold", False) else 1)
        states_s = moved / self._rate(devices // pp, apart) if devices // pp > apart else 0.0
        hidden_s = HIDDEN * compute_s if choices["zero"] == 3 else 0.0
        bubble = (pp - 1) / (microbatches * int(choices.get("chunks", 1)))
        return (compute_s + inner_s) * (1 + bubble) + max(0.0, states_s - hidden_s)

    def _exchanged(self, apart: int, ep: int, cut: int) -> float:
        """Return seconds per byte of a token that goes to its experts, out of `ep` devices that are `apart`.

        Each device sends tokens to other nodes over its own link, a token once to each of them. Devices that cut
        experts have each other's tokens, too.
        """
        near = min(ep, max(1, self.per_node // apart))  # of these devices, as many share a node
        within = self.chosen * ((near - 1) / ep + cut - 1)
        outside = min(self.chosen * (1 - near / ep), ep // near - 1)
        return within / self.inside + outside / self.between

    def _rate(self, spanned: int, apart: int = 1) -> float:
        """Return bytes/s of each device in a group that spans so many devices, with every `apart`-th of them.

        Its devices in a node share what the group sends to other nodes.
        """
        if spanned <= self.per_node:
            return self.inside
        return min(self.inside, self.between * max(1, self.per_node // apart))


def _active(shapes: Sequence[Sequence[int]], chosen: int) -> float:
    """Return the parameters that compute a token; matrices of experts are in parameters of three dimensions."""
    if not chosen:
        return sum(map(prod, shapes))
    shares = (min(1.0, chosen / shape[0]) if len(shape) == 3 else 1.0 for shape in shapes)
    return sum(share * prod(shape) for share, shape in zip(shares, shapes, strict=True))


def _chosen(traced: Traced) -> int:
    """Return how many experts compute a token; 0 without a router.

    It takes the k of the largest topk in the graph: smaller ones choose groups of experts (DeepSeek-V3).
    """
    if not traced.experts:
        return 0
    taken = [
        node.args[1] if len(node.args) > 1 else node.kwargs.get("k")
        for node in traced.forward.graph.nodes
        if getattr(node.target, "__name__", node.target) == "topk"
    ]
    return max((k for k in taken if isinstance(k, int)), default=0)


def of_policy(figures: Mapping[str, float], keep: str) -> float:
    """Return the figure of a policy of recomputation, in between for every n-th product and for parts of a layer.

    Names of ops count as products.
    """
    name, _, modules = keep.partition(BESIDE)[0].partition(WITHIN)
    base, _, every = name.partition(EVERY)
    figure = figures.get(base, figures["products"])
    if every:
        none, each = figures["attention"], figures["products/1"]
        figure = none + (each - none) / int(every)
    return (figure + figures["all"]) / 2 if modules else figure


def powers(number: int, most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most` that divide a number."""
    return tuple(2**k for k in range(20) if 2**k <= most and not number % 2**k)


def divisors(number: int, most: int) -> tuple[int, ...]:
    """Return the divisors of a number up to `most`."""
    return tuple(n for n in range(1, most + 1) if not number % n)
