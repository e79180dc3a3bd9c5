"""Make a captured program for devices that share the work of its chunks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper_compiler.capture.assemble import TRACE_ROWS
from piper_compiler.capture.codestore import Captured
from piper_compiler.capture.joint import TracedChunk
from piper_compiler.capture.layouts import Sharded, common_degrees, split_degrees
from piper_compiler.capture.sizes import Fitter, NotAffine, explain
from piper_ir.errors import CaptureError, DirectiveError
from piper_ir.layout import Layout, Sharding
from piper_ir.program import Chunk, Param


def with_shardings(captured: Captured, shardings: Sequence[Sharding]) -> Captured:
    """Return a capture whose chunks are those of one device among those that share them.

    Every code is rewritten once, not captured again. Raises DirectiveError for what cannot be shared, with what can.
    """
    asked = tuple(shardings)
    if not asked:
        return captured
    found = captured.shared.get(asked)
    if found is None:
        split = tuple(_split(captured, one) for one in asked)
        found = captured.shared[asked] = _Shared(captured, split).captured()
    return found


def _split(captured: Captured, asked: Sharding) -> Sharding:
    """Return how the devices of an axis share all chunks, with the degrees into which it must be split for them."""
    codes = dict.fromkeys(c.code for c in captured.program.chunks if not c.opaque)
    joints = [captured.code.joint(code, TRACE_ROWS[0][0]) for code in codes]
    degrees = common_degrees([split_degrees(j, asked.degree, stream=bool(asked.stream)) for j in joints])
    return replace(asked, split=degrees) if len(degrees) > 1 else asked


@dataclass(frozen=True)
class _Body:
    """Hold a chunk as a device has it; without `layouts` every device computes all of it."""

    chunk: Chunk
    layouts: Sharded | None

    def layout_of(self, number: int) -> Layout:
        return () if self.layouts is None else self.layouts.layout_of(number)

    def summed(self, number: int) -> tuple[str, ...] | None:
        """Return along which axes the gradient of an input is a sum; None where it has none."""
        if self.layouts is None:
            return () if self.chunk.inputs[number].needs_grad else None
        return self.layouts.summed(number) if number in self.layouts.grads else None


class _Shared:
    def __init__(self, captured: Captured, asked: tuple[Sharding, ...]) -> None:
        self._captured, self._asked = captured, asked
        self._bodies: dict[str, _Body] = {}

    def captured(self) -> Captured:
        program = self._captured.program
        chunks = tuple(self._chunk(c) for c in program.chunks)
        params = self._params(program.params)
        axes = tuple(axis for s in self._asked for axis in s.axes)
        made = replace(program, chunks=chunks, params=params, axes=axes, variants=())
        return replace(self._captured, program=made, under={}, shared={})

    def _chunk(self, chunk: Chunk) -> Chunk:
        body = self._bodies.get(chunk.code)
        if body is None:
            body = self._bodies[chunk.code] = self._body(chunk)
        inputs = tuple(replace(i, spec=body.chunk.ports[f"in{k}"]) for k, i in enumerate(chunk.inputs))
        outputs = tuple(replace(o, spec=body.chunk.ports[f"out{k}"]) for k, o in enumerate(chunk.outputs))
        made = body.chunk
        return replace(chunk, inputs=inputs, outputs=outputs, ports=made.ports, steps=made.steps, code=made.code)

    def _body(self, chunk: Chunk) -> _Body:
        if chunk.opaque:
            return self._opaque(chunk)
        store = self._captured.code
        code = store.shared(chunk.code, self._asked)
        problem: CaptureError | None = None
        for rows in TRACE_ROWS:
            traces: Mapping[int, TracedChunk] = {r: store.trace(code, r) for r in rows}
            fitter = Fitter(rows, (traces[rows[0]], traces[rows[1]], traces[rows[2]]))
            try:
                made = replace(chunk, ports=fitter.ports(), steps=fitter.steps(), code=code)
            except NotAffine as error:
                problem = problem or explain(error, chunk.id, traces)
                continue
            store.expect(code, made)
            return _Body(made, store.layouts(code, rows[0]))
        assert problem is not None
        raise problem

    def _opaque(self, chunk: Chunk) -> _Body:
        """Return a chunk that autograd runs as it is: each device computes all of it."""
        if any(s.stream for s in self._asked):
            raise DirectiveError(
                f"chunk {chunk.id!r} has an opaque region, which needs all tokens on each device, and stream shares them; "
                'leave the region out (piper.tag without opaque=True), or use stream=""'
            )
        return _Body(chunk, None)

    def _params(self, params: Sequence[Param]) -> tuple[Param, ...]:
        """Return the parameters as a device has them; raise DirectiveError where two chunks want them otherwise."""
        program = self._captured.program
        layouts: dict[str, tuple[Layout, str]] = {}
        summed: dict[str, tuple[tuple[str, ...], str]] = {}
        for chunk in program.chunks:
            body = self._bodies[chunk.code]
            for k, given in enumerate(chunk.inputs):
                if given.kind != "param":
                    continue
                layout = body.layout_of(k)
                known, where = layouts.setdefault(given.ref, (layout, chunk.id))
                if known != layout:
                    raise DirectiveError(
                        f"parameter {given.ref!r} would lie as {known} in {where} and as {layout} in {chunk.id}; "
                        "name the indexes to share (index=...) so that both agree"
                    )
                along = body.summed(k)
                if along is None:
                    continue
                before, where = summed.setdefault(given.ref, (along, chunk.id))
                if before != along:
                    raise DirectiveError(
                        f"the gradient of parameter {given.ref!r} would be a sum over {before or 'no axis'} in {where} and over "
                        f"{along or 'no axis'} in {chunk.id}; share both chunks alike, or untie them"
                    )
        specs = {
            given.ref: self._bodies[chunk.code].chunk.ports[f"in{k}"]
            for chunk in program.chunks
            for k, given in enumerate(chunk.inputs)
            if given.kind == "param"
        }
        return tuple(
            replace(p, spec=specs[p.name], layout=layouts[p.name][0], summed=summed.get(p.name, ((), ""))[0])
            if p.name in specs
            else p
            for p in params
        )
