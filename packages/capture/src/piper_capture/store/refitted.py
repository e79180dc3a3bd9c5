"""Fit the ports and steps of a chunk to another code: the same chunk, tiled, recomputed or divided among devices."""

from __future__ import annotations

from dataclasses import replace

from piper_capture.store.assemble import TRACE_ROWS
from piper_capture.store.codestore import CodeStore
from piper_capture.store.sizes import Fitter, NotAffine, explain
from piper_ir.ground.errors import CaptureError
from piper_ir.program.program import Chunk


def traced_at(store: CodeStore, chunk: Chunk, code: str, rows: int) -> Chunk:
    """Return a chunk with the ports and steps of a code at one number of rows, traced there alone."""
    ports, steps = store.alone(code, rows)
    return replace(chunk, ports=ports, steps=steps, code=code)


def refitted(store: CodeStore, chunk: Chunk, code: str) -> Chunk:
    """Return a chunk with the ports, steps and sizes of another code, which the store then expects of it.

    Sizes must be affine in the number of rows, for one of the two triples of rows at which the code is traced. Raises
    CaptureError, which names a size that is not.
    """
    problem: CaptureError | None = None
    for rows in TRACE_ROWS:
        traces = {r: store.trace(code, r) for r in rows}
        fitter = Fitter(rows, (traces[rows[0]], traces[rows[1]], traces[rows[2]]))
        try:
            fitted = replace(chunk, ports=fitter.ports(), steps=fitter.steps(), code=code)
        except NotAffine as error:
            problem = problem or explain(error, chunk.id, traces)
            continue
        store.expect(code, fitted)
        return fitted
    assert problem is not None
    raise problem
