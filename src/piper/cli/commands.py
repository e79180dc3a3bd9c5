"""Define the `piper` command.

A user's errors end with one message and exit code 2. The heavy imports happen inside of the commands, which define
their options and leave the work to the modules that they call.
"""

from __future__ import annotations

import json
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.checkpoints import checkpoint
from piper.cli.interrupts import INTERRUPTED
from piper.cli.messages import user_errors
from piper.cli.options import (
    RUNS,
    AddressOption,
    AsJsonOption,
    ChunksOption,
    ChunkTimesOption,
    ClusterNameOption,
    ConfirmOption,
    CostsFileOption,
    CostsOutOption,
    CsvOption,
    DevicesOption,
    FileArgument,
    JitterOption,
    JitterSeedOption,
    KeepOption,
    LauncherOption,
    LoadOption,
    LoweredOption,
    MemoryLimitOption,
    MemorySnapshotOption,
    MicrobatchesOption,
    NoContentionOption,
    ObjectiveOption,
    OtherArgument,
    OutOption,
    OwnRecipesArgument,
    ParamsOption,
    ProfileLauncherOption,
    RecipeFileArgument,
    RecipeNameOption,
    RepeatsOption,
    RepetitionsOption,
    RowsOption,
    SearchersOption,
    SeedOption,
    ShownClusterOption,
    SpaceFileArgument,
    StorageOption,
    StrategyFileOption,
    TrialsOption,
    VersionOption,
    VersusOption,
    WhyOption,
    check_drawn,
    pairs,
)
from piper.cli.run_arguments import LaunchArguments, RunArguments, command_of
from piper_ir.ground.errors import JobError

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
def simulate(
    file: FileArgument,
    other: OtherArgument = None,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    versus: VersusOption = None,
    why: WhyOption = False,
    cluster: ClusterNameOption = "cpu-local",
    costs: CostsFileOption = None,
    no_contention: NoContentionOption = False,
    load: LoadOption = None,
    jitter: JitterOption = None,
    repetitions: RepetitionsOption = None,
    seed: JitterSeedOption = None,
    out: OutOption = None,
    memory_snapshot: MemorySnapshotOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Predict step time and memory of a strategy without running it; say why; or compare two strategies.

    Example: piper simulate FILE.py --cluster h100x8 --why; piper simulate FILE.py --versus microbatches=16
    """
    with user_errors(locals()):
        from piper.cli.predicting import Noise, PredictionOutput, Target, load_named, simulated

        target, noise = (
            Target(cluster, costs, not no_contention, load_named(load)),
            Noise.of(jitter, repetitions, seed),
        )
        given, changes = pairs(params), pairs(versus, "--versus")
        shown = PredictionOutput(out, why, as_json, noise, memory_snapshot)
        simulated(file, strategy, other, given, changes, target, shown)


@app.command()
def tune(
    file: SpaceFileArgument,
    cluster: ClusterNameOption = "cpu-local",
    costs: CostsFileOption = None,
    trials: TrialsOption = 100,
    confirm: ConfirmOption = 0,
    memory_limit: MemoryLimitOption = None,
    seed: SeedOption = 0,
    storage: StorageOption = None,
    workers: SearchersOption = "1",
    launcher: LauncherOption = "ray",
    out: OutOption = RUNS,
    objective: ObjectiveOption = None,
    load: LoadOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Search the fastest strategy that fits, in simulation; --confirm runs the best on this machine.

    Example: piper tune examples/gpt_text.py --costs costs.json --confirm 2
    """
    with user_errors(locals()):
        from piper.cli import searching

        arguments = searching.TuneArguments(
            file, cluster, costs, trials, confirm, memory_limit, seed, storage, workers, launcher, out, as_json, objective, load,
        )  # fmt: skip
        if searching.tune(arguments).interrupted:
            raise typer.Exit(INTERRUPTED)


@app.command()
@command_of(RunArguments)
def run(arguments: RunArguments) -> None:
    """Train with a strategy; print predicted beside measured and write a report.

    Example: piper run examples/gpt_text.py --steps 20; without a GPU: piper run examples/gpt_text.py --emulate h100x8
    """
    from piper.cli import running

    (running.print_launch if arguments.print_launch else running.run)(arguments)


@app.command()
@command_of(LaunchArguments)
def launch(arguments: LaunchArguments) -> None:
    """Print the command lines that train on many machines: torchrun, Slurm, Ray. Runs nothing.

    Example: piper launch examples/gpt_text.py --nodes 2
    """
    from piper.cli import running

    running.launch(arguments)


@app.command()
def profile(
    file: FileArgument,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    launcher: ProfileLauncherOption = "processes",
    address: AddressOption = "auto",
    rows: RowsOption = None,
    keep: KeepOption = None,
    repeats: RepeatsOption = 7,
    out: CostsOutOption = Path("costs.json"),
    as_json: AsJsonOption = False,
) -> None:
    """Measure chunks, messages and instructions of a job on this machine; write a costs file for predictions.

    Example: piper profile examples/gpt_text.py --out costs.json
    """
    with user_errors(locals()):
        from piper.cli.loading import load_file
        from piper.cli.measuring import measure

        loaded, over = load_file(file, pairs(params), strategy), (launcher, address)
        measure(loaded, over, rows=rows, keep=keep or (), repeats=repeats, out=out, as_json=as_json)


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
            made = show_report(folder, other, out=out)
        if as_json:
            files = {"figures": made.figures, "tables": made.tables}
            print(
                json.dumps(
                    {"html": str(made.html)}
                    | {name: [str(p) for p in found] for name, found in files.items()}
                )
            )


@app.command()
def explain(
    file: FileArgument,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Print what a strategy became: directives, roles, order, communication, memory.

    Example: piper explain examples/gpt_text.py
    """
    with user_errors(locals()):
        from piper.api.compiling.compiling import compile
        from piper.cli.loading import load_file
        from piper.views.explain import explain as text
        from piper.views.explain import facts

        recipe = load_file(file, pairs(params), strategy)
        compiled = compile(recipe.job, recipe.strategy)
        print(json.dumps(facts(compiled)) if as_json else text(compiled))


@app.command()
def show(
    file: RecipeFileArgument = None,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    cluster: ShownClusterOption = None,
    costs: CostsFileOption = None,
    recipe: RecipeNameOption = None,
    pp: DevicesOption = None,
    microbatches: MicrobatchesOption = None,
    chunks: ChunksOption = None,
    times: ChunkTimesOption = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="print the training graph, a line per node")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="print the plan, a line per instruction; it parses back")
    ] = False,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE.png", help="draw the schedule into a picture"),
    ] = None,
    csv: CsvOption = None,
    lowered: LoweredOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Draw the simulated schedule of a strategy or a recipe; or print its graph or its plan.

    Example: piper show examples/gpt_text.py --png schedule.png; piper show --recipe one_f_one_b --pp 4 --microbatches 8
    """
    with user_errors(locals()):
        from piper.api.compiling.compiling import compile
        from piper.api.ground.costs_file import load_costs
        from piper.cli.loading import load_file, load_recipes
        from piper.views.recipe_view import ChunkTimes, arguments, is_table, shown, shown_table
        from piper.views.show import What, show_recipe, show_strategy

        what = What(graph, plan, png, csv, lowered, as_json)
        if recipe is None and is_table(file):
            return show_recipe(
                shown_table(
                    file, times, params, strategy, cluster, costs, pp, microbatches, chunks
                ),
                what,
            )
        check_drawn(
            recipe,
            of_files=(strategy, cluster, costs),
            of_recipes=(pp, microbatches, chunks, times),
        )
        if recipe is not None:
            if file is not None:
                load_recipes(file)
            own, each, m = arguments(pairs(params)), ChunkTimes.parse(times), microbatches or 8
            return show_recipe(
                shown(recipe, pp=pp or 4, microbatches=m, chunks=chunks, times=each, more=own), what
            )
        if file is None:
            raise JobError(
                "give a FILE.py that defines `job` and `strategy`, or --recipe NAME (`piper "
                "recipes` lists them)"
            )
        loaded, known = (
            load_file(file, pairs(params), strategy),
            load_costs(costs) if costs else None,
        )
        show_strategy(
            compile(loaded.job, loaded.strategy, costs=known),
            what,
            cluster=cluster or "cpu-local",
            costs=known,
        )


@app.command()
def recipes(file: OwnRecipesArgument = None, as_json: AsJsonOption = False) -> None:
    """List all recipes of pipeline schedules: source, formula, peak, rule, when to use.

    Example: piper recipes; piper recipes FILE.py (with those that FILE.py registers)
    """
    with user_errors(locals()):
        from piper.cli.loading import load_recipes
        from piper.views.recipe_view import listing, rows

        if file is not None:
            load_recipes(file)
        print(json.dumps(rows()) if as_json else listing())


@app.command()
def verify(
    file: FileArgument,
    params: ParamsOption = None,
    strategy: StrategyFileOption = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps to compare")] = 3,
    as_json: AsJsonOption = False,
) -> None:
    """Run a strategy in float64 in this process against plain PyTorch on one device; name the first value that differs.

    Example: piper verify examples/gpt_text.py
    """
    with user_errors(locals()):
        from piper.api.reference.verification import verify_strategy
        from piper.cli.loading import load_file

        recipe = load_file(file, pairs(params), strategy)
        report = verify_strategy(recipe.job, recipe.strategy, steps=steps)
        numbers = {
            "equal": report.equal,
            "equal_whole_batch": report.equal_whole_batch,
            "text": report.text(),
        }
        print(json.dumps(numbers) if as_json else report.text())
        if not report.equal:
            raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJsonOption = False) -> None:
    """Print what this machine can do: devices, backends, versions, and what is missing.

    Example: piper doctor
    """
    with user_errors(locals()):
        from piper.cli.doctor import examine, text

        findings = examine()
        print(json.dumps([asdict(f) for f in findings]) if as_json else text(findings))
        if any(f.state == "missing" for f in findings):
            raise typer.Exit(1)
