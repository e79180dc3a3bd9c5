"""Find where devices cut each expert of a dropless mixture: its first product by columns, its second by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from piper_capture.graphs.closures import ancestors
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import PARTIAL, parted, shared_joint, split_degrees, title
from piper_capture.layouts.rules.rules_experts import GROUPED_ADD, ROUTE, UNROUTE
from piper_capture.torch_api._torch import OpOverload
from piper_ir.program.layout import Sharding


@dataclass(frozen=True)
class Cuts:
    """Say how devices cut the experts of a chunk.

    Attributes:
        stacks: for each stack that they cut, by its input: the dimension, and the outer steps in it.
        divided: the inputs that are biases of the second product. Each device adds its part of one to its partial sum.
    """

    stacks: tuple[tuple[int, int, int], ...]
    divided: tuple[int, ...] = ()


def cuts_of(joint: Joint, over: str, degree: int) -> Cuts | str:
    """Return how so many devices along `over` cut a chunk's experts, or why they cannot.

    Between `route` and `unroute` a device may need nothing of the others, and its result must be a partial sum.
    """
    asked = (Sharding(over, degree),)
    if len(split_degrees(joint, asked)[0]) > 1:
        return "its hidden elements are several dimensions, none of which divides by that"
    found, device = parted(joint, asked), shared_joint(joint, asked)
    unroute = _calls(found.shared.joint.graph, UNROUTE)[0]
    decision, made = found.decisions[0], found.shared.indexes.ops[unroute].keys[0]
    divided = []
    while made[0].target is GROUPED_ADD and made not in decision.redistributed:
        *rows, bias = found.shared.indexes.ops[made[0]].keys
        divided.append(bias[0])
        made = rows[0]
    before = ancestors([made[0]]) - ancestors(_calls(found.shared.joint.graph, ROUTE))
    inputs = found.shared.joint.inputs
    stacks = [k for k, n in enumerate(inputs) if joint.kinds[k] == "param" and n in before]
    if uneven := next((u.why for u in device.unshared if u.input in stacks), ""):
        return f"{uneven} (hidden elements)"
    summed = [
        n for n, _ in decision.redistributed if n in before and (divided == [] or n is not made[0])
    ]
    if summed:
        return f"{title(next(iter(summed[0].users)))} needs the sum of the second product, which is made behind the experts"
    cuts = [(k, part.dim, part.outer) for k in stacks for part in device.layout_of(k)]
    if decision.placement[made] is not PARTIAL or len(cuts) < len(stacks):
        return "each of their matrices needs a dimension of hidden elements"
    return Cuts(tuple(cuts), tuple(inputs.index(node) for node in divided))


def _calls(graph: fx.Graph, op: OpOverload) -> Sequence[fx.Node]:
    return graph.find_nodes(op="call_function", target=op)
