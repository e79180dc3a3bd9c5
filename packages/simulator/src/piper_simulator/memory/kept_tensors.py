"""Size the tensors that a software stack keeps otherwise than the plan's own runtime.

A plan has places for `bound` times the mean rows of dropless experts, and keeps the experts' results for the gradient
of the router's shares. Megatron-Core allocates for the rows that came (`Stack.places`), and since 0.13 multiplies
shares into the experts' activation, so that no backward reads a result (`Stack.shares`). If no kernel makes both, as
for experts with GELU, the activation is kept beside this product. Rows are counted as if experts were chosen equally
often. Of activations that its kernels make again (`Stack.remakes`), none is kept. Temporaries
inside of a step are counted as in the plan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.instr_table import InstrTable, ValueTable
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk
from piper_simulator.cluster.stacks import Stack


def kept_by(stack: Stack | None, plan: Plan, role: RolePlan) -> RolePlan:
    """Return a role with its tensors as large as a stack keeps them; the role itself if none differs."""
    if stack is None or not stack.keeps_otherwise:
        return role
    table, sizes = role.table, dict[int, int]()
    by_chunk: dict[str, dict[str, int]] = {}
    for template in table.templates:
        for part in template.parts:
            if not isinstance(part.op, Compute):
                continue
            chunk = plan.chunk(part.op.variant)
            if chunk.variant not in by_chunk:
                by_chunk[chunk.variant] = _sizes(stack, chunk)
            if own := by_chunk[chunk.variant]:
                ports = zip(chunk.steps[part.op.step].writes, part.writes, strict=True)
                sizes |= {v // table.values.count: own[port] for port, v in ports if port in own}
    return replace(role, program=_resized(table, sizes)) if sizes else role


def _sizes(stack: Stack, chunk: Chunk) -> dict[str, int]:
    """Return the size along the first dimension of each port of a chunk that a stack keeps otherwise."""
    results = _results(chunk) if stack.shares == "activation" else ""
    sizes = {results: _weighted(stack, chunk, results)} if results else {}
    for op in stack.remakes:
        sizes |= dict.fromkeys(_activations(chunk, op, sizes), 0)
    region = chunk.steps["F"].experts
    if stack.places == "rows" and region is not None:
        rows, places = bind(region.rows, 0), bind(region.places, 0)
        for port, spec in chunk.ports.items():
            if port.startswith(("saved", "iw")) and spec.shape[:1] == (places,) != (rows,):
                sizes.setdefault(port, rows)
    return sizes


def _results(chunk: Chunk) -> str:
    """Return the port that keeps the experts' results [rows, width] for the shares' gradient; "" if there is none.

    Its rows are the ones of the device's own choices, whose number divides the rows of its experts; tensors of a shared
    expert beside them have fewer. Of several of one size, as where experts are as wide as tokens, any one will do that
    the same step makes.
    """
    forward, backward = chunk.steps["F"], chunk.steps.get("I")
    width = chunk.ports["out0"].shape[-1:] if "out0" in chunk.ports else ()
    if backward is None or not any(k.op == "unroute_wgrad" for k in backward.cost.kernels):
        return ""
    products = [k for k in forward.cost.kernels if k.rows_dim is not None]
    rows = bind(forward.experts.rows if forward.experts is not None else products[0].dims[0], 0)
    for step in ("F", "R"):
        made = chunk.steps[step].writes if step in chunk.steps else ()
        found = {
            port: bind(chunk.ports[port].shape[0], 0)
            for port in backward.reads
            if port in made and port.startswith("saved")
            if len(chunk.ports[port].shape) == 2 and chunk.ports[port].shape[1:] == width
        }
        found = {port: n for port, n in found.items() if n and not rows % n}
        if found:
            return max(found, key=found.__getitem__)
    return ""


def _weighted(stack: Stack, chunk: Chunk, results: str) -> int:
    """Return the size along the first dimension of the results that has the bytes of the activation which is kept.

    It is the one [rows, width of an expert] that shares are multiplied into; 0 if one kernel makes it and the product.
    """
    forward = chunk.steps["F"].cost.kernels
    if any(k.op in stack.remakes for k in forward):
        return 0
    rows, width = (bind(size, 0) for size in chunk.ports[results].shape)
    inner = [bind(k.dims[2], 0) for k in forward if k.rows_dim == 0 and bind(k.dims[1], 0) == width]
    return rows * min(inner, default=0) // width


def _activations(chunk: Chunk, op: str, others: Collection[str]) -> list[str]:
    """Return ports of as many bytes as the results of a gate's operator that F keeps, unless R makes these again.

    A gate keeps two such tensors for I beside the results: the argument of its activation, and the other factor.
    `others` are ports that are known as kept otherwise.
    """
    forward, backward = chunk.steps["F"], chunk.steps.get("I")
    if backward is None:
        return []
    left: list[str] = []
    again = (
        [k.bytes for k in chunk.steps["R"].cost.kernels if k.op == op] if "R" in chunk.steps else []
    )
    for kernel in forward.cost.kernels:
        if kernel.op != op or kernel.bytes in again:
            continue
        half = bind(kernel.bytes, 0) // 2  # it reads as much as it writes
        alike = [
            port
            for port in forward.writes
            if port.startswith("saved") and port in backward.reads
            if port not in others and port not in left
            if bind(chunk.ports[port].nbytes, 0) == half
        ]
        left += alike[: kernel.count] if len(alike) >= kernel.count + 2 else []
    return left


def _resized(table: InstrTable, rows: dict[int, int]) -> InstrTable:
    """Return a program some of whose values have other sizes along their first dimension."""
    values = table.values
    kinds = [
        (TensorSpec((rows[v], *kind[0].shape[1:]), kind[0].dtype), kind[1]) if v in rows else kind
        for v, kind in enumerate(values.kinds)
    ]
    sized = ValueTable(values.ids, values.tails, tuple(kinds), values.whole, values.count)
    columns = table.waits, table.early, table.made, table.first, table.astray
    return InstrTable(sized, table.templates, table.used, table.mbs, *columns)
