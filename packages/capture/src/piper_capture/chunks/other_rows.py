"""Trace the model at other numbers of rows, if the guards of the first trace do not hold at all numbers.

A comparison with the number of rows need not matter: torch's `affine_grid` looks for the smallest of all sizes, to see
whether it is 0, and so compares the rows with the channels. If a trace at other rows gives the same graph, the guards
of either trace suffice.
"""

from __future__ import annotations

from dataclasses import replace

from piper_capture.chunks.stateful_forward import transcript
from piper_capture.torch_api._torch_rows import either
from piper_capture.trace.dynamo import Forward
from piper_ir.ground.errors import CaptureError

FEWEST = 2
"""The smallest number of rows with which Dynamo traces a symbol."""


def holding_at_other_rows(forward: Forward, most: int) -> Forward:
    """Return the captured graph with guards that allow few rows, and `most` rows, if traces there give the same."""
    for rows in (FEWEST, max(FEWEST, most)):
        if forward.trace_at is None or all(guard.holds(rows) for guard in forward.guards):
            continue
        try:
            other = forward.trace_at(rows)
        except (
            CaptureError
        ):  # the model takes another path there, which check_rows says by its line
            continue
        if transcript(other, {}).lines == transcript(forward, {}).lines:
            forward = replace(forward, guards=either(forward.guards, other.guards))
    return forward


def check_rows(forward: Forward, rows: int) -> None:
    """Raise CaptureError when the captured path does not hold at `rows` rows."""
    for guard in forward.guards:
        if not guard.holds(rows):
            raise CaptureError(
                f"{guard.line or 'the model'}: the model behaves differently with {rows} rows than it did in "
                f"capture, where {guard.text}. Piper chooses the rows of a microbatch, so that what is computed "
                f"may not depend on their number: leave the comparison out, or hide it in an operator of your own "
                f"(torch.library.custom_op, register_fake)"
            )
