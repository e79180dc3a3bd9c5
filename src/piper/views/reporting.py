"""Write reports at the command line: of any result folder, and at the end of a command that made one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ir.ground.errors import PiperError
from piper_ir.tools import working

if TYPE_CHECKING:
    from piper_ir.plan.plan import Plan
    from piper_report import Report


def report(
    folder: str | Path, other: str | Path | None = None, *, out: str | Path | None = None
) -> Report:
    """Write the report of a result folder, or of two beside each other, and print its headline and where it is.

    The load of experts is printed, too, if a run logged it. Raises FormatError or OutputError.
    """
    from piper.views.display import show
    from piper_report import write_beside, write_report

    with working("writing the report"):
        written = (
            write_report(folder, out=out) if other is None else write_beside(folder, other, out=out)
        )
    for table in (written.headline, written.experts):
        if table is not None:
            show(table)
    if not written.figures and written.headline is None:
        print(f"nothing was planned or run in {folder}, so that there is nothing to draw")
    print(
        f"the report is {written.html}, with {len(written.figures)} figures (PNG) and {len(written.tables)} tables (CSV) "
        f"beside it"
    )
    return written


def report_at_end(folder: Path, plan: Plan | None = None) -> Report | None:
    """Write the report at the end of a run, tuning or simulation whose results are saved already.

    `plan` is the one in the folder's plan.json, which is then not read. When the report cannot be made, one warning
    says why, and the command has still done its work.
    """
    from piper_report import write_report

    try:
        with working("writing the report"):
            written = write_report(folder, plan=plan)
    except PiperError as e:
        print(f"warning: no report: {e}", file=sys.stderr)
        return None
    print(f"the report is {written.html}", file=sys.stderr)
    return written
