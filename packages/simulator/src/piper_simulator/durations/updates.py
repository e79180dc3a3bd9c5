"""Compute how long an optimizer's update of some buckets takes.

It moves bytes of parameters, gradients and states, in kernels:

    fused     one pass: parameters, states and gradients read, parameters and states written; BLOCKS x CHUNK elements
              per kernel
    foreach   operation by operation over all tensors, `FOREACH`, each reading and writing so many times the parameters'
              bytes

Before it scaled gradients are multiplied (clipping, weights), after it gradients are set to zero: one kernel per bucket
for each. AdamW in float32 moves 28 bytes per parameter fused, parameters 8, both states 16 and the gradient 4; and 4
more to zero the gradient. If masters are updated, a kernel per bucket reads them and writes the parameters; if
gradients have another dtype than the updated parameters, one reads them and writes a copy.

If a bucket is sharded, each rank updates its own shard. Of gradients that it keeps whole (zero=1) it reads its shard,
and zeroes all.

Muon's matrices are made orthogonal on top of that, by products in bfloat16 of which each matrix has its own: in each
iteration X X^T of the smaller side r and the larger c, its square, and that times X, 4 r^2 c + 2 r^3 FLOPs
(torch.optim.Muon; Jordan, kellerjordan.github.io/posts/muon). On the host they are not counted.

Buckets that are updated on the host come after the others: gradients are copied there, processors read and write the
same bytes in its memory as a device would in one fused pass, and parameters are copied back, one after the other. All
devices of a node do so at once and share its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.plan.plan import Category, Plan, RolePlan, State
from piper_ir.plan.plan_bytes import own_bytes
from piper_ir.program.ops import Update
from piper_ir.program.program import Kernel
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.durations.kernels import kernel_seconds, launched, memory_fraction

CHUNK, BLOCKS = 65_536, 320
"""The elements that a block takes, and the blocks of a kernel: torch, native/cuda/MultiTensorApply.cuh."""
FOREACH = {0: (3,), 1: (2, 3, 3), 2: (2, 3, 2, 3, 2, 2, 2, 4), 3: (2, 3, 2, 3, 3, 2, 2, 2, 4)}
"""The number of tensors that each operation reads and writes, by the number of states per parameter.

Source: torch.optim, SGD without and with momentum (_multi_tensor_sgd: scale the buffer, add the gradient, add to the
parameter); AdamW and with amsgrad (_multi_tensor_adam: decay, lerp, scale, addcmul, [maximum,] sqrt, division, epsilon,
addcdiv).
"""


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """Count the bytes that an update on the host works on.

    Attributes:
        touched: bytes that processors read and write in the memory of the host.
        copied: bytes of gradients that are copied there, and of parameters that are copied back.
        zeroed: bytes of gradients on the device that are set to zero.
        buckets: how many buckets.
        world: the ranks of the plan, of which all on a node update at once.
    """

    touched: int
    copied: int
    zeroed: int
    buckets: int
    world: int


@dataclass(frozen=True, slots=True)
class Updated:
    """Count the bytes that an update works on.

    Attributes:
        param: bytes of the parameters that are updated: of masters, if there are any.
        grad: bytes of the gradients that are read.
        state: bytes of the optimizer's states.
        item: bytes per parameter.
        buckets: how many buckets.
        scaled: whether the gradients are multiplied first.
        copies: by bucket, the bytes that casts read and write: of gradients before, of parameters after the update.
        others: bytes of gradients that are only set to zero, since other ranks update those parameters.
        host: the part of the update that runs on the host, which none of the other fields counts.
        products: the matrix products of Muon.
    """

    param: int
    grad: int
    state: int
    item: int
    buckets: int
    scaled: bool
    copies: tuple[int, ...] = ()
    others: int = 0
    host: HostUpdate | None = None
    products: tuple[Kernel, ...] = ()


def updated(plan: Plan, role: RolePlan, op: Update) -> Updated:
    """Return the bytes that an update of a role works on."""
    here = tuple(b for b in op.buckets if not plan.bucket(b).host)
    own = _on_buckets(plan, role, replace(op, buckets=here))
    iterated = {plan.bucket(b).newton_schulz for b in here} - {0}
    if iterated:
        own = replace(own, products=tuple(_products(plan, here)))
    return own if len(here) == len(op.buckets) else replace(own, host=_on_host(plan, role, op))


def _products(plan: Plan, buckets: Sequence[str]) -> Iterator[Kernel]:
    """Yield the products by which Newton-Schulz iterations make the matrices of some buckets orthogonal."""
    specs = {p.name: p.spec for p in plan.params}
    for bucket in map(plan.bucket, buckets):
        for name in bucket.params if bucket.newton_schulz else ():
            *stack, rows, columns = (bind(d, 0) for d in specs[name].shape)
            r, c = sorted((rows, columns))
            many = prod(stack) * bucket.newton_schulz
            for m, n, k in ((r, r, c), (r, r, r), (r, c, r)):
                moved = ITEM_BYTES["bfloat16"] * (m * k + k * n + m * n)
                yield Kernel(
                    "matmul", (m, n, k), "bfloat16", 2 * m * n * k, moved, many, op="addmm"
                )


def _on_buckets(plan: Plan, role: RolePlan, op: Update) -> Updated:
    own_states = [s for s in role.states if s.flat and s.name in op.buckets]
    sizes = _own_sizes(plan, own_states)
    param = sum((sizes["param"] | sizes["master"]).values())
    copies = [
        size + sizes["param"][b]
        for b, size in sizes["master"].items()
        if plan.bucket(b).compute_dtype != plan.bucket(b).dtype
    ]
    buckets = [plan.bucket(b) for b in op.buckets]
    for bucket in buckets:
        if bucket.accumulate_dtype != bucket.dtype:
            grad_bytes = sizes["grad"][bucket.id]
            copies.append(
                grad_bytes
                + grad_bytes // ITEM_BYTES[bucket.accumulate_dtype] * ITEM_BYTES[bucket.dtype]
            )
    grad, state = sum(sizes["grad"].values()), sum(sizes["optim"].values())
    others = sum(s.nbytes for s in own_states if s.category == "grad") - grad
    item = min((ITEM_BYTES[b.dtype] for b in buckets), default=1)
    scaled = op.weighted or op.normed
    return Updated(param, grad, state, item, len(buckets), scaled, tuple(copies), others)


def _on_host(plan: Plan, role: RolePlan, op: Update) -> HostUpdate:
    hosted = [b for b in map(plan.bucket, op.buckets) if b.host]
    own = _on_buckets(plan, role, replace(op, buckets=tuple(b.id for b in hosted)))
    names = {b.id for b in hosted if not b.away}
    params = (s for s in role.states if s.category == "param" and s.flat and s.name in names)
    sent = sum(own_bytes(plan, s) for s in params)
    passes = sum(update_bytes(replace(own, others=0), fused=True)) - own.grad
    return HostUpdate(passes, own.grad + sent, own.grad + own.others, len(hosted), plan.mesh.world)


def _own_sizes(plan: Plan, held: Sequence[State]) -> dict[Category, dict[str, int]]:
    """Return by category and bucket the bytes that a rank's optimizer works on."""
    sizes: dict[Category, dict[str, int]] = {"param": {}, "master": {}, "grad": {}, "optim": {}}
    for state in held:
        sizes[state.category][state.name] = own_bytes(plan, state)
    return sizes


