"""Define the options of `piper run` and `piper launch`, each once: as a field of the record that a command gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from piper.cli.messages import user_errors
from piper.cli.options import (
    LOADER,
    LOG,
    RUNS,
    TIMEOUT_S,
    AddressOption,
    AsJsonOption,
    CheckpointOption,
    CostsFileOption,
    EmulateOption,
    EveryOption,
    FileArgument,
    LauncherOption,
    LoaderOption,
    LogOption,
    NodesOption,
    OnLossOption,
    OutOption,
    ParamsOption,
    PrintLaunchOption,
    RangesOption,
    RestartsOption,
    ResumeOption,
    SnapshotOption,
    SparesOption,
    StepsOption,
    StrategyFileOption,
    TimeoutOption,
    pairs,
)
from piper_ir.ground.errors import JobError

if TYPE_CHECKING:
    from piper.cli.loading import JobFile
    from piper_runtime import Checkpoints

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Hold the options of `piper launch`, which `piper run` has, too."""

    file: FileArgument
    params: ParamsOption = None
    strategy: StrategyFileOption = None
    steps: StepsOption = None
    costs: CostsFileOption = None
    out: OutOption = RUNS
    timeout_s: TimeoutOption = TIMEOUT_S
    nodes: NodesOption = None
    log: LogOption = LOG
    ranges: RangesOption = False
    checkpoint: CheckpointOption = None
    every: EveryOption = None
    snapshot: SnapshotOption = None
    resume: ResumeOption = False
    restarts: RestartsOption = 0
    on_loss: OnLossOption = "restart"
    spares: SparesOption = 0
    loader: LoaderOption = LOADER
    as_json: AsJsonOption = False

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
        if given := [flag for flag, value in needing if value]:
            raise JobError(
                f"{' and '.join(given)} needs the folder of the checkpoints: give --checkpoint DIR"
            )
        return None

    def loaded(self) -> JobFile:
        """Run FILE.py and return its definitions."""
        from piper.cli.loading import load_file

        return load_file(self.file, pairs(self.params), self.strategy)

    def changed(self, *names: str) -> dict[str, Any]:
        """Return the options of these names whose value is not the default, each by its flag."""
        usual = {f.name: f.default for f in fields(self)}
        values = {name: getattr(self, name) for name in names}
        return {flag(name): value for name, value in values.items() if value != usual[name]}


@dataclass(frozen=True, kw_only=True)
class RunArguments(LaunchArguments):
    """Hold the options of `piper run`."""

    launcher: LauncherOption = "ray"
    address: AddressOption = "auto"
    print_launch: PrintLaunchOption = False
    emulate: EmulateOption = None


def flag(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"


def command_of(record: type[Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Return a decorator that gives a function of a record the record's fields as options at the command line."""

    def decorate(action: Callable[[Record], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            with user_errors(given):
                action(record(**given))

        types = get_type_hints(record, include_extras=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(f.name, kind, default=_default(f.default), annotation=types[f.name])
            for f in fields(record)  # type: ignore[arg-type]  # a dataclass
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__name__, command.__doc__ = action.__name__, action.__doc__
        return command

    return decorate


def _default(value: object) -> object:
    return inspect.Parameter.empty if value is MISSING else value
