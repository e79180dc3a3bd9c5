"""Find the reason in the text of one of Ray's errors, without importing Ray."""

from __future__ import annotations

import re

_HEADINGS = (
    "The actor died unexpectedly before finishing this task.",
    "Failed to set up runtime environment.",
)
"""The lines with which Ray begins, whatever has happened."""
_FIELD = re.compile(r"\s*\w+: \S*$")
"""The lines of which actor it was: its class, id, process and address."""
_MEMORY = re.compile(r"running low on memory|OUT_OF_MEMORY|out of memory", re.IGNORECASE)


def ray_reason(error: BaseException) -> str:
    """Return why Ray failed a call, as one line, with the way out if it has killed a worker for memory.

    An exception in the code of a task or an actor stands in the last line of its traceback. Ray's own texts begin with
    the reason, and end with advice on Ray's settings.
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "Traceback (most recent call last)" in text:
        return lines[-1]
    if exit_match := re.search(r"Worker exit type: (\w+)\.? Worker exit detail: ([^.]*)", text):
        reason = f"{exit_match[1]}: {exit_match[2].strip()}"
    else:
        reason = next(
            (line for line in lines if line not in _HEADINGS and not _FIELD.match(line)), lines[0]
        )
    if not _MEMORY.search(text):
        return reason
    used = re.search(r"was running was ([^,]*\))", text)
    return (
        f"{reason.rstrip('.')}{f' ({used[1]})' if used else ''}; put fewer ranks on a node, or use a strategy that "
        f"keeps less (more microbatches, recompute, zero)"
    )