def update_seconds(
    device: Device, of: Updated, cluster: Cluster | None = None, kind: int = 0
) -> tuple[float, float]:
    """Return the seconds of an update on a device of a kind of the cluster, and the seconds that take its host."""
    if of.host is not None:
        assert cluster is not None, "a host is of a cluster"
        own, launch_s = update_seconds(device, replace(of, host=None)) if of.buckets else (0.0, 0.0)
        copied, zero_s = _host_seconds(device, cluster, kind, of.host)
        return own + copied, launch_s + zero_s
    moved = update_bytes(of, fused=device.stack is None or device.stack.optimizer == "fused")
    busy = sum(b / (device.memory_bandwidth * memory_fraction(device, b)) for b in moved)
    busy += sum(k.count * kernel_seconds(device, k, "F").seconds for k in of.products)
    kernels = len(moved) + sum(k.count for k in of.products) + (of.state > 0)
    return launched(device, busy, kernels)  # and the step is counted


def _host_seconds(
    device: Device, cluster: Cluster, kind: int, of: HostUpdate
) -> tuple[float, float]:
    links = cluster.kinds[kind].links
    memory = links.host_memory_bandwidth / min(cluster.per_node, of.world)
    copies = of.copied / min(links.host_bandwidth, memory) + 2 * of.buckets * links.host_latency
    zeroed = of.zeroed / (device.memory_bandwidth * memory_fraction(device, of.zeroed))
    zeroing, launch_s = launched(device, zeroed, of.buckets)
    # Meanwhile the host issues nothing, as if these seconds were launches.
    own = copies + of.touched / memory
    return own + zeroing, own + launch_s


def update_bytes(of: Updated, *, fused: bool) -> list[int]:
    """Return the bytes that each kernel moves."""
    kernels = ceil(of.param / of.item / (CHUNK * BLOCKS))
    if fused:
        moved = _split(2 * of.param + of.grad + 2 * of.state, kernels)
    else:
        copies = min(max(FOREACH), round(of.state / of.param)) if of.param else 0
        moved = [b for tensors in FOREACH[copies] for b in _split(tensors * of.param, kernels)]
    read, zeroed = _split(of.grad, of.buckets), _split(of.grad + of.others, of.buckets)
    return [*moved, *zeroed, *(2 * b for b in read if of.scaled), *of.copies]


def _split(nbytes: int, kernels: int) -> list[int]:
    return [nbytes // kernels] * kernels if kernels else []
