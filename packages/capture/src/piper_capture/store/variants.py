"""Make the variants of a captured program: its chunks under policies of recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from piper_capture.store.assemble import TRACE_ROWS
from piper_capture.store.codestore import Captured
from piper_capture.store.sizes import Fitter, NotAffine, explain
from piper_ir.ground.errors import CaptureError
from piper_ir.program.ops import KEEP_ALL
from piper_ir.program.program import Chunk


def with_policies(captured: Captured, policies: Iterable[str]) -> Captured:
    """Return a capture whose program has variants of all chunks under these policies.

    Each code is traced once for each policy; variants that are known already are taken from the capture. Equal policies
    give the same program. Raises CaptureError if a chunk is not affine in the rows under a policy.
    """
    wanted = tuple(sorted({*policies} - {KEEP_ALL}))
    if not wanted:
        return captured
    extended = captured.under.get(wanted)
    if extended is None:
        variants = tuple(v for keep in wanted for v in _variants(captured, keep))
        extended = captured.under[wanted] = replace(captured.program, variants=variants)
    return replace(captured, program=extended)


def _variants(captured: Captured, keep: str) -> Iterator[Chunk]:
    bodies: dict[str, Chunk] = {}
    for chunk in captured.program.chunks:
        body = bodies.get(chunk.code)
        if body is None:
            body = bodies[chunk.code] = _body(captured, chunk, keep)
        yield replace(chunk, ports=body.ports, steps=body.steps, code=body.code, keep=keep)


def _body(captured: Captured, chunk: Chunk, keep: str) -> Chunk:
    """Return a chunk with its ports and steps under a policy; equal steps are shared with the original."""
    code = captured.code.variant(chunk.code, keep)
    problem: CaptureError | None = None
    for rows in TRACE_ROWS:
        traces = {r: captured.code.trace(code, r) for r in rows}
        fitter = Fitter(rows, (traces[rows[0]], traces[rows[1]], traces[rows[2]]))
        try:
            ports, steps = fitter.ports(), fitter.steps()
        except NotAffine as error:
            problem = problem or explain(error, chunk.id, traces)
            continue
        shared = {
            s: known if sig == (known := chunk.steps.get(s)) else sig for s, sig in steps.items()
        }
        body = replace(
            chunk,
            ports=chunk.ports if ports == chunk.ports else ports,
            steps=shared,
            code=code,
            keep=keep,
        )
        captured.code.expect(code, body)
        return body
    assert problem is not None
    raise problem
