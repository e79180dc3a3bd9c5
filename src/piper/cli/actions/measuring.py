"""Run `piper profile`: measure a job, write the costs file, and print the costs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from piper.api.ground.costs_file import check_costs_path, save_costs
from piper.api.running.profiling import profile
from piper.cli.arguments import ProfileArguments
from piper.cli.given import pairs
from piper.cli.loading import load_file
from piper.cli.pipes import show_json_text
from piper.views.costs_table import costs_table
from piper.views.display import show
from piper_ir.ground.codec import dumps
from piper_ir.tools import working

if TYPE_CHECKING:
    from piper_runtime.launch import Launcher


def measure(arguments: ProfileArguments) -> None:
    """Measure the job of a file, write its costs, and print them."""
    a = arguments
    job_file = load_file(a.file, pairs(a.params), a.strategy)
    check_costs_path(a.out)
    with working("measuring chunks, messages and instructions"):
        costs = profile(
            job_file.job,
            job_file.strategy,
            launcher=cast("Launcher", a.launcher),  # `profile` checks what was typed
            cluster=a.address,
            rows=a.rows,
            keep=a.keep or (),
            repeats=a.repeats,
            kernels=job_file.asked_options(a.kernels).kernels,
        )
    save_costs(a.out, costs)
    if a.as_json:
        show_json_text(dumps(costs))
    else:
        show(costs_table(costs, title=f"costs of {job_file.path.name}"))
    print(f"costs are in {a.out}", file=sys.stderr)
