"""Run `piper profile`: measure a job, write the costs file, and print the costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from piper.api.ground.costs_file import check_costs_path, save_costs
from piper.api.running.profiling import profile
from piper.cli.loading import JobFile
from piper.views.costs_table import costs_table
from piper.views.display import show
from piper_ir.ground.codec import dumps
from piper_ir.tools import working

if TYPE_CHECKING:
    from piper_runtime.launch import Launcher


def measure(
    recipe: JobFile,
    over: tuple[str, str],
    *,
    rows: Sequence[int] | None,
    keep: Sequence[str],
    repeats: int,
    out: Path,
    as_json: bool,
) -> None:
    """Measure a job with a launcher and the address of its cluster, write the costs to `out`, and print them."""
    check_costs_path(out)
    cluster = over[1]
    launcher = cast("Launcher", over[0])  # `profile` checks what was typed
    with working("measuring chunks, messages and instructions"):
        costs = profile(
            recipe.job,
            recipe.strategy,
            launcher=launcher,
            cluster=cluster,
            rows=rows,
            keep=keep,
            repeats=repeats,
        )
    save_costs(out, costs)
    print(dumps(costs)) if as_json else show(
        costs_table(costs, title=f"costs of {recipe.path.name}")
    )
    print(f"costs are in {out}", file=sys.stderr)
