"""Count the host's part of a step: the launches of kernels, and the issue of instructions.

The steps of a CUDA graph (`Plan.cuda_graph`) are launched as one, in the time that the host takes for one instruction,
which the instructions share here. Their kernels wait for no launch; each still takes its start (`Device.kernel_s`). The
update is issued by the host while the device works on the graph, so its launches are hidden, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper_ir.ground.errors import ClusterError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_ir.program.program import Kernel, Signature, Step
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.durations.kernels import part_of_call
from piper_simulator.durations.software_kernels import run_kernels

OF_SCALES = "in float8_scale"
"""The reason of a message (`StepCollective.why`) by which devices agree on the scale of a tensor in float8."""


def launching_devices(plan: Plan, cluster: Cluster | None) -> Sequence[Device | None]:
    """Return the devices of a cluster by kind, with the launches that kernels of a plan wait for; None without one.

    Raises ClusterError for CUDA graphs on other devices.
    """
    if cluster is None:
        return (None,)
    if plan.cuda_graph and cluster.synchronous:
        raise ClusterError(
            f"steps are CUDA graphs (cuda_graph=True), and {cluster.device.name} is no CUDA device; name another "
            f"cluster, or leave cuda_graph out"
        )
    devices = [kind.device for kind in cluster.kinds]
    return [replace(d, launch_s=0.0) for d in devices] if plan.cuda_graph else devices


def spared_launches(device: Device, step: Signature, name: Step) -> float:
    """Return how many launches the host saves in a step whose pieces are started by one call.

    Pieces are the messages of a ring, the parts of a message with the products that run beside them
    (`shard(pieces=...)`), and the messages by which devices agree on the scales of tensors in float8.
    """
    by_call: dict[tuple[str, str, str], list[int]] = {}
    pieces = 0
    for number, message in enumerate(step.collectives):
        by_call.setdefault((message.kind, message.axis, message.why), []).append(number)
        pieces += message.why.startswith(OF_SCALES)
    beside = {o.number: o.beside for o in step.overlaps}
    for (kind, _, _), numbers in by_call.items():
        if len(numbers) > 1 and (kind == "shift" or not beside.keys().isdisjoint(numbers)):
            of_products = [beside[n].kernels for n in numbers if n in beside]
            pieces += len(numbers) - 1 + sum(_products(device, k, name) for k in of_products)
    return pieces * (1 - part_of_call(device))


def _products(device: Device, kernels: Sequence[Kernel], step: Step) -> int:
    run = kernels if device.stack is None else run_kernels(device.stack, kernels, step)
    return sum(k.count for k in run if k.kind == "matmul")


def issue_seconds(plan: Plan, cluster: Cluster | None, costs: Costs) -> float:
    """Return the host seconds per instruction, which costs may have measured."""
    known = [kind.device.host_issue_s for kind in cluster.kinds] if cluster is not None else []
    issue = max(known, default=0.0) if costs.host is None else costs.host.issue_s
    if plan.cuda_graph:
        issue /= max([1, *(len(role.program) for role in plan.roles)])
    return issue


def costs_by_device(devices: Sequence[Device | None], costs: Costs) -> list[Costs]:
    """Return the measured costs for each device: other types have none where the measured type is in the cluster."""
    measured = costs.origin.cluster.partition(":")[0] if costs.origin is not None else ""
    taken_here = [device is not None and device.name == measured for device in devices]
    return [costs if here or not any(taken_here) else Costs() for here in taken_here]
