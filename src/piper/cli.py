"""The `piper` command. Errors of the user's making end with one message and exit code 2; the heavy imports happen in the
commands, which say how they are used and leave the work to the modules that they call."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from piper.interrupts import INTERRUPTED, TERMINATED, hear, leave
from piper.options import (
    Address,
    AsJson,
    Chunks,
    ChunkTimes,
    ClusterName,
    Confirm,
    CostsFile,
    CostsOut,
    Csv,
    Devices,
    Emulate,
    File,
    Jitter,
    JitterSeed,
    Launcher,
    Log,
    Lowered,
    MemoryLimit,
    MemorySnapshot,
    Microbatches,
    NoContention,
    Nodes,
    Other,
    Out,
    Params,
    PrintLaunch,
    ProfileLauncher,
    Ranges,
    RecipeFile,
    RecipeName,
    Repeats,
    Repetitions,
    Rows,
    Searchers,
    Seed,
    SpaceFile,
    Steps,
    Storage,
    StrategyFile,
    Timeout,
    Trials,
    Versus,
    Why,
    pairs,
    searchers,
    user_errors,
)
from piper.pipes import open_output
from piper_ir.errors import JobError

RUNS, TIMEOUT_S, LOG = Path("runs"), 60.0, "jsonl"

app = typer.Typer(name="piper", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Plan, simulate, tune and execute distributed training of PyTorch models from one strategy.

    `piper COMMAND --help` shows an example of each; `piper --install-completion` completes them in your shell."""


@app.command()
def simulate(
    file: File,
    other: Other = None,
    params: Params = None,
    strategy: StrategyFile = None,
    versus: Versus = None,
    why: Why = False,
    cluster: ClusterName = "cpu-local",
    costs: CostsFile = None,
    no_contention: NoContention = False,
    jitter: Jitter = None,
    repetitions: Repetitions = None,
    seed: JitterSeed = None,
    out: Out = None,
    memory_snapshot: MemorySnapshot = None,
    as_json: AsJson = False,
) -> None:
    """Predict step time and memory of a strategy without running it; say why; or compare two strategies.

    Example: piper simulate FILE.py --cluster h100x8 --why; piper simulate FILE.py --versus microbatches=16
    """
    with user_errors(locals()):
        from piper.predicting import Noise, Shown, Target, simulated

        target, noise = Target(cluster, costs, not no_contention), Noise.of(jitter, repetitions, seed)
        given, changes = pairs(params), pairs(versus, "--versus")
        shown = Shown(out, why, as_json, noise, memory_snapshot)
        simulated(file, strategy, other, given, changes, target, shown)


@app.command()
def tune(
    file: SpaceFile,
    cluster: ClusterName = "cpu-local",
    costs: CostsFile = None,
    trials: Trials = 100,
    confirm: Confirm = 0,
    memory_limit: MemoryLimit = None,
    seed: Seed = 0,
    storage: Storage = None,
    workers: Searchers = "1",
    launcher: Launcher = "ray",
    out: Out = RUNS,
    as_json: AsJson = False,
) -> None:
    """Search the fastest strategy that fits, in simulation; --confirm runs the best on this machine.

    Example: piper tune examples/gpt_text.py --costs costs.json --confirm 2
    """
    with user_errors(locals()):
        from piper.costs_file import load_costs
        from piper.loading import load_space
        from piper.reporting import report_at_end
        from piper.results import new_folder
        from piper.tuning import as_numbers, bar, files_text, saved, show_study
        from piper.tuning import tune as search

        space = load_space(file)
        folder = new_folder(out, file.stem) if out else None
        with saved(folder), bar(trials) as progress:
            study = search(
                space.job, space.strategy, cluster=cluster, costs=load_costs(costs) if costs else None, trials=trials,
                confirm=confirm, memory_limit=memory_limit, seed=seed, storage=storage, launcher=launcher,
                workers=searchers(workers), progress=progress,
            )  # fmt: skip
        if as_json:
            print(json.dumps(as_numbers(study, folder, space.job.global_batch)))
        else:
            show_study(study, file.name, space.job.global_batch)
        if folder:
            study.save(folder)
            print(files_text(study, folder), file=sys.stderr)
            report_at_end(folder)
        if study.interrupted:
            raise typer.Exit(INTERRUPTED)


