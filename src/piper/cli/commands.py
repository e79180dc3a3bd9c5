"""Define the `piper` command.

A user's errors end with one message and exit code 2. The heavy imports happen inside of the commands, which define
their options and leave the work to the modules that they call.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.accuracy_options import AccuracyArguments
from piper.cli.arguments import (
    ExportArguments,
    ImportArguments,
    PlanArguments,
    ProfileArguments,
    ShowArguments,
    SimulateArguments,
    TuneArguments,
)
from piper.cli.checkpoints import checkpoint
from piper.cli.foreign_options import TextCommand
from piper.cli.given import check_config, pairs
from piper.cli.interrupts import INTERRUPTED
from piper.cli.messages import user_errors
from piper.cli.options import (
    AsJsonOption,
    CudaGraphOption,
    FileArgument,
    KernelsOption,
    OwnRecipesArgument,
    ParamsOption,
    StrategyFileOption,
    VersionOption,
    check_drawn,
)
from piper.cli.pipes import show_json
from piper.cli.record_commands import command_of
from piper.cli.run_arguments import LaunchArguments, RunArguments
from piper.cli.trace_options import TraceArguments
from piper_ir.ground.errors import JobError
from piper_ir.tools import working

app = typer.Typer(
    name="piper",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint)


@app.callback()
def root(version: VersionOption = False) -> None:
    """Plan, simulate, tune and execute distributed training of PyTorch models from one strategy.

    `piper COMMAND --help` shows an example of each; `piper --install-completion` completes them in your shell."""


@app.command()
@command_of(SimulateArguments)
def simulate(arguments: SimulateArguments) -> None:
    """Predict step time and memory of a strategy without running it; say why; or compare two strategies.

    Example: piper simulate FILE.py --cluster h100x8 --why; piper simulate FILE.py -p tp=2,4 -p zero=1,3
    """
    from piper.cli.actions import predicting, several

    (several if several.asked(arguments) else predicting).simulated(arguments)


@app.command()
@command_of(TuneArguments)
def tune(arguments: TuneArguments) -> None:
    """Search the fastest strategy that fits, in simulation; --confirm runs the best on this machine.

    Example: piper tune examples/gpt_text.py --costs costs.json --confirm 2
    """
    from piper.cli.actions import searching

    if searching.tune(arguments).interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@command_of(PlanArguments)
def plan(arguments: PlanArguments) -> None:
    """Say which strategies of a model fit a cluster and how fast they are, and write the best as a FILE.py.

    Example: piper plan llama3-70b --cluster 'h100x8*16' --tokens-per-step 4M; piper plan config.json --global-batch 512
    """
    print(f"planning {arguments.source} for {arguments.cluster}", file=sys.stderr, flush=True)
    check_config(Path(arguments.source))
    with working("loading torch"):
        from piper.cli.actions import planning

    raise typer.Exit(planning.planned(arguments))


@app.command()
@command_of(AccuracyArguments)
def accuracy(arguments: AccuracyArguments) -> None:
    """Predict training steps that were measured elsewhere, and score the predictions; fit a software stack to them.

    Example: piper accuracy my_runs.csv --stack hopper-megatron; piper accuracy my_runs.csv --stack hopper-megatron
    --fit mine.toml
    """
    from piper.cli.actions import scoring

    raise typer.Exit(scoring.accuracy(arguments))


@app.command(name="import", cls=TextCommand)
@command_of(ImportArguments)
def import_(arguments: ImportArguments) -> None:
    """Read a job of torchtitan, Megatron-LM, DeepSpeed or Accelerate, and write it as a FILE.py.

    Example: piper import torchtitan llama3_70b --gpus 256 --cluster 'h100x8*32@eager' --out job.py
    """
    from piper.cli.actions import importing

    raise typer.Exit(importing.imported(arguments))


@app.command()
@command_of(ExportArguments)
def export(arguments: ExportArguments) -> None:
    """Write a strategy as files of torchtitan, Megatron-LM, DeepSpeed or Accelerate, or name the parts that they lack.

    Example: piper export job.py --to torchtitan --out launch
    """
    from piper.cli.actions import exporting

    exporting.exported(arguments)


@app.command()
@command_of(RunArguments)
def run(arguments: RunArguments) -> None:
    """Train with a strategy; print predicted beside measured and write a report.

    Example: piper run examples/gpt_text.py --steps 20; without a GPU: piper run examples/gpt_text.py --emulate h100x8
    """
    from piper.cli.actions import running

    (running.print_launch if arguments.print_launch else running.run)(arguments)


@app.command()
@command_of(LaunchArguments)
def launch(arguments: LaunchArguments) -> None:
    """Print the command lines that train on many machines: torchrun, Slurm, Ray. Runs nothing.

    Example: piper launch examples/gpt_text.py --nodes 2
    """
    from piper.cli.actions import running

    running.launch(arguments)


@app.command()
@command_of(ProfileArguments)
def profile(arguments: ProfileArguments) -> None:
    """Measure chunks, messages and instructions of a job on this machine; write a costs file for predictions.

    Example: piper profile examples/gpt_text.py --out costs.json
    """
    from piper.cli.actions import measuring

    measuring.measure(arguments)


@app.command()
@command_of(TraceArguments)
def trace(arguments: TraceArguments) -> None:
    """Say where the time of steps went in traces of torch.profiler, of any system; hold them beside a strategy.

    Example: piper trace rank0_trace.json.gz rank1_trace.json.gz --job FILE.py --cluster h100x8 --calibrate costs.json
    """
    from piper.cli.actions import tracing

    tracing.traced(arguments)


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="a folder that simulate, tune, run or a loop has written"
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER", help="another such folder: both on one page, beside each other"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="write there instead of DIR/report")
    ] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Draw what a folder holds, or what two hold beside each other: one HTML page, PNG figures, CSV tables.

    Example: piper report runs/gpt_text-001; piper report runs/gpt_text-001 runs/gpt_text-002
    """
    with user_errors(locals()):
        from piper.views.reporting import report as show_report

        with redirect_stdout(StringIO()) if as_json else nullcontext():
            written = show_report(folder, other, out=out)
        if as_json:
            files = {"figures": written.figures, "tables": written.tables}
            show_json(
                {"html": str(written.html)}
                | {name: [str(p) for p in paths] for name, paths in files.items()}
            )


