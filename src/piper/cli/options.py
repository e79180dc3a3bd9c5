"""Define the options that several commands share, so that their names and help are the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.completion import LAUNCHERS, LOSSES, clusters, one_of, parameters, recipe_names
from piper_ir.ground.errors import JobError

RUNS, TIMEOUT_S, LOG, LOADER = Path("runs"), 60.0, "jsonl", "thread"
"""The defaults of `piper run`: its folder for results, seconds without progress, logs, and loader."""


def named_folder(text: str) -> Path:
    """Return a folder that was named; an empty name, of a variable that was not set, would be the present folder."""
    if not text:
        raise typer.BadParameter("a folder is needed; the present one is .")
    return Path(text)


SpaceFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE.py", help="defines `job` (a piper.Job) and `strategy`, a function of a trial"
    ),
]
FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE.py",
        help="defines `job` (a piper.Job) and `strategy` (a piper.Strategy or a function of a trial)",
    ),
]
ParamsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        metavar="NAME=VALUE",
        autocompletion=parameters,
        help="a parameter of a strategy that is a function of a trial",
    ),
]
OtherArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="OTHER",
        help="compare with the strategy of this FILE.py (-p holds for both), or with a saved one of the same job "
        "(.json)",
    ),
]


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"piper {version('piper-training')}")
        raise typer.Exit()


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", help="print the version and end", callback=_say_version, is_eager=True
    ),
]
KernelsOption = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="eager|inductor",
        help="inductor compiles groups of operations (default: of FILE.py's `options`, else eager)",
    ),
]
CudaGraphOption = Annotated[
    bool,
    typer.Option(
        "--cuda-graph",
        help="a rank captures its step up to the update as one CUDA graph, and launches that in later steps",
    ),
]
VersusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--versus",
        metavar="NAME=VALUE",
        autocompletion=parameters,
        help="compare with the same strategy where a parameter has this value",
    ),
]
WhyOption = Annotated[
    bool,
    typer.Option(
        "--why",
        help="explain it: critical path, idle gaps, what if, sensitivities, costs from formulas",
    ),
]
NoContentionOption = Annotated[
    bool,
    typer.Option(
        "--no-contention",
        help="what runs at the same time takes nothing from each other: links, SMs, memory",
    ),
]
LoadOption = Annotated[
    str | None,
    typer.Option(
        "--load",
        help="of the fullest rank's experts over the mean: 1.3, zipf:0.3 (drawn), or a run's folder or "
        "metrics.jsonl (measured)",
    ),
]
JitterOption = Annotated[
    float | None,
    typer.Option(
        "--jitter",
        metavar="C",
        help="every duration varies with this coefficient of variation, e.g. 0.05: 5, 50, 95 %",
    ),
]
RepetitionsOption = Annotated[
    int | None, typer.Option("--repetitions", min=1, help="of --jitter (default 200)")
]
JitterSeedOption = Annotated[
    int | None, typer.Option("--seed", help="of --jitter; the same seed gives the same (default 0)")
]
StrategyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--strategy",
        metavar="FILE.json",
        help="use this saved strategy, such as a best.json, instead of the file's",
    ),
]
_CLUSTERS = (
    "e.g. h100x8, h100-80g-sxm:8*4, a100x8*2+h100x8*2, h100x8@eager, a file lab.toml, cpu-local "
    "(this machine, measured now)"
)
ClusterNameOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        autocompletion=clusters,
        help=_CLUSTERS,
    ),
]
ShownClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", autocompletion=clusters, help=f"{_CLUSTERS}  [default: cpu-local]"),
]
CostsFileOption = Annotated[
    Path | None,
    typer.Option(
        "--costs", metavar="FILE.json", help="measured durations, as `piper profile` writes them"
    ),
]
LauncherOption = Annotated[
    str,
    typer.Option(
        autocompletion=one_of(*LAUNCHERS),
        help="ray (one actor per rank), processes (one per rank; also under torchrun) or inline "
        "(all in one process)",
    ),
]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="of a Ray to join; auto: one that is there, else local: a Ray for this run",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="results go to a new folder below DIR")
]
ProfileLauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        autocompletion=one_of("processes", "ray"),
        help="processes or ray: ranks measure at once, as in a run. Unlike elsewhere processes are the default: a "
        "rank does the same in both, they start sooner, and nothing of Ray's runs beside what is measured; "
        "ray measures between nodes",
    ),
]
CostsOutOption = Annotated[Path, typer.Option("--out", metavar="FILE.json", help="the costs file")]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout-s", help="seconds without progress after which a rank counts as hung"),
]
StepsOption = Annotated[
    int | None, typer.Option(min=1, help="optimizer steps (default: the file's `steps`, else 3)")
]
MemorySnapshotOption = Annotated[
    Path | None,
    typer.Option(
        "--memory-snapshot",
        metavar="DIR",
        help="write predicted memory by rank for torch's visualiser (pytorch.org/memory_viz)",
    ),
]
TrialsOption = Annotated[int, typer.Option(min=1, help="candidates that are compiled and scored")]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="a preset such as llama3-70b, a config.json of Hugging Face or its folder, a FILE.py with a `job`, or a job "
        "of another system, such as torchtitan:llama3_70b or megatron:pretrain.sh",
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option("--length", min=1, max=2**26, help="tokens of a row (default: the model's)"),
]
TokensPerStepOption = Annotated[
    str | None, typer.Option(metavar="N", help="tokens of a step, such as 4M")
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, max=2**32, help="rows of a step, in place of its tokens"),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens", metavar="N", help="of the whole training, such as 15T: days and dollars"
    ),
]
PriceOption = Annotated[
    float,
    typer.Option("--price", min=0, help="dollars per device and hour (default: the cluster's)"),
]
RehearseOption = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="train a small twin under the best strategy in float64, and compare with one device",
    ),
]
ProcessesOption = Annotated[
    int, typer.Option("--workers", min=0, help="processes that score candidates (0: this one)")
]
MtbfOption = Annotated[
    float | None,
    typer.Option(
        "--mtbf", min=0.01, metavar="HOURS", help="between failures of the cluster: goodput"
    ),
]
CheckpointRateOption = Annotated[
    float,
    typer.Option(
        min=0.001, metavar="GB/S", help="that each device writes of its states; of --mtbf"
    ),
]
RestartOption = Annotated[
    float, typer.Option("--restart-s", min=0, help="seconds until a failed run goes on; of --mtbf")
]
ConfirmOption = Annotated[
    int,
    typer.Option(min=0, help="run so many of the best on this machine, predicted beside measured"),
]
MemoryLimitOption = Annotated[
    str | None,
    typer.Option(help="per device, e.g. 20GiB (default: what the cluster's devices have)"),
]
SeedOption = Annotated[int, typer.Option(help="of the search; the same seed finds the same")]
StorageOption = Annotated[
    str | None,
    typer.Option(
        help="Optuna URL, e.g. sqlite:///study.db; a search of the same space goes on where it ended"
    ),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        metavar="period|tokens_per_s_per_device|dollars_per_token",
        autocompletion=one_of("period", "tokens_per_s_per_device", "dollars_per_token"),
        help="what the best is (default: the least period; for a file whose `job` is a function of a trial the "
        "most tokens)",
    ),
]
SearchersOption = Annotated[
    str,
    typer.Option(
        "--workers", help="processes (0: this one), ray, local (a Ray of its own), or HOST:PORT"
    ),
]
RowsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--rows", help="rows per microbatch to measure (again for more; default: what fits)"
    ),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="POLICY",
        help="a policy of recomputation to measure, too: inputs, products, ...",
    ),
]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="passes of which each duration is the median")
]
PrintLaunchOption = Annotated[
    bool,
    typer.Option(
        "--print-launch", help="do what `piper launch` does: print command lines, run nothing"
    ),
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="machines in the lines of `piper launch`")
]
EmulateOption = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER",
        autocompletion=clusters,
        help="sleep in real processes instead of training, as long as CLUSTER would compute",
    ),
]
LogOption = Annotated[
    str,
    typer.Option(metavar="NAMES", help="where steps go beside metrics.jsonl: tensorboard,wandb"),
]
RecipeFileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE.py",
        help="defines `job` and `strategy` (with --recipe: your own recipes); or FILE.csv, a schedule of torch's",
    ),
]
OwnRecipesArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE.py", help="a file that registers recipes of your own; they are listed, too"
    ),
]
RecipeNameOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        autocompletion=recipe_names,
        help="draw this recipe (`piper recipes` lists them) on a synthetic model",
    ),
]
DevicesOption = Annotated[
    int | None, typer.Option("--pp", min=1, help="pipeline devices of --recipe (default 4)")
]
MicrobatchesOption = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="of --recipe (default 8)")
]
ChunksOption = Annotated[
    int | None, typer.Option("--chunks", min=1, help="per device, of a --recipe that takes them")
]
ChunkTimesOption = Annotated[
    str | None,
    typer.Option(
        "--times",
        metavar="F,I,W[,O]",
        help="seconds of one chunk of --recipe, and of an overlapped pair (default 1,1,1)",
    ),
]
GraphOption = Annotated[
    bool, typer.Option("--graph", help="print the training graph, a line per node")
]
PlanOption = Annotated[
    bool, typer.Option("--plan", help="print the plan, a line per instruction; it parses back")
]
PictureOption = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE.png", help="draw the schedule into a picture"),
]
CsvOption = Annotated[
    Path | None,
    typer.Option(
        "--csv", metavar="OUT.csv", help="write the schedule for torch.distributed.pipelining"
    ),
]
LoweredOption = Annotated[
    bool, typer.Option("--lowered", help="with --csv: with sends, receives and reductions")
]
LoaderOption = Annotated[
    str,
    typer.Option(
        metavar="thread|processes|none|N",
        help="who calls the batch function, a step ahead: a thread where it is worth it, so many processes per "
        "rank, or nobody",
    ),
]
RangesOption = Annotated[
    bool,
    typer.Option("--ranges", help="names of instructions in profilers (record_function, NVTX)"),
]
ProfilerOption = Annotated[
    Path | None,
    typer.Option(
        "--profiler",
        metavar="DIR",
        help="write a trace of torch's profiler there, of each rank's last step, for `piper trace`",
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        parser=named_folder,
        help="save the state there while training, for --resume",
    ),
]
EveryOption = Annotated[
    int | None,
    typer.Option("--every", min=1, help="steps from one --checkpoint to the next (default 100)"),
]
SnapshotOption = Annotated[
    int | None,
    typer.Option(
        "--snapshot",
        min=1,
        help="of a run that starts again: copy the state to memory after so many steps, to go on from",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="go on from the newest checkpoint of --checkpoint, with any strategy; without --steps up to the "
        "file's steps",
    ),
]
RestartsOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="start again so often after a worker died, raised or hung, from --checkpoint",
    ),
]
OnLossOption = Annotated[
    str,
    typer.Option(
        autocompletion=one_of(*LOSSES),
        metavar="restart|replan",
        help="of a run that starts again: the worker that died is replaced (restart), or its device is gone and a "
        "strategy for fewer is chosen (replan)",
    ),
]
SparesOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="on Ray, keep room for so many more workers, which replace those that die",
    ),
]
AsJsonOption = Annotated[
    bool, typer.Option("--json", help="print JSON for programs, and nothing else")
]


def searchers(workers: str) -> int | str:
    """Return `--workers`: a number of processes, "ray", "local", or HOST:PORT; raise JobError for anything else."""
    if re.fullmatch(r"\d{1,18}", workers, re.ASCII):
        return int(workers)
    if workers in ("ray", "local") or ":" in workers:
        return workers
    raise JobError(
        f"--workers {workers}: a number of processes, ray, local or the HOST:PORT of a Ray cluster is expected"
    )


def loader_of(text: str) -> str | int:
    """Return `--loader`: a number of processes, or a word that `execute` checks."""
    return int(text) if text.isdigit() else text


def check_drawn(
    recipe: str | None, *, of_files: Sequence[object], of_recipes: Sequence[object]
) -> None:
    """Raise JobError for options of `piper show` without effect on its drawing: a recipe, or a file's strategy."""
    if recipe is not None and any(option is not None for option in of_files):
        raise JobError(
            "--recipe is drawn with the durations of --times: leave out --strategy, --costs and --cluster"
        )
    if recipe is None and any(option is not None for option in of_recipes):
        raise JobError(
            "--pp, --microbatches, --chunks and --times belong to --recipe; a file's strategy has -p NAME=VALUE"
        )
