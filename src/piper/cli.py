"""The `piper` command. Errors of the user's making end with one message and exit code 2; the heavy imports happen in the
commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from piper_ir.errors import PiperError

app = typer.Typer(name="piper", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE.py", help="defines `job` (a piper.Job) and `strategy` (a piper.Strategy or a function of a trial)"
    ),
]
Params = Annotated[
    list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="a parameter of a strategy that is a function of a trial")
]
StrategyFile = Annotated[
    Path | None, typer.Option("--strategy", metavar="FILE.json", help="use this saved strategy instead of the file's")
]
CostsFile = Annotated[Path | None, typer.Option("--costs", metavar="FILE.json", help="what `piper profile` measured")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="write plan, traces and numbers to a new folder below DIR")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


@app.callback()
def root() -> None:
    """Plan, simulate and execute distributed training of PyTorch models from one strategy."""


@app.command()
def simulate(
    file: File,
    params: Params = None,
    strategy: StrategyFile = None,
    cluster: Annotated[
        str, typer.Option(help="e.g. h100x8, a100x8, h100-80g-sxm:8*4, cpu-local (this machine, measured now)")
    ] = "cpu-local",
    costs: CostsFile = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Predict step time and memory of a strategy without running it.

    Example: piper simulate examples/gpt_text.py --cluster h100x8
    """
    with _user_errors():
        from piper.costs_file import load_costs
        from piper.display import show
        from piper.frontdoor import compile
        from piper.loading import load_file
        from piper.results import new_folder, save_plan, save_prediction
        from piper.session import local_cluster
        from piper_report.summary import prediction_table
        from piper_simulator import load_cluster
        from piper_simulator import simulate as run

        recipe = load_file(file, _pairs(params), strategy)
        device = local_cluster() if cluster == "cpu-local" else load_cluster(cluster)
        folder = new_folder(out, file.stem) if out else None
        compiled = compile(recipe.job, recipe.strategy)
        result = run(compiled.plan, device, costs=load_costs(costs) if costs else None)
        if as_json:
            print(json.dumps(result.summary()))
        else:
            show(prediction_table(result, title=f"{file.name} on {device.name}"))
        if folder:
            save_plan(folder, compiled.plan, recipe.strategy)
            save_prediction(folder, result)
            print(f"results are in {folder}", file=sys.stderr)


@app.command()
def run(
    file: File,
    params: Params = None,
    strategy: StrategyFile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps (default: the file's `steps`, else 3)")] = None,
    launcher: Annotated[
        str, typer.Option(help="ray (one actor per rank), processes (one per rank; also under torchrun) or inline (one process)")
    ] = "processes",
    out: Out = Path("runs"),
    timeout_s: Annotated[float, typer.Option(help="seconds without progress after which a rank counts as hung")] = 60,
    print_launch: Annotated[
        bool, typer.Option("--print-launch", help="print the command lines for torchrun, Slurm and Ray, and run nothing")
    ] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="machines in the lines of --print-launch")] = None,
    emulate: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="sleep in real processes instead of training, as long as CLUSTER would compute"),
    ] = None,
    log: Annotated[str, typer.Option(metavar="NAMES", help="where steps go beside metrics.jsonl: tensorboard,wandb")] = "jsonl",
    ranges: Annotated[bool, typer.Option("--ranges", help="names of instructions in profilers (record_function, NVTX)")] = False,
) -> None:
    """Train with a strategy; print predicted beside measured and write both traces.

    Example: piper run examples/gpt_text.py --steps 20; without a GPU: piper run examples/gpt_text.py --emulate h100x8
    """
    with _user_errors():
        from piper.loading import load_file
        from piper.metrics import log_names
        from piper.session import session
        from piper_runtime.torchrun import is_first

        recipe = load_file(file, _pairs(params), strategy)
        if print_launch:
            from piper_runtime.launch import launch_lines

            given = [a for p in params or [] for a in ("-p", p)] + (["--strategy", str(strategy)] if strategy else [])
            given += ["--steps", str(steps)] if steps else []
            print(launch_lines(file, recipe.strategy.mesh.world, nodes=nodes, arguments=given), end="")
            return
        if emulate is not None:
            from piper.emulation import emulated_session

            emulated_session(recipe.job, recipe.strategy, emulate, steps=steps or 1, out=out, name=file.stem, timeout_s=timeout_s)
            return
        logs = log_names(log.split(","))
        with nullcontext() if is_first() else redirect_stdout(StringIO()):  # of many processes, one prints and writes
            session(
                recipe.job,
                recipe.strategy,
                steps=steps or recipe.steps,
                launcher=launcher,
                out=out if is_first() else None,
                name=file.stem,
                timeout_s=timeout_s,
                log=logs if is_first() else (),
                ranges=ranges,
            )