@app.command()
def run(
    file: File,
    params: Params = None,
    strategy: StrategyFile = None,
    steps: Steps = None,
    launcher: Launcher = "ray",
    address: Address = "auto",
    costs: CostsFile = None,
    out: Out = RUNS,
    timeout_s: Timeout = TIMEOUT_S,
    print_launch: PrintLaunch = False,
    nodes: Nodes = None,
    emulate: Emulate = None,
    log: Log = LOG,
    ranges: Ranges = False,
    as_json: AsJson = False,
) -> None:
    """Train with a strategy; print predicted beside measured and write a report.

    Example: piper run examples/gpt_text.py --steps 20; without a GPU: piper run examples/gpt_text.py --emulate h100x8
    """
    with user_errors(locals()):
        from piper.costs_file import load_costs
        from piper.loading import load_file
        from piper.metrics import check_logs
        from piper.session import Settings, as_numbers, session
        from piper_runtime.launch import is_first

        first = is_first()  # of the processes that torchrun started, one prints and writes
        trains = first and not print_launch and emulate is None
        logs = check_logs(log.split(",")) if trains else ()
        recipe = load_file(file, pairs(params), strategy)
        if print_launch:
            from piper.launching import print_launch as print_lines

            options = {"--strategy": strategy, "--steps": steps, "--costs": costs, "--log": log if log != LOG else None}
            options |= {"--timeout-s": timeout_s if timeout_s != TIMEOUT_S else None, "--out": out if out != RUNS else None}
            options |= {"--ranges": ranges}
            refused = {"--address": address != "auto", "--emulate": emulate is not None}
            world = recipe.strategy.mesh.world
            print_lines(file, world, nodes=nodes, params=params or (), options=options, refused=refused, as_json=as_json)
            return
        if emulate is not None:
            from piper.emulation import emulated_run

            if launcher != "ray" or address != "auto" or log != LOG or ranges:
                raise JobError("--emulate trains nothing: leave out --launcher, --address, --log and --ranges")
            known = load_costs(costs) if costs else None
            emulated_run(recipe, emulate, steps=steps or 1, out=out, timeout_s=timeout_s, costs=known, as_json=as_json)
            return
        if nodes is not None:
            raise JobError("--nodes belongs to --print-launch; a run takes its nodes from --address or from torchrun")
        settings = Settings(
            launcher=launcher, address=address, costs=costs, out=out if first else None, name=file.stem, timeout_s=timeout_s,
            log=logs, ranges=ranges,
        )  # fmt: skip
        with redirect_stdout(StringIO()) if as_json or not first else nullcontext():
            done = session(recipe.job, recipe.strategy, steps=steps or recipe.steps, settings=settings)
        if as_json and first:
            print(json.dumps(as_numbers(done)))


