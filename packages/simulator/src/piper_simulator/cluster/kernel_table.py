"""Look up measured kernels in a table of seconds by kind, dtype and size, or estimate others from near entries.

    table          a kernel of exactly this size was measured
    interpolated   between two sizes: a straight line on log-log paper. Among shapes: the formula times measured /
                   formula of the neighbours, their geometric mean weighted by 1 / distance^2 in logarithms of the
                   dimensions
    scaled         outside of the measured sizes, by at most a factor of REACH: the formula times measured / formula of
                   the nearest
    formula        nothing near was measured

Neighbours of a shape have every dimension within a factor of REACH of its own. Nothing else is extrapolated. The last
two count as formulas, and a prediction says how much of it they are. Attention in a window is looked up by its FLOPs,
since full attention has the same shape. A cluster file has a row per kernel:

    [[kernel]]
    kind = "matmul"                     # one of stacks.KINDS
    dtype = "bfloat16"
    shape = [4096, 8192, 2048]          # or bytes = 201326592 (read and written), or flops = 137438953472
    seconds = 176.8e-6
    source = "benchmarks/gpu_check.py, one H200, 2026-11-20"
    op = "mm"                           # optional: of this operator only
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log, prod, sqrt
from typing import Annotated, Any, Literal

from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.ground.trace import Source
from piper_ir.program.program import Kernel
from piper_ir.tools import log_log, within
from piper_simulator.cluster.checks import (
    COUNT,
    TEXT,
    Count,
    KeyPath,
    Positive,
    Text,
    check_fields,
    checks_of,
    list_of,
    one_of,
    table,
)
from piper_simulator.cluster.stacks import KINDS

REACH = 2.0
WINDOW = 2 / 3
"""The fraction of causal attention's FLOPs below which attention has a window; all of MLA's are at least 5 / 6."""
How = Literal["table", "interpolated", "scaled", "formula"]
SOURCES: Mapping[How, Source] = {
    "table": "table",
    "interpolated": "interpolated",
    "scaled": "formula",
    "formula": "formula",
}
"""The labels of durations, from the most to the least trusted."""
SizeAxis = Literal["shape", "bytes", "flops"]
AXES: tuple[SizeAxis, ...] = ("shape", "bytes", "flops")
SHAPES: Mapping[str, Mapping[int, str]] = {
    "matmul": {3: "M, N, K", 4: "batch, M, N, K"},
    "attention": {5: "batch, heads, T_q, T_k, head_dim"},
    "loss": {2: "rows, classes"},
}
"""The kinds of kernels that have a shape, with its dimensions."""
Size = tuple[Count, ...]
KernelFormula = Callable[[Kernel], float]


@dataclass(frozen=True, slots=True)
class KernelDuration:
    """Hold the seconds that a kernel took; raise ClusterError for values that are not positive.

    Attributes:
        kind: kind of kernel, as in plans.
        op: the operator (`piper_ir.program.program.Kernel.op`), "" for any of this kind.
        axis: the meaning of `size`: the shape (see SHAPES), or one number, bytes read and written or FLOPs, as plans
            count them.
        source: where the measurement comes from.
    """

    kind: Annotated[str, one_of(*KINDS)]
    op: str
    dtype: Annotated[str, one_of(*ITEM_BYTES)]
    axis: SizeAxis
    size: Size
    seconds: Positive
    source: Text

    def __post_init__(self) -> None:
        where = f"{self.kind} kernel, {self.axis} {self.size} in {self.seconds!r} s ({self.source})"
        check_fields(self, where)
        if not self.size:
            raise (
                KeyPath(where)
                .at("size")
                .error("nothing stands here; positive whole numbers are needed")
            )

    @property
    def key(self) -> tuple[str, str, str, SizeAxis, Size]:
        """Return the kernel that was measured, without its seconds."""
        return self.kind, self.op, self.dtype, self.axis, self.size


SCHEMA = list_of(
    table(
        {
            k: TEXT if k == "op" else check
            for k, check in checks_of(KernelDuration).items()
            if k not in ("axis", "size")
        }
        | {"shape": list_of(COUNT), "bytes": COUNT, "flops": COUNT}
    )
)
"""The check of `[[kernel]]` in a cluster file."""


def read_kernels(found: Sequence[Mapping[str, Any]], where: KeyPath) -> tuple[KernelDuration, ...]:
    """Return the rows that fit SCHEMA; raise ClusterError with the number of the row, from 0."""
    rows: dict[tuple[Any, ...], int] = {}
    durations = []
    for k, entry in enumerate(found):
        row = _row(entry, where.item(k))
        if row.key in rows:
            raise where.item(k).error(
                f"measured in {where.keys[-1]}[{rows[row.key]}] already; one of them is needed"
            )
        rows[row.key] = k
        durations.append(row)
    return tuple(durations)


def _row(entry: Mapping[str, Any], at: KeyPath) -> KernelDuration:
    if missing := [k for k in ("kind", "dtype", "seconds", "source") if k not in entry]:
        raise at.error(f"{', '.join(missing)} missing")
    axes = [a for a in AXES if a in entry]
    if len(axes) != 1:
        raise at.error(
            f"{' and '.join(axes) or 'no size'} given; exactly one of {', '.join(AXES)} is needed"
        )
    axis: SizeAxis = axes[0]
    kind = entry["kind"]
    size = tuple(entry[axis]) if axis == "shape" else (entry[axis],)
    if axis == "shape" and len(size) not in SHAPES.get(kind, {}):
        forms = " or ".join(f"[{names}]" for names in SHAPES.get(kind, {}).values())
        needed = (
            f"{forms} is needed"
            if forms
            else f"give bytes or flops; only {', '.join(SHAPES)} have a shape"
        )
        raise at.at("shape").error(f"{list(size)} stands here, of kind {kind!r}; {needed}")
    return KernelDuration(
        kind, entry.get("op", ""), entry["dtype"], axis, size, entry["seconds"], entry["source"]
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Hold the seconds of a kernel, and where they come from."""

    seconds: float
    how: How


