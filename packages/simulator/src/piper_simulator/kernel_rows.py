"""Measured kernels in a cluster file, `[[kernel]]`; what a prediction makes of them: `piper_simulator.kernel_table`.

[[kernel]]
kind = "matmul"                     # one of stacks.KINDS
dtype = "bfloat16"
shape = [4096, 8192, 2048]          # or bytes = 201326592 (read and written), or flops = 137438953472
seconds = 176.8e-6
source = "benchmarks/gpu_check.py, one H200, 2026-11-20"
op = "mm"                           # optional: of this operator only
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piper_ir.sizes import ITEM_BYTES
from piper_simulator.checks import COUNT, POSITIVE, TEXT, Where, list_of, one_of, table
from piper_simulator.kernel_table import AXES, SHAPES, Axis, KernelDuration
from piper_simulator.stacks import KINDS

SCHEMA = list_of(
    table(
        {"kind": one_of(*KINDS), "op": TEXT, "dtype": one_of(*ITEM_BYTES), "seconds": POSITIVE, "source": TEXT}
        | {"shape": list_of(COUNT), "bytes": COUNT, "flops": COUNT}
    )
)


def read_kernels(found: Sequence[Mapping[str, Any]], where: Where) -> tuple[KernelDuration, ...]:
    """Rows that fit SCHEMA. ClusterError with the number of the row, from 0."""
    rows: dict[tuple[Any, ...], int] = {}
    out = []
    for k, entry in enumerate(found):
        row = _row(entry, where.item(k))
        if row.key in rows:
            raise where.item(k).error(f"measured in {where.keys[-1]}[{rows[row.key]}] already; one of them is needed")
        rows[row.key] = k
        out.append(row)
    return tuple(out)


def _row(entry: Mapping[str, Any], at: Where) -> KernelDuration:
    if missing := [k for k in ("kind", "dtype", "seconds", "source") if k not in entry]:
        raise at.error(f"{', '.join(missing)} missing")
    axes = [a for a in AXES if a in entry]
    if len(axes) != 1:
        raise at.error(f"{' and '.join(axes) or 'no size'} given; exactly one of {', '.join(AXES)} is needed")
    axis: Axis = axes[0]
    kind = entry["kind"]
    size = tuple(entry[axis]) if axis == "shape" else (entry[axis],)
    if axis == "shape" and len(size) not in SHAPES.get(kind, {}):
        forms = " or ".join(f"[{names}]" for names in SHAPES.get(kind, {}).values())
        needed = f"{forms} is needed" if forms else f"give bytes or flops; only {', '.join(SHAPES)} have a shape"
        raise at.at("shape").error(f"{list(size)} stands here, of kind {kind!r}; {needed}")
    return KernelDuration(kind, entry.get("op", ""), entry["dtype"], axis, size, entry["seconds"], entry["source"])