@app.command()
def explain(
    file: FileArgument,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    kernels: KernelsOption = None,
    cuda_graph: CudaGraphOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Print what a strategy became: directives, roles, order, communication, memory.

    Example: piper explain examples/gpt_text.py
    """
    with user_errors(locals()):
        from piper.api.compiling.compiling import compile
        from piper.cli.loading import load_file
        from piper.views.explained.explain import explain as text
        from piper.views.explained.explain import facts

        recipe = load_file(file, pairs(params), strategy)
        options = recipe.asked_options(kernels, cuda_graph)
        compiled = compile(recipe.job, recipe.strategy, options=options)
        if as_json:
            show_json(facts(compiled))
        else:
            print(text(compiled))


@app.command()
@command_of(ShowArguments)
def show(arguments: ShowArguments) -> None:
    """Draw the simulated schedule of a strategy or a recipe; or print its graph or its plan.

    Example: piper show examples/gpt_text.py --png schedule.png; piper show --recipe one_f_one_b --pp 4 --microbatches 8
    """
    from piper.api.compiling.compiling import compile
    from piper.api.ground.costs_file import load_costs
    from piper.cli.loading import load_file, load_recipes
    from piper.views.recipe_view import (
        ChunkTimes,
        Pipeline,
        arguments_of,
        is_table,
        shown,
        shown_table,
    )
    from piper.views.show import What, show_recipe, show_strategy

    a = arguments
    what = What(a.graph, a.plan, a.png, a.csv, a.lowered, a.as_json)
    of_files, of_recipes = (a.strategy, a.cluster, a.costs), (a.pp, a.microbatches, a.chunks)
    if a.recipe is None and is_table(a.file):
        return show_recipe(shown_table(a.file, a.times, a.params, *of_files, *of_recipes), what)
    check_drawn(a.recipe, of_files=of_files, of_recipes=(*of_recipes, a.times))
    if a.recipe is not None:
        if a.file is not None:
            load_recipes(a.file)
        pipeline = Pipeline(a.pp or 4, a.microbatches or 8, a.chunks)
        own = arguments_of(pairs(a.params))
        return show_recipe(shown(a.recipe, pipeline, ChunkTimes.parse(a.times), own), what)
    if a.file is None:
        raise JobError(
            "give a FILE.py that defines `job` and `strategy`, or --recipe NAME (`piper recipes` lists them)"
        )
    job_file = load_file(a.file, pairs(a.params), a.strategy)
    costs = load_costs(a.costs) if a.costs else None
    compiled = compile(job_file.job, job_file.strategy, costs=costs, options=job_file.options)
    show_strategy(compiled, what, cluster=a.cluster or "cpu-local", costs=costs)


@app.command()
def recipes(file: OwnRecipesArgument = None, as_json: AsJsonOption = False) -> None:
    """List all recipes of pipeline schedules: source, formula, peak, rule, when to use.

    Example: piper recipes; piper recipes FILE.py (with the ones that FILE.py registers)
    """
    with user_errors(locals()):
        from piper.cli.loading import load_recipes
        from piper.views.recipe_view import listing, rows

        if file is not None:
            load_recipes(file)
        if as_json:
            show_json(rows())
        else:
            print(listing())


@app.command()
def verify(
    file: FileArgument,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps to compare")] = 3,
    kernels: KernelsOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Run a strategy in float64 in this process against plain PyTorch on one device; name the first value that differs.

    Example: piper verify examples/gpt_text.py
    """
    with user_errors(locals()):
        from piper.api.reference.verification import verify_strategy
        from piper.cli.loading import load_file

        recipe = load_file(file, pairs(params), strategy)
        report = verify_strategy(
            recipe.job,
            recipe.strategy,
            steps=steps,
            options=replace(
                recipe.asked_options(kernels), cuda_graph=False
            ),  # no host launches here
        )
        numbers = {
            "equal": report.equal,
            "equal_whole_batch": report.equal_whole_batch,
            "text": report.text(),
        }
        if as_json:
            show_json(numbers)
        else:
            print(report.text())
        if not report.equal:
            raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJsonOption = False) -> None:
    """Print what this machine can do: devices, backends, versions, and what is missing.

    Example: piper doctor
    """
    with user_errors(locals()):
        from piper.cli.actions.doctor import examine, text

        findings = examine()
        if as_json:
            show_json([asdict(f) for f in findings])
        else:
            print(text(findings))
        if any(f.state == "missing" for f in findings):
            raise typer.Exit(1)
