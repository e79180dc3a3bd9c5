"""Define the options of `piper simulate`, `tune`, `profile` and `show`, each command's as the fields of a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    GraphOption,
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
    ParamsOption,
    PictureOption,
    PlanOption,
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
    VersusOption,
    WhyOption,
)


@dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """Hold the options of `piper simulate`."""

    file: FileArgument
    other: OtherArgument = None
    params: ParamsOption = None
    strategy: StrategyFileOption = None
    versus: VersusOption = None
    why: WhyOption = False
    cluster: ClusterNameOption = "cpu-local"
    costs: CostsFileOption = None
    no_contention: NoContentionOption = False
    load: LoadOption = None
    jitter: JitterOption = None
    repetitions: RepetitionsOption = None
    seed: JitterSeedOption = None
    out: OutOption = None
    memory_snapshot: MemorySnapshotOption = None
    as_json: AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """Hold the options of `piper tune`."""

    file: SpaceFileArgument
    cluster: ClusterNameOption = "cpu-local"
    costs: CostsFileOption = None
    trials: TrialsOption = 100
    confirm: ConfirmOption = 0
    memory_limit: MemoryLimitOption = None
    seed: SeedOption = 0
    storage: StorageOption = None
    workers: SearchersOption = "1"
    launcher: LauncherOption = "ray"
    out: OutOption = RUNS
    objective: ObjectiveOption = None
    load: LoadOption = None
    as_json: AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ProfileArguments:
    """Hold the options of `piper profile`."""

    file: FileArgument
    params: ParamsOption = None
    strategy: StrategyFileOption = None
    launcher: ProfileLauncherOption = "processes"
    address: AddressOption = "auto"
    rows: RowsOption = None
    keep: KeepOption = None
    repeats: RepeatsOption = 7
    out: CostsOutOption = Path("costs.json")
    as_json: AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """Hold the options of `piper show`."""

    file: RecipeFileArgument = None
    params: ParamsOption = None
    strategy: StrategyFileOption = None
    cluster: ShownClusterOption = None
    costs: CostsFileOption = None
    recipe: RecipeNameOption = None
    pp: DevicesOption = None
    microbatches: MicrobatchesOption = None
    chunks: ChunksOption = None
    times: ChunkTimesOption = None
    graph: GraphOption = False
    plan: PlanOption = False
    png: PictureOption = None
    csv: CsvOption = None
    lowered: LoweredOption = False
    as_json: AsJsonOption = False