@app.command()
def profile(
    file: File,
    params: Params = None,
    strategy: StrategyFile = None,
    launcher: ProfileLauncher = "processes",
    address: Address = "auto",
    rows: Rows = None,
    repeats: Repeats = 7,
    out: CostsOut = Path("costs.json"),
    as_json: AsJson = False,
) -> None:
    """Measure chunks, messages and instructions of a job on this machine; write a costs file for predictions.

    Example: piper profile examples/gpt_text.py --out costs.json
    """
    with user_errors(locals()):
        from piper.costs_file import check_costs_path, costs_table, save_costs
        from piper.display import show
        from piper.loading import load_file
        from piper.profiling import profile as measure
        from piper_ir.codec import dumps

        recipe = load_file(file, pairs(params), strategy)
        check_costs_path(out)
        costs = measure(recipe.job, recipe.strategy, launcher=launcher, cluster=address, rows=rows, repeats=repeats)
        save_costs(out, costs)
        if as_json:
            print(dumps(costs))
        else:
            show(costs_table(costs, title=f"costs of {file.name}"))
        print(f"costs are in {out}", file=sys.stderr)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that simulate, tune, run or a loop has written")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="write there instead of DIR/report")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw what a folder holds: one HTML page, PNG figures, CSV tables.

    Example: piper report runs/gpt_text-001
    """
    with user_errors(locals()):
        from piper.reporting import report as show_report

        with redirect_stdout(StringIO()) if as_json else nullcontext():
            made = show_report(folder, out=out)
        if as_json:
            files = {"figures": made.figures, "tables": made.tables}
            print(json.dumps({"html": str(made.html)} | {name: [str(p) for p in found] for name, found in files.items()}))


@app.command()
def explain(file: File, params: Params = None, strategy: StrategyFile = None, as_json: AsJson = False) -> None:
    """Print what a strategy became: directives, roles, order, communication, memory.

    Example: piper explain examples/gpt_text.py
    """
    with user_errors(locals()):
        from piper.explain import explain as text
        from piper.explain import facts
        from piper.frontdoor import compile
        from piper.loading import load_file

        recipe = load_file(file, pairs(params), strategy)
        compiled = compile(recipe.job, recipe.strategy)
        print(json.dumps(facts(compiled)) if as_json else text(compiled))


@app.command()
def show(
    file: RecipeFile = None,
    params: Params = None,
    strategy: StrategyFile = None,
    cluster: ClusterName = "cpu-local",
    costs: CostsFile = None,
    recipe: RecipeName = None,
    pp: Devices = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = None,
    times: ChunkTimes = "1,1,1",
    graph: Annotated[bool, typer.Option("--graph", help="print the training graph, a line per node")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="print the plan, a line per instruction; it parses back")] = False,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE.png", help="draw the schedule into a picture")] = None,
    csv: Csv = None,
    lowered: Lowered = False,
    as_json: AsJson = False,
) -> None:
    """Draw the simulated schedule of a strategy or a recipe; or print its graph or its plan.

    Example: piper show examples/gpt_text.py --png schedule.png; piper show --recipe one_f_one_b --pp 4 --microbatches 8
    """
    with user_errors(locals()):
        from piper.costs_file import load_costs
        from piper.frontdoor import compile
        from piper.loading import load_file, load_recipes
        from piper.recipe_view import Times, arguments, shown
        from piper.showing import What, show_recipe, show_strategy

        what = What(graph, plan, png, csv, lowered, as_json)
        if recipe is not None:
            if strategy is not None or costs is not None:
                raise JobError("--recipe is drawn with the durations of --times: leave out --strategy and --costs")
            if file is not None:
                load_recipes(file)
            more = arguments(pairs(params))
            show_recipe(shown(recipe, pp=pp, microbatches=microbatches, chunks=chunks, times=Times.parse(times), **more), what)
            return
        if file is None:
            raise JobError("give a FILE.py that defines `job` and `strategy`, or --recipe NAME (`piper recipes` lists them)")
        loaded = load_file(file, pairs(params), strategy)
        known = load_costs(costs) if costs else None
        show_strategy(compile(loaded.job, loaded.strategy, costs=known), what, cluster=cluster, costs=known)


@app.command()
def recipes(file: RecipeFile = None, as_json: AsJson = False) -> None:
    """List all recipes of pipeline schedules: source, formula, peak, rule, when to use.

    Example: piper recipes; piper recipes FILE.py (with those that FILE.py registers)
    """
    with user_errors(locals()):
        from piper.loading import load_recipes
        from piper.recipe_view import listing, rows

        if file is not None:
            load_recipes(file)
        print(json.dumps(rows()) if as_json else listing())


@app.command()
def verify(
    file: File,
    params: Params = None,
    strategy: StrategyFile = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps to compare")] = 3,
    as_json: AsJson = False,
) -> None:
    """Run a strategy in float64 in this process against plain PyTorch on one device; name the first value that differs.

    Example: piper verify examples/gpt_text.py
    """
    with user_errors(locals()):
        from piper.loading import load_file
        from piper.verification import verify_strategy

        recipe = load_file(file, pairs(params), strategy)
        found = verify_strategy(recipe.job, recipe.strategy, steps=steps)
        numbers = {"equal": found.equal, "equal_whole_batch": found.equal_whole_batch, "text": found.text()}
        print(json.dumps(numbers) if as_json else found.text())
        if not found.equal:
            raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Print what this machine can do: devices, backends, versions, and what is missing.

    Example: piper doctor
    """
    with user_errors(locals()):
        from piper.doctor import as_rows, examine, text

        found = examine()
        print(json.dumps(as_rows(found)) if as_json else text(found))
        if any(f.state == "missing" for f in found):
            raise typer.Exit(1)


def main() -> None:
    """Entry point of the `piper` command."""
    open_output()
    hear()
    try:
        app()
    except SystemExit as e:
        with user_errors():
            sys.stdout.flush()
        if e.code in (INTERRUPTED, TERMINATED):
            leave(e.code)
        raise