@dataclass(frozen=True)
class KernelTable:
    """Look durations up.

    Rows of an operator come before rows of its kind. Of several axes the shape comes before bytes, and bytes before
    FLOPs.
    """

    rows: tuple[KernelDuration, ...]

    @cached_property
    def _series(self) -> dict[tuple[str, str, str, SizeAxis, int], dict[Size, float]]:
        series_by_key: dict[tuple[str, str, str, SizeAxis, int], dict[Size, float]] = {}
        for r in self.rows:
            series_by_key.setdefault((r.kind, r.op, r.dtype, r.axis, len(r.size)), {})[r.size] = (
                r.seconds
            )
        return series_by_key

    def find(self, kernel: Kernel, formula: KernelFormula) -> Found:
        """Return the duration of a bound kernel; `formula` gives the seconds of a kernel without a table."""
        for op in dict.fromkeys((kernel.op, "")):
            for axis in AXES:
                size = _size(kernel, axis)
                series = (
                    self._series.get((kernel.kind, op, kernel.dtype, axis, len(size)))
                    if size
                    else None
                )
                looked_up = _look(series, kernel, axis, size, formula) if series else None
                if looked_up is not None:
                    return looked_up
        return Found(formula(kernel), "formula")


def _look(
    series: Mapping[Size, float], kernel: Kernel, axis: SizeAxis, size: Size, formula: KernelFormula
) -> Found | None:
    """Look a size up in the rows of one kind; None if nothing near was measured."""
    if size in series:
        return Found(series[size], "table")
    if axis != "shape":
        points = sorted((k[0], seconds) for k, seconds in series.items())
        between = log_log(points, size[0]) if within(points, size[0]) else None
        if between is not None:
            return Found(between, "interpolated")
    near = {
        k: _distance(k, size)
        for k in series
        if all(a <= REACH * b and b <= REACH * a for a, b in zip(k, size))
    }
    if not near:
        return None
    ratios = {k: log(series[k] / formula(_resized(kernel, axis, size, k))) for k in near}
    if all(min(k[i] for k in near) <= n <= max(k[i] for k in near) for i, n in enumerate(size)):
        weights = {k: d**-2 for k, d in near.items()}
        mean = sum(w * ratios[k] for k, w in weights.items()) / sum(weights.values())
        return Found(formula(kernel) * exp(mean), "interpolated")
    nearest = min(near, key=lambda k: (near[k], k))
    return Found(formula(kernel) * exp(ratios[nearest]), "scaled")


def _size(kernel: Kernel, axis: SizeAxis) -> Size:
    """Return a kernel's size on an axis; empty if it has none, or if its shape does not tell its work."""
    if axis == "shape" and _in_window(kernel):
        return ()
    dims = kernel.dims if axis == "shape" else (kernel.bytes if axis == "bytes" else kernel.flops,)
    size = tuple(bind(d, 0) for d in dims)
    return size if all(size) else ()


def _in_window(kernel: Kernel) -> bool:
    """Return whether attention leaves out so much that a window is its reason, which its shape does not tell.

    Causal attention has 2 FLOPs for each query, key and dimension, its backward 5 (FlashAttention-2, arXiv 2307.08691,
    section 4.1). Values with fewer dimensions than keys need fewer: in MLA, a sixth fewer in the forward.
    """
    if kernel.kind != "attention" or len(kernel.dims) not in SHAPES["attention"]:
        return False
    products = 5 if kernel.op.endswith(("dgrad", "backward")) else 2
    causal = products * prod(bind(d, 0) for d in kernel.dims)
    return bind(kernel.flops, 0) < WINDOW * causal


def _distance(a: Size, b: Size) -> float:
    """Return the distance of two shapes that differ, in logarithms of the dimensions."""
    return sqrt(sum(log(x / y) ** 2 for x, y in zip(a, b)))


def _resized(kernel: Kernel, axis: SizeAxis, size: Size, other: Size) -> Kernel:
    """Return the same kernel at another size."""
    factor = prod(other) / prod(size)
    flops, moved = round(bind(kernel.flops, 0) * factor), round(bind(kernel.bytes, 0) * factor)
    if axis != "shape":
        return replace(kernel, flops=flops, bytes=moved)
    if kernel.kind == "matmul":
        *batch, m, n, k = other
        moved = prod(batch) * (m * k + k * n + m * n) * ITEM_BYTES[kernel.dtype]
    return replace(kernel, dims=other, flops=flops, bytes=moved)
