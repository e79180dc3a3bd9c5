"""Define the options of `piper run` and `piper launch`, each once: as a field of the record that a command gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from piper.cli import options as flags
from piper.cli.given import pairs
from piper_ir.ground.errors import JobError

if TYPE_CHECKING:
    from piper.cli.loading import JobFile
    from piper_runtime import Checkpoints
    from piper_runtime.launch import Launch, Launcher, RunOptions

HANDED_ON = (
    "strategy", "steps", "kernels", "cuda_graph", "costs", "log", "timeout_s", "out", "ranges", "profiler", "checkpoint",
    "every", "snapshot", "resume", "loader", "restarts",
)  # fmt: skip
"""The options that command lines of `piper launch` hand on to `piper run`."""
OF_RAY = ("on_loss", "spares")
"""The options that they hand on under Ray."""
OF_TRAINING = (
    "launcher", "address", "log", "ranges", "profiler", "checkpoint", "every", "snapshot", "resume", "loader", *OF_RAY,
    "restarts",
)  # fmt: skip
"""The options that an emulated run does not take."""
OF_EXECUTE = (
    "launcher", "timeout_s", "resume", "loader", "restarts", "on_loss", "spares", "steps",
)  # fmt: skip
"""The options that are arguments of `piper.execute`, whose messages name them."""


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Hold the options of `piper launch`, which `piper run` has, too."""

    file: flags.FileArgument
    params: flags.ParamsOption = None
    strategy: flags.StrategyFileOption = None
    steps: flags.StepsOption = None
    kernels: flags.KernelsOption = None
    cuda_graph: flags.CudaGraphOption = False
    costs: flags.CostsFileOption = None
    out: flags.OutOption = flags.RUNS
    timeout_s: flags.TimeoutOption = flags.TIMEOUT_S
    nodes: flags.NodesOption = None
    log: flags.LogOption = flags.LOG
    ranges: flags.RangesOption = False
    profiler: flags.ProfilerOption = None
    checkpoint: flags.CheckpointOption = None
    every: flags.EveryOption = None
    snapshot: flags.SnapshotOption = None
    resume: flags.ResumeOption = False
    restarts: flags.RestartsOption = 0
    on_loss: flags.OnLossOption = "restart"
    spares: flags.SparesOption = 0
    loader: flags.LoaderOption = flags.LOADER
    as_json: flags.AsJsonOption = False

    def checkpoints(self) -> Checkpoints | None:
        """Return where and how often the run is saved; raise JobError for options that need a folder."""
        from piper_runtime import Checkpoints

        if self.checkpoint is not None:
            saved = Checkpoints(self.checkpoint, snapshot=self.snapshot)
            return saved if self.every is None else replace(saved, every=self.every)
        needing = (
            ("--every", self.every),
            ("--snapshot", self.snapshot),
            ("--resume", self.resume),
        )
        if present_flags := [flag for flag, value in needing if value]:
            raise JobError(
                f"{' and '.join(present_flags)} needs the folder of the checkpoints: give --checkpoint DIR"
            )
        return None

    def loaded(self) -> JobFile:
        """Run FILE.py and return its definitions."""
        from piper.cli.loading import load_file

        return load_file(self.file, pairs(self.params), self.strategy)

    def launch(self, world: int) -> Launch:
        """Return how command lines start the ranks of the file, with the options that were given."""
        from piper_runtime.launch import Launch

        words = [word for p in self.params or () for word in ("-p", p)]
        return Launch(
            self.file,
            world,
            nodes=self.nodes,
            arguments=[*words, *_words(self.changed(*HANDED_ON))],
            of_ray=_words(self.changed(*OF_RAY)),
            of_torchrun=_words({"--max-restarts": self.restarts or None}),
        )

    def changed(self, *names: str) -> dict[str, Any]:
        """Return the options of these names whose value is not the default, each by its flag."""
        usual = {f.name: f.default for f in fields(self)}
        values = {name: getattr(self, name) for name in names}
        return {flag(name): value for name, value in values.items() if value != usual[name]}


@dataclass(frozen=True, kw_only=True)
class RunArguments(LaunchArguments):
    """Hold the options of `piper run`."""

    launcher: flags.LauncherOption = "ray"
    address: flags.AddressOption = "auto"
    print_launch: flags.PrintLaunchOption = False
    emulate: flags.EmulateOption = None

    def options(self, steps: int) -> RunOptions:
        """Return the options of a run of so many steps; raise JobError for options that need a folder."""
        from piper_runtime.launch import RunOptions

        return RunOptions(
            steps=steps,
            launcher=cast("Launcher", self.launcher),
            cluster=self.address,
            timeout_s=self.timeout_s,
            ranges=self.ranges,
            profiler=self.profiler,
            checkpoint=self.checkpoints(),
            resume="latest" if self.resume else None,
            loader=flags.loader_of(self.loader),
            restarts=self.restarts,
            spares=self.spares,
        )


def flag(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"


def _words(options: Mapping[str, object]) -> list[str]:
    """Return the words of the options that were given."""
    words: list[str] = []
    for flag, value in options.items():
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words
