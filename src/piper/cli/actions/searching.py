"""Run `piper tune`: search a file's strategies, show the results, and write them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from piper.api.content.origin import save_origin
from piper.api.ground.clusters import cluster_named
from piper.api.ground.costs_file import load_costs
from piper.api.ground.results import new_folder
from piper.api.problems.spaces import space as job_space
from piper.api.running import tuning
from piper.cli.actions.predicting import load_named
from piper.cli.arguments import TuneArguments
from piper.cli.loading import load_space
from piper.cli.options import searchers
from piper.cli.pipes import show_json
from piper.cli.variant_options import tried_parameters, tried_variants
from piper.views.reporting import report_at_end
from piper.views.study_view import as_numbers, bar, files_text, show_study
from piper_autotune import OBJECTIVES, Objective, Study
from piper_compiler import kernel_source
from piper_ir.ground.errors import JobError
from piper_ir.program.ops import KernelSource

if TYPE_CHECKING:
    from piper_runtime.launch import Launcher


def objective_named(name: str | None) -> Objective | None:
    """Return the objective of a name; raise JobError for one that is none."""
    if name is None or name in OBJECTIVES:
        return name
    raise JobError(f"--objective {name}: one of {', '.join(OBJECTIVES)} is accepted")


def _of_confirmed(a: TuneArguments) -> KernelSource:
    """Return the kernels of confirming runs; raise JobError for variants beside a strategy of the file's own."""
    several = a.kernels is not None and "," in a.kernels
    for name, given in (
        ("--kernels", several),
        ("--precision", a.precision),
        ("--cuda-graph", a.cuda_graph),
        ("-p", a.params),
    ):
        if given:
            raise JobError(
                f"{name}: {a.file} has a strategy of its own, with its own parameters and without variants; a file "
                f"with a `job` alone is searched with them"
            )
    return "eager" if a.kernels is None else kernel_source(a.kernels)


def tune(arguments: TuneArguments) -> Study:
    """Search, print the table or its JSON, write study and report, and return the study, which may be unfinished."""
    a = arguments
    space = load_space(a.file)
    tried = tried_variants(a.kernels, a.precision, a.cuda_graph) | tried_parameters(a.params)
    kernels: KernelSource = "eager"
    if space.strategy is not None:  # its own function of a trial chooses no variants
        kernels = _of_confirmed(a)
    elif tried:
        assert not callable(space.job), "such a job has a strategy beside it"
        space = replace(space, strategy=job_space(space.job, cluster_named(a.cluster), **tried))
    rows = None if callable(space.job) else space.job.global_batch
    folder = new_folder(a.out, a.file.stem) if a.out else None
    with tuning.saved(folder), bar(a.trials) as progress:
        study = tuning.tune(
            space.job, space.strategy, cluster=a.cluster, costs=load_costs(a.costs) if a.costs else None, trials=a.trials,
            confirm=a.confirm, memory_limit=a.memory_limit, seed=a.seed, storage=a.storage, launcher=cast("Launcher", a.launcher),
            workers=searchers(a.workers), progress=progress, objective=objective_named(a.objective),
            load=load_named(a.load), kernels=kernels,
        )  # fmt: skip
    if a.as_json:
        show_json(as_numbers(study, folder, rows))
    else:
        show_study(study, a.file.name, rows, profiled=a.costs is not None)
    if folder:
        study.save(folder)
        save_origin(folder, a.seed, a.file)
        print(files_text(study, folder), file=sys.stderr)
        report_at_end(folder)
    return study
