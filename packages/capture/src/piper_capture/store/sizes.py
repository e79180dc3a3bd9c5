"""Fit the sizes of a chunk, traced at several numbers of rows, to functions that are affine in the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper_capture.steps.joint import TracedChunk
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import Affine, Dim, TensorSpec, affine, bind
from piper_ir.program.layout import StepCollective
from piper_ir.program.program import (
    Cost,
    ExpertRegion,
    Inside,
    Kernel,
    Liveness,
    OverlappedCollective,
    Signature,
    Step,
)
from piper_ops import own_costs


class NotAffine(Exception):
    """Say which size does not fit."""


class Fitter:
    """Fit sizes to traces at rows (r0, r1, r2): r0 and r1 determine every size, r2 checks it."""

    def __init__(
        self, rows: tuple[int, int, int], traces: tuple[TracedChunk, TracedChunk, TracedChunk]
    ) -> None:
        self._rows, self._traces = rows, traces

    def ports(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of each port, affine in rows; raise NotAffine if one is not."""
        first, *others = (t.ports for t in self._traces)
        if any(list(o) != list(first) for o in others):
            raise NotAffine("its saved tensors differ in number")
        return {name: self._spec(name, [t.ports[name] for t in self._traces]) for name in first}

    def steps(self) -> dict[Step, Signature]:
        """Return the steps with costs and memory affine in rows; raise NotAffine if one is not."""
        return {
            step: self._signature(step, [t.steps[step] for t in self._traces])
            for step in self._traces[0].steps
        }

    def _spec(self, name: str, specs: Sequence[TensorSpec]) -> TensorSpec:
        if len({(s.dtype, len(s.shape)) for s in specs}) != 1:
            raise NotAffine(f"{name} has another dtype or number of dimensions")
        return TensorSpec(
            tuple(
                self._fit(f"{name}.shape", d) for d in zip(*(s.shape for s in specs), strict=True)
            ),
            specs[0].dtype,
        )

    def _signature(self, step: Step, signatures: Sequence[Signature]) -> Signature:
        first = signatures[0]
        if any(
            (s.reads, s.writes, s.accumulates) != (first.reads, first.writes, first.accumulates)
            for s in signatures
        ):
            raise NotAffine(f"step {step} reads or writes other tensors")
        cost = self._cost(step, [s.cost for s in signatures])
        live = self._liveness(step, [s.liveness for s in signatures])
        inside = self._collectives(step, [s.collectives for s in signatures])
        experts = self._experts(step, [s.experts for s in signatures if s.experts is not None])
        overlaps = self._overlaps(step, [s.overlaps for s in signatures])
        return Signature(
            first.reads, first.writes, first.accumulates, cost, live, inside, experts, overlaps
        )

    def _overlaps(
        self, step: Step, each: Sequence[tuple[OverlappedCollective, ...]]
    ) -> tuple[OverlappedCollective, ...]:
        if any([o.number for o in overlaps] != [o.number for o in each[0]] for overlaps in each):
            raise NotAffine(f"step {step} has other collectives beside its kernels")
        return tuple(
            replace(same[0], beside=self._cost(step, [o.beside for o in same]))
            for same in zip(*each, strict=True)
        )

    def _experts(self, step: Step, regions: Sequence[ExpertRegion]) -> ExpertRegion | None:
        if not regions:
            return None
        rows, places = (
            self._fit(f"rows of experts of step {step}", sizes)
            for sizes in zip(*((r.rows, r.places) for r in regions), strict=True)
        )
        return ExpertRegion(rows, places, self._cost(step, [r.round for r in regions]))

    def _collectives(
        self, step: Step, each: Sequence[tuple[StepCollective, ...]]
    ) -> tuple[StepCollective, ...]:
        kinds = [[(c.kind, c.axis, c.why) for c in inside] for inside in each]
        if any(k != kinds[0] for k in kinds):
            raise NotAffine(f"step {step} has other collectives")
        return tuple(
            self._collective(f"collectives of step {step}", same)
            for same in zip(*each, strict=True)
        )

    def _collective(self, what: str, same: Sequence[StepCollective]) -> StepCollective:
        nbytes, mean = (
            self._fit(what, sizes)
            for sizes in zip(*((c.nbytes, c.mean_nbytes) for c in same), strict=True)
        )
        return replace(same[0], nbytes=nbytes, mean_nbytes=mean)

    def _cost(self, step: Step, costs: Sequence[Cost]) -> Cost:
        """Fit kernels by their places in the step.

        Only kernels that are equal in all traces are counted together, because different ones may coincide at one
        number of rows.
        """
        if len({len(c.kernels) for c in costs}) != 1:
            raise NotAffine(f"step {step} launches other kernels")
        launched = Counter(zip(*(c.kernels for c in costs), strict=True))
        return Cost(
            tuple(replace(self._kernel(step, kernels), count=n) for kernels, n in launched.items())
        )

    def _kernel(self, step: Step, kernels: Sequence[Kernel]) -> Kernel:
        if (
            len(
                {
                    (k.kind, k.dtype, len(k.dims), k.lowering, k.op, k.shared, k.counts)
                    for k in kernels
                }
            )
            != 1
        ):
            raise NotAffine(f"step {step} launches other kernels")
        first = kernels[0]
        what = f"{first.kind} kernel of step {step}"
        dims = tuple(
            self._fit(f"{what}: dims", d) for d in zip(*(k.dims for k in kernels), strict=True)
        )
        flops, moved = (self._counted(name, kernels) for name in ("flops", "bytes"))
        return replace(first, dims=dims, flops=flops, bytes=moved, count=1)

    def _counted(self, name: str, kernels: Sequence[Kernel]) -> Dim:
        """Fit FLOPs or bytes exactly, or within the rounding of the operator's formula: by one, or a hundredth."""
        (r0, r1, r2), (y0, y1, y2) = self._rows, [bind(getattr(k, name), 0) for k in kernels]
        try:
            return self._fit(name, [getattr(k, name) for k in kernels])
        except NotAffine:
            slope = (y2 - y0) / (r2 - r0)
            if abs(y0 + slope * (r1 - r0) - y1) <= max(1, 0.01 * y1):
                return affine(round(y0 - slope * r0), round(slope))
        op = kernels[0].op
        gives = f"gives {y0}, {y1}, {y2} at {r0}, {r1}, {r2} rows"
        if op not in {name for name, *_ in own_costs()}:
            raise NotAffine(f"the formula of {name} of the operator {op!r} {gives}")
        raise CaptureError(
            f"op_cost({op!r}): the formula of {name} {gives}; it must grow by the same with each row "
            "of a microbatch (a + b * rows), but for rounding"
        )

    def _liveness(self, step: Step, liveness: Sequence[Liveness]) -> Liveness:
        first = liveness[0]
        if any(
            (x.consumed, list(map(len, x.segments)))
            != (first.consumed, list(map(len, first.segments)))
            for x in liveness
        ):
            raise NotAffine(f"the order of memory use in step {step} changes")
        segments, on_cpu = (
            tuple(
                _maximal(
                    [
                        self._fit(f"memory of step {step}", sizes)
                        for sizes in zip(*group, strict=True)
                    ]
                )
                for group in zip(*all_of, strict=True)
            )
            for all_of in ([x.segments for x in liveness], [x.on_cpu for x in liveness])
        )
        inside = tuple(
            tuple(self._inside(step, kernels) for kernels in zip(*group, strict=True))
            for group in zip(*(x.inside for x in liveness), strict=True)
        )
        return Liveness(first.consumed, segments, inside, on_cpu)

    def _inside(self, step: Step, kernels: Sequence[Inside]) -> Inside:
        what = f"memory inside a kernel of step {step}"
        if len({k.most for k in kernels}) != 1:
            raise NotAffine(f"{what}: {', '.join(str(k.most) for k in kernels)} bytes per slice")
        held, own = (
            self._fit(what, [getattr(k, name) for k in kernels]) for name in ("held", "own")
        )
        return Inside(held, own, kernels[0].most)

    def _fit(self, what: str, sizes: Sequence[Dim]) -> Dim:
        (r0, r1, r2), (y0, y1, y2) = self._rows, [bind(s, 0) for s in sizes]
        slope, rest = divmod(y1 - y0, r1 - r0)
        fitted = affine(y0 - slope * r0, slope)
        if rest or bind(fitted, r2) != y2:
            raise NotAffine(f"{what}: {y0}, {y1}, {y2} at {r0}, {r1}, {r2} rows")
        return fitted


def _maximal(sizes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the sizes that are the largest for some number of rows >= 1, in a fixed order."""
    points = sorted({(s.b, s.a) if isinstance(s, Affine) else (0, s) for s in sizes})
    hull: list[tuple[int, int]] = []
    for slope, offset in points:
        while hull and (hull[-1][0] == slope or hull[-1][1] + hull[-1][0] <= offset + slope):
            hull.pop()
        hull.append((slope, offset))
    return tuple(affine(offset, slope) for slope, offset in hull)


def explain(error: NotAffine, chunk: str, traces: Mapping[int, TracedChunk]) -> CaptureError:
    """Return the user's error for a chunk that does not fit; `traces` are by rows."""
    return CaptureError(
        f"chunk {chunk!r} is not affine in the rows of a microbatch: {error} (traced at "
        f"{', '.join(map(str, traces))} rows); every size must be a + b * rows: no rows-by-rows products, and the "
        f"rows stay in the first dimension. A model that compares the rows of a batch with each other (in-batch "
        f"negatives) changes with the number of rows; give it the other side of each comparison as a tensor of the "
        f"batch, [rows, ...]"
    )
