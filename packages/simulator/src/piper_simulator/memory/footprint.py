"""Break down the bytes at a role's peak into lines that people who train models know; each byte is in one line."""

from __future__ import annotations

from piper_ir.fold.memory_owners import Held, held_at_peak
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.collectives import HOST_COPIES
from piper_ir.program.ops import COMM, Compute, message_op
from piper_simulator.memory.device_memory import DeviceMemory

LINES = (
    *(
        "parameters",
        "master",
        "gradients",
        "optimizer",
        "buffers",
        "gathered_parameters",
        "gradient_buffers",
    ),
    *("activations", "recomputed_activations", "activation_gradients", "communication_buffers"),
    *("logits_and_loss", "kernels", "update", "batch", "scalars"),
)
"""The names of the lines that add up to the peak.

`master`: parameters as the optimizer updates them, if forward and backward read copies in another dtype, which are
`parameters` then. `gradients`: buckets. `gathered_parameters` and `gradient_buffers`: sharded buckets, whole
while they are gathered or not yet scattered. `activations`: outputs and saved tensors; `recomputed_activations`: the
recomputed ones of these; `activation_gradients`: of both. `communication_buffers`: values that were received, or summed
over ranks, and are not freed yet. `logits_and_loss`: of the chunk that computes the loss, its saved tensors, gradients
and temporaries. `kernels`: temporaries of any other chunk that runs at the peak. `update`: temporaries of the
optimizer.
"""

_STATES = {
    "param": "parameters",
    "master": "master",
    "grad": "gradients",
    "optim": "optimizer",
    "buffer": "buffers",
}
_SHARED = {"gathered": "gathered_parameters", "reduced": "gradient_buffers"}
_VALUES = {
    "activation": "activations",
    "gradient": "activation_gradients",
    "batch": "batch",
    "scalar": "scalars",
}
BESIDE = (
    "allocator_reserve",
    "context",
    "group_communicators",
    "pair_communicators",
    "stack_buffers",
)
"""The names of the lines beside `LINES`, as in `DeviceMemory`."""


def footprint(plan: Plan, role: RolePlan, device: DeviceMemory) -> dict[str, int]:
    """Return the bytes by `LINES`, which add up to the peak, and by `BESIDE`; all add up to `device.total`."""
    losses = {c.id for c in plan.chunks if any(o.kind == "loss" for o in c.outputs)}
    special = dict.fromkeys(_received(role), "communication_buffers") | dict.fromkeys(
        _recomputed(role), "recomputed_activations"
    )
    lines = dict.fromkeys(LINES, 0)
    for item in held_at_peak(plan, role):
        lines[_line(item, special.get(item.value, ""), losses)] += item.bytes
    beside = (device.reserve, device.context, device.groups, device.pairs, device.buffers)
    return lines | dict(zip(BESIDE, beside, strict=True))


def _received(role: RolePlan) -> set[str]:
    """Return the values that a communication writes, but for tensors that come back from the host."""
    return {
        v
        for i in role.program
        for p in i.parts
        if isinstance(p.op, COMM) and message_op(p.op) not in HOST_COPIES
        for v in p.writes
    }


def _recomputed(role: RolePlan) -> set[str]:
    """Return the values that recomputation writes."""
    return {
        v
        for i in role.program
        for p in i.parts
        if isinstance(p.op, Compute) and p.op.step == "R"
        for v in p.writes
    }


def _line(held: Held, special: str, losses: set[str]) -> str:
    if held.category in _STATES:
        return _STATES[held.category]
    if held.category in _SHARED:
        return _SHARED[held.category]
    if special:
        return special
    if held.chunk in losses and held.category != "batch":
        return "logits_and_loss"
    if held.category == "workspace":
        return "kernels" if held.chunk else "update"
    return _VALUES[held.category]