@app.command()
def profile(
    file: File,
    params: Params = None,
    strategy: StrategyFile = None,
    launcher: Annotated[str, typer.Option(help="processes (one per rank, gloo)")] = "processes",
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help="rows per microbatch to measure (again for more; default: what fits)")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="passes of which each duration is the median")] = 7,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="the costs file")] = Path("costs.json"),
    as_json: AsJson = False,
) -> None:
    """Measure chunks, messages and instructions of a job on this machine; write a costs file for predictions.

    Example: piper profile examples/gpt_text.py --out costs.json
    """
    with _user_errors():
        from piper.costs_file import costs_table, save_costs
        from piper.display import show
        from piper.loading import load_file
        from piper.profiling import profile as measure
        from piper_ir.codec import dumps

        recipe = load_file(file, _pairs(params), strategy)
        costs = measure(recipe.job, recipe.strategy, launcher=launcher, rows=rows, repeats=repeats)
        save_costs(out, costs)
        if as_json:
            print(dumps(costs))
        else:
            show(costs_table(costs, title=f"costs of {file.name}"))
        print(f"costs are in {out}", file=sys.stderr)


@app.command()
def tune(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.py", help="defines `job` (a piper.Job) and `strategy(trial)`, which returns a Strategy"),
    ],
    cluster: Annotated[str, typer.Option(help="as for simulate")] = "cpu-local",
    trials: Annotated[int, typer.Option(min=1, help="candidates that are compiled and scored")] = 100,
    confirm: Annotated[int, typer.Option(min=0, help="run so many of the best on this machine")] = 0,
    memory_limit: Annotated[str | None, typer.Option(help="per device, e.g. 20GiB (default: the device's)")] = None,
    seed: Annotated[int, typer.Option(help="of the search")] = 0,
    storage: Annotated[str | None, typer.Option(help="Optuna URL, e.g. sqlite:///study.db; the same space goes on there")] = None,
    workers: Annotated[str, typer.Option(help='processes (0: this one), "ray" or the address of a Ray cluster')] = "1",
    out: Out = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Search the fastest strategy that fits, in simulation; --confirm runs the best.

    Example: piper tune examples/gpt_text.py --confirm 2
    """
    with _user_errors():
        from piper.loading import load_space
        from piper.results import new_folder
        from piper.tuning import bar, saved, show_study
        from piper.tuning import tune as search

        job, strategy = load_space(file)
        folder = new_folder(out, file.stem) if out else None
        with saved(folder), bar(trials) as progress:
            study = search(
                job,
                strategy,
                cluster=cluster,
                trials=trials,
                confirm=confirm,
                memory_limit=memory_limit,
                seed=seed,
                storage=storage,
                workers=int(workers) if workers.isdigit() else workers,
                progress=progress,
            )
        if folder:
            study.save(folder)
            print(f"best.json and study.json are in {folder}", file=sys.stderr)
        if as_json:
            best = study.best_row
            print(json.dumps(None if best is None else best.as_dict()))
        else:
            show_study(study, file.name)


@app.command()
def explain(file: File, params: Params = None, strategy: StrategyFile = None) -> None:
    """Print what a strategy became: directives, roles, order, communication, memory.

    Example: piper explain examples/gpt_text.py
    """
    with _user_errors():
        from piper.explain import explain as text
        from piper.frontdoor import compile
        from piper.loading import load_file

        recipe = load_file(file, _pairs(params), strategy)
        print(text(compile(recipe.job, recipe.strategy)))


@app.command()
def verify(
    file: File, params: Params = None, strategy: StrategyFile = None, steps: Annotated[int, typer.Option(min=1)] = 3
) -> None:
    """Run a strategy in float64 in this process against plain PyTorch on one device; name the first value that differs.

    Example: piper verify examples/gpt_text.py
    """
    with _user_errors():
        from piper.loading import load_file
        from piper.verification import verify_strategy

        recipe = load_file(file, _pairs(params), strategy)
        report = verify_strategy(recipe.job, recipe.strategy, steps=steps)
        print(report.text())
        if not report.equal:
            raise typer.Exit(1)


def _pairs(params: list[str] | None) -> dict[str, str]:
    from piper_ir.errors import JobError

    out = {}
    for item in params or []:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise JobError(f"-p {item}: NAME=VALUE is expected, e.g. -p microbatches=8")
        out[name] = value
    return out


@contextmanager
def _user_errors() -> Iterator[None]:
    """A PiperError becomes one message on stderr and exit code 2; nobody wants a traceback for a typing mistake."""
    try:
        yield
    except PiperError as e:
        print(f"piper: {e}", file=sys.stderr)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the `piper` command."""
    app()
