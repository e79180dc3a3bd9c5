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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.plan.plan import Category, Plan, RolePlan, State
from piper_ir.plan.plan_bytes import own_bytes
from piper_ir.program.ops import Update
from piper_simulator.cluster.device import Device
from piper_simulator.durations.kernels import launched, memory_fraction

CHUNK, BLOCKS = 65_536, 320
"""The elements that a block takes, and the blocks of a kernel: torch, native/cuda/MultiTensorApply.cuh."""
FOREACH = {0: (3,), 1: (2, 3, 3), 2: (2, 3, 2, 3, 2, 2, 2, 4), 3: (2, 3, 2, 3, 3, 2, 2, 2, 4)}
"""The number of tensors that each operation reads and writes, by the number of states per parameter.

Source: torch.optim, SGD without and with momentum (_multi_tensor_sgd: scale the buffer, add the gradient, add to the
parameter); AdamW and with amsgrad (_multi_tensor_adam: decay, lerp, scale, addcmul, [maximum,] sqrt, division, epsilon,
addcdiv).
"""


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
    """

    param: int
    grad: int
    state: int
    item: int
    buckets: int
    scaled: bool
    copies: tuple[int, ...] = ()
    others: int = 0


def updated(plan: Plan, role: RolePlan, op: Update) -> Updated:
    """Return the bytes that an update of a role works on."""
    own_states = [s for s in role.states if s.flat and s.name in op.buckets]
    sizes = _own_sizes(plan, own_states)
    param = sum((sizes["param"] | sizes["master"]).values())
    copies = [size + sizes["param"][b] for b, size in sizes["master"].items()]
    buckets = [plan.bucket(b) for b in op.buckets]
    for bucket in buckets:
        if bucket.reduce_dtype != bucket.dtype:
            grad_bytes = sizes["grad"][bucket.id]
            copies.append(
                grad_bytes
                + grad_bytes // ITEM_BYTES[bucket.reduce_dtype] * ITEM_BYTES[bucket.dtype]
            )
    grad, state = sum(sizes["grad"].values()), sum(sizes["optim"].values())
    others = sum(s.nbytes for s in own_states if s.category == "grad") - grad
    item = min((ITEM_BYTES[b.dtype] for b in buckets), default=1)
    scaled = op.weighted or op.normed
    return Updated(param, grad, state, item, len(buckets), scaled, tuple(copies), others)


def _own_sizes(plan: Plan, held: Sequence[State]) -> dict[Category, dict[str, int]]:
    """Return by category and bucket the bytes that a rank's optimizer works on."""
    sizes: dict[Category, dict[str, int]] = {"param": {}, "master": {}, "grad": {}, "optim": {}}
    for state in held:
        sizes[state.category][state.name] = own_bytes(plan, state)
    return sizes


def update_seconds(device: Device, of: Updated) -> float:
    """Return the seconds of an update on a device with a stack."""
    moved = update_bytes(of, fused=device.stack is None or device.stack.optimizer == "fused")
    busy = sum(b / (device.memory_bandwidth * memory_fraction(device, b)) for b in moved)
    return launched(device, busy, len(moved) + (of.state > 0))  # and the step is counted


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
